"""What the command says besides an answer: info, the version, the help, and notes."""

from pathlib import Path

import pytest

import jaxfuse
import tiny
from command import SMALL, Result, Run
from jaxfuse import devices, hub


def test_info(run: Run, folder: Path, tmp_path: Path) -> None:
    """The number of parameters is torch's own, a tied head counted once; the weights are not read."""
    result = run("info", "--model", folder)
    assert (result.status, result.err) == (0, "")
    rows = dict(line.split("  ", 1) for line in result.out.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    theirs = tiny.torch_model("untied", **SMALL)
    assert rows["parameters"] == f"{theirs.num_parameters():,}"
    assert rows["layers"] == "2"
    assert rows["heads"] == "4 query, 2 key-value, of 16"
    assert rows["vocabulary"] == "320"
    assert rows["dtype"] == "float32"
    assert rows["device"] == devices.describe()
    assert jaxfuse.__version__ in rows["versions"]
    tied = tiny.torch_model("attention_bias", **SMALL)
    tiny.save(tied, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    out = run("info", "--model", tmp_path).out
    assert f"  {tied.num_parameters():,}\n" in out
    assert "320, tied" in out


def test_only_generate_fetches_the_weights(run: Run, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository's name goes to the hub; to be described, a model need not be downloaded."""
    asked: list[tuple[str, bool]] = []

    def download(repo_id: str, patterns: tuple[str, ...]) -> Path:
        asked.append((repo_id, "*.safetensors" in patterns))
        return bare

    monkeypatch.setattr(hub, "_download", download)
    assert run("info", "--model", "owner/name").status == 0
    assert set(asked) == {("owner/name", False)}
    asked.clear()
    assert run("generate", "--tokens", "5", "--model", "owner/name", "--max-new-tokens", "2").status == 0
    assert ("owner/name", True) in asked


def test_version(run: Run) -> None:
    """The version is the package's."""
    assert run("--version") == Result(0, f"jaxfuse {jaxfuse.__version__}\n", "")


def test_notes_go_to_standard_error(run: Run, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note leaves the answer as it is, in both commands."""
    arguments = ("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "3", "--json")
    expected = run(*arguments).json["tokens"]
    monkeypatch.setattr(devices, "unused_gpu", lambda: "a GPU is idle")
    result = run(*arguments)
    assert (result.status, result.err) == (0, "jaxfuse: a GPU is idle\n")
    assert result.json["tokens"] == expected
    result = run("info", "--model", bare)
    assert (result.status, result.err) == (0, "jaxfuse: a GPU is idle\n")


def test_the_help_names_every_flag(run: Run) -> None:
    """--help prints to standard output and ends well."""
    result = run("generate", "--help")
    assert (result.status, result.err) == (0, "")
    flags = ("model", "tokens", "max-new-tokens", "temperature", "top-k", "top-p", "min-p", "seed", "raw", "dtype")
    for flag in (*flags, "rounding", "implementation", "json"):
        assert f"--{flag}" in result.out
