"""Each op of `jaxfuse.kernels` against its twin in PyTorch, on activations of the model."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfuse import kernels
from jaxfuse.kernels import Implementation, ImplementationError
from jaxfuse.model import Qwen3
from jaxfuse.parity.float64 import Steps
from jaxfuse.parity.local import errors_of, step_record
from jaxfuse.parity.taps import to_jax
from jaxfuse.parity.torch_run import TorchRun
from jaxfuse.parity.yardstick import Line, judge_step


def implementations() -> list[Implementation]:
    """Those that this machine has."""
    return ["xla", "mosaic"] if kernels.has_mosaic() else ["xla"]


def compare_ops(
    model: Qwen3, detail: Steps, torch_run: TorchRun, dtype: str
) -> tuple[list[dict[str, Any]], list[Line]]:
    """Runs each op, in each implementation that is here, in every layer.

    Returns:
        A record of the worst case of each op and implementation, and all lines of the contract.
    """
    records: dict[tuple[str, str], dict[str, Any]] = {}
    lines: list[Line] = []
    strains: dict[tuple[str, str], float] = {}
    for implementation in implementations():
        run = _ops(model.config.rms_norm_eps, implementation)
        for op, arrays, names in _calls(model, detail):
            key = op, implementation
            try:
                values = run[op](*arrays)
            except ImplementationError as error:
                records[key] = {"op": op, "implementation": implementation, "dtype": dtype, "refused": str(error)}
                continue
            for name, value in zip(names, values if isinstance(values, tuple) else (values,), strict=True):
                errors, theirs = errors_of(value, detail, name), torch_run.local[name]
                judged = judge_step(f"{dtype} ops {op} {implementation} {name}", dtype, errors.tokens[0], theirs)
                lines += judged
                strain = max(line.strain for line in judged)
                if key not in strains or strain > strains[key]:
                    strains[key] = strain
                    records[key] = {
                        "op": op,
                        "implementation": implementation,
                        "dtype": dtype,
                        "worst": name,
                        **step_record(errors, theirs, judged),
                    }
    return list(records.values()), lines


def _ops(eps: float, implementation: Implementation) -> dict[str, Callable[..., Any]]:
    norm = jax.jit(partial(kernels.rms_norm, eps=eps, implementation=implementation))
    return {
        "rms_norm": norm,
        "head_norm": norm,
        "fused_add_rms_norm": jax.jit(partial(kernels.fused_add_rms_norm, eps=eps, implementation=implementation)),
        "rotary_embedding": jax.jit(partial(kernels.rotary_embedding, implementation=implementation)),
        "silu_and_mul": jax.jit(partial(kernels.silu_and_mul, implementation=implementation)),
    }


def _calls(model: Qwen3, detail: Steps) -> Iterator[tuple[str, tuple[jax.Array, ...], tuple[str, ...]]]:
    """An op, its arrays, and the steps that its outputs stand for."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    embedded = to_jax(detail["embed_tokens"])
    batch, length, _ = embedded.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    table = model.rotary_emb.cos_sin_cache[...]
    yield "rms_norm", (embedded, model.layers[0].input_layernorm.weight[...]), ("layers.0.input_layernorm",)
    before = "embed_tokens"
    for i, layer in enumerate(model.layers):
        at = f"layers.{i}."
        attention = layer.self_attn

        def given(name: str, at: str = at) -> jax.Array:
            return to_jax(detail[at + name])

        merged = given("qkv_proj").reshape(batch, length, heads + 2 * kv_heads, config.head_dim)
        q, k, _ = jnp.split(merged, (heads, heads + kv_heads), axis=2)
        yield "head_norm", (q, attention.q_norm.weight[...]), (f"{at}q_norm",)
        yield "head_norm", (k, attention.k_norm.weight[...]), (f"{at}k_norm",)
        turned = (given("q_norm"), given("k_norm"), positions, table)
        yield "rotary_embedding", turned, (f"{at}rotary.q", f"{at}rotary.k")
        added = (given("o_proj"), to_jax(detail[before]), layer.post_attention_layernorm.weight[...])
        yield "fused_add_rms_norm", added, (f"{at}post_attention_layernorm", f"{at}attention_residual")
        yield "silu_and_mul", (given("gate_up_proj"),), (f"{at}silu_and_mul",)
        before = f"{at}block"
