"""The ops in float64 NumPy, and what roundings may do to a value: what the tests of the kernels compare with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

type Wide = NDArray[np.float64]

UNIT = 2.0**-24  # what one float32 rounding may do to a value, relative to it


def wide(x: jax.Array | NDArray[Any]) -> Wide:
    """The same values in float64."""
    return np.asarray(x).astype(np.float64)


def rms_norm64(x: Wide, weight: Wide, eps: float) -> Wide:
    """x [..., H], weight [H]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu_and_mul64(x: Wide) -> Wide:
    """x [..., 2 I]."""
    gate, up = np.split(x, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def rotate64(x: Wide, positions: NDArray[Any], cache: Wide) -> Wide:
    """x [..., heads, D], cache [max_position, rotary_dim]."""
    half = cache.shape[1] // 2
    cos, sin = cache[positions][..., None, :half], cache[positions][..., None, half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def rounding_bound(exact: Wide, dtype: Any) -> Wide:
    """Half the distance between neighbors in `dtype`: what one correct rounding may add."""
    info = jnp.finfo(dtype)
    exponent = np.maximum(np.frexp(exact)[1] - 1, info.minexp)
    return 2.0 ** (exponent - info.nmant - 1)
