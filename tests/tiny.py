"""Small random Qwen3 checkpoints, made by transformers, that cover what a config.json can ask for."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import jaxfuse

# Two thread pools, torch's and XLA's, spin for one another's cores: a greedy token took 50 ms instead of 2.
torch.set_num_threads(1)

_BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # times 4 heads is not hidden_size
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "attention_bias": {"attention_bias": True},
    "square_heads": {"head_dim": 32},
    "one_kv_head": {"num_key_value_heads": 1},
    "kv_heads_equal_heads": {"num_key_value_heads": 4},
    "yarn": {"rope_parameters": _YARN},
    "yarn_attention_factor": {"rope_parameters": {**_YARN, "attention_factor": 1.3}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
}


def torch_model(variant: str = "tied", *, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A float32 model of a variant; norms and biases are random too, since a fresh model's would hide a fault."""
    config = Qwen3Config(**{**_BASE, **VARIANTS[variant], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float().eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = 1 + 0.2 * torch.randn_like(parameter)
            elif "bias" in name:
                parameter.data = 0.3 * torch.randn_like(parameter)
            else:
                parameter.data = 3 * parameter.data  # attention that is far from uniform
    return model


def save(model: Qwen3ForCausalLM, folder: Path, **options: Any) -> Path:
    """Saves a model with transformers, without its progress bars."""
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, **options)
    return folder


def unmerged(model: jaxfuse.Qwen3) -> dict[str, np.ndarray]:
    """A model's weights, or gradients, by Hugging Face's names: a table of its own, so that one checks the other."""
    config = model.config
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.lm_head.weight
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."
        attention, mlp = layer.self_attn, layer.mlp
        tensors |= {
            f"{at}input_layernorm.weight": layer.input_layernorm.weight,
            f"{at}post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
            f"{at}self_attn.q_norm.weight": attention.q_norm.weight,
            f"{at}self_attn.k_norm.weight": attention.k_norm.weight,
            f"{at}self_attn.o_proj.weight": attention.o_proj.weight,
            f"{at}mlp.down_proj.weight": mlp.down_proj.weight,
            f"{at}mlp.gate_proj.weight": mlp.gate_up_proj.weight[: config.intermediate_size],
            f"{at}mlp.up_proj.weight": mlp.gate_up_proj.weight[config.intermediate_size :],
        }
        for name in ("weight", "bias") if config.attention_bias else ("weight",):
            merged = getattr(attention.qkv_proj, name)[...]
            assert merged.shape[0] == q + 2 * kv
            tensors |= {
                f"{at}self_attn.q_proj.{name}": merged[:q],
                f"{at}self_attn.k_proj.{name}": merged[q : q + kv],
                f"{at}self_attn.v_proj.{name}": merged[q + kv :],
            }
        if config.attention_bias:
            tensors[f"{at}self_attn.o_proj.bias"] = attention.o_proj.bias
    return {name: np.asarray(value[...]) for name, value in tensors.items()}
