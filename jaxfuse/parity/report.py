"""What a comparison found."""

import dataclasses
import json
import math
import os
from typing import Any

from jaxfuse.parity.yardstick import Line

type Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Report:
    """Figures and verdict of one comparison. Errors are relative L2 errors of a token's values.

    Attributes:
        model: the checkpoint.
        prompts: how many there were, their tokens, and whether that is enough for the contract in 16 bits.
        sides: versions, device and settings: `torch` and `jaxfuse`.
        ops: for each op, implementation and dtype its worst case on activations of the model: `error` and
            `torch_error` against float64, their `ratio`, the `largest` difference of a value.
        layers: for each step and dtype, in order: `local`, as for ops, the step alone given transformers' own input;
            `end`, the error at the end of all steps so far, ours and torch's, against transformers' float32; in float32
            `end_float64`, the same against float64, over the prompts compared step by step; in 16 bits `ratio`, ours
            over torch's, and `ratio_upper`, its upper 95 % bound.
        logits: for each dtype, ours and torch's against transformers' float32.
        tokens: for each dtype the greedy continuation: tokens compared, the first that differs with its margin.
        self_consistency: jaxfuse against itself.
        sensitivity: the smallest faults that this comparison would have found.
        located: for each dtype in which something is wrong, the first step where it shows.
        contract: every line, as `name`, `value`, `bound`.
        broken: the names of the lines that are broken.
    """

    model: str
    prompts: Record
    sides: Record
    ops: list[Record]
    layers: list[Record]
    logits: list[Record]
    tokens: list[Record]
    self_consistency: list[Record]
    sensitivity: list[Record]
    located: list[Record]
    contract: list[Line]

    @property
    def broken(self) -> list[str]:
        """The names of the lines of the contract that do not hold, the worst first."""
        lines = [line for line in self.contract if not line.passed]
        return [line.name for line in sorted(lines, key=lambda line: -line.strain)]

    @property
    def passed(self) -> bool:
        """Whether the contract holds."""
        return not self.broken

    def to_dict(self) -> Record:
        """The object that `to_json` writes."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["contract"] = [dataclasses.asdict(line) | {"passed": line.passed} for line in self.contract]
        return fields | {"passed": self.passed, "broken": self.broken}

    def to_json(self) -> str:
        """One JSON object, on one line; a number that is not finite is written as a string, "nan" or "inf"."""
        return json.dumps(_finite(self.to_dict()), ensure_ascii=False, allow_nan=False)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the error by layer, jaxfuse and transformers in one picture; the ending of `path` names the format.

        Raises:
            ModuleNotFoundError: without matplotlib.
        """
        from jaxfuse.parity.plot import plot

        plot(self, path)

    def table(self, width: int | None = None) -> str:
        """The report as text; `width` in columns, None takes the terminal's."""
        from jaxfuse.parity.table import table

        return table(self, width)

    def __str__(self) -> str:
        return self.table(110)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
