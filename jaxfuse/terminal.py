"""Notes, progress and timings of the command; all of them on standard error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def note(message: str) -> None:
    """One line for the user."""
    print(f"jaxfuse: {message}", file=sys.stderr, flush=True)


def transient(message: str) -> None:
    """A note about progress: only for a person at a terminal."""
    if sys.stderr.isatty():
        note(message)


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar for `weights.load`; none when standard error is no terminal."""
    if not sys.stderr.isatty():  # a disabled bar of rich 14.0 still writes a line
        yield lambda done, total: None
        return
    columns = (TextColumn("loading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class Stopwatch:
    """Seconds of each stage of a run, compilation counted apart; use it as a context manager."""

    def __init__(self) -> None:
        self.compile_s = 0.0
        self._start = 0.0
        self._compiled_before = 0.0

    def __enter__(self) -> "Stopwatch":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self.lap()
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        # JAX reports tracing, lowering and compiling one by one; none of them contains another.
        if event.startswith("/jax/core/compile/"):
            self.compile_s += duration_secs

    def lap(self) -> float:
        """Seconds since the last lap, without those spent compiling."""
        now = time.perf_counter()
        seconds = now - self._start - (self.compile_s - self._compiled_before)
        self._start, self._compiled_before = now, self.compile_s
        return max(seconds, 0.0)
