"""`silu_and_mul` as a Mosaic GPU kernel. The reference is in reference.py."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import reference
from .blocks import each_block, load, programs, rows_at_once, rows_layout, store
from .opaque import opaque


@dataclass(frozen=True)
class Config:
    """How the kernel is launched."""

    vec: int
    """Neighboring elements that a thread loads at once."""
    warps_per_row: int
    """1, 2 or 4 of the four warps of a program."""
    rows: int
    """Rows of a program."""
    columns: int
    """Columns of a program, a divisor of I."""


def config_for(width: int, dtype: jnp.dtype) -> Config:
    """One load of 16 bytes a thread: on an H200 in bfloat16, more columns a program were never faster."""
    vec = 16 // dtype.itemsize
    warps = next((warps for warps in (4, 2, 1) if width % (32 * vec * warps) == 0), 1)
    columns = 32 * vec * warps if width % (32 * vec * warps) == 0 else 128
    return Config(vec, warps, rows_at_once(columns, vec, warps), columns)


def refusal(x: jax.Array) -> str | None:
    """Why the kernel cannot take this array, or None."""
    width = x.shape[-1] // 2
    return None if width % 128 == 0 else f"takes halves whose width is a multiple of 128; got {width}"


@partial(jax.jit, static_argnames=("config",))
def silu_and_mul(x: jax.Array, *, config: Config | None = None) -> jax.Array:
    """x [..., 2 I], gate then up -> [..., I]: silu(gate) * up."""

    def launch(x: jax.Array) -> jax.Array:
        shape = (*x.shape[:-1], x.shape[-1] // 2)
        rows = x.reshape(-1, x.shape[-1])
        if x.size == 0:
            return jnp.zeros(shape, x.dtype)
        choice = config or config_for(shape[-1], x.dtype)
        result = plgpu.kernel(
            partial(_silu_and_mul_kernel, config=choice),
            out_type=jax.ShapeDtypeStruct((rows.shape[0], shape[-1]), x.dtype),
            grid=(programs(rows.shape[0], choice.rows) * (shape[-1] // choice.columns),),
            grid_names=("program",),
            kernel_name="silu_and_mul",
        )(rows)
        return jnp.reshape(result, shape)

    result: jax.Array = opaque(launch, partial(reference.silu_and_mul, rounding="fused"), shared=())(x)
    return result


def _silu_and_mul_kernel(x_ref: Any, result_ref: Any, *, config: Config) -> None:
    rows, width = result_ref.shape
    # One axis for both: the second axis of a grid holds no more than 65,535 programs.
    parts = np.int32(width // config.columns)  # with 64-bit types on, a Python number would be an int64
    program, part = lax.div(lax.axis_index("program"), parts), lax.rem(lax.axis_index("program"), parts)

    def run(start: Any, rows: int) -> None:
        block, first = pl.ds(start, rows), part * config.columns
        layout = rows_layout(rows, config.columns, vec=config.vec, warps_per_row=config.warps_per_row)
        gate = load(x_ref.at[block, pl.ds(first, config.columns)], layout)
        up = load(x_ref.at[block, pl.ds(width + first, config.columns)], layout)
        store(result_ref.at[block, pl.ds(first, config.columns)], gate / (1 + jnp.exp(-gate)) * up)

    each_block(program, rows, config.rows, run)
