"""Tokens as text that comes piece by piece: whole characters, and in sum the decoded text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from command import SMALL
from jaxfuse.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    """The checkpoint's tokenizer as the command uses it."""
    return Tokenizer(folder)


def streamed(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds, and what is left at the end."""
    stream = tokenizer.streamer()
    return [*(stream.push([token]) for token in tokens), stream.flush()]


@pytest.mark.parametrize(
    "text", ["日本語のテキスト", "naïve – “quoted” 😀👩‍🚀!", "  two  spaces", "\n\tline\r\n ", "the cat"]
)
def test_characters_are_never_broken(tokenizer: Tokenizer, plain: tokenizers.Tokenizer, text: str) -> None:
    """A character of several tokens comes whole with its last one; leading spaces stay."""
    tokens = plain.encode(text).ids
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_end(tokenizer: Tokenizer, plain: tokenizers.Tokenizer) -> None:
    """A character that never became whole is shown at the end, as the tokenizer shows it; nothing comes twice."""
    tokens = plain.encode("the 語").ids[:-1]
    pieces = streamed(tokenizer, tokens)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == plain.decode(tokens) == "the \ufffd"
    assert streamed(tokenizer, []) == [""]


@given(st.lists(st.lists(st.integers(0, SMALL["vocab_size"] - 1), max_size=12), max_size=8))
def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer, chunks: list[list[int]]) -> None:
    """Any tokens, special and unknown ones and broken UTF-8 too, in any chunks, add up to their decoded text."""
    stream = tokenizer.streamer()
    text = "".join([*(stream.push(chunk) for chunk in chunks), stream.flush()])
    assert text == tokenizer.decode([token for chunk in chunks for token in chunk])


def test_decoding_is_that_of_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    """Special tokens are left out; spaces before punctuation stay."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = theirs("the cat <|im_end|> , sat . on", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True) == "the cat  , sat . on"
