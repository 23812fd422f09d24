"""What both sides read: held-out text, or random tokens when the checkpoint has no tokenizer."""

import dataclasses
from pathlib import Path

import numpy as np

from jaxfuse.config import Qwen3Config
from jaxfuse.errors import InputError
from jaxfuse.generate import Prompts, prompt_rows
from jaxfuse.model import check_ids
from jaxfuse.parity.yardstick import PROMPTS, TOKENS
from jaxfuse.text import Tokenizer

_EXCERPT = Path(__file__).parent.parent / "checkpoint" / "heldout_excerpt.txt"
_AT_ONCE = 8


def default_prompts(folder: Path, config: Qwen3Config, count: int = PROMPTS) -> list[np.ndarray]:
    """So many pieces of a novel, 128 tokens each, in the checkpoint's own tokens.

    Without a tokenizer in the folder they are random tokens; the same at every call.
    """
    length = min(TOKENS // PROMPTS, config.max_position_embeddings)
    if not (folder / "tokenizer.json").is_file():
        return list(np.random.default_rng(0).integers(0, config.vocab_size, (count, length), np.int32))
    return _pieces(_EXCERPT.read_text("utf-8"), folder, config, count, length)


def prompts_of_text(folder: Path, lines: list[str]) -> list[np.ndarray]:
    """Each line that is not blank as a prompt, without a chat template.

    Raises:
        CheckpointError: when the folder has no tokenizer.
        InputError: for a line of fewer than two tokens.
    """
    tokenizer = Tokenizer(folder)
    return [np.asarray(tokenizer.encode(line, raw=True), np.int32) for line in lines if line.strip()]


def _pieces(text: str, folder: Path, config: Qwen3Config, count: int, length: int) -> list[np.ndarray]:
    ids = np.asarray(Tokenizer(folder).encode(text, raw=True), np.int32)
    ids = np.tile(ids, -(-length // max(len(ids), 1)))  # a test's tokenizer may make few of it
    check_ids("the tokenizer's ids", ids, config.vocab_size, "the vocabulary")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [ids[start : start + length] for start in starts]


@dataclasses.dataclass(frozen=True)
class Group:
    """Prompts of one length, `[rows, T]`, and which they are of all."""

    rows: np.ndarray
    numbers: list[int]


def grouped(prompts: Prompts, config: Qwen3Config) -> list[Group]:
    """Prompts by their length, up to 8 together; the longest come first.

    Raises:
        InputError, TypeError: for something that is no prompt, or one that the model or the comparison cannot take.
    """
    rows = prompt_rows(prompts)
    by_length: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        check_ids("prompt tokens", row, config.vocab_size, "the vocabulary")
        if not 2 <= len(row) <= config.max_position_embeddings:
            raise InputError(
                f"a prompt must have from 2 to {config.max_position_embeddings} tokens (the first is left out of the "
                f"errors), got {len(row)} for prompt {index}"
            )
        by_length.setdefault(len(row), []).append(index)
    batches = [
        same[start : start + _AT_ONCE]
        for _, same in sorted(by_length.items(), reverse=True)
        for start in range(0, len(same), _AT_ONCE)
    ]
    return [Group(np.stack([rows[i].astype(np.int32) for i in numbers]), numbers) for numbers in batches]
