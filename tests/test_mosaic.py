"""The Mosaic GPU kernels without a GPU: interpreted against float64, and lowered for CUDA.

What only a GPU shows (its own order of sums, its exp and rsqrt, speed) is in the tests marked gpu.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from math import log2
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # Where the interpreter keeps what it saw.
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from numpy.typing import NDArray

from jaxfuse.kernels import (
    ImplementationError,
    blocks,
    dispatch,
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from jaxfuse.kernels.rms_norm import config_for
from truth import UNIT, Wide, rms_norm64, rotate64, rounding_bound, silu_and_mul64, wide

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
EPS = 1e-6
TINY = float(jnp.finfo(jnp.float32).tiny)  # XLA turns smaller results into zero on a CPU.

OPS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "rotary_embedding": rotary_embedding,
}
NORMS: dict[str, Callable[..., Any]] = {
    "rms_norm": partial(rms_norm, eps=EPS, implementation="mosaic"),
    "fused_add_rms_norm": partial(fused_add_rms_norm, eps=EPS, implementation="mosaic"),
}
silu = partial(silu_and_mul, implementation="mosaic")
rope = partial(rotary_embedding, implementation="mosaic")


# How a kernel is run here.

# JAX 0.12 raises at a race unless told to warn; 0.11 only notes it. Noting it does for both.
_WARN = {"on_race": "warn"} if hasattr(plgpu.InterpretGPUParams, "on_race") else {}
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True, **_WARN)  # type: ignore[arg-type]


def interpreted(run: Callable[..., Any], *arguments: Any) -> Any:
    """`run(*arguments)`, which launches one kernel, by JAX's interpreter: no race, each element written once.

    Uninitialized memory reads as NaN there, and a read out of bounds raises.
    """
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        results = jax.block_until_ready(run(*arguments))
    if all(result.size for result in jax.tree.leaves(results)):
        assert_written_once(jax.tree.leaves(results))
    return results


def assert_written_once(results: list[jax.Array]) -> None:
    """The last kernel wrote each element of its results once, and nothing else, and no race was found."""
    races = gpu_callbacks.get_races()
    assert not races.races_found
    written = sorted((key for key, writes in races.writes.items() if writes), key=lambda key: key.buffer_id)
    assert len(written) == len(results)
    for key, result in zip(written, results, strict=True):
        places = [place for _, _, place, _ in races.writes[key]]
        # The kernel sees the leading axes as one.
        times = np.zeros(result.shape, np.int64).reshape(-1, *result.shape[1 - len(places[0]) :])
        for place in places:
            times[place] += 1
        np.testing.assert_array_equal(times, 1)


def assert_lowers(run: Callable[..., Any], *arguments: Any) -> None:
    """`run` lowers for CUDA, to one Mosaic kernel."""
    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2(") == 1


def _copy_kernel(x_ref: Any, y_ref: Any, *, rows: int) -> None:
    row = pl.ds(jax.lax.rem(jax.lax.axis_index("thread"), rows), 1)
    blocks.store(y_ref.at[row], blocks.load(x_ref.at[row], blocks.rows_layout(1, 128, vec=1, warps_per_row=4)))


COPIERS: dict[str, tuple[int, dict[str, Any], str]] = {
    "two warpgroups write a row": (1, {"num_threads": 2, "thread_name": "thread"}, "races_found"),
    "two programs write a row": (1, {"grid": (2,), "grid_names": ("thread",)}, "races_found"),
    "nobody writes the last row": (3, {"grid": (2,), "grid_names": ("thread",)}, "Mismatched elements: 128 / 384 "),
}


@pytest.mark.parametrize("case", COPIERS)
def test_faulty_kernels_are_found(case: str) -> None:
    """Races, and elements that no one writes, fail where a kernel is interpreted: the detector is on."""
    rows, launch, message = COPIERS[case]
    kernel = plgpu.kernel(
        partial(_copy_kernel, rows=rows), out_type=jax.ShapeDtypeStruct((rows, 128), jnp.float32), **launch
    )
    with pytest.raises(AssertionError, match=message):
        interpreted(kernel, draw(1, (rows, 128)))


# Inputs.


def draw(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> NDArray[Any]:
    """Normal values at scales from 0.1 to 10."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10 ** rng.uniform(-1, 1, shape)).astype(dtype)


def draw_small(seed: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """The same, each row at a scale from 1e-4 to 1: in some rows eps is most of the mean square, in others nothing."""
    scales = 10 ** np.random.default_rng(seed + 500).uniform(-4, 0, (*shape[:-1], 1))
    return (draw(seed, shape) * scales).astype(dtype)


def make_cache(max_position: int, head_dim: int) -> NDArray[np.float32]:
    """A RoPE table, [max_position, head_dim]."""
    angles = np.arange(max_position)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


type Look = Callable[[jax.Array], jax.Array]

# The views of leading axes, each with the number of axes that it needs.
VIEWS = {"itself": 0, "every other": 1, "but the first": 1, "backwards": 1, "transposed": 2, "inner rows": 2}


def behind_a_view(view: str, x: NDArray[Any]) -> tuple[NDArray[Any], Look]:
    """An array, and a view of it that is x. What the view leaves out is NaN, or a position out of range."""
    poison = np.nan if x.dtype.kind != "i" else -1

    def around(shape: tuple[int, ...], look: Any) -> tuple[NDArray[Any], Look]:
        stored = np.full(shape, poison, x.dtype)
        look(stored)[...] = x
        return stored, look

    length, *rest = x.shape or (0,)
    match view:
        case "every other":
            return around((2 * length, *rest), lambda x: x[::2])
        case "but the first":
            return around((1 + length, *rest), lambda x: x[1:])
        case "backwards":
            return around((length, *rest), lambda x: x[::-1])
        case "transposed":
            return around((rest[0], length, *rest[1:]), lambda x: x.swapaxes(0, 1))
        case "inner rows":
            return around((length, 2 + rest[0], *rest[1:]), lambda x: x[:, 1:-1])
        case _:
            return around(x.shape, lambda x: x)


def through_views(
    run: Callable[..., Any], view: str, rows: list[NDArray[Any]], shared: list[NDArray[Any]]
) -> tuple[Callable[..., Any], list[NDArray[Any]]]:
    """`run(*rows, *shared)` as a function of what lies behind a view of each of `rows`, and those arguments."""
    stored, looks = zip(*(behind_a_view(view, x) for x in rows), strict=True)

    def function(*arguments: jax.Array) -> Any:
        seen = [look(x) for look, x in zip(looks, arguments, strict=False)]
        return run(*seen, *arguments[len(seen) :])

    return jax.jit(function), [*stored, *shared]


def run_and_lower(
    run: Callable[..., Any], view: str, rows: list[NDArray[Any]], shared: list[NDArray[Any]]
) -> list[jax.Array]:
    """The results of `run(*rows, *shared)`, interpreted; it also lowers for CUDA."""
    function, arguments = through_views(run, view, rows, shared)
    if rows[0].size:
        assert_lowers(function, *arguments)
    return jax.tree.leaves(interpreted(function, *arguments))


# No rows; one; up to 20, under up to three axes.
SHAPES: list[tuple[int, ...]] = [
    *[(), (0,), (3, 0)] * 2,
    *[(length,) for length in range(1, 21)],
    *product(range(1, 5), range(1, 6)),
    *product(range(1, 3), range(1, 4), range(1, 4)),
]


@st.composite
def leading_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], str]:
    """A shape, and a view that it can be."""
    shape = draw(st.sampled_from(SHAPES))
    view = draw(st.sampled_from([view for view, axes in VIEWS.items() if axes <= len(shape)]))
    return shape, view


few = hypothesis.settings(max_examples=30)
given_rows = {
    "leading": leading_shapes(),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 1000),
}
widths = st.sampled_from([128, 256, 384, 512, 640, 1024, 1152, 2560, 5120])


def assert_close(ours: jax.Array, exact: Wide, dtype: Any, error: Wide) -> None:
    """Of `dtype`, and off by at most one rounding to it and `error`. A missing or NaN element is off by more."""
    assert ours.dtype == dtype
    assert ours.shape == exact.shape
    off = np.abs(wide(ours) - exact)
    assert np.all(off <= rounding_bound(exact, dtype) + error)


# Numbers.


def roundings_of_a_norm(width: int, dtype: Any) -> float:
    """How many float32 roundings, at the most, a norm adds to its value before the output is rounded.

    The square, the division and eps add one each to the mean square. Its sum adds as many as it is deep: each
    thread adds up width / threads terms, then log2(threads) steps join them; no term is negative, so a rounding of
    a part is no larger a part of the whole. (The interpreter adds up in XLA's order for a CPU: width terms, whose
    roundings add as a random walk does, to some √width / 3, which is less.) The root halves all that. rsqrt errs by
    2 ulps, which are at most 4 roundings, and 2 products follow.
    """
    config = config_for(width, np.dtype(dtype))
    threads = config.warps_per_row * blocks.lanes_of_a_row(width, config.vec, config.warps_per_row)
    return (3 + width / threads + log2(threads)) / 2 + 4 + 2


@few
@hypothesis.given(**given_rows, width=widths)
def test_rms_norm_against_float64(leading: tuple[tuple[int, ...], str], dtype: Any, seed: int, width: int) -> None:
    """rms_norm of any rows errs by the roundings of its own arithmetic, and lowers."""
    shape, view = leading
    x, weight = draw_small(seed, (*shape, width), dtype), draw(seed + 1, (width,), dtype)
    (normed,) = run_and_lower(NORMS["rms_norm"], view, [x], [weight])
    exact = rms_norm64(wide(x), wide(weight), EPS)
    assert_close(normed, exact, dtype, roundings_of_a_norm(width, dtype) * UNIT * np.abs(exact))


@few
@hypothesis.given(**given_rows, width=widths)
def test_fused_add_rms_norm_against_float64(
    leading: tuple[tuple[int, ...], str], dtype: Any, seed: int, width: int
) -> None:
    """The sum is rounded once; the norm reads it before that, and errs by 2 more float32 roundings than rms_norm.

    They are the sum's own: in the row, and under the root, where the square doubles and the root halves it.
    """
    shape, view = leading
    x, residual = (draw_small(seed, (*shape, width), dtype) for seed in (seed, seed + 1))
    weight = draw(seed + 2, (width,), dtype)
    normed, total = run_and_lower(NORMS["fused_add_rms_norm"], view, [x, residual], [weight])
    exact_total = wide(x) + wide(residual)
    exact = rms_norm64(exact_total, wide(weight), EPS)
    # In float32 the sum's rounding is that of the output.
    assert_close(total, exact_total, dtype, (dtype != jnp.float32) * UNIT * np.abs(exact_total))
    assert_close(normed, exact, dtype, (roundings_of_a_norm(width, dtype) + 2) * UNIT * np.abs(exact))


GATES = [-1000, -100, -89, -88.75, -88.5, -87, -20, -1e-3, -0.0, 0.0, 1e-3, 20, 87, 88.5, 89, 1000]


@few
@hypothesis.given(**given_rows, width=widths)
def test_silu_and_mul_against_float64(leading: tuple[tuple[int, ...], str], dtype: Any, seed: int, width: int) -> None:
    """silu_and_mul errs by 7 float32 roundings: 2 ulps, so 4, in exp; one each in the sum, quotient and product.

    The formula is g / (1 + exp(-g)): where exp overflows, below -88.7, it gives -0 for what is 1e-37 or less.
    """
    shape, view = leading
    x = draw(seed, (*shape, 2 * width), dtype)
    x[..., : len(GATES)] = GATES
    (activated,) = run_and_lower(silu, view, [x], [])
    exact = silu_and_mul64(np.maximum(wide(x), -700))  # exp(1000) overflows in float64, too.
    lost = (wide(x)[..., :width] < -88.7) | (np.abs(exact) < TINY)
    assert np.all(np.abs(exact[lost]) < 1e-35)
    assert_close(activated, exact, dtype, 7 * UNIT * np.abs(exact) + np.where(lost, np.abs(exact), 0))


@few
@hypothesis.given(
    **given_rows,
    heads=st.integers(1, 40),
    kv_heads=st.integers(1, 40),
    head_dim=st.sampled_from([128, 256]),
)
def test_rotary_embedding_against_float64(
    leading: tuple[tuple[int, ...], str], dtype: Any, seed: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    """rotary_embedding errs by 2 float32 roundings of |a cos| + |b sin|, at most: a product's, and the sum's.

    In float32 the sum's rounding is that of the output.
    """
    shape, view = leading
    q, k = draw(seed, (*shape, heads, head_dim), dtype), draw(seed + 1, (*shape, kv_heads, head_dim), dtype)
    cache = make_cache(50, head_dim)
    positions = np.asarray(np.random.default_rng(seed).integers(0, 50, shape), np.int32)
    cos, sin = np.split(np.abs(wide(cache))[positions][..., None, :], 2, axis=-1)
    for ours, x in zip(run_and_lower(rope, view, [q, k, positions], [cache]), (q, k), strict=True):
        exact = rotate64(wide(x), positions, wide(cache))
        first, second = np.split(np.abs(wide(x)), 2, axis=-1)
        sizes = np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1)
        assert_close(ours, exact, dtype, (1 if dtype == jnp.float32 else 2) * UNIT * sizes)


def bits(x: Any) -> NDArray[Any]:
    """The bits of an array, as integers."""
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("width", [128, 1024, 2560])
def test_the_bits_of_a_row_are_its_own(op: str, dtype: Any, width: int) -> None:
    """A row normed alone, and first, in the middle and last among others, has the same bits, and so has a repeat."""
    weight = draw(1, (width,), dtype)

    def run(x: NDArray[Any]) -> list[NDArray[Any]]:
        inputs = (x,) if op == "rms_norm" else (x, x[..., ::-1].copy())
        return [bits(y) for y in jax.tree.leaves(interpreted(NORMS[op], *inputs, weight))]

    row = draw(2, (1, width), dtype)
    alone = run(row)
    for others in (3, 8, 13):
        x = draw(others, (others + 1, width), dtype)
        places = [0, others // 2, others]
        x[places] = row
        together = run(x)
        for ours, expected, again in zip(together, alone, run(x), strict=True):
            np.testing.assert_array_equal(ours[places], np.repeat(expected, 3, axis=0))
            np.testing.assert_array_equal(ours, again)


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


def rope_inputs(dtype: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
    """q and k of 8 tokens, and a table of 50 positions."""
    return draw(1, (8, 4, 128), dtype), draw(2, (8, 2, 128), dtype), make_cache(50, 128)


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


def test_int64_positions_do_not_wrap_into_the_table() -> None:
    """With 64-bit types on, a traced position of 2^32 + 3 or -2^32 is outside the table too."""
    q, k, cache = rope_inputs(jnp.float32)
    with jax.enable_x64(True):
        positions = jnp.asarray([3, 2**32 + 3, -(2**32), 49, 2**31, -(2**31), 0, 2**63 - 1], jnp.int64)
        assert positions.dtype == jnp.int64
        turned = interpreted(jax.jit(rope), q, k, positions, cache)
    for ours in turned:
        outside = np.isnan(wide(ours)).all(axis=(1, 2))
        np.testing.assert_array_equal(outside, [False, True, True, False, True, True, False, True])
        assert np.isfinite(wide(ours)[~outside]).all()


# Lowering.

HIDDEN = [128, 256, 1024, 2048, 2560, 4096, 5120]  # 128: the norms of q and k.
INTERMEDIATE = [512, 3072, 6144, 9728, 12288, 17408, 25600]
HEADS = [(4, 2), (16, 8), (32, 8), (40, 8), (64, 8)]


def shaped(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """An array that has no data."""
    return jax.ShapeDtypeStruct(shape, dtype)


def lower_op(op: str, size: Any, rows: int, dtype: Any) -> None:
    """An op over `rows` rows of one size: a width, or the heads of q and k."""
    struct = partial(shaped, dtype=dtype)
    match op:
        case "rms_norm":
            assert_lowers(NORMS[op], struct(rows, size), struct(size))
        case "fused_add_rms_norm":
            assert_lowers(NORMS[op], struct(rows, size), struct(rows, size), struct(size))
        case "silu_and_mul":
            assert_lowers(silu, struct(rows, 2 * size))
        case "rotary_embedding":
            q, k = (struct(rows, heads, 128) for heads in size)
            assert_lowers(rope, q, k, shaped(rows, dtype=jnp.int32), shaped(40960, 128, dtype=jnp.float32))


SIZES: dict[str, list[Any]] = {
    "rms_norm": HIDDEN,
    "fused_add_rms_norm": HIDDEN,
    "silu_and_mul": INTERMEDIATE,
    "rotary_embedding": HEADS,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "size"), [(op, size) for op, sizes in SIZES.items() for size in sizes])
def test_the_sizes_of_the_published_models_lower(op: str, size: Any, dtype: Any) -> None:
    """Qwen3 0.6B, 1.7B, 4B, 8B, 14B and 32B, and the checkpoint that ships, at 1 to 16,384 rows."""
    for rows in (1, 7, 64, 16384):
        lower_op(op, size, rows, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", SIZES)
def test_more_elements_than_int32_counts_lower(op: str, dtype: Any) -> None:
    """Arrays of more than 2^31 elements, at a number of rows that leaves some over."""
    size = SIZES[op][2]
    elements_of_a_row = 128 * min(size) if op == "rotary_embedding" else size
    rows = 2**31 // elements_of_a_row + 3
    assert rows * elements_of_a_row > 2**31
    lower_op(op, size, rows, dtype)


# The parts of blocks.py.


def elements_of_threads(layout: Any, rows: int, width: int) -> NDArray[Any]:
    """The elements that each thread holds, as [warps, lanes, elements]: what a TiledLayout is defined to mean."""
    array = np.arange(rows * width).reshape(rows, width)
    for tile in layout.tiling.tiles:
        kept = array.ndim - len(tile)
        split = [part for size, of in zip(array.shape[kept:], tile, strict=True) for part in (size // of, of)]
        array = array.reshape(*array.shape[:kept], *split)
        array = array.transpose(*range(kept), *range(kept, array.ndim, 2), *range(kept + 1, array.ndim, 2))
    axes = []
    rank = array.ndim
    for dim in (*layout.warp_dims, *layout.lane_dims):
        if isinstance(dim, plgpu.Replicated):
            array = np.repeat(array[..., None], dim.times, axis=-1)
            axes.append(array.ndim - 1)
        else:
            axes.append(rank + dim)
    return np.moveaxis(array, axes, range(len(axes))).reshape(blocks.WARPS, blocks.LANES, -1)


def shares_of_a_row(elements: NDArray[Any], row: int, width: int) -> set[tuple[int, ...]]:
    """What the threads hold of one row, each different share once."""
    shares = set()
    for held in elements.reshape(-1, elements.shape[-1]):
        share = tuple(int(column) for column in np.sort(held[held // width == row] % width))
        if share:
            shares.add(share)
    return shares


@pytest.mark.parametrize("warps_per_row", [1, 2, 4])
@pytest.mark.parametrize("vec", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [64, 128, 192, 256, 384, 512, 640, 1024, 2560])
def test_layouts_of_rows(width: int, vec: int, warps_per_row: int) -> None:
    """Every thread has a share of a row, the same however many rows there are, and the shares make up the row.

    A layout names no axis of one warp or lane: with one more entry than the four warps of a row need, a sum across
    them missed half of the row on an H200, which the interpreter does not show.
    """
    if width % (vec * warps_per_row):
        pytest.skip("no multiple of vec * warps_per_row")
    at_once = blocks.rows_at_once(width, vec, warps_per_row)
    lanes = blocks.lanes_of_a_row(width, vec, warps_per_row)
    expected: set[tuple[int, ...]] | None = None
    for rows in (1, 2, 3, 4, 6, 7, 8, 20, at_once, 3 * at_once):
        layout = blocks.rows_layout(rows, width, vec=vec, warps_per_row=warps_per_row).to_mgpu()
        for dims in (layout.warp_dims, layout.lane_dims):
            assert all(dim.times > 1 for dim in dims if isinstance(dim, plgpu.Replicated))
        if warps_per_row == 4:
            assert len(layout.warp_dims) == 1
            assert isinstance(layout.warp_dims[0], int)
        elements = elements_of_threads(layout, rows, width)
        runs = elements.reshape(-1, vec)
        assert np.all(np.diff(runs, axis=1) == 1)
        assert np.all(runs[:, 0] % vec == 0)
        if rows % at_once == 0:
            assert len(np.unique(elements)) == elements.size
        for row in {0, rows // 2, rows - 1}:
            shares = shares_of_a_row(elements, row, width)
            assert len(shares) == warps_per_row * lanes
            assert sorted(column for share in shares for column in share) == list(range(width))
            expected = expected or shares
            assert shares == expected


def blocks_of(program: int, rows: int, rows_of_a_program: int) -> list[tuple[int, int]]:
    """The blocks that a program runs: first row, number of rows."""
    taken: list[tuple[int, int]] = []
    blocks.each_block(program, rows, rows_of_a_program, lambda *block: taken.append(block))  # type: ignore[arg-type]
    return taken


@pytest.mark.parametrize("rows_of_a_program", [1, 2, 4, 8, 16])
def test_each_block_covers_each_row_once(rows_of_a_program: int) -> None:
    """Whole blocks, then the rows left over one by one: no row is left out or taken twice, and no program idles."""
    for rows in range(50):
        programs = range(blocks.programs(rows, rows_of_a_program))
        taken = [blocks_of(program, rows, rows_of_a_program) for program in programs]
        assert [len(of_a_program) for of_a_program in taken] == [1] * len(programs)
        assert [row for [(start, count)] in taken for row in range(start, start + count)] == [*range(rows)]
        assert {count for [(_, count)] in taken} <= {1, rows_of_a_program}


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
    q, k, cache = rope_inputs(jnp.float32)
    arguments = {
        "rms_norm": (x, weight),
        "fused_add_rms_norm": (x, y, weight),
        "silu_and_mul": (x,),
        "rotary_embedding": (q, k, np.arange(8, dtype=np.int32), cache),
    }[op]
    interpreted(OPS[op], *arguments)  # It fails where no kernel ran.
