"""Blocks of rows in a Mosaic GPU kernel: how a warpgroup's 128 threads share one, load it and store it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS, LANES = 4, 32


def lanes_of_a_row(width: int, vec: int, warps_per_row: int) -> int:
    """The lanes of each of its warps that hold a row: the most, up to 32, whose vectors divide the width evenly."""
    lanes = LANES
    while width % (warps_per_row * lanes * vec):
        lanes //= 2
    return lanes


def rows_at_once(width: int, vec: int, warps_per_row: int) -> int:
    """The rows that the warpgroup holds in one pass when every thread has elements of its own."""
    return WARPS // warps_per_row * (LANES // lanes_of_a_row(width, vec, warps_per_row))


def rows_layout(rows: int, width: int, *, vec: int, warps_per_row: int) -> Any:
    """The layout of a block `[rows, width]`, for `plgpu.load`.

    A row lies across `warps_per_row` warps, each thread holding `vec` neighboring elements at a time, so which
    elements of a row a thread adds up does not depend on the number of rows. Where there are too few rows for all
    threads, several hold the same elements, and store the same values.

    Args:
      rows: any number; `rows_at_once` and its multiples leave no thread without elements of its own.
      width: a multiple of `vec * warps_per_row`.
      vec: elements of one load, a power of two.
      warps_per_row: 1, 2 or 4.
    """
    lanes = lanes_of_a_row(width, vec, warps_per_row)
    rows_of_a_warp = _common_power_of_two(LANES // lanes, rows)
    warps_on_rows = _common_power_of_two(WARPS // warps_per_row, rows // rows_of_a_warp)
    columns = lanes * vec
    # The block's last six axes become: warps on rows, warps on columns, rows of a warp, lanes, 1, vec.
    layout = mgpu.TiledLayout(
        plgpu.Tiling(
            (
                (warps_on_rows * rows_of_a_warp, warps_per_row * columns),
                (rows_of_a_warp, columns),
                (1, vec),
            )
        ),
        warp_dims=(*_replicated(WARPS // warps_per_row // warps_on_rows), -6, -5),
        lane_dims=(*_replicated(LANES // lanes // rows_of_a_warp), -4, -3),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _replicated(times: int) -> tuple[Any, ...]:
    """Not of one: a sum across warps takes two entries for two warps each, whatever they say (seen in JAX 0.11)."""
    return () if times == 1 else (plgpu.Replicated(times),)


def _common_power_of_two(limit: int, rows: int) -> int:
    """The largest power of two that divides `rows` and is at most `limit`, itself a power of two."""
    return min(limit, rows & -rows)


def load(ref: Any, layout: Any) -> jax.Array:
    """A block of global memory, in float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def store(ref: Any, value: jax.Array) -> None:
    """A float32 block to global memory, rounded once to the dtype there."""
    value = value.astype(ref.dtype)
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11, where assignment does what optimized=False does later.
        ref[...] = value


def programs(rows: int, rows_of_a_program: int) -> int:
    """How many programs `each_block` shares the rows among."""
    whole, rest = divmod(rows, rows_of_a_program)
    return whole + rest


def each_block(program: jax.Array, rows: int, rows_of_a_program: int, run: Callable[[Any, int], None]) -> None:
    """Call `run(first row, number of rows)` for this program: a whole block, or one of the rows left over."""
    whole, rest = divmod(rows, rows_of_a_program)
    if whole:
        pl.when(program < whole)(lambda: run(program * rows_of_a_program, rows_of_a_program))
    if rest:
        pl.when(program >= whole)(lambda: run(whole * rows_of_a_program + program - whole, 1))
