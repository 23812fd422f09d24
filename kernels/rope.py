"""`rotary_embedding` as a Mosaic GPU kernel. The reference is in reference.py."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import reference
from .blocks import load, rows_layout, store
from .opaque import opaque


@dataclass(frozen=True)
class Config:
    """How the kernel is launched: a program turns the heads of one token."""

    vec: int = 4
    """Neighboring elements that a thread loads at once. Of 2, 4 and 8, the first two were faster on an H200, by up
    to a tenth, for 16, 32 and 64 heads beside 8 (bfloat16)."""


def refusal(q: jax.Array, k: jax.Array, positions: jax.Array, cos_sin_cache: jax.Array) -> str | None:
    """Why the kernel cannot take these arrays, or None."""
    head_dim, rotary_dim = q.shape[-1], cos_sin_cache.shape[-1]
    if rotary_dim != head_dim:
        return f"turns whole heads; got rotary_dim {rotary_dim} for heads of {head_dim}"
    if head_dim % 128:
        return f"takes heads whose size is a multiple of 128; got {head_dim}"
    if 0 in (q.shape[-2], k.shape[-2]):
        return f"needs a head in each of q and k; got {q.shape[-2]} and {k.shape[-2]}"
    return None


@partial(jax.jit, static_argnames=("config",))
def rotary_embedding(
    q: jax.Array, k: jax.Array, positions: jax.Array, cos_sin_cache: jax.Array, *, config: Config = Config()
) -> tuple[jax.Array, jax.Array]:
    """q [..., heads, D], k [..., kv_heads, D], positions [...], cos_sin_cache [max_position, D] -> (q, k)."""

    def launch(
        q: jax.Array, k: jax.Array, positions: jax.Array, cos_sin_cache: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if positions.size == 0:
            return jnp.zeros(q.shape, q.dtype), jnp.zeros(k.shape, k.dtype)
        rows = [array.reshape(-1, *array.shape[-2:]) for array in (q, k)]
        turned = plgpu.kernel(
            partial(_rotary_embedding_kernel, config=config),
            out_type=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in rows],
            grid=(positions.size,),
            grid_names=("token",),
            kernel_name="rotary_embedding",
        )(*rows, reference.as_int32(positions).reshape(-1), cos_sin_cache)
        return turned[0].reshape(q.shape), turned[1].reshape(k.shape)

    result: tuple[jax.Array, jax.Array] = opaque(
        launch, partial(reference.rotary_embedding, rounding="fused"), shared=(3,)
    )(q, k, positions, cos_sin_cache)
    return result


def _rotary_embedding_kernel(
    q_ref: Any,
    k_ref: Any,
    positions_ref: Any,
    cos_sin_cache_ref: Any,
    turned_q_ref: Any,
    turned_k_ref: Any,
    *,
    config: Config,
) -> None:
    token = lax.axis_index("token")
    position, max_position = positions_ref[token], cos_sin_cache_ref.shape[0]
    inside = (position >= 0) & (position < max_position)
    # A token outside the table must show as NaN; only then is the row that is read another's.
    mark = jnp.where(inside, 1.0, jnp.nan).astype(jnp.float32)
    row = cos_sin_cache_ref.at[jnp.where(inside, position, 0)]
    for source_ref, result_ref in ((q_ref, turned_q_ref), (k_ref, turned_k_ref)):
        _, heads, head_dim = source_ref.shape
        half = head_dim // 2
        layout = rows_layout(heads, half, vec=config.vec, warps_per_row=1)
        first = load(source_ref.at[token, :, pl.ds(0, half)], layout)
        second = load(source_ref.at[token, :, pl.ds(half, half)], layout)
        angle = [plgpu.load(row.at[pl.ds(start, half)], optimized=False) * mark for start in (0, half)]
        cos, sin = (lax.broadcast_in_dim(part, (heads, half), (1,)) for part in angle)
        store(result_ref.at[token, :, pl.ds(0, half)], first * cos - second * sin)
        store(result_ref.at[token, :, pl.ds(half, half)], second * cos + first * sin)
