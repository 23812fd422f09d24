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
    batch, queries, _, head_dim = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], -1, head_dim)
    if queries == 1:
        scores, mix = _scores_of_one(grouped, k), _mix_for_one
    else:
        scores, mix = _scores(grouped, k), _mix
    scale = jnp.float32(head_dim**-0.5)
    if numerics.rounding == "hf":
        scores = numerics.round(scores).astype(jnp.float32) * scale
        scores = numerics.round(scores).astype(jnp.float32)
    else:
        scores = scores * scale
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    # In both roundings the probabilities meet v in v's dtype: that is what the tensor cores take.
    weights = numerics.round(jax.nn.softmax(scores, axis=-1))
    return numerics.round(mix(weights, v)).reshape(q.shape)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q `[B, T, K, G, D]` and k `[B, S, K, D]` -> `[B, K, G, T, S]` float32."""
    precision = precision_of(q.dtype)
    return jnp.einsum("btkgd,bskd->bkgts", q, k, precision=precision, preferred_element_type=jnp.float32)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """weights `[B, K, G, T, S]` and v `[B, S, K, D]` -> `[B, T, K, G, D]` float32."""
    precision = precision_of(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=precision, preferred_element_type=jnp.float32)


# One query a row, the step of a decode loop: products and sums that read the cache as it lies. For a product of
# matrices XLA wants the heads outermost, and on a GPU keeps a whole second cache in that order.


def _scores_of_one(q: jax.Array, k: jax.Array) -> jax.Array:
    """As `_scores`, for T = 1."""
    terms = q.astype(jnp.float32) * k[:, :, :, None].astype(jnp.float32)  # [B, S, K, G, D]
    return jnp.moveaxis(jnp.sum(terms, axis=-1), 1, -1)[:, :, :, None]


def _mix_for_one(weights: jax.Array, v: jax.Array) -> jax.Array:
    """As `_mix`, for T = 1."""
    shares = jnp.moveaxis(weights[:, :, :, 0], -1, 1)[..., None]  # [B, S, K, G, 1]
    return jnp.sum(shares.astype(jnp.float32) * v[:, :, :, None].astype(jnp.float32), axis=1, keepdims=True)
