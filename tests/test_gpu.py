"""The model on a GPU: its numbers against PyTorch's and the CPU's, and what its compiled programs copy."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Qwen3ForCausalLM

import jaxfuse
from gpu import IMPLEMENTATIONS, QWEN3_06B, SHIPPED, needs_mosaic
from jaxfuse import Qwen3
from jaxfuse.generate import begin, decode, interned, prefill
from jaxfuse.kernels import Implementation

pytestmark = pytest.mark.gpu


def prompts() -> np.ndarray:
    """Four rows of 600 tokens of the held-out text."""
    from tokenizers import Tokenizer

    text = (SHIPPED / "heldout_excerpt.txt").read_text("utf-8")
    ids = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode(text).ids
    return np.asarray(ids[:2400], np.int32).reshape(4, 600)


def torch_logits(dtype: torch.dtype, tokens: np.ndarray, attention: str = "sdpa") -> np.ndarray:
    """transformers' logits on the CPU, float64."""
    model = Qwen3ForCausalLM.from_pretrained(SHIPPED, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.double().numpy()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_logits_match_transformers(implementation: Implementation) -> None:
    """The float32 contract on a GPU: at most 2e-5 of the largest logit, so no product runs in TF32."""
    tokens = prompts()
    expected = torch_logits(torch.float32, tokens)
    model = Qwen3.from_pretrained(SHIPPED, dtype="float32", implementation=implementation)
    logits = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    assert logits.devices() == {jax.devices("gpu")[0]}
    assert np.abs(np.asarray(logits, np.float64) - expected).max() <= 2e-5 * np.abs(expected).max()


def test_float32_tokens_match_the_cpu() -> None:
    """Greedy tokens of a batch of unequal prompts are the CPU's, each row alone and together."""
    rows = [row[:n] for row, n in zip(prompts(), (1, 40, 130, 500), strict=True)]

    def continued(implementation: Implementation) -> np.ndarray:
        model = Qwen3.from_pretrained(SHIPPED, dtype="float32", implementation=implementation)
        return jaxfuse.generate(model, rows, max_new_tokens=64, stop_token_ids=()).tokens

    with jax.default_device(jax.devices("cpu")[0]):
        expected = continued("xla")
    for implementation in IMPLEMENTATIONS:
        np.testing.assert_array_equal(continued(implementation), expected)
    model = Qwen3.from_pretrained(SHIPPED, dtype="float32")
    for row, tokens in zip(rows, expected, strict=True):
        alone = jaxfuse.generate(model, row, max_new_tokens=64, stop_token_ids=())
        np.testing.assert_array_equal(alone.tokens[0], tokens)


def materialized(compiled: jax.stages.Compiled, shapes: set[tuple[int, ...]]) -> Iterator[str]:
    """Instructions outside fusions that make an array of one of these shapes; sides of 1 apart."""
    text = compiled.as_text()
    assert text is not None
    fused = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text))
    plumbing = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}
    inside = False
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            inside = header[1] in fused
        found = re.match(r" +(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        if inside or not found or found[2] in plumbing:
            continue
        for shape in re.findall(r"[a-z]\w*\[([\d,]+)\]", found[1]):
            sides = tuple(int(n) for n in shape.split(",") if n != "1")
            if sides in shapes or sides[::-1] in shapes:
                yield line.strip()


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_copy_of_a_weight_or_the_cache(implementation: Implementation, batch: int) -> None:
    """At Qwen3-0.6B's size nothing makes an array of a weight's shape; a longer cache costs no scratch memory.

    And no step of the decode loop copies an activation to hand it to a kernel.
    """
    model = Qwen3(QWEN3_06B, rngs=nnx.Rngs(0), implementation=implementation)
    weights = {leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim > 1}
    assert len(weights) == 5
    leaves, treedef = jax.tree.flatten(model)
    tree = interned(treedef)
    tokens, lengths = np.ones((batch, 192), np.int32), np.full(batch, 150, np.int32)
    program = prefill.lower(tree, leaves, tokens, lengths).compile()
    assert list(materialized(program, weights)) == []

    logits, cache = prefill(tree, leaves, tokens, lengths)
    sampling = jaxfuse.Sampling().for_batch(batch)
    options = (sampling, np.full(8, -1, np.int32), jax.random.split(jax.random.key(0), batch))
    scratch = []
    for capacity in (1024, 4096):
        state = begin(logits, cache, *options, capacity=capacity, size=64, greedy=True)
        program = decode.lower(tree, leaves, state, *options, np.int32(64), greedy=True).compile()
        whole = state.cache.keys.shape
        assert list(materialized(program, weights)) == []
        # Writing in place makes an array of the cache's shape, too, so only copies are looked for.
        assert [line for line in materialized(program, {tuple(n for n in whole if n > 1)}) if " copy" in line] == []
        hidden = {(batch, n) for n in (1024, 2048, 3072, 4096, 6144)} | {(batch, n, 128) for n in (8, 16, 24, 32)}
        activations = {tuple(n for n in shape if n > 1) for shape in hidden}
        assert [line for line in materialized(program, activations) if " copy" in line] == []
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= 2 * state.cache.keys.nbytes
        scratch.append(memory.temp_size_in_bytes)
    one_layer = 2 * state.cache.keys.nbytes // QWEN3_06B.num_hidden_layers
    assert scratch[1] - scratch[0] <= 2 * one_layer


def decode_program(model: Qwen3, batch: int, compiler_options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """The decode loop that `generate` runs, for a short prompt."""
    leaves, treedef = jax.tree.flatten(model)
    tree = interned(treedef)
    logits, cache = prefill(tree, leaves, np.ones((batch, 128), np.int32), np.full(batch, 100, np.int32))
    options = (
        jaxfuse.Sampling().for_batch(batch),
        np.full(8, -1, np.int32),
        jax.random.split(jax.random.key(0), batch),
    )
    state = begin(logits, cache, *options, capacity=512, size=64, greedy=True)
    lowered = decode.lower(tree, leaves, state, *options, np.int32(64), greedy=True)
    # Equal calls are lowered once: rms_norm at three shapes, and the three other ops at one. None leaves the norms of
    # heads to XLA.
    expected = {"mosaic": 6, None: 4}
    kernels = set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', lowered.as_text()))
    assert len(kernels) == expected[model.numerics.implementation]
    return lowered.compile(compiler_options=compiler_options)


def shipped_or_full(name: str, implementation: Implementation | None) -> Qwen3:
    """The trained checkpoint, or a random Qwen3-0.6B."""
    if name == "shipped":
        return Qwen3.from_pretrained(SHIPPED, implementation=implementation)
    return Qwen3(QWEN3_06B, rngs=nnx.Rngs(1), implementation=implementation)


@needs_mosaic
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["shipped", "0.6B"])
def test_the_decode_loop_is_a_command_buffer_of_kernels(name: str, batch: int, tmp_path: Path) -> None:
    """The compiled loop holds each layer's Mosaic kernels, and its body is one command buffer (a CUDA graph)."""
    model = shipped_or_full(name, "mosaic")
    layers = model.config.num_hidden_layers
    program = decode_program(model, batch, {"xla_dump_to": str(tmp_path)})
    text = program.as_text()
    assert text is not None
    # Two norms of the hidden size, q's, k's, RoPE and the activation a layer, and the last norm.
    assert text.count('custom_call_target="mosaic_gpu') == 6 * layers + 1
    (dump,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    lines = dump.read_text("utf-8").splitlines()
    body = lines[next(i for i, line in enumerate(lines) if line.strip() == "body:") + 1 :]
    depth = len(body[0]) - len(body[0].lstrip())
    inside = [line for line in body if len(line) - len(line.lstrip()) > depth]
    outside = [line.split()[1] for line in body if line.strip() and line not in inside]
    assert outside == ["kCommandBuffer"]
    assert sum("kCustomCall" in line for line in inside) >= 6 * layers + 1


@needs_mosaic
@pytest.mark.parametrize("name", ["shipped", "0.6B"])
def test_none_runs_the_kernels(name: str) -> None:
    """The default model runs Mosaic kernels, all but the norms of q and k, and generates the same twice."""
    model = shipped_or_full(name, None)
    text = decode_program(model, 64).as_text()  # of few rows, the activation is XLA's, too
    assert text is not None
    assert text.count('custom_call_target="mosaic_gpu') == 4 * model.config.num_hidden_layers + 1
    first, second = (jaxfuse.generate(model, [[1, 2, 3], [4]], max_new_tokens=32) for _ in range(2))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.logprobs, second.logprobs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_generates_at_full_size(implementation: Implementation) -> None:
    """A random Qwen3-0.6B generates finite numbers, and the same ones twice."""
    model = Qwen3(QWEN3_06B, rngs=nnx.Rngs(1), implementation=implementation)
    first, second = (jaxfuse.generate(model, [[1, 2, 3], [4]], max_new_tokens=32) for _ in range(2))
    assert np.isfinite(first.logprobs).all()
    assert (first.lengths == 32).all()
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.logprobs, second.logprobs)
