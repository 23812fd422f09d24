"""Rounding "hf" gives the bits of transformers' eager Qwen3, run by torch on the CPU.

A mismatch is let off in two cases only, and each is counted:

* torch's own float32 value, before it is rounded, lies within 8 float32 ulps of the middle between two values
  of the narrow dtype: torch and XLA sum, divide and take exp and rsqrt in their own ways, so that it may fall
  to either side. Only the norm's scaled row and silu come from such arithmetic. All else is one product or
  sum of narrow values, which float32 rounds alike everywhere.
* in bfloat16, an input or a result is subnormal: XLA on a CPU flushes them to zero. float16's subnormals are
  normal float32 numbers, and are held to the bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.activations import ACT2FN
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from jaxfuse.kernels import fused_add_rms_norm, reference, rms_norm, rotary_embedding, silu_and_mul

DTYPES = [np.dtype(jnp.bfloat16), np.dtype(jnp.float16)]
TORCH = {DTYPES[0]: torch.bfloat16, DTYPES[1]: torch.float16}
ULPS = 8
# 2^16 or 2^13 float32 values lie between two neighbors of the dtype, 17 of them within 8 ulps of the middle.
# Four times that share leaves room for rows whose values are few and repeat.
MOST_NEAR = {DTYPES[0]: 4 * 17 / 2**16, DTYPES[1]: 4 * 17 / 2**13}
EPS = 3e-5  # not the default, which a call that forgot its own would take

Values = NDArray[Any]
Flags = NDArray[np.bool_]


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Values:
    """Heavy-tailed values: normal ones, at scales from 1e-3 to 1e3; all are finite in float16."""
    return (rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, shape)).astype(np.float32).astype(dtype)


def to_torch(values: Values) -> torch.Tensor:
    """The same bits as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int16)).view(TORCH[values.dtype])


def differ(ours: jax.Array, theirs: torch.Tensor) -> Flags:
    """Where the bits differ, the sign of zero included."""
    assert ours.shape == tuple(theirs.shape)
    return np.asarray(ours).view(np.int16) != theirs.contiguous().view(torch.int16).numpy()


def near_boundary(values: Values, dtype: np.dtype[Any]) -> Flags:
    """Where a float32 value lies within ULPS float32 ulps of the middle between two values of `dtype`."""
    assert values.dtype == np.float32
    nearest = values.astype(dtype)
    with np.errstate(over="ignore"):
        above = np.nextafter(nearest, np.array(np.inf, dtype)).astype(np.float64)
        below = np.nextafter(nearest, np.array(-np.inf, dtype)).astype(np.float64)
    center = nearest.astype(np.float64)
    middles = np.stack([(center + above) / 2, (center + below) / 2])
    return (np.abs(middles - values) <= ULPS * np.spacing(np.abs(values)).astype(np.float64)).any(axis=0)


def subnormal(values: Values) -> Flags:
    """Where a value is not zero and below the smallest normal float32, which is bfloat16's too."""
    size = np.abs(values.astype(np.float64))
    return (size > 0) & (size < np.finfo(np.float32).tiny)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 1000, 4096])
def test_norms_have_torchs_bits(dtype: np.dtype[Any], width: int) -> None:
    """rms_norm and fused_add_rms_norm round where Qwen3RMSNorm and the residual sum before it do."""
    rng = np.random.default_rng(width)
    shape = (2**20 // width, width)
    x, residual, weight = draw(rng, shape, dtype), draw(rng, shape, dtype), draw(rng, (width,), dtype)
    module = qwen3.Qwen3RMSNorm(width, eps=EPS)
    module.weight = torch.nn.Parameter(to_torch(weight), requires_grad=False)

    total = to_torch(x) + to_torch(residual)
    added, ours_total = fused_add_rms_norm(x, residual, weight, eps=EPS, rounding="hf")
    assert not differ(ours_total, total).any()

    for ours, hidden in [(rms_norm(x, weight, eps=EPS, rounding="hf"), to_torch(x)), (added, total)]:
        wide = hidden.float()
        unrounded = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        near = near_boundary(unrounded.numpy(), dtype)
        assert near.mean() <= MOST_NEAR[dtype]
        assert not (differ(ours, module(hidden)) & ~near).any()


def silu_case(dtype: np.dtype[Any]) -> tuple[Values, Values]:
    """Every finite gate of the dtype, 16 times, beside a random up."""
    gate = np.arange(2**16, dtype=np.uint16).view(dtype)
    gate = np.tile(gate[np.isfinite(gate.astype(np.float32))], (16, 1))
    return gate, draw(np.random.default_rng(1), gate.shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul_has_torchs_bits(dtype: np.dtype[Any]) -> None:
    """silu_and_mul rounds silu before the product, and the product, for every gate that the dtype has."""
    gate, up = silu_case(dtype)
    ours = silu_and_mul(np.concatenate([gate, up], axis=-1), rounding="hf")
    activated = ACT2FN["silu"](to_torch(gate))
    theirs = activated * to_torch(up)

    wide = to_torch(gate).float()
    unrounded = (wide / (1 + torch.exp(-wide))).numpy()
    near = near_boundary(unrounded, dtype)
    product = activated.double() * to_torch(up).double()
    tiny = subnormal(gate) | subnormal(unrounded) | subnormal(product.numpy())
    assert (near & ~tiny).mean() <= MOST_NEAR[dtype]
    # Of bfloat16's 255 exponents one is subnormal, and the ten above it are so after about half of the ups.
    assert tiny.mean() <= (6 / 255 if dtype == jnp.bfloat16 else 0)
    assert not (differ(ours, theirs) & ~near & ~tiny).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [128, 64])
def test_rotary_embedding_has_torchs_bits(dtype: np.dtype[Any], rotary_dim: int) -> None:
    """RoPE rounds cos, sin, each product and the sum, as apply_rotary_pos_emb does: no bit is let off."""
    rng = np.random.default_rng(rotary_dim)
    tokens, head_dim, max_position = 512, 128, 40960
    inverse_frequency = 1.0 / (1e6 ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim))
    angles = torch.arange(max_position).float()[:, None] * inverse_frequency
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1).numpy()
    positions = rng.integers(0, max_position, (2, tokens))
    q, k = draw(rng, (2, tokens, 8, head_dim), dtype), draw(rng, (2, tokens, 2, head_dim), dtype)

    doubled = torch.cat([angles, angles], dim=-1)[positions]
    cos, sin = doubled.cos().to(TORCH[dtype]), doubled.sin().to(TORCH[dtype])
    theirs = qwen3.apply_rotary_pos_emb(
        to_torch(q[..., :rotary_dim]), to_torch(k[..., :rotary_dim]), cos, sin, unsqueeze_dim=2
    )
    ours = rotary_embedding(q, k, positions, cache, rounding="hf")
    for turned, expected, given in zip(ours, theirs, (q, k), strict=True):
        assert not subnormal(expected.float().numpy()).any()
        assert not differ(turned[..., :rotary_dim], expected).any()
        assert not differ(turned[..., rotary_dim:], to_torch(given[..., rotary_dim:])).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fused_rounding_has_other_bits(dtype: np.dtype[Any]) -> None:
    """The comparison sees a rounding left out: "fused" differs from torch in over a tenth of the values."""
    rng = np.random.default_rng(2)
    x, residual, weight = (
        draw(rng, (64, 1024), dtype),
        draw(rng, (64, 1024), dtype),
        draw(rng, (1024,), dtype),
    )
    module = qwen3.Qwen3RMSNorm(1024, eps=EPS)
    module.weight = torch.nn.Parameter(to_torch(weight), requires_grad=False)
    assert differ(rms_norm(x, weight, eps=EPS), module(to_torch(x))).mean() > 0.1
    added, _ = fused_add_rms_norm(x, residual, weight, eps=EPS)
    assert differ(added, module(to_torch(x) + to_torch(residual))).mean() > 0.1
    theirs = torch.nn.SiLU()(to_torch(x)) * to_torch(residual)
    assert differ(silu_and_mul(np.concatenate([x, residual], axis=-1)), theirs).mean() > 0.05


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_the_dtypes_own_under_jit(dtype: np.dtype[Any]) -> None:
    """The rounding inside the ops is the conversion's, ties, subnormals, infinities and -0 included."""
    rng = np.random.default_rng(3)
    wide = (rng.standard_normal(2**18) * 10 ** rng.uniform(-9, 6, 2**18)).astype(np.float32)
    ties = np.arange(1, 2**15, 2).astype(np.float32) * np.float32(2.0**-25)
    values = np.concatenate([wide, ties, -ties, np.array([0.0, -0.0, 65519.9, 65520.0, np.inf], np.float32)])
    ours = jax.jit(lambda x: reference._round(x, dtype))(values)
    expected = torch.from_numpy(values).to(TORCH[dtype]).float().numpy()
    np.testing.assert_array_equal(np.asarray(ours).view(np.int32), expected.view(np.int32))
