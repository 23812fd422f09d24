"""Qwen3 as a Flax NNX module."""

import os
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxfuse.cache import KVCache
from jaxfuse.config import Qwen3Config
from jaxfuse.errors import InputError
from jaxfuse.fused_ops import fused_ops
from jaxfuse.kernels import Implementation, Rounding, check_implementation
from jaxfuse.layers import DecoderLayer, Embedding, Linear, RMSNorm, RotaryEmbedding
from jaxfuse.numerics import Numerics
from jaxfuse.products import dense

Array = jax.Array | np.ndarray


class Qwen3(nnx.Module):
    """A dense Qwen3 decoder with its language-model head.

    It holds no state but weights and the RoPE table, so it works in `jax.jit`, `jax.value_and_grad`,
    `jax.checkpoint`, `jax.vmap` and `nnx.split`/`nnx.merge`. Each layer holds arrays of its own: XLA copies a
    slice of a stack of layers before it multiplies with it (bench/NOTES.md has the measurement).

    Args:
        config: the model's shape.
        rngs: draws the initial weights.
        dtype: of weights and activations; None takes the configuration's, float32 if it names none.
        rounding: "fused", or "hf" to round where transformers does.
        implementation: of the fused ops; None chooses by device and shape the one that is faster for the op alone.

    Raises:
        ImplementationError: when the implementation cannot take the model's shapes, or the rounding. A device that
            lacks it is refused when the model runs.
    """

    def __init__(
        self,
        config: Qwen3Config,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike | None = None,
        rounding: Rounding = "fused",
        implementation: Implementation | None = None,
    ):
        check_implementation(implementation, rounding)
        numerics = Numerics(model_dtype(config, dtype), rounding, implementation)
        if implementation is not None:
            fused_ops(config, numerics)  # raises now, rather than when the model runs
        self.config = config
        self.numerics = numerics
        size, std = config.hidden_size, config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, size, std=std, rngs=rngs, numerics=numerics)
        self.rotary_emb = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, numerics=numerics
        )
        self.layers = nnx.List(
            [DecoderLayer(config, rngs=rngs, numerics=numerics) for _ in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(size, eps=config.rms_norm_eps, numerics=numerics)
        # A tied model has no head of its own: NNX would count, donate and train a shared array twice.
        if not config.tie_word_embeddings:
            self.lm_head = Linear(size, config.vocab_size, std=std, rngs=rngs, numerics=numerics)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | os.PathLike[str],
        *,
        dtype: jax.typing.DTypeLike | None = None,
        rounding: Rounding = "fused",
        implementation: Implementation | None = None,
    ) -> "Qwen3":
        """Loads a Hugging Face checkpoint from a folder or, by its repository id, from the hub.

        Raises:
            ConfigError: when config.json is damaged or describes another model.
            CheckpointError: when a file is missing or damaged, or a tensor is missing, unknown or misshapen.
        """
        from jaxfuse.weights import load  # weights.py fills this class, so it imports this file

        return load(path_or_repo_id, dtype=dtype, rounding=rounding, implementation=implementation)

    def save_pretrained(self, path: str | os.PathLike[str], *, dtype: jax.typing.DTypeLike | None = None) -> None:
        """Writes config.json and unmerged safetensors that transformers loads; dtype None keeps the model's."""
        from jaxfuse.weights import save

        save(self, path, dtype=dtype)

    def layer(self, index: int) -> DecoderLayer:
        """One decoder layer."""
        return self.layers[index]

    def init_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache for `batch_size` rows of up to `capacity` tokens, in the model's dtype."""
        config = self.config
        shape = (
            config.num_hidden_layers,
            batch_size,
            capacity,
            config.num_key_value_heads,
            config.head_dim,
        )
        return KVCache.zeros(shape, self.numerics.dtype)

    @overload
    def __call__(self, tokens: Array, *, positions: Array | None = None, logits_to_keep: int = 0) -> jax.Array: ...

    @overload
    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        cache: KVCache,
        logits_to_keep: int = 0,
    ) -> tuple[jax.Array, KVCache]: ...

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Logits of the next token.

        Args:
            tokens: `[B, T]` integer ids. Concrete ones are checked; a traced id outside the vocabulary gives NaN.
            positions: `[B, T]` integer; None continues each row of the cache, or counts from 0. Concrete ones are
                checked; a traced position outside the RoPE table or the cache gives NaN. With a cache a row's
                positions are consecutive and start at most one past the tokens it holds.
            cache: keys and values so far; these tokens are written to it at their positions. Without one, the
                tokens see each other causally by their place in the row.
            logits_to_keep: only the last n places of each row; 0 keeps all.

        Returns:
            `[B, T or logits_to_keep, vocab]` float32, and with a cache the cache holding these tokens; its
            lengths are one past the last position of each row (set them after a right-padded prefill).

        Raises:
            InputError, TypeError: when an argument does not fit.
        """
        if logits_to_keep < 0:
            raise InputError(f"logits_to_keep must be at least 0, got {logits_to_keep}; 0 keeps all")
        hidden, new_cache = self._run(tokens, positions, cache)
        logits = self.logits(hidden[:, -logits_to_keep:])
        return logits if new_cache is None else (logits, new_cache)

    @overload
    def hidden(self, tokens: Array, *, positions: Array | None = None) -> jax.Array: ...

    @overload
    def hidden(self, tokens: Array, *, positions: Array | None = None, cache: KVCache) -> tuple[jax.Array, KVCache]: ...

    def hidden(
        self, tokens: Array, *, positions: Array | None = None, cache: KVCache | None = None
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """`[B, T, hidden]` after the last norm, in the model's dtype; arguments as in `__call__`."""
        hidden, new_cache = self._run(tokens, positions, cache)
        return hidden if new_cache is None else (hidden, new_cache)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """`[..., hidden]` -> `[..., vocab]` float32."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        logits = dense(hidden, head.weight[...])
        return self.numerics.round(logits).astype(jnp.float32) if self.numerics.rounding == "hf" else logits

    def _run(self, tokens: Array, positions: Array | None, cache: KVCache | None) -> tuple[jax.Array, KVCache | None]:
        tokens, positions = self._checked(tokens, positions, cache)
        length = tokens.shape[1]
        if cache is None:
            visible = jnp.tril(jnp.ones((1, length, length), bool))
        else:
            slots = jnp.arange(cache.capacity)
            # A traced negative position sees slot 0, so that its NaN from RoPE has a score to appear in.
            visible = slots[None, None, :] <= jnp.maximum(positions, 0)[:, :, None]
            cache = cache.replace(lengths=jnp.max(positions, axis=1) + 1)
            # Such a token cannot be stored, so it must not be answered either: RoPE turns it into NaN.
            positions = jnp.where(positions < cache.capacity, positions, -1)
        x, residual = self.embed_tokens(tokens), None
        for index, layer in enumerate(self.layers):
            x, residual, cache = layer(x, residual, positions, visible, self.rotary_emb, cache, index)
        x, _ = self.norm(x, residual)
        return x, cache

    def _checked(self, tokens: Array, positions: Array | None, cache: KVCache | None) -> tuple[jax.Array, jax.Array]:
        """Tokens, and int32 positions `[B, T]`."""
        if jnp.ndim(tokens) != 2 or jnp.size(tokens) == 0:
            raise InputError(
                f"tokens must be [batch, length], neither zero, got {jnp.shape(tokens)}; add an axis for one row"
            )
        check_ids("tokens", tokens, self.config.vocab_size, "the vocabulary")
        shape = jnp.shape(tokens)
        if cache is not None:
            self._check_cache(cache, shape[0])
        places = jnp.arange(shape[1], dtype=jnp.int32)[None]
        given = positions is not None
        if positions is None:
            start = jnp.zeros((1, 1), jnp.int32) if cache is None else cache.lengths[:, None]
            positions = jnp.broadcast_to(start + places, shape)
        if jnp.shape(positions) != shape:
            raise InputError(f"positions must have the shape of tokens {shape}, got {jnp.shape(positions)}")
        limit = self.config.max_position_embeddings
        check_ids("positions", positions, limit, "the model's maximum (max_position_embeddings)")
        positions = jnp.asarray(positions).astype(jnp.int32)
        if cache is not None:
            check_ids("positions", positions, cache.capacity, "the cache's capacity")
            if given:
                # A gap would leave slots that hold nothing and are seen.
                first = positions[:, :1]
                unbroken = (positions == first + places) & (first <= cache.lengths[:, None])
                if not isinstance(unbroken, jax.core.Tracer) and not np.all(unbroken):
                    raise InputError(
                        "with a cache the positions of a row must be consecutive and leave no gap after its "
                        f"{np.asarray(cache.lengths).tolist()} tokens, got {np.asarray(positions).tolist()}"
                    )
                # What follows a gap would see it, so that row is over.
                intact = jnp.cumprod(unbroken, axis=1, dtype=jnp.int32) == 1
                positions = jnp.where(intact, positions, cache.capacity)
        return jnp.asarray(tokens), positions

    def _check_cache(self, cache: KVCache, batch: int) -> None:
        expected = jax.eval_shape(lambda: self.init_cache(batch, cache.capacity))
        if jax.tree.map(lambda a: (a.shape, a.dtype), cache) != jax.tree.map(lambda a: (a.shape, a.dtype), expected):
            raise InputError(
                f"the cache must be this model's for {batch} rows, keys {expected.keys.shape} "
                f"{expected.keys.dtype}, got {cache.keys.shape} {cache.keys.dtype}; make it with model.init_cache"
            )


def model_dtype(config: Qwen3Config, dtype: jax.typing.DTypeLike | None) -> jnp.dtype:
    """The dtype of a model: the one asked for, else the configuration's, else float32."""
    chosen = jnp.dtype(dtype if dtype is not None else config.dtype or "float32")
    if chosen not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(f"dtype must be bfloat16, float16 or float32, got {chosen}")
    return chosen


def check_ids(name: str, ids: Array, limit: int, what: str) -> None:
    """Refuses anything but integers, and concrete values outside [0, limit); traced values are not known yet."""
    dtype = ids.dtype if isinstance(ids, np.ndarray) else jnp.result_type(ids)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {dtype}; convert them to int32")
    if isinstance(ids, jax.core.Tracer):
        return
    values = np.asarray(ids)
    wrong = values[(values < 0) | (values >= limit)]
    if wrong.size:
        raise InputError(f"{name} must lie in [0, {limit}), {what}, got {wrong.flat[0]}")
