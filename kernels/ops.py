"""The public ops: arguments are checked, then the implementation that was chosen runs."""

import jax

from .checks import Array, check_residual, check_rms_norm, check_rotary_embedding, check_silu_and_mul
from .dispatch import Implementation, choose
from .reference import Rounding


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
