"""`rms_norm` and `fused_add_rms_norm` as Mosaic GPU kernels. The reference is in reference.py."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import reference
from .blocks import each_block, load, programs, rows_at_once, rows_layout, store
from .opaque import opaque


@dataclass(frozen=True)
class Config:
    """How a kernel is launched. `vec` and `warps_per_row` fix the order of a row's sum."""

    vec: int
    """Neighboring elements that a thread loads at once."""
    warps_per_row: int
    """1, 2 or 4 of the four warps of a program."""
    rows: int
    """Rows of a program."""


def config_for(width: int, dtype: jnp.dtype) -> Config:
    """The choice for rows of `width`: it looks at nothing else, so a row's bits depend on nothing else.

    Measured on an H200 in bfloat16 (bench/NOTES.md). Wide rows want loads in flight, so all four warps; narrow ones
    a program of several rows.
    """
    largest = 16 // dtype.itemsize
    warps = 1 if width <= 512 else 2 if width < 1024 else 4
    vec = next(vec for vec in (8, 4, 2, 1) if vec <= largest and (width <= 256 or width % (32 * warps * vec) == 0))
    return Config(vec, warps, rows_at_once(width, vec, warps))


def refusal(x: jax.Array, *_: jax.Array) -> str | None:
    """Why the kernels cannot take these arrays, or None."""
    width = x.shape[-1]
    return None if width % 128 == 0 else f"takes rows whose width is a multiple of 128; got {width}"


@partial(jax.jit, static_argnames=("eps", "config"))
def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, config: Config | None = None) -> jax.Array:
    """x [..., H], weight [H] -> [..., H]."""

    def launch(x: jax.Array, weight: jax.Array) -> jax.Array:
        (normed,) = _launch(_rms_norm_kernel, (x,), weight, eps, config)
        return normed

    result: jax.Array = opaque(launch, partial(reference.rms_norm, eps=eps, rounding="fused"), shared=(1,))(x, weight)
    return result


@partial(jax.jit, static_argnames=("eps", "config"))
def fused_add_rms_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
    """x and residual [..., H], weight [H] -> (rms_norm of the unrounded sum, the sum), both [..., H]."""

    def launch(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        normed, total = _launch(_fused_add_rms_norm_kernel, (x, residual), weight, eps, config)
        return normed, total

    result: tuple[jax.Array, jax.Array] = opaque(
        launch, partial(reference.fused_add_rms_norm, eps=eps, rounding="fused"), shared=(2,)
    )(x, residual, weight)
    return result


def _launch(
    kernel: Any, inputs: tuple[jax.Array, ...], weight: jax.Array, eps: float, config: Config | None
) -> tuple[jax.Array, ...]:
    """Run `kernel` over the rows of the inputs; it has as many outputs, of their shape."""
    shape, dtype, width = inputs[0].shape, inputs[0].dtype, weight.shape[0]
    config = config or config_for(width, dtype)
    flat = [array.reshape(-1, width) for array in inputs]
    rows = flat[0].shape[0]
    if rows == 0:
        return tuple(jnp.zeros(shape, dtype) for _ in inputs)  # not the inputs, whose types may be weak
    outputs = plgpu.kernel(
        partial(kernel, eps=eps, config=config),
        out_type=[jax.ShapeDtypeStruct((rows, width), dtype)] * len(inputs),
        grid=(programs(rows, config.rows),),
        grid_names=("program",),
        kernel_name=kernel.__name__.removeprefix("_").removesuffix("_kernel"),
    )(*flat, weight)
    return tuple(output.reshape(shape) for output in outputs)


def _rms_norm_kernel(x_ref: Any, weight_ref: Any, normed_ref: Any, *, eps: float, config: Config) -> None:
    def run(start: Any, rows: int) -> None:
        block = pl.ds(start, rows)
        layout = rows_layout(rows, x_ref.shape[1], vec=config.vec, warps_per_row=config.warps_per_row)
        store(normed_ref.at[block], _normalize(load(x_ref.at[block], layout), weight_ref, eps))

    each_block(lax.axis_index("program"), x_ref.shape[0], config.rows, run)


def _fused_add_rms_norm_kernel(
    x_ref: Any, residual_ref: Any, weight_ref: Any, normed_ref: Any, total_ref: Any, *, eps: float, config: Config
) -> None:
    def run(start: Any, rows: int) -> None:
        block = pl.ds(start, rows)
        layout = rows_layout(rows, x_ref.shape[1], vec=config.vec, warps_per_row=config.warps_per_row)
        total = load(x_ref.at[block], layout) + load(residual_ref.at[block], layout)
        store(total_ref.at[block], total)
        store(normed_ref.at[block], _normalize(total, weight_ref, eps))

    each_block(lax.axis_index("program"), x_ref.shape[0], config.rows, run)


def _normalize(x: jax.Array, weight_ref: Any, eps: float) -> jax.Array:
    """x [rows, H] float32 -> x / sqrt(mean(x^2) + eps) * weight, unrounded."""
    weight = plgpu.load(weight_ref, optimized=False).astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(x * x, axis=1) / x.shape[1] + eps)
    return x * lax.broadcast_in_dim(scale, x.shape, (0,)) * lax.broadcast_in_dim(weight, x.shape, (1,))
