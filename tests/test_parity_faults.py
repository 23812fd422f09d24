"""Faults planted in a model: the comparison finds each, and names the step that has it.

Each is planted in a copy of the shipped checkpoint whose theta is 1e6 on both sides, so that activations are those of
a trained model; the transposed weight needs a square one, which a small random model has.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny
from jaxfuse import Qwen3, Qwen3Config
from jaxfuse.attention import attend
from jaxfuse.cache import KVCache
from jaxfuse.errors import InputError
from jaxfuse.layers import Attention, DecoderLayer, Linear, RMSNorm, RotaryEmbedding
from jaxfuse.parity import compare
from jaxfuse.parity.activations import Activations
from jaxfuse.parity.float64 import Steps
from jaxfuse.parity.local import LocalErrors, compare_steps
from jaxfuse.parity.prompts import Group, default_prompts
from jaxfuse.parity.steps import names
from jaxfuse.parity.taps import JaxSide
from jaxfuse.parity.torch_run import Plan, TorchRun, detail_name, run_torch

SHIPPED = Path(__file__).parent.parent / "jaxfuse" / "checkpoint"
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Reference:
    """Transformers' steps of a checkpoint, and jaxfuse's judged by them."""

    folder: Path
    tokens: np.ndarray
    details: dict[str, Steps]
    runs: dict[str, TorchRun]

    def model(self, dtype: str) -> Qwen3:
        """A fresh copy."""
        return Qwen3.from_pretrained(self.folder, dtype=dtype)

    def judge(self, model: Qwen3, dtype: str) -> LocalErrors:
        """Each step of it alone."""
        steps = names(model.config)
        return compare_steps(JaxSide(model), self.tokens, self.details[dtype], self.runs[dtype], dtype, steps)


def reference_of(folder: Path, scratch: Path, tokens: np.ndarray) -> Reference:
    """Runs transformers once in each dtype."""
    plan = Plan(folder, "cpu", [Group(tokens, [0, 1])], tokens, tokens[:1, :4], 1, Activations(scratch, 0))
    runs = {dtype: run_torch(plan, dtype, lambda: None) for dtype in DTYPES}
    return Reference(folder, tokens, {dtype: plan.files.load(detail_name(dtype)) for dtype in DTYPES}, runs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The shipped checkpoint with theta 1e6, two prompts of 96 tokens."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    shutil.copytree(SHIPPED, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6}))
    prompts = default_prompts(folder, Qwen3.from_pretrained(folder).config, count=2)
    return reference_of(folder, tmp_path_factory.mktemp("scratch"), np.stack(prompts)[:, :96])


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A random model whose o_proj is square."""
    folder = tiny.save(tiny.torch_model("square_heads"), tmp_path_factory.mktemp("square"))
    tokens = np.random.default_rng(0).integers(0, 320, (2, 48), np.int32)
    return reference_of(folder, tmp_path_factory.mktemp("scratch"), tokens)


class FaultyAttention(Attention):
    """As the model's own, with one fault."""

    fault: str  # set on an instance that becomes one

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        rotary: RotaryEmbedding,
        cache: KVCache | None,
        layer: int,
    ) -> tuple[jax.Array, KVCache | None]:
        """As there."""
        batch, length, _ = x.shape
        qkv = self.qkv_proj(x).reshape(batch, length, -1, self.head_dim)
        q, k, v = jnp.split(qkv, (self.heads, self.heads + self.kv_heads), axis=2)
        if self.fault == "RoPE before the norm":
            q, k = rotary(q, k, positions)
            q, k = self.q_norm(q)[0], self.k_norm(k)[0]
        else:
            q, k = rotary(self.q_norm(q)[0], self.k_norm(k)[0], positions)
        if self.fault == "no scale":
            q = q * jnp.asarray(math.sqrt(self.head_dim), q.dtype)
        if self.fault == "mask sees one ahead":
            visible = visible | jnp.eye(length, k=1, dtype=bool)[None]
        if self.fault == "mask sees one too few":
            visible = (visible & ~jnp.eye(length, dtype=bool)[None]).at[:, 0, 0].set(True)
        mixed = attend(q, k, v, visible, numerics=self.numerics)
        return self.o_proj(mixed.reshape(batch, length, -1)), cache


class Interleaved(nnx.Module):
    """RoPE that turns neighbors, as GPT-J's, where neox style turns halves."""

    def __init__(self, rotary: RotaryEmbedding):
        self.rotary = rotary

    def __call__(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As RotaryEmbedding."""

        def halves(x: jax.Array) -> jax.Array:
            return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)

        def neighbors(x: jax.Array) -> jax.Array:
            first, second = jnp.split(x, 2, axis=-1)
            return jnp.stack([first, second], axis=-1).reshape(x.shape)

        q, k = self.rotary(halves(q), halves(k), positions)
        return neighbors(q), neighbors(k)


class NoResidual(DecoderLayer):
    """A layer that forgets what came in."""

    def __call__(self, *arguments: object) -> tuple[jax.Array, jax.Array, KVCache | None]:
        """As DecoderLayer."""
        x, residual, cache = super().__call__(*arguments)  # type: ignore[arg-type]
        return x, jnp.zeros_like(residual), cache


def theta(model: Qwen3) -> None:
    """1e4 for 1e6."""
    config = model.config
    rope = dataclasses.replace(config.rope, rope_theta=1e4)
    model.rotary_emb = RotaryEmbedding(rope, config.head_dim, config.max_position_embeddings, numerics=model.numerics)


def eps(model: Qwen3) -> None:
    """1e-5 for 1e-6, in every norm of the hidden size."""
    for layer in model.layers:
        layer.input_layernorm.eps = layer.post_attention_layernorm.eps = 1e-5
    model.norm.eps = 1e-5


def eps_of(find: Callable[[Qwen3], RMSNorm]) -> Callable[[Qwen3], None]:
    """1e-5 for 1e-6, in one norm."""

    def plant(model: Qwen3) -> None:
        find(model).eps = 1e-5

    return plant


def attention(index: int, fault: str) -> Callable[[Qwen3], None]:
    """A fault in one layer's attention."""

    def plant(model: Qwen3) -> None:
        faulty: Any = model.layers[index].self_attn
        faulty.__class__ = FaultyAttention
        faulty.fault = fault

    return plant


def weight(
    find: Callable[[Qwen3], Linear | RMSNorm], change: Callable[[jax.Array], jax.Array]
) -> Callable[[Qwen3], None]:
    """Another weight in one module."""

    def plant(model: Qwen3) -> None:
        parameter = find(model).weight
        parameter.set_value(change(parameter[...]))

    return plant


def interleaved(model: Qwen3) -> None:
    """Neighbors instead of halves."""
    model.rotary_emb = Interleaved(model.rotary_emb)  # type: ignore[assignment]


def no_residual(model: Qwen3) -> None:
    """In the second layer."""
    model.layers[1].__class__ = NoResidual


def swap_last_two(part: int) -> Callable[[jax.Array], jax.Array]:
    """Of three groups of rows, the last two of `part` rows each."""
    return lambda w: jnp.concatenate([w[: -2 * part], w[-part:], w[-2 * part : -part]])


def plus_one(w: jax.Array) -> jax.Array:
    """As Gemma keeps its norms."""
    return w + jnp.asarray(1, w.dtype)


def misread(w: jax.Array) -> jax.Array:
    """`[out, in]` bytes taken for `[in, out]`."""
    return w.T.reshape(w.shape)


KV_ROWS = 256  # of the shipped checkpoint: 2 heads of 128
FAULTS: dict[str, tuple[Callable[[Qwen3], None], str]] = {
    "theta 1e4 for 1e6": (theta, "layers.0.q_rope"),
    "eps 1e-5 for 1e-6": (eps, "layers.0.input_layernorm"),
    "eps of one norm": (eps_of(lambda m: m.layers[2].post_attention_layernorm), "layers.2.post_attention_layernorm"),
    "eps of the last norm": (eps_of(lambda m: m.norm), "norm"),
    "eps of k_norm": (eps_of(lambda m: m.layers[1].self_attn.k_norm), "layers.1.k_rope"),
    "RoPE before the norm": (attention(1, "RoPE before the norm"), "layers.1.q_rope"),
    "interleaved RoPE": (interleaved, "layers.0.q_rope"),
    "gate and up swapped": (
        weight(lambda m: m.layers[2].mlp.gate_up_proj, lambda w: jnp.roll(w, w.shape[0] // 2, axis=0)),
        "layers.2.gate_up_proj",
    ),
    "k and v rows swapped": (
        weight(lambda m: m.layers[1].self_attn.qkv_proj, swap_last_two(KV_ROWS)),
        "layers.1.qkv_proj",
    ),
    "norm weight plus one": (weight(lambda m: m.layers[3].input_layernorm, plus_one), "layers.3.input_layernorm"),
    "q_norm weight plus one": (weight(lambda m: m.layers[0].self_attn.q_norm, plus_one), "layers.0.q_rope"),
    "last norm weight plus one": (weight(lambda m: m.norm, plus_one), "norm"),
    "no 1/sqrt(d)": (attention(2, "no scale"), "layers.2.attention"),
    "down_proj misread": (weight(lambda m: m.layers[0].mlp.down_proj, misread), "layers.0.down_proj"),
    "mask sees one ahead": (attention(0, "mask sees one ahead"), "layers.0.attention"),
    "mask sees one too few": (attention(3, "mask sees one too few"), "layers.3.attention"),
    "no residual": (no_residual, "layers.1.block"),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_fault_no_alarm(trained: Reference, square: Reference, dtype: str) -> None:
    """The models that the faults are planted in are right."""
    for reference in (trained, square):
        judged = reference.judge(reference.model(dtype), dtype)
        assert judged.first_fault is None
        assert len(judged.records) == len(names(reference.model(dtype).config))


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_located(trained: Reference, fault: str) -> None:
    """A fault that no step shows, or that an earlier or a later one shows first."""
    plant, step = FAULTS[fault]
    model = trained.model("float32")
    plant(model)
    assert trained.judge(model, "float32").first_fault == step


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if not fault.startswith("eps of")])
def test_planted_faults_are_located_in_bfloat16(trained: Reference, fault: str) -> None:
    """The same in bfloat16; an eps of 1e-5 for 1e-6 is seen there only where activations are as small as embeddings."""
    plant, step = FAULTS[fault]
    model = trained.model("bfloat16")
    plant(model)
    assert trained.judge(model, "bfloat16").first_fault == step


def test_a_transposed_weight_is_located(square: Reference) -> None:
    """A square weight that was not to be transposed."""
    model = square.model("float32")
    weight(lambda m: m.layers[1].self_attn.o_proj, jnp.transpose)(model)
    assert square.judge(model, "float32").first_fault == "layers.1.o_proj"


class WithoutItsNorm(DecoderLayer):
    """A layer that adds the residual by itself, and calls no module for its first norm."""

    def __call__(self, x: jax.Array, residual: jax.Array | None, *rest: Any) -> tuple[jax.Array, jax.Array, None]:
        """As DecoderLayer, without a cache."""
        total = x if residual is None else x + residual
        mixed, _ = self.self_attn(total, *rest)
        normed, total = self.post_attention_layernorm(mixed, total)
        return self.mlp(normed), total, None


def test_a_step_that_cannot_be_seen(trained: Reference) -> None:
    """A module that is not called must not count as right."""
    model = trained.model("float32")
    model.layers[1].__class__ = WithoutItsNorm
    with pytest.raises(InputError, match=r"call the modules .* got none of 'layers.0.block'"):
        trained.judge(model, "float32")


def shallow(config: Qwen3Config) -> Qwen3:
    """One layer."""
    return Qwen3(dataclasses.replace(config, num_hidden_layers=1), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("made", "error", "part"),
    [
        (lambda model: 3, TypeError, "got int"),
        (lambda model: Qwen3.from_pretrained(SHIPPED, dtype="bfloat16"), InputError, "float32, got bfloat16"),
        (lambda model: shallow(model.config), InputError, "num_hidden_layers is 4 there, got 1"),
    ],
)
def test_models_that_cannot_be_compared(
    trained: Reference, made: Callable[[Qwen3], Any], error: type[Exception], part: str
) -> None:
    """Something else than a model, another dtype, another shape: refused with what was wanted."""
    model = trained.model("float32")
    model.config = dataclasses.replace(model.config, dtype="float32")
    with pytest.raises(error, match=part):
        compare(trained.folder, prompts=trained.tokens, dtypes=["float32"], new_tokens=1, model=lambda _: made(model))


class CacheFault(Attention):
    """Wrong with a cache alone."""

    def __call__(self, *arguments: Any) -> tuple[jax.Array, KVCache | None]:
        """As Attention."""
        x, cache = super().__call__(*arguments)
        return (x if cache is None else x * jnp.asarray(1.5, x.dtype)), cache


def test_a_fault_of_the_decode_path(trained: Reference) -> None:
    """Every step is right, and what reads from the cache is not: found by jaxfuse against itself."""

    def make(dtype: str) -> Qwen3:
        model = trained.model(dtype)
        model.layers[1].self_attn.__class__ = CacheFault
        return model

    report = compare(trained.folder, prompts=trained.tokens, dtypes=["float32"], new_tokens=16, model=make)
    assert report.located == []
    assert set(report.broken) == {
        "float32 self_consistency decode against prefill",
        "float32 self_consistency padded batch against rows alone",
        "float32 tokens that differ",
    }
    (tokens,) = report.tokens
    first = tokens["first_difference"]
    assert tokens["agreed"] < tokens["of"] == 2 * 16
    assert first["token"] != first["expected"]
    assert first["margin"] > 0


def test_a_fault_of_one_token(trained: Reference) -> None:
    """An embedding that is wrong for a token of the last prompt, which is not compared step by step."""
    rare = 1999
    prompts = np.where(trained.tokens == rare, 5, trained.tokens)
    prompts = np.concatenate([prompts] * 3)
    prompts[-1, 50] = rare

    def make(dtype: str) -> Qwen3:
        model = trained.model(dtype)
        parameter = model.embed_tokens.weight
        # Turned, so that its length is right; the head is tied, and the token is never the most likely.
        parameter.set_value(parameter[...].at[rare].set(jnp.roll(parameter[...][rare], 1)))
        return model

    report = compare(trained.folder, prompts=prompts, dtypes=["float32"], new_tokens=1, model=make)
    assert any(name.startswith("float32 logits") for name in report.broken)
