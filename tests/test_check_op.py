"""`check_op`: right code passes, and each kind of wrong code fails with a message that names the worst case."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxfuse.errors import InputError
from jaxfuse.kernels import fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
from jaxfuse.parity import check_op
from truth import Wide, rms_norm64, rotate64

DTYPES = ("float32", "bfloat16", "float16")
NORMS = [((4, 256), (256,)), ((1, 3, 128), (128,))]
EPS = 1e-6


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Qwen3RMSNorm."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def norm64(x: Wide, weight: Wide) -> Wide:
    """The truth."""
    return rms_norm64(x, weight, EPS)


def torch_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate first."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def torch_add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, then its norm."""
    total = x + residual
    return torch_norm(total, weight), total


ANGLES = np.arange(64)[:, None] * 1e4 ** (-np.arange(0, 128, 2) / 128)
TABLE = np.concatenate([np.cos(ANGLES), np.sin(ANGLES)], -1).astype(np.float32)
POSITIONS = np.array([3, 60, 0, 7, 7])


def torch_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Halves, in the dtype given."""
    cos, sin = (x[:, None].to(q.dtype) for x in torch.from_numpy(TABLE)[positions].chunk(2, -1))

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return turn(q), turn(k)


def rope64(q: Wide, k: Wide, positions: np.ndarray) -> tuple[Wide, Wide]:
    """The truth."""
    return rotate64(q, positions, TABLE.astype(np.float64)), rotate64(k, positions, TABLE.astype(np.float64))


def test_right_code_passes() -> None:
    """One and two outputs, with a truth and without, an array among the arguments, cases by name, all dtypes."""
    found = check_op(rms_norm, torch_norm, NORMS, norm64, dtypes=DTYPES)
    assert [(case.case, case.dtype) for case in found][:3] == [("(4, 256), (256,)", dtype) for dtype in DTYPES]
    assert all(case.error is not None and case.torch_error is not None and case.largest > 0 for case in found)
    assert all(case.error <= case.torch_error for case in found if case.dtype != "float32")  # type: ignore[operator]
    check_op(jax.jit(silu_and_mul), torch_silu_and_mul, {"one": ((1, 64),), "many": ((3, 2, 512),)}, dtypes=DTYPES)
    shapes = [((3, 256), (3, 256), (256,))]
    found = check_op(fused_add_rms_norm, torch_add_norm, shapes, dtypes=DTYPES)
    assert [case.output for case in found] == [0, 1] * 3

    def turn(q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotary_embedding(q, k, positions, TABLE)

    check_op(turn, torch_rope, [((5, 4, 128), (5, 2, 128), POSITIONS)], rope64, dtypes=DTYPES)


@pytest.mark.parametrize("seed", range(20))
def test_torch_against_itself(seed: int) -> None:
    """The same function written in another way is no fault."""

    def again(x: jax.Array, weight: jax.Array) -> jax.Array:
        given = [torch.from_numpy(np.array(a.astype(jnp.float32))).to(torch_dtype(a)) for a in (x, weight)]
        out = torch.nn.functional.rms_norm(given[0], (x.shape[-1],), given[1], EPS)
        return jnp.asarray(out.float().numpy()).astype(x.dtype)

    def torch_dtype(a: jax.Array) -> torch.dtype:
        return torch.float32 if a.dtype == jnp.float32 else torch.bfloat16

    check_op(again, torch_norm, NORMS, norm64, seed=seed)


def test_draws() -> None:
    """The same values for both sides and the truth, rounded to the dtype; others for another seed or case."""
    seen: list[np.ndarray] = []

    def note(x: Any) -> Any:
        seen.append(np.array(x.double().numpy() if isinstance(x, torch.Tensor) else x, np.float64))
        return x

    check_op(note, note, [((8, 32),), ((8, 32),)], note, dtypes=["bfloat16"])
    check_op(note, note, [((8, 32),)], note, dtypes=["bfloat16"], seed=1)
    for i in (0, 3, 6):
        np.testing.assert_array_equal(seen[i], seen[i + 1])
        np.testing.assert_array_equal(seen[i], seen[i + 2])
        assert (seen[i].astype(np.float32).view(np.int32) & 0xFFFF == 0).all()
        assert (seen[i] != 0).all()
    assert not np.isclose(seen[0], seen[3]).any()
    assert not np.isclose(seen[0], seen[6]).any()
    scales = np.std(seen[0], axis=1)
    assert scales.max() > 3 * scales.min()


def small_norm(eps: float) -> Callable[..., jax.Array]:
    """Of values whose mean square is about 1e-4."""
    return lambda x, weight: rms_norm(x / 100, weight, eps=eps)


def one_bad_row(x: jax.Array, weight: jax.Array) -> jax.Array:
    """In the shape (1, 3, 128) alone."""
    out = rms_norm(x, weight)
    return out.at[0, 1, 5].mul(1.5) if out.ndim == 3 else out


def twice_rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A rounding to bfloat16 too many, three bits coarser."""
    out = rms_norm(x, weight)
    return jax.lax.reduce_precision(out, 8, 4)


WRONG: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "eps": (small_norm(1e-5), lambda x, w: torch_norm(x / 100, w), NORMS, lambda x, w: norm64(x / 100, w), "error"),
    "a rounding": (twice_rounded, torch_norm, NORMS, norm64, r"\(1, 3, 128\)|\(4, 256\)"),
    "swapped": (lambda x: silu_and_mul(jnp.roll(x, 32, -1)), torch_silu_and_mul, [((2, 64),)], None, "difference"),
    "one row": (one_bad_row, torch_norm, NORMS, norm64, r"output 0 of \(1, 3, 128\), \(128,\) in float32"),
    "no truth": (one_bad_row, torch_norm, NORMS, None, r"largest difference .* at \(0, 1, 5\)"),
    "second output": (
        lambda x, r, w: (fused_add_rms_norm(x, r, w)[0], x - r),
        torch_add_norm,
        [((3, 256), (3, 256), (256,))],
        None,
        "output 1 of",
    ),
    "dtype": (lambda x, w: rms_norm(x, w).astype(jnp.float32), torch_norm, NORMS, norm64, "JAX returns .*float32"),
    "shape": (lambda x, w: rms_norm(x, w)[:1], torch_norm, NORMS, norm64, "JAX returns shapes"),
    "outputs": (lambda x, w: (rms_norm(x, w), x), torch_norm, NORMS, norm64, "JAX returns shapes"),
    "nan": (lambda x, w: rms_norm(x, w).at[..., 3].set(jnp.nan), torch_norm, NORMS, norm64, "NaN or infinities"),
    "infinity": (lambda x: x.at[0, 3].set(-jnp.inf), lambda x: x, [((2, 5),)], None, r"NaN or infinities.*\(0, 3\)"),
    "integers": (
        lambda x: jnp.argsort(x, -1),
        lambda x: x.argsort(-1).int() + 1,
        [((2, 5),)],
        None,
        "values that differ",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_code_fails(fault: str) -> None:
    """The message names what is worst."""
    ours, theirs, shapes, truth, message = WRONG[fault]
    with pytest.raises(AssertionError, match=message):
        check_op(ours, theirs, shapes, truth)


TABLE_OF_THREE = [((1, 8),), ((5, 8),), ((3, 8),)]


def test_the_message() -> None:
    """The worst case comes first, with figures, the place, and how many fail; then the others."""
    with pytest.raises(AssertionError) as caught:
        check_op(lambda x: x * (1 + 0.02 * x.shape[0]), lambda x: x, TABLE_OF_THREE, dtypes=["float32"], seed=4)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("output 0 of (5, 8) in float32: ")
    assert "3 of 3 comparisons fail (seed 4)" in lines[0]
    assert "at most" in lines[0]
    assert "largest difference" in lines[0]
    many = [((1, 8),)] * 20
    with pytest.raises(AssertionError, match=r"\n  and 9 more$"):
        check_op(lambda x: x + 1, lambda x: x, many, dtypes=["float32"])


def test_inplace_functions_are_apart() -> None:
    """A function that changes its arguments does not change what the others get."""

    def torch_inplace(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def truth_inplace(x: Wide) -> Wide:
        x *= 2
        return x

    check_op(lambda x: x * 2, torch_inplace, [((2, 5),)], truth_inplace)
    check_op(lambda x: x * 2, torch_inplace, [(np.ones((2, 5), np.float32),)])


def test_same_places_may_be_odd() -> None:
    """NaN and infinities in the same places are the same; the rest is compared."""
    values = np.array([[-1.0, 0.0, 4.0, np.inf]], np.float32)
    check_op(jnp.sqrt, torch.sqrt, [(values,)])
    with pytest.raises(AssertionError):
        check_op(lambda x: jnp.sqrt(x) * 1.01, torch.sqrt, [(values,)], dtypes=["float32"])


def test_exceptions_name_the_case() -> None:
    """An error of the function itself."""
    with pytest.raises(ZeroDivisionError) as caught:
        check_op(lambda x: x, lambda x: x / (1 // 0), [((2, 5),)])
    assert caught.value.__notes__ == ["raised by the PyTorch function for (2, 5) in float32"]


@pytest.mark.parametrize(
    ("shapes", "error"),
    [([], InputError), ([(2, 3)], TypeError), ([[(2, 3)]], TypeError), ([((2, 0),)], TypeError), (["ab"], TypeError)],
)
def test_tables_that_do_not_fit(shapes: Any, error: type[Exception]) -> None:
    """An empty table, a shape without its tuple, a list, no values, text."""
    with pytest.raises(error, match=r"case"):
        check_op(lambda x: x, lambda x: x, shapes)


def test_dtypes_that_do_not_exist() -> None:
    """A typing mistake is no pass."""
    with pytest.raises(InputError, match="float8"):
        check_op(lambda x: x, lambda x: x, [((2, 3),)], dtypes=["float8"])
    with pytest.raises(InputError, match="at least one"):
        check_op(lambda x: x, lambda x: x, [((2, 3),)], dtypes=[])


def test_integers_of_another_width() -> None:
    """Indices have 64 bits in PyTorch and 32 in JAX; their values must be equal, and integers are no truth values."""
    cases = [((8, 128),)]
    assert len(check_op(lambda x: x.argmax(-1), lambda x: x.argmax(-1), cases)) == 2
    with pytest.raises(AssertionError, match="values that differ: 8"):
        check_op(lambda x: x.argmax(-1) + 1, lambda x: x.argmax(-1), cases)
    with pytest.raises(AssertionError, match=r"JAX returns \['integers'\], PyTorch \['bool'\]"):
        check_op(lambda x: (x > 0).astype(jnp.int32), lambda x: x > 0, cases)


def test_a_tensor_with_a_gradient() -> None:
    """What a module with parameters returns, outside the tool's own inference mode."""

    def module(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            return x.clone() * torch.nn.Parameter(torch.ones(128, dtype=x.dtype))

    assert len(check_op(lambda x: x, module, [((8, 128),)])) == 2


@pytest.mark.parametrize("out", [None, {"a": 1}, "text", (None,)])
@pytest.mark.parametrize("side", ["the JAX function", "the PyTorch function", "the truth"])
def test_functions_that_return_no_arrays(out: Any, side: str) -> None:
    """A dictionary, or nothing: refused by the function's name."""

    def function(name: str) -> Callable[[Any], Any]:
        return lambda x: out if name == side else x

    with pytest.raises(TypeError, match=f"{side} must return an array, or several .*, got "):
        check_op(
            function("the JAX function"),
            function("the PyTorch function"),
            [((8, 128),)],
            truth=function("the truth"),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_truth_of_another_function(dtype: str) -> None:
    """PyTorch itself is far from it: the bound of three times its error would let everything pass."""
    cases = [((16, 64),)]
    with pytest.raises(AssertionError, match="PyTorch's own error, so the truth is another function"):
        check_op(jax.nn.relu, torch.relu, cases, truth=lambda x: x, dtypes=[dtype])


def test_a_function_that_loses_most_bits() -> None:
    """Without a truth PyTorch in 16 bits may be as far from itself in float32 as it is."""

    def lossy(x: Any) -> Any:
        return (x + 1000.0) - 1000.0

    (case,) = check_op(lossy, lossy, [((16, 64),)], dtypes=["bfloat16"])
    assert case.torch_error is not None
    assert case.torch_error > 0.3


def test_infinities_of_opposite_sign() -> None:
    """Both sides are infinite, and the difference is not none."""
    with pytest.raises(AssertionError, match=r"infinities that differ: 64, .*; largest difference inf"):
        check_op(lambda x: x / 0, lambda x: -x / 0, [((64,),)], dtypes=["float32"])


def test_cases_of_the_same_shapes_have_numbers() -> None:
    """Which positions it was."""
    cases = [(np.arange(4),), (np.arange(4) * 100,), (np.arange(5),)]
    with pytest.raises(AssertionError, match=r"\(4,\) \(case 1\) in float32: values that differ"):
        check_op(lambda x: x % 50, lambda x: x, cases, dtypes=["float32"])
    assert [case.case for case in check_op(lambda x: x, lambda x: x, cases, dtypes=["float32"])] == [
        "(4,) (case 0)",
        "(4,) (case 1)",
        "(5,)",
    ]
