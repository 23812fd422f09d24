"""The smallest faults that a comparison would have found: how far off a parameter may be without an alarm."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jaxfuse.model import Qwen3
from jaxfuse.parity import float64
from jaxfuse.parity.float64 import Steps
from jaxfuse.parity.local import Value
from jaxfuse.parity.taps import to_torch
from jaxfuse.parity.torch_run import TorchRun
from jaxfuse.parity.yardstick import judge_step, token_errors
from jaxfuse.rope import inv_freq

_LEAST, _MOST = 1e-9, 1e3


def smallest_faults(
    model: Qwen3, local: Mapping[str, Value], detail: Steps, torch_run: TorchRun, dtype: str
) -> list[dict[str, Any]]:
    """For RoPE's theta, the norm's eps and the scale of attention: the smallest relative change that raises an alarm.

    Instead of our step the truth is changed, which is the same to their distance: the step that ran is compared with
    a float64 of theta · (1 + x), and x is bisected. Looked for in the first layer, on this comparison's prompts.

    Args:
        model: the jaxfuse model.
        local: its steps, given transformers' inputs.
        detail: transformers' steps.
        torch_run: whose local errors are the yardstick.
        dtype: of the run.

    Returns:
        For each `fault`: the step that shows it, the `value` in the model, and the smallest change found, `relative`
        to it; None where no change up to a thousandfold would show.
    """
    config, first = model.config, model.layers[0]
    eps, size = config.rms_norm_eps, config.head_dim
    q, _, v = float64.split_heads(detail["layers.0.qkv_proj"], config.num_key_value_heads, size)
    device = str(q.device)
    q_weight, norm_weight = (
        to_torch(norm.weight[...], device) for norm in (first.self_attn.q_norm, first.input_layernorm)
    )

    def theta(change: float) -> torch.Tensor:
        rope = dataclasses.replace(config.rope, rope_theta=config.rope.rope_theta * (1 + change))
        frequencies, factor = inv_freq(rope, size)
        return float64.rotate(float64.rms_norm(q, q_weight, eps), to_torch(frequencies, device), factor)

    def norm_eps(change: float) -> torch.Tensor:
        return float64.rms_norm(detail["embed_tokens"], norm_weight, eps * (1 + change))

    def scale(change: float) -> torch.Tensor:
        turned = detail["layers.0.q_rope"], detail["layers.0.k_rope"]
        return float64.attention(*turned, v, size**-0.5 * (1 + change))

    faults: list[tuple[str, str, float, Callable[[float], torch.Tensor]]] = [
        ("rope_theta", "layers.0.q_rope", config.rope.rope_theta, theta),
        ("rms_norm_eps", "layers.0.input_layernorm", eps, norm_eps),
        ("attention scale", "layers.0.attention", size**-0.5, scale),
    ]
    return [
        {"dtype": dtype, "fault": fault, "step": step, "value": value, "relative": _smallest(found)}
        for fault, step, value, truth in faults
        for found in [_alarm(local[step], step, truth, torch_run, dtype, device)]
    ]


def _alarm(
    value: Value, step: str, truth: Callable[[float], torch.Tensor], torch_run: TorchRun, dtype: str, device: str
) -> Callable[[float], bool]:
    ours = (value if isinstance(value, torch.Tensor) else to_torch(value)).to(device).double()

    def found(change: float) -> bool:
        exact = truth(change)
        errors = token_errors(ours.reshape(exact.shape) - exact, exact).cpu()
        return not all(line.passed for line in judge_step(step, dtype, errors, torch_run.local[step]))

    return found


def _smallest(found: Callable[[float], bool]) -> float | None:
    """To a tenth of itself."""
    if not found(_MOST):
        return None
    low, high = math.log10(_LEAST), math.log10(_MOST)
    while high - low > 0.04:
        middle = (low + high) / 2
        low, high = (low, middle) if found(10**middle) else (middle, high)
    return 10**high
