"""The model on a GPU: its numbers against PyTorch's and the CPU's, and what its compiled programs copy."""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Qwen3ForCausalLM

import jaxfuse
from jaxfuse import Qwen3, Qwen3Config
from jaxfuse.generate import begin, decode, interned, prefill
from jaxfuse.kernels import Rounding

pytestmark = pytest.mark.gpu

SHIPPED = Path(jaxfuse.__file__).parent / "checkpoint"
QWEN3_06B = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


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


def test_float32_logits_match_transformers() -> None:
    """The float32 contract on a GPU: at most 2e-5 of the largest logit, so no product runs in TF32."""
    tokens = prompts()
    expected = torch_logits(torch.float32, tokens)
    model = Qwen3.from_pretrained(SHIPPED, dtype="float32")
    logits = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    assert logits.devices() == {jax.devices("gpu")[0]}
    assert np.abs(np.asarray(logits, np.float64) - expected).max() <= 2e-5 * np.abs(expected).max()


def test_float32_tokens_match_the_cpu() -> None:
    """Greedy tokens of a batch of unequal prompts are the CPU's, each row alone and together."""
    rows = [row[:n] for row, n in zip(prompts(), (1, 40, 130, 500), strict=True)]

    def continued() -> np.ndarray:
        model = Qwen3.from_pretrained(SHIPPED, dtype="float32")
        return jaxfuse.generate(model, rows, max_new_tokens=64, stop_token_ids=()).tokens

    with jax.default_device(jax.devices("cpu")[0]):
        expected = continued()
    together = continued()
    np.testing.assert_array_equal(together, expected)
    model = Qwen3.from_pretrained(SHIPPED, dtype="float32")
    for row, tokens in zip(rows, together, strict=True):
        alone = jaxfuse.generate(model, row, max_new_tokens=64, stop_token_ids=())
        np.testing.assert_array_equal(alone.tokens[0], tokens)


@pytest.mark.parametrize("rounding", ["fused", "hf"])
def test_bfloat16_logits_err_no_more_than_transformers(rounding: Rounding) -> None:
    """Against float32, the error of a token's logits is on average no larger than transformers' own in bfloat16."""
    tokens = prompts()
    exact = torch_logits(torch.float32, tokens)
    model = Qwen3.from_pretrained(SHIPPED, dtype="bfloat16", rounding=rounding)
    ours = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens), np.float64)
    theirs = torch_logits(torch.bfloat16, tokens, "sdpa" if rounding == "fused" else "eager")
    errors = [np.linalg.norm(logits - exact, axis=-1)[:, 1:] for logits in (ours, theirs)]
    ratio = np.exp(np.mean(np.log(errors[0]) - np.log(errors[1])))
    # "hf" rounds as often as transformers' eager attention does, and sums in another order.
    assert ratio <= (1.0 if rounding == "fused" else 1.05)


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
def test_no_copy_of_a_weight_or_the_cache(batch: int) -> None:
    """At Qwen3-0.6B's size nothing makes an array of a weight's shape; a longer cache costs no scratch memory."""
    model = Qwen3(QWEN3_06B, rngs=nnx.Rngs(0))
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
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= 2 * state.cache.keys.nbytes
        scratch.append(memory.temp_size_in_bytes)
    one_layer = 2 * state.cache.keys.nbytes // QWEN3_06B.num_hidden_layers
    assert scratch[1] - scratch[0] <= 2 * one_layer


def test_generates_at_full_size() -> None:
    """A random Qwen3-0.6B generates finite numbers, and the same ones twice."""
    model = Qwen3(QWEN3_06B, rngs=nnx.Rngs(1))
    first, second = (jaxfuse.generate(model, [[1, 2, 3], [4]], max_new_tokens=32) for _ in range(2))
    assert np.isfinite(first.logprobs).all()
    assert (first.lengths == 32).all()
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.logprobs, second.logprobs)
