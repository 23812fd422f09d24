"""Runs of the command, the checkpoint that they load, and what both are to give."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxfuse import Qwen3, Sampling, generate

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = "the cat"
CHAT = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
FILE_SAMPLING = {"do_sample": True, "temperature": 3.0, "top_k": 200, "top_p": 0.99, "min_p": 0.0001}
FROM_FILE = Sampling.from_generation_config(FILE_SAMPLING)
KEYS = {
    "model",
    "device",
    "dtype",
    "rounding",
    "implementation",
    "prompt_tokens",
    "tokens",
    "text",
    "finish_reason",
    "timings",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run of the command left."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on standard output, which is one line of its own."""
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        result: dict[str, Any] = json.loads(self.out)
        return result


Run = Callable[..., Result]


def spawn(*arguments: str | Path, cache: str | Path = "0", **environment: str) -> Result:
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "jaxfuse.cli", *map(str, arguments)]
    env = {**os.environ, "JAXFUSE_CACHE": str(cache), **environment}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env, check=False, timeout=120)
    return Result(done.returncode, done.stdout, done.stderr)


def assert_refused(result: Result, *parts: str) -> None:
    """Bad input: status 2, one line on standard error that says what, nothing on standard output."""
    assert result.status == 2, result
    assert result.out == ""
    assert result.err.startswith("jaxfuse: error: ")
    assert result.err.endswith("\n")
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err


def part_of(folder: Path, target: Path, *names: str) -> Path:
    """A folder with links to some files of another; all, if none is named."""
    for name in names or [file.name for file in folder.iterdir()]:
        (target / name).symlink_to(folder / name)
    return target


def replaced(folder: Path, target: Path, name: str, content: str | bytes | None) -> Path:
    """A checkpoint in which one file has other content, or is missing."""
    part_of(folder, target)
    (target / name).unlink()
    if content is not None:
        (target / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return target


def written(model: Qwen3, prompt: Sequence[int], steps: int, sampling: Sampling, key: int = 0) -> list[int]:
    """The tokens that the library writes."""
    out = generate(model, prompt, max_new_tokens=steps, sampling=sampling, key=key)
    tokens: list[int] = out.tokens[0, : out.lengths[0]].tolist()
    return tokens
