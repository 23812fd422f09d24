"""What the ops are timed against: PyTorch's own, and FlashInfer's.

PEERS holds, by op and by implementation, a builder: called with the op's arrays as torch tensors, it does what a
model would have done beforehand and returns the call to time, which returns the op's outputs. Some write over their
inputs, so each builder gets copies of its own. Nothing is imported before a builder is called.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

EPS = 1e-6

type Tensor = Any
type Run = Callable[[], tuple[Tensor, ...]]
type Builder = Callable[..., Run]


def eager_rms_norm(x: Tensor, weight: Tensor) -> Run:
    """x [rows, H], weight [H]: as transformers' eager Qwen3, eight kernels; rounded before the weight multiplies."""
    return lambda: (_eager_norm(x, weight),)


def eager_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Run:
    """x and residual [rows, H], weight [H]: the sum rounded, then the eager norm of it."""

    def run() -> tuple[Tensor, ...]:
        total = x + residual
        return _eager_norm(total, weight), total

    return run


def _eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    import torch

    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * (wide * scale).to(x.dtype)


def eager_silu_and_mul(x: Tensor) -> Run:
    """x [rows, 2 I]: two kernels. Gate and up lie apart, as the two products of an unmerged layer leave them."""
    import torch

    gate, up = (half.contiguous() for half in x.chunk(2, -1))
    return lambda: (torch.nn.functional.silu(gate) * up,)


def eager_rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Run:
    """q [rows, heads, D], k [rows, kv_heads, D]: ten kernels.

    The tokens' cosines and sines, rounded, are there beforehand: transformers looks them up once for all layers.
    """
    import torch

    cos, sin = (torch.cat([part, part], -1).to(q.dtype)[:, None] for part in cos_sin_cache[positions].chunk(2, -1))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return lambda: (rotate(q), rotate(k))


def torch_rms_norm(x: Tensor, weight: Tensor) -> Run:
    """x [rows, H], weight [H]: torch's own norm."""
    import torch

    return lambda: (torch.nn.functional.rms_norm(x, weight.shape, weight, EPS),)


def torch_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Run:
    """x and residual [rows, H], weight [H]: a sum, then torch's own norm."""
    import torch

    def run() -> tuple[Tensor, ...]:
        total = x + residual
        return torch.nn.functional.rms_norm(total, weight.shape, weight, EPS), total

    return run


def flashinfer_rms_norm(x: Tensor, weight: Tensor) -> Run:
    """x [rows, H], weight [H]."""
    flashinfer = importlib.import_module("flashinfer")
    return lambda: (flashinfer.rmsnorm(x, weight, EPS),)


def flashinfer_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Run:
    """x and residual [rows, H], weight [H]: writes over both."""
    flashinfer = importlib.import_module("flashinfer")

    def run() -> tuple[Tensor, ...]:
        flashinfer.fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    return run


def flashinfer_silu_and_mul(x: Tensor) -> Run:
    """x [rows, 2 I]."""
    flashinfer = importlib.import_module("flashinfer")
    return lambda: (flashinfer.silu_and_mul(x),)


def flashinfer_rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Run:
    """q [rows, heads, D], k [rows, kv_heads, D], cos_sin_cache [max_position, D] float32: writes over q and k."""
    apply = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace
    flat_q, flat_k = q.flatten(1), k.flatten(1)  # Views: their memory is q's and k's.

    def run() -> tuple[Tensor, ...]:
        apply(positions, flat_q, flat_k, q.shape[-1], cos_sin_cache, is_neox=True)
        return q, k

    return run


PEERS: Mapping[str, Mapping[str, Builder]] = MappingProxyType(
    {
        "rms_norm": {
            "torch": eager_rms_norm,
            "torch_rms_norm": torch_rms_norm,
            "flashinfer": flashinfer_rms_norm,
        },
        "fused_add_rms_norm": {
            "torch": eager_fused_add_rms_norm,
            "torch_rms_norm": torch_fused_add_rms_norm,
            "flashinfer": flashinfer_fused_add_rms_norm,
        },
        "silu_and_mul": {"torch": eager_silu_and_mul, "flashinfer": flashinfer_silu_and_mul},
        "rotary_embedding": {"torch": eager_rotary_embedding, "flashinfer": flashinfer_rotary_embedding},
    }
)
