"""The Mosaic kernels as they are lowered: the published sizes, more than int32 counts, layouts and blocks of rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from numpy.typing import NDArray

from interpreter import NORMS, assert_lowers, rope, silu
from jaxfuse.kernels import blocks
from op_inputs import DTYPES

# Sizes.


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
