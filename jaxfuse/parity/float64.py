"""The steps of a model in float64: the truth for both sides, of one step alone or of all up to it.

Transformers' `.double()` is none: its norms, its softmax and its RoPE cast to float32.
"""

import torch
from transformers import Qwen3ForCausalLM

Steps = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`[..., H]` -> `[..., H]`: x / sqrt(mean(x²) + eps) · weight."""
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def product(x: torch.Tensor, *layers: torch.nn.Module) -> torch.Tensor:
    """`[..., in]` -> `[..., out]`, the outputs of several linear layers side by side."""
    x = x.double()
    return torch.cat([torch.nn.functional.linear(x, *_parameters(layer)) for layer in layers], dim=-1)


def _parameters(layer: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.double() for parameter in (layer.weight, layer.bias) if parameter is not None]


def rotate(x: torch.Tensor, inv_freq: torch.Tensor, factor: float) -> torch.Tensor:
    """Turns `[B, T, heads, D]` by the angles of positions 0, 1, ...; column i goes with column i + D / 2.

    Args:
        x: the heads.
        inv_freq: `[D / 2]`, radians a position.
        factor: on cosine and sine.
    """
    angles = torch.arange(x.shape[1], device=x.device).double()[:, None, None] * inv_freq.double()
    cos, sin = angles.cos() * factor, angles.sin() * factor
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`[..., 2 I]` -> `[..., I]`."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of q `[B, T, heads, D]` over k, v `[B, T, kv_heads, D]` -> `[B, T, heads · D]`."""
    batch, length, heads, size = q.shape
    queries = q.double().view(batch, length, k.shape[2], -1, size)
    scores = torch.einsum("btkgd,bskd->bkgts", queries, k.double()) * scale
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bkgts,bskd->btkgd", weights, v.double()).reshape(batch, length, heads * size)


def split_heads(qkv: torch.Tensor, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[B, T, (heads + 2 kv_heads) · D]` -> q `[B, T, heads, D]`, k and v `[B, T, kv_heads, D]`."""
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
    return q, k, v


def truth_of(model: Qwen3ForCausalLM, tokens: torch.Tensor, steps: Steps | None = None) -> Steps:
    """What each step should have given.

    Args:
        model: whose weights are taken, and the float32 frequencies of its RoPE.
        tokens: `[B, T]`.
        steps: what its steps gave: each is computed for the inputs that it had. None: for the true ones, so that all is
            float64 from the tokens on.

    Returns:
        float64, by the same names; and `rotary.q` and `rotary.k`, RoPE alone, for each layer.
    """
    config = model.config
    split = config.num_key_value_heads, config.head_dim
    inv_freq, factor = model.model.rotary_emb.inv_freq, model.model.rotary_emb.attention_scaling
    truth: Steps = {"embed_tokens": model.model.embed_tokens.weight.double()[tokens]}
    if steps is None:
        steps = truth  # what is read below was written above
    total, residual = truth["embed_tokens"], steps["embed_tokens"]
    for i, layer in enumerate(model.model.layers):
        at, attn, mlp = f"layers.{i}.", layer.self_attn, layer.mlp
        truth[f"{at}input_layernorm"] = rms_norm(total, layer.input_layernorm.weight, config.rms_norm_eps)
        normed = steps[f"{at}input_layernorm"]
        truth[f"{at}qkv_proj"] = product(normed, attn.q_proj, attn.k_proj, attn.v_proj)
        q, k, v = split_heads(steps[f"{at}qkv_proj"], *split)
        for name, heads, norm in (("q", q, attn.q_norm), ("k", k, attn.k_norm)):
            truth[f"{at}{name}_norm"] = rms_norm(heads, norm.weight, config.rms_norm_eps)
            truth[f"{at}{name}_rope"] = rotate(truth[f"{at}{name}_norm"], inv_freq, factor)
            truth[f"{at}rotary.{name}"] = rotate(steps[f"{at}{name}_norm"], inv_freq, factor)
        truth[f"{at}attention"] = attention(steps[f"{at}q_rope"], steps[f"{at}k_rope"], v, config.head_dim**-0.5)
        truth[f"{at}o_proj"] = product(steps[f"{at}attention"], attn.o_proj)

        total = residual.double() + steps[f"{at}o_proj"].double()
        truth[f"{at}attention_residual"] = total
        truth[f"{at}post_attention_layernorm"] = rms_norm(
            total, layer.post_attention_layernorm.weight, config.rms_norm_eps
        )
        truth[f"{at}gate_up_proj"] = product(steps[f"{at}post_attention_layernorm"], mlp.gate_proj, mlp.up_proj)
        truth[f"{at}silu_and_mul"] = silu_and_mul(steps[f"{at}gate_up_proj"])
        truth[f"{at}down_proj"] = product(steps[f"{at}silu_and_mul"], mlp.down_proj)

        total = steps[f"{at}attention_residual"].double() + steps[f"{at}down_proj"].double()
        truth[f"{at}block"] = total
        residual = steps[f"{at}block"]
    truth["norm"] = rms_norm(total, model.model.norm.weight, config.rms_norm_eps)
    truth["lm_head"] = product(steps["norm"], model.lm_head)
    return truth
