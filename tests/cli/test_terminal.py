"""The command on terminals: one without a character, and the progress that one is shown."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from command import PROMPT, spawn


def test_a_terminal_without_the_character(folder: Path) -> None:
    """A standard output that cannot hold a character gets a question mark instead of a traceback."""
    result = spawn("generate", PROMPT, "--model", folder, "--max-new-tokens", "30", PYTHONIOENCODING="ascii")
    assert (result.status, result.err) == (0, "")
    assert "?" in result.out


def test_progress_on_a_terminal(bare: Path) -> None:
    """A bar while loading and a note while compiling, on a standard error that is a terminal."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "jaxfuse.cli", "generate", "--tokens", "5,6", "--max-new-tokens", "3"]
    env = {**os.environ, "JAXFUSE_CACHE": "0", "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        [*command, "--model", str(bare)], stdout=subprocess.PIPE, stderr=terminal, env=env, timeout=120, check=False
    )
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 65536):
            shown += piece
    except OSError:  # how Linux ends a terminal without users
        pass
    finally:
        os.close(controller)
    assert done.returncode == 0
    assert done.stdout.count(b",") == 2
    assert b"loading" in shown
    assert b"jaxfuse: compiling the model" in shown
