"""The key-value cache of a decoder: a pytree that is passed in and handed back, never a module attribute."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer; slot `b` belongs to row `b` of the batch.

    Donate it at every step (`jax.jit(..., donate_argnums=...)`): then a write happens in place.

    Attributes:
        keys: `[layers, slots, capacity, kv_heads, head_dim]`, rotated, in the model's dtype.
        values: the same shape and dtype.
        lengths: `[slots]` int32, the tokens a row holds; the next one's position. What lies beyond it is
            padding: it is overwritten before it can be seen.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int, int], dtype: jax.typing.DTypeLike) -> "KVCache":
        """An empty cache; `shape` is that of the keys."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape[1], jnp.int32))

    @property
    def capacity(self) -> int:
        """The tokens a row can hold."""
        return self.keys.shape[2]

    def replace(self, **changes: jax.Array) -> "KVCache":
        """A cache with some fields changed, as `replace(lengths=...)` after a right-padded prefill."""
        return dataclasses.replace(self, **changes)

    def write(self, layer: int, positions: jax.Array, keys: jax.Array, values: jax.Array) -> "KVCache":
        """Stores the keys and values of new tokens in one layer; a position outside the cache is dropped.

        Args:
            layer: its index.
            positions: `[slots, T]` int32.
            keys, values: `[slots, T, kv_heads, head_dim]`.
        """
        # One scatter into the whole array: updating a layer of its own and putting it back copies that layer.
        rows = jnp.arange(positions.shape[0])[:, None]

        def stored(old: jax.Array, new: jax.Array) -> jax.Array:
            def put(old: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
                return old.at[layer, rows, positions].set(new, mode="drop", wrap_negative_indices=False)

            def put_two(old: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
                outside = jnp.full_like(positions, self.capacity)
                twice = jnp.concatenate([new, new], axis=1)
                return put(old, twice, jnp.concatenate([positions, outside], axis=1))

            new = new.astype(old.dtype)
            if positions.size > 1:
                return put(old, new, positions)
            # XLA's CPU turns a scatter of one token into a copy of the whole cache; one of two stays in place.
            return jax.lax.platform_dependent(old, new, positions, cpu=put_two, default=put)

        return self.replace(keys=stored(self.keys, keys), values=stored(self.values, values))

    def grown(self, capacity: int) -> "KVCache":
        """A copy with room for `capacity` tokens a row."""
        wider = [(0, 0), (0, 0), (0, capacity - self.capacity), (0, 0), (0, 0)]
        return self.replace(keys=jnp.pad(self.keys, wider), values=jnp.pad(self.values, wider))
