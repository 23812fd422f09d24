"""The compilation cache: where it lies, what it saves, and which folders it does without."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from command import Run, spawn
from jaxfuse import compile_cache


def contents(folder: Path) -> dict[str, int]:
    """The files of a folder, and when each was written."""
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


def test_the_cache_serves_the_second_start(bare: Path, tmp_path: Path) -> None:
    """JAXFUSE_CACHE names the folder, made with mode 0700; a second start finds all there and writes nothing."""
    cache = tmp_path / "deep" / "cache"
    arguments = ("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "3", "--json")
    first = spawn(*arguments, cache=cache)
    assert (first.status, first.err) == (0, "")
    assert cache.stat().st_mode & 0o777 == 0o700
    before = contents(cache)
    assert any("decode" in name for name in before)
    assert any("prefill" in name for name in before)
    second = spawn(*arguments, cache=cache)
    assert (second.status, second.err) == (0, "")
    assert contents(cache) == before
    assert second.json["tokens"] == first.json["tokens"]
    assert second.json["timings"]["compile_s"] < first.json["timings"]["compile_s"]


@pytest.fixture
def jax_cache() -> Iterator[Callable[[], Any]]:
    """The folder that JAX's configuration names; it is set back after the test."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda: jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)


def test_cache_folders(jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JAXFUSE_CACHE wins over XDG_CACHE_HOME, which wins over ~/.cache; each is made with mode 0700."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for chosen, folder in [("~/mine", "home/mine"), (None, "xdg/jaxfuse"), (None, "home/.cache/jaxfuse")]:
        if chosen is not None:
            monkeypatch.setenv("JAXFUSE_CACHE", chosen)
        else:
            monkeypatch.delenv("JAXFUSE_CACHE", raising=False)
        assert compile_cache.enable() is None
        assert jax_cache() == str(tmp_path / folder)
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700
        if chosen is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_the_cache_can_be_off(jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """JAXFUSE_CACHE=0 keeps nothing, and says nothing."""
    monkeypatch.setenv("JAXFUSE_CACHE", "0")
    assert compile_cache.enable() is None
    assert jax_cache() is None


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_cache_that_others_can_write_to(
    jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    """Who can write to the cache can run code as its user: such a folder is not used, and the note says why."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    monkeypatch.setenv("JAXFUSE_CACHE", str(tmp_path / "shared"))
    message = compile_cache.enable()
    assert message is not None
    assert "others can write to" in message
    assert "chmod 700" in message
    assert jax_cache() is None


def test_a_cache_of_another_user(jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that belongs to someone else is not used either."""
    monkeypatch.setenv("JAXFUSE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert "no compilation cache" in str(compile_cache.enable())
    assert jax_cache() is None


@pytest.mark.parametrize("place", ["file/cache", "~nobody-of-this-name/cache"])
def test_a_cache_that_cannot_be_made(
    run: Run, bare: Path, jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """The command runs without a cache, after a note that says how to have one."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("JAXFUSE_CACHE", place if place.startswith("~") else str(tmp_path / place))
    result = run("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "3")
    assert result.status == 0
    assert result.out.count(",") == 2
    assert result.err.startswith("jaxfuse: no compilation cache (")
    assert result.err.endswith("set JAXFUSE_CACHE to a folder of yours, or to 0\n")
    assert result.err.count("\n") == 1
    assert jax_cache() is None


def test_an_import_turns_no_cache_on(tmp_path: Path) -> None:
    """Only the command keeps programs on the disk: a library that did would surprise its user."""
    code = (
        "import jaxfuse, jaxfuse.cli, jaxfuse.kernels, jax; from jaxfuse import compile_cache;"
        "print(jax.config.jax_compilation_cache_dir)"
    )
    env = {**os.environ, "JAXFUSE_CACHE": str(tmp_path / "cache")}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # a user's own
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=True
    )
    assert done.stdout == "None\n"
    assert list(tmp_path.iterdir()) == []
