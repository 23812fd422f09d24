"""The steps of a Qwen3, by name and in order: what is compared, one by one."""

from jaxfuse.config import Qwen3Config

LAYER = (
    "input_layernorm",
    "qkv_proj",
    "q_rope",
    "k_rope",
    "attention",
    "o_proj",
    "attention_residual",
    "post_attention_layernorm",
    "gate_up_proj",
    "silu_and_mul",
    "down_proj",
    "block",
)
"""The steps of a layer; `q_rope` and `k_rope` are norm and RoPE of the heads, `block` the layer's own value."""


def names(config: Qwen3Config) -> list[str]:
    """Every step of a model: `embed_tokens`, `layers.0.input_layernorm`, ..., `norm`, `lm_head`."""
    layers = [f"layers.{i}.{step}" for i in range(config.num_hidden_layers) for step in LAYER]
    return ["embed_tokens", *layers, "norm", "lm_head"]


def is_coarse(name: str) -> bool:
    """Whether a step is one of those that are compared over all prompts: embedding, blocks, last norm, logits."""
    return "." not in name or name.endswith(".block")


def values_per_token(config: Qwen3Config) -> int:
    """How many numbers all steps give for one token, logits apart."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = 7 * hidden + 3 * inner + (4 * heads + 4 * kv_heads) * head_dim
    return config.num_hidden_layers * layer + 2 * hidden
