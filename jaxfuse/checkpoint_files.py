"""The safetensors files of a checkpoint folder: one file, or shards with an index."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors needs)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxfuse.errors import CheckpointError
from jaxfuse.fields import read_json_object

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class CheckpointFiles:
    """Memory-mapped access by tensor name; use it as a context manager.

    Raises:
        CheckpointError: when a file is missing, damaged, or does not hold what the index says.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._stack = ExitStack()
        self._home: dict[str, Any] = {}  # the open file of each tensor

    def __enter__(self) -> Self:
        try:
            single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
            if single.is_file():
                self._add(single)
            elif index.is_file():
                self._add_shards(index)
            else:
                raise CheckpointError(
                    f"{self.folder} has neither model.safetensors nor model.safetensors.index.json; give a folder "
                    "with safetensors weights"
                )
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def _add(self, path: Path) -> set[str]:
        try:
            file = self._stack.enter_context(safe_open(path, framework="np"))
            names = set(file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a whole safetensors file ({error}); download it again") from None
        for name in names:
            if name in self._home:
                raise CheckpointError(f"tensor {name} is in two files, {path.name} one of them; remove one")
            self._home[name] = file
        return names

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map; download it again")
        shards: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(
                    f"{index.name} must name files of its own folder, got {file_name!r} for {name}; download it again"
                )
            shards.setdefault(file_name, set()).add(name)
        for file_name, promised in sorted(shards.items()):
            path = self.folder / file_name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, which {index.name} names; download the whole checkpoint")
            missing = sorted(promised - self._add(path))
            if missing:
                raise CheckpointError(
                    f"{file_name} lacks {_listed(missing)}, which {index.name} places there; download it again"
                )

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Compares names, shapes and dtypes with what the model takes, before anything is read.

        Raises:
            CheckpointError: naming the tensors that are missing, unknown, misshapen, or of another dtype.
        """
        missing = sorted(set(required) - set(self._home))
        if missing:
            raise CheckpointError(f"the checkpoint {self.folder} lacks {_listed(missing)}; download it again")
        unknown = sorted(set(self._home) - set(required) - set(optional))
        if unknown:
            raise CheckpointError(
                f"the checkpoint {self.folder} holds {_listed(unknown)}, which the model of its config.json does "
                "not have; check that config.json belongs to these weights"
            )
        for name in self._home:
            shape, expected = self._shape(name), required.get(name) or optional[name]
            if shape != expected:
                raise CheckpointError(
                    f"{name} must have shape {expected} by config.json, got {shape}; check that config.json "
                    "belongs to these weights"
                )
            dtype = self._slice(name).get_dtype()
            if dtype not in _DTYPES:
                raise CheckpointError(
                    f"{name} has dtype {dtype}; jaxfuse loads {', '.join(_DTYPES)}: use an unquantized checkpoint"
                )

    def first_dtype(self) -> str | None:
        """The dtype of the first tensor, for a config.json that names none."""
        names = sorted(self._home)
        return _DTYPES.get(self._slice(names[0]).get_dtype()) if names else None

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)` of a tensor, copied out of the mapping."""
        try:
            return self._slice(name)[start:stop]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name} ({error}); download the checkpoint again") from None

    def _slice(self, name: str) -> Any:
        return self._home[name].get_slice(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
