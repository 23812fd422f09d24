"""The layers of Qwen3 as Flax NNX modules; names follow Hugging Face's and vLLM's."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxfuse.attention import attend
from jaxfuse.cache import KVCache
from jaxfuse.config import Qwen3Config
from jaxfuse.kernels import fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
from jaxfuse.numerics import Numerics
from jaxfuse.products import dense
from jaxfuse.rope import RopeParameters, cos_sin_table


class Table(nnx.Variable[jax.Array]):
    """An array that is computed, not learnt."""


class Linear(nnx.Module):
    """A product with a weight `[out, in]`, as in the checkpoint, and an optional bias `[out]`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        std: float,
        rngs: nnx.Rngs,
        numerics: Numerics,
    ):
        self.weight = nnx.Param(normal((out_features, in_features), std, rngs, numerics))
        self.bias = nnx.Param(jnp.zeros(out_features, numerics.dtype)) if bias else None
        self.numerics = numerics

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., in]` -> `[..., out]` in the model's dtype."""
        bias = None if self.bias is None else self.bias[...]
        return self.numerics.round(dense(x, self.weight[...], bias))


class Embedding(nnx.Module):
    """A row of weight `[vocab, hidden]` for each token; an id outside the vocabulary gives NaN."""

    def __init__(self, vocab: int, hidden: int, *, std: float, rngs: nnx.Rngs, numerics: Numerics):
        self.weight = nnx.Param(normal((vocab, hidden), std, rngs, numerics))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[B, T]` integer -> `[B, T, hidden]`."""
        rows = self.weight[...].at[tokens]
        return rows.get(mode="fill", fill_value=np.nan, wrap_negative_indices=False)


def normal(shape: tuple[int, ...], std: float, rngs: nnx.Rngs, numerics: Numerics) -> jax.Array:
    """Fresh weights, drawn as transformers initializes them."""
    return jnp.asarray(std, numerics.dtype) * jax.random.normal(rngs.params(), shape, numerics.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis with a weight, fused with the residual sum before it."""

    def __init__(self, size: int, *, eps: float, numerics: Numerics):
        self.weight = nnx.Param(jnp.ones(size, numerics.dtype))
        self.eps = eps
        self.numerics = numerics

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """`(norm(x), x)`, or with a residual `(norm(x + residual), x + residual)`; all `[..., size]`."""
        weight = self.weight[...]
        if residual is None:
            return rms_norm(x, weight, eps=self.eps, **self.numerics.op), x
        return fused_add_rms_norm(x, residual, weight, eps=self.eps, **self.numerics.op)


class RotaryEmbedding(nnx.Module):
    """RoPE with a table that is computed once for the whole model."""

    def __init__(self, rope: RopeParameters, head_dim: int, max_position: int, *, numerics: Numerics):
        self.cos_sin_cache = Table(jnp.asarray(cos_sin_table(rope, head_dim, max_position)))
        self.numerics = numerics

    def __call__(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotates q `[B, T, heads, D]` and k `[B, T, kv_heads, D]` by their positions `[B, T]`."""
        return rotary_embedding(q, k, positions, self.cos_sin_cache[...], **self.numerics.op)


class Attention(nnx.Module):
    """Grouped-query attention with merged q, k, v rows and a norm of each q and k head before RoPE."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, numerics: Numerics):
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.numerics = numerics
        hidden, std, bias = config.hidden_size, config.initializer_range, config.attention_bias
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv_proj = Linear(hidden, q_size + 2 * kv_size, bias=bias, std=std, rngs=rngs, numerics=numerics)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, numerics=numerics)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, numerics=numerics)
        self.o_proj = Linear(q_size, hidden, bias=bias, std=std, rngs=rngs, numerics=numerics)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        rotary: RotaryEmbedding,
        cache: KVCache | None,
        layer: int,
    ) -> tuple[jax.Array, KVCache | None]:
        """Attends over the tokens given, or over the cache after these tokens were written to it.

        Args:
            x: `[B, T, hidden]`.
            positions: `[B, T]` int32.
            visible: `[B or 1, T, S]` bool; S is T, or the cache's capacity.
            rotary: the model's RoPE.
            cache: to read and write, or None.
            layer: this layer's index in the cache.

        Returns:
            `[B, T, hidden]`, and the cache.
        """
        batch, length, _ = x.shape
        qkv = self.qkv_proj(x).reshape(batch, length, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = jnp.split(qkv, (self.heads, self.heads + self.kv_heads), axis=2)
        q, k = rotary(self.q_norm(q)[0], self.k_norm(k)[0], positions)
        if cache is not None:
            cache = cache.write(layer, positions, k, v)
            k, v = cache.keys[layer], cache.values[layer]
        mixed = attend(q, k, v, visible, numerics=self.numerics)
        return self.o_proj(mixed.reshape(batch, length, -1)), cache


class MLP(nnx.Module):
    """SwiGLU with merged gate and up rows: `down(silu(gate) * up)`."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, numerics: Numerics):
        hidden, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.gate_up_proj = Linear(hidden, 2 * inner, std=std, rngs=rngs, numerics=numerics)
        self.down_proj = Linear(inner, hidden, std=std, rngs=rngs, numerics=numerics)
        self.numerics = numerics

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., hidden]` -> `[..., hidden]`."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x), **self.numerics.op))


class DecoderLayer(nnx.Module):
    """One block; the residual travels beside the activations and is added inside the next norm."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, numerics: Numerics):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, numerics=numerics)
        self.self_attn = Attention(config, rngs=rngs, numerics=numerics)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, numerics=numerics)
        self.mlp = MLP(config, rngs=rngs, numerics=numerics)

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array | None,
        positions: jax.Array,
        visible: jax.Array,
        rotary: RotaryEmbedding,
        cache: KVCache | None,
        layer: int,
    ) -> tuple[jax.Array, jax.Array, KVCache | None]:
        """`(x, residual)`, both `[B, T, hidden]`, to the next pair: the block's value is their sum.

        The other arguments are those of `Attention`.
        """
        x, residual = self.input_layernorm(x, residual)
        x, cache = self.self_attn(x, positions, visible, rotary, cache, layer)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual, cache
