"""Every op in plain jax.numpy: the specification of the kernels, and the implementation "xla".

Arithmetic is float32. Two roundings say where a value is rounded to the dtype of the inputs:

* "fused": at each output, nowhere else.
* "hf": also wherever transformers' eager Qwen3 rounds (transformers/models/qwen3/modeling_qwen3.py).

The functions here take arguments that are already checked: the public ops, in ops.py, check them.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Rounding = Literal["fused", "hf"]


@partial(jax.jit, static_argnames=("eps", "rounding"))
def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, rounding: Rounding) -> jax.Array:
    """x [..., H], weight [H] -> [..., H]: x / sqrt(mean(x^2) + eps) * weight."""
    return _normalize(_widen(x, rounding), weight, eps, rounding)


@partial(jax.jit, static_argnames=("eps", "rounding"))
def fused_add_rms_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float, rounding: Rounding
) -> tuple[jax.Array, jax.Array]:
    """x and residual [..., H], weight [H] -> (rms_norm of the sum, the sum), both [..., H]."""
    total = _widen(x, rounding) + _widen(residual, rounding)
    total = _hf_round(total, x.dtype, rounding)
    return _normalize(total, weight, eps, rounding), round_to(total, x.dtype, rounding)


@partial(jax.jit, static_argnames=("rounding",))
def silu_and_mul(x: jax.Array, *, rounding: Rounding) -> jax.Array:
    """x [..., 2 I], gate then up -> [..., I]: silu(gate) * up."""
    gate, up = jnp.split(_widen(x, rounding), 2, axis=-1)
    activated = _hf_round(_silu(gate), x.dtype, rounding)
    return round_to(activated * up, x.dtype, rounding)


@partial(jax.jit, static_argnames=("rounding",))
def rotary_embedding(
    q: jax.Array, k: jax.Array, positions: jax.Array, cos_sin_cache: jax.Array, *, rounding: Rounding
) -> tuple[jax.Array, jax.Array]:
    """q [..., heads, D], k [..., kv_heads, D], positions [...] -> (q, k), their first rotary_dim turned."""
    # A traced position outside the cache must show as NaN, not as some other position's angle.
    rows = cos_sin_cache.at[as_int32(positions)].get(
        mode="fill", fill_value=jnp.nan, wrap_negative_indices=False, out_sharding=_beside(positions)
    )
    cos, sin = jnp.split(_hf_round(rows, q.dtype, rounding)[..., None, :], 2, axis=-1)
    return _rotate(q, cos, sin, rounding), _rotate(k, cos, sin, rounding)


def _beside(positions: jax.Array) -> NamedSharding | None:
    """How rows picked by `positions` lie on a mesh of Explicit axes, where JAX may ask for it; None elsewhere."""
    sharding = jax.typeof(positions).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return NamedSharding(sharding.mesh, P(*sharding.spec, None)) if explicit else None


def as_int32(positions: jax.Array) -> jax.Array:
    """Positions as int32; those beyond its range stay outside of any table, where a cast would wrap into one."""
    if positions.dtype == jnp.int32:
        return positions
    info = jnp.iinfo(positions.dtype)
    low, high = max(info.min, -1), min(info.max, 2**31 - 1)
    return jnp.clip(positions, jnp.asarray(low, positions.dtype), jnp.asarray(high, positions.dtype)).astype(jnp.int32)


def _normalize(x: jax.Array, weight: jax.Array, eps: float, rounding: Rounding) -> jax.Array:
    """x [..., H] float32, weight [H] -> [..., H] in weight's dtype."""
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    normed = x * lax.rsqrt(variance + eps)
    normed = _hf_round(normed, weight.dtype, rounding)
    scale = jnp.expand_dims(_widen(weight, rounding), tuple(range(x.ndim - 1)))
    return round_to(normed * scale, weight.dtype, rounding)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, rounding: Rounding) -> jax.Array:
    """x [..., heads, D]; cos and sin [..., 1, rotary_dim / 2] float32; neox style: halves, not pairs."""

    def times(a: jax.Array, b: jax.Array) -> jax.Array:
        return _hf_round(a * b, x.dtype, rounding)

    rotary_dim = 2 * cos.shape[-1]
    first, second = jnp.split(_widen(x[..., :rotary_dim], rounding), 2, axis=-1)
    turned = [times(first, cos) - times(second, sin), times(second, cos) + times(first, sin)]
    return jnp.concatenate([*(round_to(half, x.dtype, rounding) for half in turned), x[..., rotary_dim:]], axis=-1)


@jax.custom_jvp
def _silu(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.exp(-x))


@_silu.defjvp
def _silu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # Derived from the quotient, the slope is 0 * inf = NaN below about -88, where exp(-x) overflows.
    (x,), (x_dot,) = primals, tangents
    sigmoid = lax.logistic(x)
    return _silu(x), x_dot * sigmoid * (1 + x * (1 - sigmoid))


def _widen(x: jax.Array, rounding: Rounding) -> jax.Array:
    """To float32. "hf" rounds once more: XLA may hand on the float32 that x was rounded from."""
    return _hf_round(x.astype(jnp.float32), x.dtype, rounding)


def round_to(x: jax.Array, dtype: jnp.dtype, rounding: Rounding) -> jax.Array:
    """From float32 to `dtype`. "hf" insists on the bits; in "fused" XLA may pass float32 on to what reads it.

    (Insisting costs a third of a norm's time on an H200: bench/NOTES.md.)
    """
    return _hf_round(x, dtype, rounding).astype(dtype)


def _hf_round(x: jax.Array, dtype: jnp.dtype, rounding: Rounding) -> jax.Array:
    """Round where transformers does and the fused kernels do not."""
    return _round(x, dtype) if rounding == "hf" else x


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 values rounded to those that `dtype` has, to nearest even; the result is still float32.

    XLA drops a conversion to a narrower dtype and back; `lax.reduce_precision` stays.
    """
    if dtype == jnp.float32:
        return x
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    # reduce_precision flushes float16's subnormals, which are the multiples of 2^-24 below 2^-14.
    normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    subnormal = lax.round(x * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    return jnp.where(jnp.abs(x) < 2.0**-14, subnormal, normal)


@_round.defjvp
def _round_jvp(dtype: jnp.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # The derivative of the unrounded function; rounding the tangent would flush small float16 ones to zero.
    return _round(*primals, dtype), tangents[0]
