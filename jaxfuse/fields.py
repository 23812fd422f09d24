"""Typed reading of a JSON object: a value of the wrong type or sign is one clear error."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfuse.errors import ConfigError

_REQUIRED: Any = object()


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds one object.

    Raises:
        ConfigError: when the file cannot be read, is not JSON, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); give the folder of a whole checkpoint") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold one JSON object, got {type(data).__name__}; download it again")
    return data


class Fields:
    """Typed access to the values of `data`; `where` names it in errors."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data = data
        self.where = where

    def _get(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(f"{self.where} must have {name!r}, which is missing; add it")
        return default

    def _refuse(self, name: str, rule: str, value: Any) -> ConfigError:
        return ConfigError(f"{name!r} in {self.where} must be {rule}, got {value!r}")

    def integer(self, name: str, default: int = _REQUIRED) -> int:
        """A positive integer (0 only as a default)."""
        value = self._get(name, default)
        if self.data.get(name) is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refuse(name, "a positive integer", value)
        return value

    def count(self, name: str, default: int) -> int:
        """An integer of at least 0."""
        value = self.data.get(name)
        return 0 if value == 0 and value is not False else self.integer(name, default)

    def number(
        self, name: str, default: float = _REQUIRED, *, above: float = -math.inf, at_least: float = -math.inf
    ) -> float:
        """A finite number."""
        value = self._get(name, default)
        valid = not isinstance(value, bool) and isinstance(value, int | float)
        if not valid or not abs(value) <= sys.float_info.max or value <= above or value < at_least:
            bound = f" above {above:g}" if above > -math.inf else f" of at least {at_least:g}"
            bounded = above > -math.inf or at_least > -math.inf
            raise self._refuse(name, "a finite number" + (bound if bounded else ""), value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number of at least 0, or None when it is missing or null."""
        return None if self.data.get(name) is None else self.number(name, at_least=0.0)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._refuse(name, "true or false", value)
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self._refuse(name, "a token id or a list of token ids", value)
        return tuple(dict.fromkeys(ids))

    def token_id(self, name: str) -> int | None:
        """One token id, or None when it is missing or null."""
        ids = self.token_ids(name)
        if len(ids) > 1:
            raise self._refuse(name, "one token id", self.data[name])
        return ids[0] if ids else None
