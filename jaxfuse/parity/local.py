"""Each step alone, given the input that transformers' own step had: where a fault is found."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import torch

from jaxfuse.parity.errors import Errors
from jaxfuse.parity.float64 import Steps
from jaxfuse.parity.taps import to_torch
from jaxfuse.parity.torch_run import TorchRun, short_of_truth, value_name
from jaxfuse.parity.yardstick import Line, judge_step, root_mean_square

type Value = jax.Array | torch.Tensor


class Side(Protocol):
    """What is compared with transformers."""

    def local_steps(self, tokens: np.ndarray, theirs: Steps, keep: tuple[str, ...]) -> Mapping[str, Value]:
        """What the steps named in `keep` give, each given transformers' outputs of the steps before it."""


@dataclasses.dataclass(frozen=True)
class LocalErrors:
    """What came of it.

    Attributes:
        values: what each step gave.
        records: for each step `error`, `torch_error`, their `ratio`, `largest` and whether it `passed`.
        lines: of the contract.
    """

    values: Mapping[str, Value]
    records: dict[str, dict[str, Any]]
    lines: list[Line]

    @property
    def first_fault(self) -> str | None:
        """The first step that is wrong."""
        return next((name for name, record in self.records.items() if not record["passed"]), None)


def compare_steps(
    side: Side, tokens: np.ndarray, detail: Steps, torch_run: TorchRun, dtype: str, steps: Sequence[str]
) -> LocalErrors:
    """Judges each step by its error against float64, beside that of transformers' step.

    Args:
        side: the model.
        tokens: `[B, T]`, those of the detail.
        detail: what transformers' steps gave, and what they are short of float64.
        torch_run: whose local errors are the yardstick.
        dtype: of both.
        steps: their names, in order.
    """
    values = side.local_steps(tokens, {name: detail[name] for name in steps}, tuple(steps))
    records, lines = {}, []
    for name in steps:
        errors, theirs = errors_of(values[name], detail, name), torch_run.local[name]
        judged = judge_step(f"{dtype} layers {name}", dtype, errors.tokens[0], theirs)
        records[name] = step_record(errors, theirs, judged)
        lines += judged
    return LocalErrors(values, records, lines)


def step_record(errors: Errors, theirs: torch.Tensor, judged: list[Line]) -> dict[str, Any]:
    """Figures of a step that was given transformers' own inputs."""
    mine, yours = root_mean_square(errors.tokens[0]), root_mean_square(theirs)
    return {
        "error": mine,
        "torch_error": yours,
        "ratio": mine / yours if yours else float(mine > 0),
        "largest": errors.largest,
        "passed": all(line.passed for line in judged),
    }


def errors_of(value: Value, detail: Steps, name: str, *, whole: bool = False) -> Errors:
    """How far a value is from float64, given the inputs that transformers' step had; `whole`: from the tokens on.

    Args:
        value: `[B, T, ...]`.
        detail: what transformers' steps gave, and what they are short of float64.
        name: of the step.
    """
    theirs = detail[value_name(name)].double()
    short = detail[short_of_truth(name, whole=whole)].double()
    errors = Errors()
    given = value if isinstance(value, torch.Tensor) else to_torch(value)
    difference = given.to(theirs.device).double().reshape(theirs.shape) - theirs - short
    errors.add_difference(difference, theirs + short)
    return errors
