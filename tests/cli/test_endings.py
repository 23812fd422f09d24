"""How a run of the command can end early: a closed pipe, Ctrl-C."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import jaxfuse
from command import FROM_FILE, KEYS, PROMPT, Result, Run, written
from jaxfuse import Qwen3, cli, weights


@pytest.mark.parametrize(
    "arguments", [("generate", "--tokens", "1,2"), ("generate", "--tokens", "1", "--json"), ("info",)]
)
def test_a_closed_pipe(bare: Path, arguments: tuple[str, ...]) -> None:
    """A reader that has enough, such as `head -c 1`, leaves no traceback and no error status."""
    command = [sys.executable, "-m", "jaxfuse.cli", *arguments, "--model", str(bare)]
    env = {**os.environ, "JAXFUSE_CACHE": "0"}
    env.pop("PYTHONUNBUFFERED", None)  # with it nothing is left to write at exit, where it is too late to answer
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=env, timeout=120, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the third chunk is made."""
    whole = jaxfuse.stream

    def stream(*args: Any, **options: Any) -> Iterator[Any]:
        for index, chunk in enumerate(whole(*args, **options)):
            if index == 2:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(cli, "stream", stream)


@pytest.mark.usefixtures("interrupted")
def test_interrupted(run: Run, folder: Path, model: Qwen3, plain: tokenizers.Tokenizer) -> None:
    """Ctrl-C ends with status 130; what was written until then is kept, in text and in JSON."""
    common = ("generate", "--tokens", "3,4,5", "--model", folder, "--max-new-tokens", "30")
    tokens = written(model, [3, 4, 5], 9, FROM_FILE)
    assert run(*common) == Result(130, plain.decode(tokens) + "\n", "")
    result = run(*common, "--json")
    assert result.status == 130
    assert set(result.json) == KEYS
    assert (result.json["tokens"], result.json["finish_reason"]) == ([tokens], ["cancelled"])


def test_interrupted_while_loading(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before there is an answer: status 130 and no traceback."""

    def load(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "load", load)
    assert run("generate", PROMPT, "--model", folder) == Result(130, "", "")
