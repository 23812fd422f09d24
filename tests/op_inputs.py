"""What the tests of the kernels start from: the ops by name, the dtypes that they take, numbers, a RoPE table."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxfuse.kernels import fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
OPS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "rotary_embedding": rotary_embedding,
}


def draw(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> NDArray[Any]:
    """Normal values at scales from 0.1 to 10."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10 ** rng.uniform(-1, 1, shape)).astype(dtype)


def make_cache(max_position: int, rotary_dim: int) -> NDArray[np.float32]:
    """A RoPE table, [max_position, rotary_dim]."""
    angles = np.arange(max_position)[:, None] * 10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
