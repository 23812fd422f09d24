"""Transformers' activations, on disk between the run of one model and that of the other."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from jaxfuse.errors import JaxfuseError
from jaxfuse.parity.float64 import Steps

_MEND = "set TMPDIR to a folder with more room, or compare fewer prompts"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end however that comes.

    Raises:
        JaxfuseError: when there is no place for one.
    """
    try:
        scratch = tempfile.TemporaryDirectory(prefix="jaxfuse-parity-")
    except OSError as error:
        raise JaxfuseError(f"there is no place for a temporary folder ({error}); set TMPDIR to one of yours") from error
    with scratch as path:
        yield Path(path)


class Activations:
    """Tensors by name, one file a batch.

    Args:
        folder: that they go to.
        expected_bytes: how many there will be.

    Raises:
        JaxfuseError: when the disk has no room for them.
    """

    def __init__(self, folder: Path, expected_bytes: int):
        self._folder = folder
        free = shutil.disk_usage(folder).free
        if expected_bytes > free:
            raise JaxfuseError(
                f"the activations take {expected_bytes / 1e9:.1f} GB, and {folder.parent} has {free / 1e9:.1f} GB; "
                f"{_MEND}"
            )

    def save(self, name: str, steps: Steps) -> None:
        """Writes a batch.

        Raises:
            JaxfuseError: when it cannot be written.
        """
        try:
            save_file({key: value.contiguous().cpu() for key, value in steps.items()}, self._path(name))
        except (OSError, SafetensorError) as error:
            raise JaxfuseError(f"cannot keep the activations in {self._folder} ({error}); {_MEND}") from error

    def load(self, name: str, device: str = "cpu") -> Steps:
        """Reads a batch to a device of PyTorch."""
        steps: Steps = load_file(self._path(name), device=device)
        return steps

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"
