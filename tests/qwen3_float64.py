"""Qwen3 in float64 NumPy: the truth for jaxfuse and for transformers.

Written from the architecture (Qwen3 technical report, arXiv 2505.09388; RoPE, arXiv 2104.09864; YaRN, arXiv
2309.00071) and a checkpoint's config.json, and from neither implementation that it judges: transformers' `.double()`
is no truth, since its norms, its softmax and its RoPE cast to float32.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - teaches NumPy the bfloat16 that safetensors reads
import numpy as np
from safetensors import safe_open

from truth import Wide, rms_norm64, silu_and_mul64


@dataclasses.dataclass(frozen=True)
class Model64:
    """A checkpoint, its weights in float64 by Hugging Face's names."""

    config: dict[str, Any]
    weights: dict[str, Wide]

    def steps(self, tokens: np.ndarray) -> dict[str, Wide]:
        """Every value on the way from tokens `[B, T]` at positions 0, 1, ... to logits.

        Returns:
            By name, in order: `embed_tokens`; for each layer i `layers.{i}.` with `input_layernorm`, `qkv_proj` (q, k
            and v side by side), `q_rope` and `k_rope` `[B, T, heads, D]`, `attention`, `o_proj`,
            `attention_residual`, `post_attention_layernorm`, `gate_up_proj`, `silu_and_mul`, `down_proj` and `block`;
            `norm`; `lm_head`.
        """
        config, weights = self.config, self.weights
        eps = config["rms_norm_eps"]
        steps = {"embed_tokens": weights["model.embed_tokens.weight"][tokens]}
        hidden = steps["embed_tokens"]
        for i in range(config["num_hidden_layers"]):
            layer: dict[str, Wide] = {}
            self._attention(f"model.layers.{i}.", hidden, layer)
            layer["attention_residual"] = hidden + layer["o_proj"]
            self._mlp(f"model.layers.{i}.", layer["attention_residual"], layer)
            hidden = layer["block"] = layer["attention_residual"] + layer["down_proj"]
            steps |= {f"layers.{i}.{name}": value for name, value in layer.items()}
        steps["norm"] = rms_norm64(hidden, weights["model.norm.weight"], eps)
        head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
        steps["lm_head"] = steps["norm"] @ weights[head].T
        return steps

    def _attention(self, at: str, hidden: Wide, out: dict[str, Wide]) -> None:
        config, weights = self.config, self.weights
        eps, size = config["rms_norm_eps"], head_dim(config)
        out["input_layernorm"] = rms_norm64(hidden, weights[f"{at}input_layernorm.weight"], eps)
        projected = [self._linear(f"{at}self_attn.{name}_proj", out["input_layernorm"]) for name in "qkv"]
        out["qkv_proj"] = np.concatenate(projected, axis=-1)
        q, k, v = (x.reshape(*x.shape[:2], -1, size) for x in projected)
        # Each head of q and k is normed over its own values, then turned (arXiv 2505.09388, section 2).
        out["q_rope"] = self._turn(rms_norm64(q, weights[f"{at}self_attn.q_norm.weight"], eps))
        out["k_rope"] = self._turn(rms_norm64(k, weights[f"{at}self_attn.k_norm.weight"], eps))
        length, group = q.shape[1], q.shape[2] // k.shape[2]
        causal = np.arange(length)[None, :] <= np.arange(length)[:, None]
        mixed = np.empty_like(q)
        for head in range(q.shape[2]):
            scores = out["q_rope"][:, :, head] @ out["k_rope"][:, :, head // group].swapaxes(1, 2) / math.sqrt(size)
            scores = np.where(causal, scores, -np.inf)
            weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[:, :, head] = weight / weight.sum(axis=-1, keepdims=True) @ v[:, :, head // group]
        out["attention"] = mixed.reshape(*mixed.shape[:2], -1)
        out["o_proj"] = self._linear(f"{at}self_attn.o_proj", out["attention"])

    def _mlp(self, at: str, hidden: Wide, out: dict[str, Wide]) -> None:
        out["post_attention_layernorm"] = rms_norm64(
            hidden, self.weights[f"{at}post_attention_layernorm.weight"], self.config["rms_norm_eps"]
        )
        projected = [self._linear(f"{at}mlp.{name}_proj", out["post_attention_layernorm"]) for name in ("gate", "up")]
        out["gate_up_proj"] = np.concatenate(projected, axis=-1)
        out["silu_and_mul"] = silu_and_mul64(out["gate_up_proj"])
        out["down_proj"] = self._linear(f"{at}mlp.down_proj", out["silu_and_mul"])

    def _linear(self, name: str, x: Wide) -> Wide:
        y = x @ self.weights[f"{name}.weight"].T
        biased = self.config.get("attention_bias") and "self_attn" in name
        return y + self.weights[f"{name}.bias"] if biased else y

    def _turn(self, x: Wide) -> Wide:
        """RoPE of `[B, T, heads, D]`: value i of a head is turned with value i + D / 2, as a point in the plane."""
        frequency, factor = frequencies(self.config)
        turned = np.exp(1j * np.arange(x.shape[1])[:, None, None] * frequency) * factor
        first, second = np.split(x, 2, axis=-1)
        point = (first + 1j * second) * turned
        return np.concatenate([point.real, point.imag], axis=-1)


def head_dim(config: dict[str, Any]) -> int:
    """The size of a head, which a config.json need not name."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def frequencies(config: dict[str, Any]) -> tuple[Wide, float]:
    """Radians a position for each pair of values of a head, `[D / 2]`, and the factor on what is turned."""
    # transformers 4 writes rope_theta at the top and rope_scaling, transformers 5 all in rope_parameters.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    size = head_dim(config)
    plain = theta ** -(np.arange(0, size, 2) / size)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    assert kind == "yarn"
    context = rope["original_max_position_embeddings"]
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1

    def pair(turns: float) -> float:
        """The pair, a fraction, that makes so many turns over the original context: context / wavelength = turns."""
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    assert low < high
    # Pairs below `low` keep their frequency, those above `high` are slowed by the factor, with a ramp between.
    slowed = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    blended = plain / factor * slowed + plain * (1 - slowed)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 0.1 * math.log(factor) + 1
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            one, other = (0.1 * rope[name] * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
            attention = one / other
    return blended, float(attention)


def load(folder: Path) -> Model64:
    """A checkpoint: one file, or shards."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    weights: dict[str, Wide] = {}
    for file in files:
        with safe_open(folder / file, framework="numpy") as tensors:
            weights |= {name: tensors.get_tensor(name).astype(np.float64) for name in tensors.keys()}  # noqa: SIM118
    return Model64(config, weights)
