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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from numpy.typing import NDArray

from interpreter import EPS, NORMS, TINY, assert_lowers, bits, interpreted, rope, silu
from jaxfuse.kernels import blocks
from jaxfuse.kernels.rms_norm import config_for
from op_inputs import DTYPES, draw, make_cache
from truth import UNIT, Wide, rms_norm64, rotate64, rounding_bound, silu_and_mul64, wide

# The interpreter.


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


def draw_small(seed: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """As `draw`, each row at a scale from 1e-4 to 1: in some rows eps is most of the mean square, in others nothing."""
    scales = 10 ** np.random.default_rng(seed + 500).uniform(-4, 0, (*shape[:-1], 1))
    return (draw(seed, shape) * scales).astype(dtype)


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
widths = st.sampled_from([128, 256, 384, 512, 640, 768, 1024, 1152, 2560, 5120])


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


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("width", [128, 384, 640, 1024, 2560])
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
