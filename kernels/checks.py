"""The rules for the arguments of the public ops. Each error states the rule, what came, and the mend."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

type Array = jax.Array | NDArray[Any]

_FLOATS = tuple(np.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
_SMALLEST_EPS, _LARGEST_EPS = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def check_rms_norm(op: str, x: Array, weight: Array, eps: float) -> None:
    """x [..., H] and weight [H] of one dtype; eps a normal float32 number above zero."""
    _check_float_array(op, "x", x)
    _check_float_array(op, "weight", weight)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"{op}: x must be [..., H] with H at least 1; got shape {x.shape}; add the last axis.")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight must be [H], H the last axis of x; got weight {weight.shape} for x {x.shape}; "
            "pass one weight for each column of x."
        )
    _check_same_dtype(op, "weight", weight, "x", x)
    if not isinstance(eps, float):
        raise TypeError(f"{op}: eps must be a Python float; got {type(eps).__name__}; pass float(eps).")
    if not (math.isfinite(eps) and _SMALLEST_EPS <= eps <= _LARGEST_EPS):
        raise ValueError(
            f"{op}: eps must be above zero, finite and a normal float32; got {eps!r}; pass the checkpoint's "
            "rms_norm_eps, such as 1e-6."
        )


def check_residual(op: str, x: Array, residual: Array) -> None:
    """residual has the shape and dtype of x."""
    _check_float_array(op, "x", x)
    _check_float_array(op, "residual", residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual must have x's shape; got residual {residual.shape} for x {x.shape}; "
            "broadcast or reshape one of them."
        )
    _check_same_dtype(op, "residual", residual, "x", x)


def check_silu_and_mul(op: str, x: Array) -> None:
    """x [..., 2 I]."""
    _check_float_array(op, "x", x)
    if x.ndim < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(
            f"{op}: x must be [..., 2 I], gate then up, so its last axis is even and at least 2; "
            f"got shape {x.shape}; join gate and up along the last axis."
        )


def check_rotary_embedding(op: str, q: Array, k: Array, positions: Array, cos_sin_cache: Array) -> None:
    """q [..., heads, D], k [..., kv_heads, D], positions [...], cos_sin_cache [max_position, rotary_dim]."""
    _check_float_array(op, "q", q)
    _check_float_array(op, "k", k)
    _check_array(op, "positions", positions)
    _check_array(op, "cos_sin_cache", cos_sin_cache)
    _check_same_dtype(op, "k", k, "q", q)
    if q.ndim < 2 or k.ndim < 2 or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{op}: q must be [..., heads, D] and k [..., kv_heads, D], alike but for the heads; "
            f"got q {q.shape} and k {k.shape}; reshape them so."
        )
    if not (jnp.issubdtype(positions.dtype, jnp.integer) and positions.dtype.isnative):
        raise TypeError(
            f"{op}: positions must be integers; got {positions.dtype}; cast with positions.astype(jnp.int32)."
        )
    if positions.shape != q.shape[:-2]:
        raise ValueError(
            f"{op}: positions must have the leading shape of q, {q.shape[:-2]}; got {positions.shape}; "
            "broadcast them to one position a token."
        )
    _check_cos_sin_cache(op, cos_sin_cache, q.shape[-1])
    _check_positions_in_cache(op, positions, cos_sin_cache.shape[0])


def _check_cos_sin_cache(op: str, cos_sin_cache: Array, head_dim: int) -> None:
    if cos_sin_cache.dtype != jnp.float32:
        raise TypeError(
            f"{op}: cos_sin_cache must be float32, whatever q is; got {cos_sin_cache.dtype}; "
            "keep the table in float32: the op rounds as its rounding says."
        )
    if cos_sin_cache.ndim != 2 or cos_sin_cache.shape[0] < 1:
        raise ValueError(
            f"{op}: cos_sin_cache must be [max_position, rotary_dim] with a row for each position; "
            f"got shape {cos_sin_cache.shape}; join cos and sin along the last axis."
        )
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"{op}: rotary_dim, the width of cos_sin_cache, must be even and from 2 to D = {head_dim}; "
            f"got {rotary_dim}; a row holds rotary_dim / 2 cosines, then as many sines."
        )


def _check_positions_in_cache(op: str, positions: Array, max_position: int) -> None:
    # Traced positions have no values yet: out of range they turn into NaN when the program runs.
    if isinstance(positions, jax.core.Tracer) or positions.size == 0:
        return
    values = np.asarray(positions)
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= max_position:
        raise ValueError(
            f"{op}: positions must be from 0 to {max_position - 1}, the rows of cos_sin_cache; "
            f"got {lowest} to {highest}; make a longer cache, or correct the positions."
        )


def _check_array(op: str, name: str, value: Array) -> None:
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{op}: {name} must be a jax.Array or numpy.ndarray; got {type(value).__name__}; "
            "convert it with jnp.asarray."
        )
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{op}: {name} must not be a masked array; fill what is masked with {name}.filled().")


def _check_float_array(op: str, name: str, value: Array) -> None:
    _check_array(op, name, value)
    if value.dtype not in _FLOATS:
        raise TypeError(f"{op}: {name} must be bfloat16, float16 or float32; got {value.dtype}; cast it with astype.")


def _check_same_dtype(op: str, name: str, value: Array, other_name: str, other: Array) -> None:
    if value.dtype != other.dtype:
        raise TypeError(
            f"{op}: {name} must have the dtype of {other_name}, {other.dtype}; got {value.dtype}; "
            f"cast one of them, as {name}.astype({other_name}.dtype)."
        )
