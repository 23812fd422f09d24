"""The text that bench/corpus.py prepared, its tokenizer, and rows of tokens to train on and to measure."""

from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

# The last ids, in this order. As with Qwen3, the marks of thought are no special tokens: decoding shows them.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THOUGHT = ["<think>", "</think>"]
VOCAB = 2048
END_OF_TEXT, IM_START, IM_END = range(VOCAB - len(SPECIAL) - len(THOUGHT), VOCAB - len(THOUGHT))
# Where Qwen's tokenizers split text before byte pairs are joined; part of the format, as the special tokens.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IGNORED = -1  # a target that carries no loss

Chapters = list[list[str]]  # of paragraphs


def read_chapters(path: Path) -> Chapters:
    """A file of bench/corpus.py."""
    return [chapter.split("\n") for chapter in path.read_text("utf-8").rstrip("\n").split("\n\n")]


def plain(chapter: list[str]) -> str:
    """A chapter as the text that is trained and measured."""
    return "\n\n".join(chapter)


def train_tokenizer(chapters: Chapters) -> tokenizers.Tokenizer:
    """A byte-level BPE in Qwen's form: any text in NFC comes back from decode(encode(text))."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=END_OF_TEXT, initial_alphabet=alphabet, show_progress=False)
    # A role opens every chat turn: counted often enough that each becomes one token.
    roles = ["system\n", "user\n", "assistant\n"] * 10_000
    tokenizer.train_from_iterator([*map(plain, chapters), *roles], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in THOUGHT])
    if tokenizer.get_vocab_size() != VOCAB or tokenizer.token_to_id("<|im_end|>") != IM_END:
        got = tokenizer.get_vocab_size()
        raise RuntimeError(f"the text is too small for a vocabulary of {VOCAB}: it gives {got}")
    return tokenizer


def stream(tokenizer: tokenizers.Tokenizer, chapters: Chapters) -> np.ndarray:
    """All chapters in a row, each between two <|endoftext|>, [tokens] int32."""
    ids = [END_OF_TEXT]
    for encoding in tokenizer.encode_batch([plain(chapter) for chapter in chapters]):
        ids += [*encoding.ids, END_OF_TEXT]
    return np.array(ids, np.int32)


def windows(tokenizer: tokenizers.Tokenizer, text: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A text as overlapping rows (inputs, targets), [rows, length] int32, every token a target just once.

    A text starts after <|endoftext|>. Rows step by half a length and score their second half, so that a token
    has length/2 to length tokens before it; the first row scores all it has.
    """
    ids = [END_OF_TEXT, *tokenizer.encode(text).ids]
    inputs, targets = [], []
    for start in range(0, max(len(ids) - 1 - length // 2, 1), length // 2):
        row, target = ids[start : start + length], ids[start + 1 : start + length + 1]
        if start:
            target = [IGNORED] * (length // 2) + target[length // 2 :]
        inputs.append(row + [END_OF_TEXT] * (length - len(row)))
        targets.append(target + [IGNORED] * (length - len(target)))
    return np.array(inputs, np.int32), np.array(targets, np.int32)
