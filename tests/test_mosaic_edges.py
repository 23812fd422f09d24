"""The Mosaic kernels at their edges, interpreted: extreme values, positions, and what a kernel does not take."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from interpreter import TINY, assert_lowers, bits, interpreted, rope, rope_inputs
from jaxfuse.kernels import (
    ImplementationError,
    dispatch,
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from op_inputs import DTYPES, OPS, draw, make_cache
from truth import wide

# Extreme values.


def extremes(dtype: Any) -> list[float]:
    """Largest and smallest of each sign, NaN, infinities and zeros."""
    info = jnp.finfo(dtype)
    largest, smallest = float(info.max), float(info.tiny)
    return [largest, -largest, smallest, -smallest, np.nan, np.inf, -np.inf, 0.0, -0.0]


def classes(y: jax.Array) -> NDArray[Any]:
    """NaN as 0; else 1 for zero and what float32 flushes to it, 2 for finite, 3 for infinite; with the sign."""
    values = wide(y)
    size = np.select([np.abs(values) < TINY, np.isfinite(values)], [1, 2], 3)
    return np.where(np.isnan(values), 0, np.where(np.signbit(values), -size, size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_extreme_values_become_what_xla_makes_of_them(op: str, dtype: Any) -> None:
    """NaN, infinities, zeros and their signs are those of the reference; ordinary rows keep their bits.

    The odd rows are extreme: the first half of them holds one of the values in one column, the second half in all,
    and the second input (the residual, up, k) then holds each of the values in a column.
    """
    values = extremes(dtype)
    count = len(values)
    rows = 4 * count + 1
    one, every = np.arange(1, 2 * count, 2), np.arange(2 * count + 1, rows, 2)
    ordinary = np.arange(0, rows, 2)

    def with_extremes(x: NDArray[Any]) -> NDArray[Any]:
        x = x.reshape(rows, -1).copy()
        x[one, 5] = values
        x[every] = np.asarray(values)[:, None]
        return x

    def beside(x: NDArray[Any]) -> NDArray[Any]:
        x = x.reshape(rows, -1).copy()
        x[np.ix_(every, np.arange(count))] = values
        return x

    weight = draw(1, (128,), dtype)
    x, other = draw(2, (rows, 128), dtype), draw(3, (rows, 128), dtype)
    # The largest value, turned so, overflows.
    cache = np.tile(np.repeat(np.asarray([0.6, 0.8], np.float32), 64), (3, 1))
    positions = np.arange(rows, dtype=np.int32) % 3

    def arguments(x: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        return {
            "rms_norm": (x, weight),
            "fused_add_rms_norm": (x, other, weight),
            "silu_and_mul": (np.concatenate([x, other], axis=-1),),
            "rotary_embedding": (x[:, None], other[:, None], positions, cache),
        }[op]

    plain = arguments(x, other)
    extreme = arguments(with_extremes(x), beside(other))
    run = OPS[op]
    usual, ours = (interpreted(partial(run, implementation="mosaic"), *case) for case in (plain, extreme))
    expected = run(*extreme, implementation="xla")
    for one_usual, one_ours, one_expected in zip(*map(jax.tree.leaves, (usual, ours, expected)), strict=True):
        np.testing.assert_array_equal(classes(one_ours), classes(one_expected))
        np.testing.assert_array_equal(bits(one_ours)[ordinary], bits(one_usual)[ordinary])
        assert np.isfinite(wide(one_ours)[ordinary]).all()
    assert len(np.unique(np.concatenate([classes(y).ravel() for y in jax.tree.leaves(ours)]))) > 4


# Positions.


@pytest.mark.parametrize("wrong", [-1, 50, 2**31 - 1])
def test_concrete_positions_out_of_range_raise(wrong: int) -> None:
    """Before anything runs, and with the range in the message."""
    q, k, cache = rope_inputs(jnp.bfloat16)
    with pytest.raises(ValueError, match="positions must be from 0 to 49"):
        rope(q, k, np.asarray([*range(7), wrong], np.int32), cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_traced_positions_out_of_range_fill_with_nan(dtype: Any) -> None:
    """A token outside the table becomes NaN, whole; the tokens beside it have the bits that they have without it."""
    q, k, cache = rope_inputs(dtype)
    positions = np.asarray([7, -1, 49, 50, -50, 2**31 - 1, -(2**31), 0], np.int32)
    inside = (positions >= 0) & (positions < 50)
    expected = interpreted(rope, q, k, np.where(inside, positions, 0), cache)
    for ours, right in zip(interpreted(jax.jit(rope), q, k, positions, cache), expected, strict=True):
        assert np.isnan(wide(ours)[~inside]).all()
        np.testing.assert_array_equal(bits(ours)[inside], bits(right)[inside])


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (np.int8, [-1, -56]),
        (np.int16, [-1, 256]),
        (np.uint8, [200, 255]),
        (np.uint16, [200, 65535]),
        (np.uint32, [2**31, 2**32 - 1]),
    ],
)
def test_positions_of_any_integer_dtype(dtype: Any, wrong: list[int]) -> None:
    """The bits are int32's, and a traced position outside the table of 200 rows is NaN."""
    q, k, _ = rope_inputs(jnp.float16)
    cache = make_cache(200, 128)
    positions = np.asarray([3, 0, 126, 127, 5, 99, 1, 2], dtype)
    expected = interpreted(rope, q, k, positions.astype(np.int32), cache)
    for ours, right in zip(interpreted(rope, q, k, positions, cache), expected, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(right))
    positions[:2] = wrong
    assert_lowers(rope, *map(jax.typeof, map(jnp.asarray, (q, k, positions, cache))))
    for ours, right in zip(interpreted(jax.jit(rope), q, k, positions, cache), expected, strict=True):
        assert np.isnan(wide(ours)[:2]).all()
        np.testing.assert_array_equal(bits(ours)[2:], bits(right)[2:])


def test_positions_of_four_bits() -> None:
    """They have no NumPy dtype of their own."""
    q, k, cache = rope_inputs(jnp.float32)
    positions = jnp.asarray([3, 0, 7, 1, 5, 6, 2, 4], jnp.int4)
    expected = interpreted(rope, q, k, positions.astype(jnp.int32), cache)
    for ours, right in zip(interpreted(jax.jit(rope), q, k, positions, cache), expected, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(right))


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_int64_positions_do_not_wrap_into_the_table(implementation: Any) -> None:
    """With 64-bit types on, a traced position of 2^32 + 3 or -2^32 is outside the table too."""
    q, k, cache = rope_inputs(jnp.float32)
    run = jax.jit(partial(rotary_embedding, implementation=implementation))
    with jax.enable_x64(True):
        positions = jnp.asarray([3, 2**32 + 3, -(2**32), 49, 2**31, -(2**31), 0, 2**63 - 1], jnp.int64)
        assert positions.dtype == jnp.int64
        turned = interpreted(run, q, k, positions, cache) if implementation == "mosaic" else run(q, k, positions, cache)
    for ours in turned:
        outside = np.isnan(wide(ours)).all(axis=(1, 2))
        np.testing.assert_array_equal(outside, [False, True, True, False, True, True, False, True])
        assert np.isfinite(wide(ours)[~outside]).all()


# 64-bit types.


@pytest.mark.parametrize("op", OPS)
def test_64_bit_types_change_nothing(op: str) -> None:
    """With jax_enable_x64 a kernel lowers, also in a gradient, and gives the same bits; so does an eps of NumPy's."""
    x, y, weight = draw(1, (5, 1024)), draw(2, (5, 1024)), draw(3, (1024,))
    q, k, cache = rope_inputs(jnp.float32)
    arguments: dict[str, tuple[NDArray[Any], ...]] = {
        "rms_norm": (x, weight),
        "fused_add_rms_norm": (x, y, weight),
        "silu_and_mul": (x,),
        "rotary_embedding": (q, k, np.arange(8, dtype=np.int32), cache),
    }
    run = partial(OPS[op], implementation="mosaic")
    expected = interpreted(run, *arguments[op])
    if op.endswith("rms_norm"):
        run = partial(run, eps=np.float64(1e-6))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        ours = interpreted(run, *arguments[op])
        assert_lowers(run, *map(jax.typeof, map(jnp.asarray, arguments[op])))
        grad = jax.grad(lambda *values: sum(map(jnp.sum, jax.tree.leaves(run(*values)))))
        assert_lowers(lambda *values: (run(*values), grad(*values)), *map(jnp.asarray, arguments[op]))
    for one, right in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert one.dtype == right.dtype
        np.testing.assert_array_equal(bits(one), bits(right))


# What a kernel does not take.


def refusals() -> dict[str, tuple[Callable[..., Any], tuple[NDArray[Any], ...], str]]:
    """An op, arguments that its kernel does not take, and what it says of them."""
    q, k, cache = rope_inputs(jnp.float32)
    positions = np.arange(8, dtype=np.int32)
    x, weight = draw(3, (5, 576)), draw(4, (576,))
    width, halves = "rows whose width is a multiple of 128; got 576", "a multiple of 128; got 288"
    return {
        "rms_norm": (rms_norm, (x, weight), width),
        "fused_add_rms_norm": (fused_add_rms_norm, (x, x[::-1].copy(), weight), width),
        "silu_and_mul": (silu_and_mul, (x,), halves),
        "rotary_dim": (rotary_embedding, (q, k, positions, make_cache(50, 64)), "got rotary_dim 64 for heads of 128"),
        "head_dim": (
            rotary_embedding,
            (q[..., :64].copy(), k[..., :64].copy(), positions, make_cache(50, 64)),
            "a multiple of 128; got 64",
        ),
        "no heads": (rotary_embedding, (q, k[:, :0], positions, cache), "a head in each of q and k; got 4 and 0"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_a_kernel_does_not_take(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises under the kernel's name, traced or not, and runs as "xla" under None, even where there is a GPU."""
    run, arguments, message = refusals()[case]
    mosaic = partial(run, implementation="mosaic")
    for attempt in (mosaic, jax.jit(mosaic)):
        with pytest.raises(ImplementationError, match=f'^{run.__name__}: implementation "mosaic" .*{message}; pass'):
            attempt(*arguments)
    monkeypatch.setattr(dispatch, "has_mosaic", lambda *_: True)
    for ours, expected in zip(
        jax.tree.leaves(run(*arguments)), jax.tree.leaves(run(*arguments, implementation="xla")), strict=True
    ):
        np.testing.assert_array_equal(bits(ours), bits(expected))


@pytest.mark.parametrize("op", OPS)
def test_none_is_the_kernel_where_there_is_a_gpu(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: with a GPU, None does run the kernel, for a shape that it takes."""
    monkeypatch.setattr(dispatch, "has_mosaic", lambda *_: True)
    x, y, weight = draw(1, (5, 1024)), draw(2, (5, 1024)), draw(3, (1024,))
    gate_up = draw(4, (3, 2 * 12288))
    q, k, cache = rope_inputs(jnp.float32)
    arguments = {
        "rms_norm": (x, weight),
        "fused_add_rms_norm": (x, y, weight),
        "silu_and_mul": (gate_up,),
        "rotary_embedding": (q, k, np.arange(8, dtype=np.int32), cache),
    }[op]
    interpreted(OPS[op], *arguments)  # It fails where no kernel ran.
