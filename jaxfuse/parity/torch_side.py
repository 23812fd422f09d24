"""The checkpoint in transformers, with every setting pinned that could move a number."""

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import GenerationConfig, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from jaxfuse.errors import InputError, JaxfuseError
from jaxfuse.parity.float64 import Steps, split_heads

Attention = Literal["sdpa", "eager"]


def choose_device(device: str | None) -> str:
    """The device of the torch side: the one asked for, else a GPU that PyTorch can use, else the CPU.

    Raises:
        InputError: for another name, or a GPU that PyTorch cannot use.
    """
    if device not in (None, "cpu", "cuda"):
        raise InputError(f'the device of the PyTorch side must be "cpu" or "cuda", got {device!r}')
    usable = torch.cuda.is_available()
    if device == "cuda" and not usable:
        raise InputError("PyTorch has no GPU that it can use here; leave out the device, or give cpu")
    return device or ("cuda" if usable else "cpu")


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Float32 products in float32, not TF32; no gradients. What was set before comes back."""
    flags = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [flag.allow_tf32 for flag in flags]
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        for flag in flags:
            flag.allow_tf32 = False
        with torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


class TorchSide:
    """A checkpoint in transformers.

    Args:
        folder: the checkpoint.
        dtype: of weights and activations.
        device: "cpu" or "cuda".

    Raises:
        JaxfuseError: when transformers cannot load it, or loads it other than pinned.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str):
        self.device = device
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
                model = Qwen3ForCausalLM.from_pretrained(
                    folder, dtype=dtype, attn_implementation="sdpa", use_kernels=False, local_files_only=True
                )
            self.model: Qwen3ForCausalLM = model.to(device).eval()
        except (OSError, ValueError, RuntimeError, torch.cuda.OutOfMemoryError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise JaxfuseError(f"transformers cannot load {folder} ({reason})") from error
        rotary = model.model.rotary_emb
        if model.dtype != dtype or rotary.inv_freq.dtype != torch.float32 or getattr(model, "use_kernels", False):
            raise JaxfuseError(
                f"transformers {transformers.__version__} loads {folder} as {model.dtype} with RoPE in "
                f"{rotary.inv_freq.dtype}; this comparison needs {dtype}, float32 and no kernels of the hub"
            )

    def settings(self) -> dict[str, Any]:
        """What a report says about this side."""
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else f"CPU ({os.uname().machine})",
            "threads": torch.get_num_threads(),
            "attention": "sdpa; eager beside it",
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "hub_kernels": bool(getattr(self.model, "use_kernels", False)),
            "inv_freq": str(self.model.model.rotary_emb.inv_freq.dtype).removeprefix("torch."),
        }

    def logits(self, tokens: torch.Tensor, attention: Attention = "sdpa") -> torch.Tensor:
        """`[B, T]` -> `[B, T, vocab]` in the model's dtype."""
        return self.blocks(tokens, attention)["lm_head"]

    def blocks(self, tokens: torch.Tensor, attention: Attention = "sdpa") -> Steps:
        """The embedding, the value after each layer, the last norm and the logits."""
        return self._run(tokens, attention, _coarse)

    def steps(self, tokens: torch.Tensor, attention: Attention = "sdpa") -> Steps:
        """What every step gave, `[B, T, ...]` in the model's dtype, by the names of `steps.names`.

        Besides: `q_norm` and `k_norm` of each layer, before RoPE.
        """
        steps = self._run(tokens, attention, _fine)
        return self._with_rope(steps)

    def eager_attention(self, steps: Steps) -> Steps:
        """`layers.{i}.attention` as eager attention gives it, for the q, k and v that sdpa was given."""
        config = self.model.config
        out: Steps = {}
        for i, layer in enumerate(self.model.model.layers):
            at = f"layers.{i}."
            q, k = steps[f"{at}q_rope"], steps[f"{at}k_rope"]
            _, _, v = split_heads(steps[f"{at}qkv_proj"], config.num_key_value_heads, config.head_dim)
            length = q.shape[1]
            lowest = torch.finfo(q.dtype).min
            mask = torch.full((1, 1, length, length), lowest, dtype=q.dtype, device=q.device).triu(1)
            mixed, _ = modeling_qwen3.eager_attention_forward(
                layer.self_attn, *(x.transpose(1, 2) for x in (q, k, v)), mask, config.head_dim**-0.5
            )
            out[f"{at}attention"] = mixed.flatten(2)
        return out

    def greedy(self, prompts: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What transformers appends to prompts `[B, T]` of one length: the most likely tokens; none stops it.

        Returns:
            tokens `[B, new_tokens]`, and `[B, new_tokens]` float32: by how much the first logit is ahead of the second.
        """
        self.model.set_attn_implementation("sdpa")
        self.model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        out: Any = self.model.generate(prompts.to(self.device), attention_mask=torch.ones_like(prompts).to(self.device))
        margins = []
        for logits in out.logits:
            first, second = logits.float().topk(2, dim=-1).values.T
            margins.append(first - second)
        return out.sequences[:, prompts.shape[1] :], torch.stack(margins, dim=1)

    def _run(self, tokens: torch.Tensor, attention: Attention, places: "Places") -> Steps:
        self.model.set_attn_implementation(attention)
        steps: Steps = {}
        handles = places(self.model, steps)
        try:
            # Logits without a cache, as those of the other side.
            steps["lm_head"] = self.model(tokens.to(self.device), use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return steps

    def _with_rope(self, steps: Steps) -> Steps:
        """Adds q and k after RoPE, which no module returns: transformers' own function on its own inputs."""
        config = self.model.config
        example = steps["embed_tokens"]
        places = torch.arange(example.shape[1], device=example.device)[None]
        cos, sin = self.model.model.rotary_emb(example, places)
        for i in range(config.num_hidden_layers):
            at = f"layers.{i}."
            q, k = steps[f"{at}q_norm"], steps[f"{at}k_norm"]
            turned = modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
            steps[f"{at}q_rope"], steps[f"{at}k_rope"] = turned
            steps[f"{at}qkv_proj"] = torch.cat([steps.pop(f"{at}{name}_proj") for name in "qkv"], dim=-1)
            steps[f"{at}gate_up_proj"] = torch.cat([steps.pop(f"{at}{name}_proj") for name in ("gate", "up")], dim=-1)
        return steps


Places = Callable[[Qwen3ForCausalLM, Steps], list[Any]]


def _output(steps: Steps, name: str) -> Callable[..., None]:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        steps[name] = output if torch.is_tensor(output) else output[0]

    return hook


def _input(steps: Steps, name: str) -> Callable[..., None]:
    def hook(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        steps[name] = inputs[0]

    return hook


def _coarse(model: Qwen3ForCausalLM, steps: Steps) -> list[Any]:
    inner = model.model
    modules = {"embed_tokens": inner.embed_tokens, "norm": inner.norm}
    modules |= {f"layers.{i}.block": layer for i, layer in enumerate(inner.layers)}
    return [module.register_forward_hook(_output(steps, name)) for name, module in modules.items()]


def _fine(model: Qwen3ForCausalLM, steps: Steps) -> list[Any]:
    handles = _coarse(model, steps)
    for i, layer in enumerate(model.model.layers):
        attn, mlp = layer.self_attn, layer.mlp
        outputs = {name: getattr(attn, name) for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj")}
        outputs |= {name: getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}
        outputs |= {name: getattr(layer, name) for name in ("input_layernorm", "post_attention_layernorm")}
        inputs = {
            "attention": attn.o_proj,
            "attention_residual": layer.post_attention_layernorm,
            "silu_and_mul": mlp.down_proj,
        }
        at = f"layers.{i}."
        handles += [module.register_forward_hook(_output(steps, at + name)) for name, module in outputs.items()]
        handles += [module.register_forward_pre_hook(_input(steps, at + name)) for name, module in inputs.items()]
    return handles


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def gigabytes(*counts: int) -> float:
    """10⁹ bytes of so many float32 values."""
    return 4 * math.prod(counts) / 1e9
