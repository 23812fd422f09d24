"""The public ops: shapes, accuracy against float64, gradients, vmap, and every error.

Bits against torch are in test_hf_bits.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse.kernels
import op_inputs
from jaxfuse.kernels import (
    Rounding,
    check_implementation,
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from op_inputs import DTYPES
from truth import UNIT, Wide, rms_norm64, rotate64, rounding_bound, silu_and_mul64, wide

ROUNDINGS = get_args(Rounding)
# In float32 the two roundings are one computation; of the other pairs, enough to see each dtype and rounding.
KINDS = [(jnp.bfloat16, "fused"), (jnp.bfloat16, "hf"), (jnp.float16, "hf"), (jnp.float32, "fused")]
EPS = 3e-5  # not the default, which a call that forgot its own would take

# Inputs.


def draw(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Normal values at scales from 0.1 to 10, rounded to float32 and then to `dtype`."""
    return jnp.asarray(op_inputs.draw(seed, shape).astype(dtype))


def make_cache(max_position: int, rotary_dim: int) -> jax.Array:
    """A RoPE table, [max_position, rotary_dim] float32."""
    return jnp.asarray(op_inputs.make_cache(max_position, rotary_dim))


def make_positions(seed: int, shape: tuple[int, ...], max_position: int) -> jax.Array:
    """Positions in the table, int32."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, max_position, shape).astype(np.int32))


Call = tuple[Callable[..., Any], tuple[jax.Array, ...], int]


def calls(leading: tuple[int, ...], dtype: Any) -> dict[str, Call]:
    """Each op, arguments for it, and how many of them, counted from the first, carry the leading shape."""
    x, residual, weight = (
        draw(1, (*leading, 96), dtype),
        draw(2, (*leading, 96), dtype),
        draw(3, (96,), dtype),
    )
    q, k = draw(4, (*leading, 4, 32), dtype), draw(5, (*leading, 2, 32), dtype)
    positions, cache = make_positions(6, leading, 50), make_cache(50, 24)
    return {
        "rms_norm": (rms_norm, (x, weight), 1),
        "fused_add_rms_norm": (fused_add_rms_norm, (x, residual, weight), 2),
        "silu_and_mul": (silu_and_mul, (x,), 1),
        "rotary_embedding": (rotary_embedding, (q, k, positions, cache), 3),
    }


OPS = list(calls((1,), jnp.float32))


def assert_same(ours: Any, expected: Any) -> None:
    """Equal shapes, dtypes and values, leaf by leaf."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one).astype(np.float32), np.asarray(other).astype(np.float32))


def assert_within_roundings(ours: Any, expected: Any) -> None:
    """Equal shapes and dtypes; values within two roundings of 16 bits, or 32 of float32 (a sum in another order)."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        ulps = 32 if one.dtype == jnp.float32 else 2
        np.testing.assert_allclose(wide(one), wide(other), rtol=ulps * float(jnp.finfo(one.dtype).eps))


# What is offered.


def test_the_offer() -> None:
    """The four ops and the implementation check are public; what later work brings is absent."""
    assert set(OPS) < set(jaxfuse.kernels.__all__)
    assert not hasattr(jaxfuse.kernels, "qk_norm_rope")
    for rounding in ROUNDINGS:
        check_implementation(None, rounding)
        check_implementation("xla", rounding)
    check_implementation("mosaic", "fused")


@pytest.mark.parametrize("op", OPS)
def test_none_is_xla(op: str) -> None:
    """On a CPU the default implementation and "xla" asked for by name are the same function."""
    run, arguments, _ = calls((5,), jnp.bfloat16)[op]
    assert_same(run(*arguments), run(*arguments, implementation="xla"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "triton"}, 'implementation \'triton\' is not available; available: "mosaic", "xla"'),
        ({"implementation": "cuda"}, 'must be one of "mosaic", "xla" or None; got \'cuda\''),
        (
            {"implementation": "mosaic", "rounding": "hf"},
            'rounding "hf" exists in implementation "xla" alone',
        ),
        ({"rounding": "exact"}, 'rounding must be one of "fused", "hf"; got \'exact\''),
    ],
)
def test_an_implementation_asked_for_runs_or_raises(op: str, options: dict[str, Any], message: str) -> None:
    """Nothing silently becomes another implementation or rounding, in an op or for a whole model."""
    run, arguments, _ = calls((5,), jnp.float32)[op]
    with pytest.raises(ValueError, match=message):
        run(*arguments, **options)
    with pytest.raises(ValueError, match=message):
        check_implementation(options.get("implementation"), options.get("rounding", "fused"))


# Shapes.


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (0,), (3, 0), (1,), (7,), (2, 3, 5)])
def test_any_leading_shape(op: str, dtype: Any, leading: tuple[int, ...]) -> None:
    """No leading axis, several, and zero rows: shapes and dtypes are those of the inputs."""
    run, arguments, _ = calls(leading, dtype)[op]
    expected = {
        "rms_norm": [(*leading, 96)],
        "fused_add_rms_norm": [(*leading, 96), (*leading, 96)],
        "silu_and_mul": [(*leading, 48)],
        "rotary_embedding": [(*leading, 4, 32), (*leading, 2, 32)],
    }[op]
    for rounding in ROUNDINGS:
        results = jax.tree.leaves(jax.eval_shape(partial(run, rounding=rounding), *arguments))
        assert [leaf.shape for leaf in results] == expected
        assert {leaf.dtype for leaf in results} == {np.dtype(dtype)}


@pytest.mark.parametrize("op", OPS)
def test_no_rows_and_no_leading_axis_run(op: str) -> None:
    """The shapes at the edge also compile and run."""
    for leading in [(), (0,), (3, 0)]:
        run, arguments, _ = calls(leading, jnp.bfloat16)[op]
        results = jax.tree.leaves(run(*arguments, rounding="hf"))
        assert all(np.isfinite(wide(y)).all() for y in results)
        assert [y.size == 0 for y in results] == [0 in leading] * len(results)


def test_numpy_arguments() -> None:
    """NumPy arrays are taken as they are, in any integer dtype for the positions."""
    run, arguments, _ = calls((4,), jnp.float16)["rotary_embedding"]
    q, k, positions, cache = map(np.asarray, arguments)
    for integer in (np.int8, np.uint8, np.int64, np.uint32):
        assert_same(run(q, k, positions.astype(integer), cache), run(*arguments))


# Numbers.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 127, 5120])
def test_norms_against_float64(dtype: Any, width: int) -> None:
    """The norms err by one rounding of the output, and by what float32 arithmetic adds before it.

    In float32 roundings: √H + 3 in the mean square (the square, the sum in whatever order, whose errors add as a
    random walk does, the division, eps), of which the root halves the effect; 4 in rsqrt, 2 in the products; 2
    more for the sum with the residual, which is rounded in the row and again under the root.
    """
    x, residual, weight = draw(1, (64, width), dtype), draw(2, (64, width), dtype), draw(3, (width,), dtype)
    total64 = wide(x) + wide(residual)
    roundings = (np.sqrt(width) + 3) / 2 + 4 + 2
    added, total = fused_add_rms_norm(x, residual, weight, eps=EPS)
    for ours, exact, count in [
        (rms_norm(x, weight, eps=EPS), rms_norm64(wide(x), wide(weight), EPS), roundings),
        (added, rms_norm64(total64, wide(weight), EPS), roundings + 2),
        (total, total64, 1),
    ]:
        bound = rounding_bound(exact, dtype) + count * UNIT * np.abs(exact)
        assert np.all(np.abs(wide(ours) - exact) <= bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_against_float64(dtype: Any) -> None:
    """One rounding of the output, and in float32 roundings: 4 in exp, 1 each in sum, quotient and product."""
    gate = jnp.asarray(np.linspace(-80, 80, 20001).astype(dtype))
    x = jnp.concatenate([gate, draw(1, gate.shape, dtype)])
    exact = silu_and_mul64(wide(x))
    bound = rounding_bound(exact, dtype) + 7 * UNIT * np.abs(exact)
    assert np.all(np.abs(wide(silu_and_mul(x)) - exact) <= bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [2, 20, 32])
def test_rotary_embedding_against_float64(dtype: Any, rotary_dim: int) -> None:
    """One rounding of the output and two in float32; columns beyond rotary_dim come back untouched."""
    q, k, cache = draw(1, (2, 99, 5, 32), dtype), draw(2, (2, 99, 1, 32), dtype), make_cache(300, rotary_dim)
    positions = make_positions(3, (2, 99), 300)
    for ours, x in zip(rotary_embedding(q, k, positions, cache), (q, k), strict=True):
        exact = rotate64(wide(x), np.asarray(positions), wide(cache))
        sizes = np.hypot(*np.split(np.abs(wide(x))[..., :rotary_dim], 2, axis=-1))
        bound = rounding_bound(exact, dtype)
        bound[..., :rotary_dim] += 4 * UNIT * np.concatenate([sizes, sizes], axis=-1)
        assert np.all(np.abs(wide(ours) - exact) <= bound)
        assert_same(ours[..., rotary_dim:], x[..., rotary_dim:])


def test_positions_to_a_million() -> None:
    """The last position of a table of 2^20 rows reads the last row."""
    cache = make_cache(2**20, 2)
    q = draw(1, (3, 1, 2))
    positions = jnp.asarray([0, 2**19 + 1, 1_048_575], jnp.int32)
    ours, _ = rotary_embedding(q, q, positions, cache)
    np.testing.assert_allclose(ours, rotate64(wide(q), np.asarray(positions), wide(cache)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_traced_positions_out_of_range_fill_with_nan(rounding: Rounding, dtype: Any) -> None:
    """Under jit a position outside the table gives NaN in its own token: neither clamped nor wrapped."""
    positions = jnp.asarray([7, -1, 49, 50, -50, 2**31 - 1, -(2**31), 0], jnp.int32)
    inside = np.array([True, False, True, False, False, False, False, True])
    q, k, cache = draw(1, (8, 4, 32), dtype), draw(2, (8, 2, 32), dtype), make_cache(50, 24)
    run = partial(rotary_embedding, rounding=rounding)
    for ours, x in zip(jax.jit(run)(q, k, positions, cache), (q, k), strict=True):
        assert np.isnan(wide(ours)[~inside, :, :24]).all()
        assert np.isfinite(wide(ours)[inside]).all()
        assert_same(ours[..., 24:], x[..., 24:])
    # The index dtype must not wrap either: 200 rows are more than int8 counts.
    small = jax.jit(run)(q, k, jnp.full(8, -56, jnp.int8), make_cache(200, 24))
    assert np.isnan(wide(small[0])[..., :24]).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("dtype", "rounding"), KINDS)
def test_jit_vmap_and_rows_alone_give_the_same(op: str, rounding: Rounding, dtype: Any) -> None:
    """A row's result is the same bits under jit, and whatever rows are beside it.

    But for the norms' sum, whose order XLA chooses by the whole shape: there a row may differ by one rounding of
    the output, and of each value on the way that "hf" rounds.
    """
    run, arguments, batched = calls((33,), dtype)[op]
    run = partial(run, rounding=rounding)
    together = run(*arguments)
    assert_same(jax.jit(run)(*arguments), together)
    axes = (0,) * batched + (None,) * (len(arguments) - batched)
    compare = assert_within_roundings if "norm" in op else assert_same
    compare(jax.vmap(run, axes)(*arguments), together)
    for rows in (slice(20, 27), 32):
        alone = run(*(x[rows] for x in arguments[:batched]), *arguments[batched:])
        compare(alone, jax.tree.map(lambda x, rows=rows: x[rows], together))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_an_op_reads_the_rounded_values_of_its_arguments(dtype: Any) -> None:
    """In one program with what comes before and after, an op in "hf" gives the bits that it gives alone.

    XLA may drop the rounding of an array that is at once widened again: it does so on GPUs.
    """
    rounding: Rounding = "hf"
    x, weight = draw(1, (64, 256)), draw(2, (256,), dtype)

    def before(x: jax.Array) -> jax.Array:
        return (x * x).astype(dtype)

    def after(x: jax.Array) -> list[jax.Array]:
        outputs = fused_add_rms_norm(x, x, weight, rounding=rounding)
        activated = silu_and_mul(x, rounding=rounding)
        return [3 * y.astype(jnp.float32) for y in (*outputs, activated)]

    assert_same(jax.jit(lambda x: after(before(x)))(x), jax.jit(after)(jax.jit(before)(x)))


# Gradients.


def mix(outputs: Any) -> Any:
    """One number from an op's outputs: each times fixed random factors, summed in float32 or float64."""
    total: Any = 0.0
    for i, y in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
        factors = op_inputs.draw(9 + i, y.shape)
        if y.dtype == np.float64:
            total += np.sum(y * factors.astype(np.float64))
        else:
            total += jnp.sum(y.astype(jnp.float32) * factors)
    return total


Mixed = tuple[Callable[..., Any], Callable[..., Any], list[jax.Array]]


def mixed(op: str, dtype: Any, rounding: Rounding) -> Mixed:
    """The op mixed to one number, the same in float64, and the floating arguments to differentiate by."""
    run, arguments, _ = calls((2,), dtype)[op]
    if op == "rotary_embedding":
        q, k, positions, cache = arguments
        where, table = np.asarray(positions), wide(cache)
        return (
            lambda q, k: mix(run(q, k, positions, cache, rounding=rounding)),
            lambda q, k: mix((rotate64(q, where, table), rotate64(k, where, table))),
            [q, k],
        )
    if op != "silu_and_mul":
        run = partial(run, eps=EPS)
    exact: dict[str, Callable[..., Any]] = {
        "rms_norm": partial(rms_norm64, eps=EPS),
        "fused_add_rms_norm": lambda x, residual, weight: (rms_norm64(x + residual, weight, EPS), x + residual),
        "silu_and_mul": silu_and_mul64,
    }
    return lambda *x: mix(run(*x, rounding=rounding)), lambda *x: mix(exact[op](*x)), list(arguments)


def slopes(f: Callable[..., float], inputs: list[Wide], index: int, step: float) -> Wide:
    """The gradient of f by inputs[index], by central differences in float64."""
    result = np.zeros_like(inputs[index])
    for place in np.ndindex(result.shape):
        ends = []
        for sign in (1, -1):
            moved = [x.copy() for x in inputs]
            moved[index][place] += sign * step
            ends.append(f(*moved))
        result[place] = (ends[0] - ends[1]) / (2 * step)
    return result


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gradients_against_float64(op: str, dtype: Any, rounding: Rounding) -> None:
    """Gradients keep their inputs' dtypes, and are those of the op in float64.

    Over an array they err by the roundings of the narrow dtype: one in the cotangent, one in the result, and
    in "hf" those of the values in between; eps is two of them. In float32 the differences err by some 1e-8.
    """
    ours, exact, inputs = mixed(op, dtype, rounding)
    gradients = jax.jit(jax.grad(ours, argnums=tuple(range(len(inputs)))))(*inputs)
    for index, gradient in enumerate(gradients):
        assert gradient.dtype == inputs[index].dtype
        expected = slopes(exact, [wide(x) for x in inputs], index, 1e-5)
        error = np.linalg.norm(wide(gradient) - expected) / np.linalg.norm(expected)
        assert error <= max(float(jnp.finfo(dtype).eps), 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_against_float64(op: str) -> None:
    """Reverse over reverse: the curvature along a random direction is that of the op in float64."""
    ours, exact, inputs = mixed(op, jnp.float32, "fused")
    every = tuple(range(len(inputs)))
    directions = [draw(20 + i, x.shape) for i, x in enumerate(inputs)]

    def slope(*x: jax.Array) -> jax.Array:
        gradients = jax.grad(ours, argnums=every)(*x)
        return jax.tree.reduce(jnp.add, [jnp.sum(g * v) for g, v in zip(gradients, directions, strict=True)])

    curved = jax.jit(jax.grad(slope, argnums=every))(*inputs)
    terms = np.concatenate([wide(g * v).ravel() for g, v in zip(curved, directions, strict=True)])

    def along(step: float) -> float:
        return exact(*(wide(x) + step * wide(v) for x, v in zip(inputs, directions, strict=True)))

    step = 1e-4
    expected = (along(step) - 2 * along(0.0) + along(-step)) / step**2
    assert abs(terms.sum() - expected) <= 1e-6 * np.abs(terms).sum() + 1e-5


def test_silu_slopes_are_finite_where_exp_overflows() -> None:
    """The first and second derivatives of silu_and_mul are finite, and right, at gates of any size."""
    gates = jnp.asarray([-1e30, -1e4, -100.0, -89.0, -88.0, 0.0, 88.0, 89.0, 1e4])
    first = jax.vmap(jax.grad(lambda gate: silu_and_mul(jnp.stack([gate, jnp.float32(1)]))[0]))
    second = jax.vmap(jax.grad(lambda gate: first(gate[None])[0]))
    np.testing.assert_allclose(first(gates), [0, 0, 0, 0, 0, 0.5, 1, 1, 1], atol=1e-35)
    np.testing.assert_allclose(second(gates), [0, 0, 0, 0, 0, 0.5, 0, 0, 0], atol=1e-35)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_small_float16_gradients_are_not_flushed(rounding: Rounding) -> None:
    """A gradient among float16's subnormals comes through every rounding inside an op."""
    x, weight = draw(1, (4, 64), jnp.float16), jnp.ones(64, jnp.float16)
    scale = 2.0**-20

    def loss(x: jax.Array, scale: float) -> jax.Array:
        return scale * jnp.sum(rms_norm(x, weight, rounding=rounding).astype(jnp.float32) * draw(2, x.shape))

    small, large = jax.grad(loss)(x, scale), jax.grad(loss)(x, 1.0)
    assert jnp.max(jnp.abs(small)) < jnp.finfo(jnp.float16).tiny
    np.testing.assert_allclose(wide(small), scale * wide(large), rtol=0.01, atol=4 * 2.0**-24)
    assert np.count_nonzero(small) > small.size / 2


# Errors.

X, WEIGHT, CACHE = np.ones((2, 8), np.float32), np.ones(8, np.float32), np.ones((10, 4), np.float32)
Q, K, POSITIONS = np.ones((2, 3, 8), np.float32), np.ones((2, 1, 8), np.float32), np.array([0, 9], np.int32)


def norm_errors() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]]:
    """A name, arguments of rms_norm, options, and what they raise."""
    yield (
        "list",
        ([[1.0]], WEIGHT),
        {},
        TypeError,
        "x must be a jax.Array or numpy.ndarray; got list; convert",
    )
    yield (
        "float64",
        (X.astype(np.float64), WEIGHT),
        {},
        TypeError,
        "x must be bfloat16, .*; got float64; cast",
    )
    yield "integer", (X.astype(np.int32), WEIGHT), {}, TypeError, "x must be bfloat16, .*; got int32; cast"
    yield "scalar", (X[0, 0, ...], WEIGHT), {}, ValueError, r"x must be \[..., H\] .*; got shape \(\); add"
    yield "no width", (X[:, :0], WEIGHT[:0]), {}, ValueError, r"H at least 1; got shape \(2, 0\)"
    yield (
        "weight too short",
        (X, WEIGHT[:7]),
        {},
        ValueError,
        r"weight must be \[H\].* \(7,\) for x \(2, 8\); pass",
    )
    yield "weight of rank 2", (X, X), {}, ValueError, r"weight must be \[H\].* \(2, 8\) for x \(2, 8\)"
    yield (
        "weight in another dtype",
        (X.astype(jnp.bfloat16), WEIGHT),
        {},
        TypeError,
        r"weight must have the dtype of x, bfloat16; got float32; cast .* weight.astype\(x.dtype\)",
    )
    yield "eps an integer", (X, WEIGHT), {"eps": 1}, TypeError, r"Python float; got int; pass float\(eps\)"
    yield "eps an array", (X, WEIGHT), {"eps": jnp.float32(1e-6)}, TypeError, "eps must be a Python float"
    for eps in (0.0, -1e-6, float("inf"), float("nan"), 1e-39, 1e39):
        yield f"eps {eps}", (X, WEIGHT), {"eps": eps}, ValueError, "eps must be above zero.*; got .*; pass"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"), [pytest.param(*c, id=name) for name, *c in norm_errors()]
)
def test_norm_errors(arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Both norms state the rule, what came, and the mend, and name themselves."""
    with pytest.raises(error, match=f"^rms_norm: .*{message}"):
        rms_norm(*arguments, **options)
    x, weight = arguments
    with pytest.raises(error, match=f"^fused_add_rms_norm: .*{message}"):
        fused_add_rms_norm(x, x, weight, **options)


def other_errors() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]]:
    """An op, its arguments, and what they raise."""
    add, rope = fused_add_rms_norm, rotary_embedding
    yield (
        add,
        (X, X[:1], WEIGHT),
        ValueError,
        r"residual must have x's shape; got residual \(1, 8\) for x \(2, 8\)",
    )
    yield (
        add,
        (X, X.astype(np.float16), WEIGHT),
        TypeError,
        "residual must have the dtype of x, float32; got float16",
    )
    yield add, (X, [1.0], WEIGHT), TypeError, "residual must be a jax.Array or numpy.ndarray; got list"
    yield silu_and_mul, (X[:, :7],), ValueError, r"last axis is even and at least 2; got shape \(2, 7\); join"
    yield silu_and_mul, (X[:, :0],), ValueError, r"last axis is even and at least 2; got shape \(2, 0\)"
    yield silu_and_mul, (np.ones((), np.float32),), ValueError, r"got shape \(\)"
    yield (
        silu_and_mul,
        (X.astype(np.float64),),
        TypeError,
        "x must be bfloat16, float16 or float32; got float64",
    )
    yield (
        rope,
        (Q[0, 0], K, POSITIONS, CACHE),
        ValueError,
        r"q must be \[..., heads, D\].* got q \(8,\) and k",
    )
    yield (
        rope,
        (Q, K[:1], POSITIONS, CACHE),
        ValueError,
        r"alike but for the heads; got q \(2, 3, 8\) and k \(1, 1, 8\)",
    )
    yield (
        rope,
        (Q, K[..., :6], POSITIONS, CACHE),
        ValueError,
        r"alike but for the heads; .* k \(2, 1, 6\); reshape",
    )
    yield (
        rope,
        (Q, K.astype(np.float16), POSITIONS, CACHE),
        TypeError,
        "k must have the dtype of q, float32; got",
    )
    yield rope, (Q.astype(np.int8), K, POSITIONS, CACHE), TypeError, "q must be bfloat16, .* got int8"
    yield rope, (Q, K, [0, 9], CACHE), TypeError, "positions must be a jax.Array or numpy.ndarray; got list"
    yield rope, (Q, K, POSITIONS * 1.0, CACHE), TypeError, "positions must be integers; got float64; cast"
    yield rope, (Q, K, POSITIONS > 0, CACHE), TypeError, "positions must be integers; got bool"
    yield rope, (Q, K, POSITIONS.astype(">i4"), CACHE), TypeError, "positions must be integers; got >i4; cast"
    masked = np.ma.masked_array(np.ones((2, 8), np.float32), mask=True)
    yield silu_and_mul, (masked,), TypeError, r"x must not be a masked array; fill .*\.filled\(\)"
    yield rope, (Q, K, POSITIONS[:1], CACHE), ValueError, r"leading shape of q, \(2,\); got \(1,\); broadcast"
    yield (
        rope,
        (Q, K, POSITIONS - 1, CACHE),
        ValueError,
        "positions must be from 0 to 9, .* got -1 to 8; make a longer",
    )
    yield (
        rope,
        (Q, K, POSITIONS + 1, CACHE),
        ValueError,
        "positions must be from 0 to 9, .* got 1 to 10; make a longer",
    )
    yield (
        rope,
        (Q, K, POSITIONS.astype(np.int64) + 2**40, CACHE),
        ValueError,
        "got 1099511627776 to 1099511627785",
    )
    yield (
        rope,
        (Q, K, POSITIONS, CACHE.astype(jnp.bfloat16)),
        TypeError,
        "must be float32, .*; got bfloat16; keep",
    )
    yield (
        rope,
        (Q, K, POSITIONS, CACHE[0]),
        ValueError,
        r"must be \[max_position, rotary_dim\].* \(4,\); join",
    )
    yield rope, (Q, K, POSITIONS, CACHE[:0]), ValueError, r"a row for each position; got shape \(0, 4\)"
    yield (
        rope,
        (Q, K, POSITIONS, CACHE[:, :3]),
        ValueError,
        "rotary_dim, .* even and from 2 to D = 8; got 3; a row",
    )
    yield rope, (Q, K, POSITIONS, CACHE[:, :0]), ValueError, "rotary_dim, .* even and from 2 to D = 8; got 0"
    yield rope, (Q, K, POSITIONS, np.ones((10, 10), np.float32)), ValueError, "from 2 to D = 8; got 10"
    yield (
        rope,
        (Q, K, POSITIONS, None),
        TypeError,
        "cos_sin_cache must be a jax.Array or numpy.ndarray; got NoneType",
    )


@pytest.mark.parametrize(("run", "arguments", "error", "message"), list(other_errors()))
def test_other_errors(
    run: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    """The other rules, likewise."""
    with pytest.raises(error, match=f"^{run.__name__}: .*{message}"):
        run(*arguments)


def test_the_arguments_of_the_error_cases_fit() -> None:
    """What the error cases start from is accepted: each raises for its one fault."""
    rms_norm(X, WEIGHT)
    rotary_embedding(Q, K, POSITIONS, CACHE)
