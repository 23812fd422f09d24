"""Products with a weight `[out, in]`."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.numerics import precision_of


def dense(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias`, accumulated and added in float32.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.

    Returns:
        `[..., out]` float32, unrounded.
    """
    if x.dtype != jnp.float32 and math.prod(x.shape[:-1]) == 1:
        y = jax.lax.platform_dependent(x, weight, cpu=_as_two_rows, default=_product)
    else:
        y = _product(x, weight)
    return y if bias is None else y + jnp.expand_dims(bias.astype(jnp.float32), range(y.ndim - 1))


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, precision=precision_of(x.dtype), preferred_element_type=jnp.float32)


def _as_two_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """For a single row of 16 bits XLA's CPU writes the whole weight out in float32 before it multiplies."""
    row = x.reshape(1, -1)
    y = _product(jnp.concatenate([row, jnp.zeros_like(row)]), weight)
    return y[0].reshape(*x.shape[:-1], -1)
