"""The small trained checkpoint that ships with the package."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

import jaxfuse

FOLDER = Path(jaxfuse.__file__).parent / "checkpoint"
BENCH = Path(__file__).parent.parent / "bench"
CHAT = "<|im_start|>user\nIt is a truth<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    """The recorded figures."""
    record: dict[str, Any] = json.loads((FOLDER / "training.json").read_text("utf-8"))
    return record


def from_bench(name: str) -> ModuleType:
    """A module of bench/, a folder of scripts and no package, whose modules find one another beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        return importlib.import_module(name)


def test_size() -> None:
    """The package stays small: the weights are at most 8 MB."""
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000


def test_widths_suit_the_kernels() -> None:
    """Every kernel can take the model: widths are multiples of 128, heads are 128 wide."""
    config = jaxfuse.Qwen3Config.from_pretrained(FOLDER)
    assert config.head_dim == 128
    assert all(n % 128 == 0 for n in (config.hidden_size, config.intermediate_size, config.vocab_size))
    assert config.dtype == "bfloat16"


def test_readme_gives_the_recorded_figures(training: dict[str, Any]) -> None:
    """The README's figures are those of the run that made the weights."""
    readme = (FOLDER / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", readme, re.MULTILINE)
    assert {"heldout_bits_per_byte", "words_generated", "words_in_corpus"} <= {name for name, _ in rows}
    assert dict(rows) == {name: json.dumps(training[name]) for name, _ in rows}


def test_recorded_words_are_of_the_corpus(training: dict[str, Any]) -> None:
    """What was written while checking is English: 95 % of 1,000 words occur in the corpus."""
    assert training["words_generated"] >= 1000
    assert training["words_in_corpus"] >= 0.95


def test_bits_per_byte(training: dict[str, Any]) -> None:
    """The weights, the tokenizer and the model still give the recorded quality on held-out text, to 1 %."""
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = (FOLDER / "heldout_excerpt.txt").read_text("utf-8")
    model = jaxfuse.Qwen3.from_pretrained(FOLDER, dtype=jnp.float32)
    bits = from_bench("quality").BitsPerByte(tokenizer, [text])(jax.jit(model))
    np.testing.assert_allclose(bits, training["excerpt_bits_per_byte"], rtol=0.01)


def test_tokenizer_in_transformers() -> None:
    """AutoTokenizer reads the folder: the chat form, Qwen's special tokens, the ids tokenizers gives."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    config = jaxfuse.Qwen3Config.from_pretrained(FOLDER)
    turns = [{"role": "user", "content": "It is a truth"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == CHAT
    plain = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer(CHAT)["input_ids"] == plain.encode(CHAT).ids
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    ids = tokenizer.convert_tokens_to_ids(special)
    assert ids == list(range(config.vocab_size - 5, config.vocab_size))
    assert len(tokenizer) == config.vocab_size
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert set(config.eos_token_ids) == {ids[0], ids[2]}


def test_chat_template_is_the_trained_form() -> None:
    """The model is asked in the very form it was trained on."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    turns = [{"role": "user", "content": "Emma Woodhouse,"}, {"role": "assistant", "content": "handsome."}]
    trained = from_bench("chat").chat_text("Emma Woodhouse,", "handsome.")
    assert tokenizer.apply_chat_template(turns, tokenize=False) == trained


@pytest.mark.parametrize(
    "text",
    [
        "It is a truth",
        " two  spaces \t\n\n and lines\r\n",
        "naïve 日本語 Привет 😀 \x00\x7f",
        "a , b . ' n't",
    ],
)
def test_any_text_comes_back(text: str) -> None:
    """The tokenizer loses nothing of a text in NFC, whatever its script."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_model_in_transformers() -> None:
    """transformers loads the folder, and its float32 logits are jaxfuse's."""
    torch = pytest.importorskip("torch")
    tokens = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(CHAT).ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits.numpy()
    ours = jaxfuse.Qwen3.from_pretrained(FOLDER, dtype=jnp.float32)(jnp.asarray([tokens], jnp.int32))
    np.testing.assert_allclose(np.asarray(ours), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_it_writes_prose_and_stops() -> None:
    """Asked through the chat template with its own sampling, it writes words and ends by itself."""
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    model = jaxfuse.Qwen3.from_pretrained(FOLDER)
    data = json.loads((FOLDER / "generation_config.json").read_text("utf-8"))
    sampling = jaxfuse.Sampling.from_generation_config(data)
    out = jaxfuse.generate(model, [tokenizer.encode(CHAT).ids] * 4, max_new_tokens=384, sampling=sampling)
    assert out.finish_reasons.count("stop") >= 3
    for row, length in zip(out.tokens, out.lengths, strict=True):
        text = tokenizer.decode(row[:length].tolist())
        assert len(re.findall(r"\b(?:the|to|of|and|a|her|in|was|she|it|be|not|you|he)\b", text)) > len(text) / 60
