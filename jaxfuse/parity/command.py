"""The command `jaxfuse parity`."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxfuse import compile_cache, devices
from jaxfuse.config import Qwen3Config
from jaxfuse.errors import InputError
from jaxfuse.hub import resolve
from jaxfuse.parity.compare import compare
from jaxfuse.parity.plot import check_target
from jaxfuse.parity.prompts import default_prompts, prompts_of_text
from jaxfuse.terminal import note


def run(options: argparse.Namespace) -> int:
    """Compares, prints, and returns the exit status: 1 when the contract is broken."""
    # JAX would take three quarters of the GPU's memory at its start, and transformers needs some of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    devices.start()
    for message in (compile_cache.enable(), devices.unused_gpu()):
        if message is not None:
            note(message)
    if options.plot is not None:
        check_target(options.plot)
    folder = resolve(options.model)
    with _progress_bar() as progress:
        report = compare(
            options.model,
            prompts=_prompts(options, folder),
            dtypes=("float32", "bfloat16") if options.dtype is None else (options.dtype,),
            implementation=options.implementation,
            device=options.device,
            new_tokens=options.new_tokens,
            progress=progress,
        )
    if options.plot is not None:
        report.plot(options.plot)
        note(f"wrote {options.plot}")
    if options.json:
        print(report.to_json())
    else:
        print(report.table())
    if report.passed:
        return 0
    worst = next(line for line in report.contract if line.name == report.broken[0])
    others = f" and {len(report.broken) - 1} more lines" if len(report.broken) > 1 else ""
    note(f"parity is broken: {worst.name} is {worst.value:.3g}, at most {worst.bound:.3g} is allowed{others}")
    return 1


def _prompts(options: argparse.Namespace, folder: Path) -> list[np.ndarray]:
    if options.prompts is None:
        return default_prompts(folder, Qwen3Config.from_pretrained(folder), options.num_prompts)
    try:
        lines = Path(options.prompts).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompts in {options.prompts} ({error}); give a text file") from error
    prompts = prompts_of_text(folder, lines)
    if not prompts:
        raise InputError(f"{options.prompts} has no prompts; write one on each line")
    return prompts[: options.num_prompts]


@contextmanager
def _progress_bar() -> Iterator["_Show | None"]:
    """A bar on standard error for a person at a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Show(progress)


class _Show:
    """What `compare` calls."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._task = progress.add_task("starting", total=None)

    def __call__(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total)
