"""The ops of the fused layer stack, on JAX alone; imported as jaxfuse.kernels.

Each op takes two more arguments:

* `rounding`: "fused" computes in float32 and rounds once, at each output; "hf" rounds where transformers'
  eager Qwen3 does, for comparing bits with it.
* `implementation`: "mosaic" is a Pallas kernel for NVIDIA GPUs from Hopper on; "xla" is plain jax.numpy and runs
  anywhere. None picks, by device and shape and before anything is traced, the one that is faster for the op alone.
  One asked for by name runs or raises ImplementationError, a ValueError; it never becomes another.

Inputs are bfloat16, float16 or float32, and outputs have their dtype. Every op is differentiable in reverse
mode, to any order, and can be vmapped. An argument that does not fit raises TypeError (kind or dtype) or
ValueError (shape or value).

In "mosaic" a row's bits depend neither on the rows beside it nor on their number, and repeat. In "xla" the order of
a norm's sum is XLA's choice, which may follow from the number of rows: a row then differs by float32 roundings from
the same row among others.
"""

import jax

from .checks import Array, check_residual, check_rms_norm, check_rotary_embedding, check_silu_and_mul
from .dispatch import Implementation, ImplementationError, check_implementation, choose, has_mosaic, pick
from .reference import Rounding, round_to

# No __version__: seen from the repository root, transformers would take this folder for another package.
__all__ = [
    "Implementation",
    "ImplementationError",
    "Rounding",
    "check_implementation",
    "fused_add_rms_norm",
    "has_mosaic",
    "pick",
    "rms_norm",
    "rotary_embedding",
    "round_to",
    "silu_and_mul",
]


def rms_norm(
    x: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    rounding: Rounding = "fused",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Root-mean-square norm over the last axis: x / sqrt(mean(x^2) + eps) * weight (Zhang, Sennrich, 2019).

    Args:
      x: [..., H], any leading shape.
      weight: [H], of x's dtype.
      eps: a Python float above zero, added to the mean square.

    Returns:
      [..., H], of x's dtype.

    Raises:
      TypeError, ValueError: an argument does not fit, or the implementation is not available.
    """
    check_rms_norm("rms_norm", x, weight, eps)
    run = choose("rms_norm", implementation, rounding, x, weight)
    result: jax.Array = run(x, weight, eps=float(eps))
    return result


def fused_add_rms_norm(
    x: Array,
    residual: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    rounding: Rounding = "fused",
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add the residual, then `rms_norm` of the sum. In "fused" rounding the norm reads the unrounded sum.

    Args:
      x: [..., H], any leading shape.
      residual: [..., H], of x's shape and dtype.
      weight: [H], of x's dtype.
      eps: a Python float above zero, added to the mean square.

    Returns:
      (normed, x + residual), both [..., H] and of x's dtype.

    Raises:
      TypeError, ValueError: an argument does not fit, or the implementation is not available.
    """
    check_rms_norm("fused_add_rms_norm", x, weight, eps)
    check_residual("fused_add_rms_norm", x, residual)
    run = choose("fused_add_rms_norm", implementation, rounding, x, residual, weight)
    result: tuple[jax.Array, jax.Array] = run(x, residual, weight, eps=float(eps))
    return result


def silu_and_mul(x: Array, *, rounding: Rounding = "fused", implementation: Implementation | None = None) -> jax.Array:
    """The gated activation of a SwiGLU layer: silu(gate) * up, silu(g) = g / (1 + exp(-g)) (Shazeer, 2020).

    Args:
      x: [..., 2 I], any leading shape; the gate is the first half of the last axis, up the second.

    Returns:
      [..., I], of x's dtype.

    Raises:
      TypeError, ValueError: an argument does not fit, or the implementation is not available.
    """
    check_silu_and_mul("silu_and_mul", x)
    run = choose("silu_and_mul", implementation, rounding, x)
    result: jax.Array = run(x)
    return result


def rotary_embedding(
    q: Array,
    k: Array,
    positions: Array,
    cos_sin_cache: Array,
    *,
    rounding: Rounding = "fused",
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotary position embedding, neox style: column i turns with column i + rotary_dim / 2 (Su et al., 2021).

    Columns from rotary_dim on pass through.

    Args:
      q: [..., heads, D], any leading shape.
      k: [..., kv_heads, D], of q's leading shape and dtype.
      positions: [...], integers, in rows of cos_sin_cache. Concrete ones out of range raise; traced ones turn
        the rotated columns of their token into NaN.
      cos_sin_cache: [max_position, rotary_dim] float32; a row is rotary_dim / 2 cosines, then as many sines.

    Returns:
      (q, k), in the shapes and dtype given.

    Raises:
      TypeError, ValueError: an argument does not fit, or the implementation is not available.
    """
    check_rotary_embedding("rotary_embedding", q, k, positions, cos_sin_cache)
    run = choose("rotary_embedding", implementation, rounding, q, k, positions, cos_sin_cache)
    result: tuple[jax.Array, jax.Array] = run(q, k, positions, cos_sin_cache)
    return result
