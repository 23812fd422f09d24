"""Grouped-query attention in plain jnp."""

import jax
import jax.numpy as jnp

from jaxfuse.numerics import Numerics, precision_of


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, *, numerics: Numerics) -> jax.Array:
    """softmax(q kᵀ / √D) v, each group of query heads sharing one kv head.

    `"fused"` keeps scores and softmax in float32; `"hf"` rounds where transformers' eager attention does: the
    product, the scaled product, and the softmax.

    Args:
        q: `[B, T, heads, D]`.
        k, v: `[B, S, kv_heads, D]`, `heads` a multiple of `kv_heads`.
        visible: `[B, T, S]` bool (B may be 1), whether a query sees a key; each query sees at least one.
        numerics: the model's.

    Returns:
        `[B, T, heads, D]` in the model's dtype.
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    precision = precision_of(q.dtype)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    scale = jnp.float32(head_dim**-0.5)
    if numerics.rounding == "hf":
        scores = numerics.round(scores).astype(jnp.float32) * scale
        scores = numerics.round(scores).astype(jnp.float32)
    else:
        scores = scores * scale
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    # In both roundings the probabilities meet v in v's dtype: that is what the tensor cores take.
    weights = numerics.round(jax.nn.softmax(scores, axis=-1))
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=precision, preferred_element_type=jnp.float32)
    return numerics.round(mixed).reshape(q.shape)
