"""Figures gathered over the batches of a comparison."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from jaxfuse.parity.yardstick import root_mean_square, token_errors


@dataclasses.dataclass
class Errors:
    """How far a step's values lie from the true ones.

    Attributes:
        tokens: for each batch `[B, T]` float64, the relative L2 error of each token.
        largest: the largest difference of a single value.
    """

    tokens: list[torch.Tensor] = dataclasses.field(default_factory=list)
    largest: float = 0.0

    def add(self, value: torch.Tensor, true: torch.Tensor) -> None:
        """One batch, `[B, T, ...]` both."""
        self.add_difference(value.double() - true.double(), true)

    def add_difference(self, difference: torch.Tensor, true: torch.Tensor) -> None:
        """One batch by its difference, for one that is finer than the values' dtype."""
        self.tokens.append(token_errors(difference, true).cpu())
        self.largest = _larger(self.largest, float(difference.abs().max()))

    @property
    def all(self) -> torch.Tensor:
        """The errors of all tokens, the first of each prompt apart."""
        return torch.cat([batch[:, 1:].flatten() for batch in self.tokens])

    @property
    def rest(self) -> list[torch.Tensor]:
        """The same, batch by batch."""
        return [batch[:, 1:] for batch in self.tokens]

    def figures(self) -> dict[str, float]:
        """Root mean square, median, 99th percentile and maximum over tokens, and the largest difference of a value."""
        errors = self.all
        return {
            "rms": root_mean_square(errors),
            "median": float(errors.median()),
            "p99": float(torch.quantile(errors, 0.99)),
            "max": float(errors.max()),
            "largest": self.largest,
        }


def _larger(one: float, other: float) -> float:
    """The maximum; a NaN stays one."""
    return float(np.maximum(one, other))


@dataclasses.dataclass
class LogitFigures:
    """How far logits lie from transformers' float32 ones, over all positions."""

    errors: Errors = dataclasses.field(default_factory=Errors)
    largest_logit: float = 0.0
    kl: list[torch.Tensor] = dataclasses.field(default_factory=list)
    top1: list[torch.Tensor] = dataclasses.field(default_factory=list)
    top5: list[torch.Tensor] = dataclasses.field(default_factory=list)
    disagreements: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, logits: torch.Tensor, true: torch.Tensor, numbers: Sequence[int]) -> None:
        """One batch, `[B, T, vocab]` both, of the prompts of these numbers."""
        logits, true = logits.float(), true.float()
        self.errors.add(logits, true)
        self.largest_logit = _larger(self.largest_logit, float(true.abs().max()))
        for row, expected, number in zip(logits, true, numbers, strict=True):  # float64 of one row at a time
            self._add_row(row, expected, number)

    def _add_row(self, row: torch.Tensor, true: torch.Tensor, prompt: int) -> None:
        ours, theirs = row.double().log_softmax(-1), true.double().log_softmax(-1)
        self.kl.append((theirs.exp() * (theirs - ours)).sum(-1).cpu())
        count = min(5, row.shape[-1])
        mine, yours = row.topk(count).indices, true.topk(count).indices
        self.top1.append((mine[:, 0] == yours[:, 0]).cpu())
        self.top5.append((mine[:, :, None] == yours[:, None]).any(-1).double().mean(-1).cpu())
        for place in (mine[:, 0] != yours[:, 0]).nonzero().flatten().tolist():
            token, expected = int(mine[place, 0]), int(yours[place, 0])
            margin = float(true[place, expected] - true[place, token])
            self.disagreements.append(
                {"prompt": prompt, "position": place, "token": token, "expected": expected, "margin": margin}
            )

    def figures(self) -> dict[str, Any]:
        """Numbers for a report; KL in nats, margins in logits."""
        kl = torch.cat(self.kl)
        worst = sorted(self.disagreements, key=lambda place: -place["margin"])
        return {
            **self.errors.figures(),
            "largest_logit": self.largest_logit,
            "of_largest_logit": self.errors.largest / self.largest_logit if self.largest_logit else math.inf,
            "kl_mean": float(kl.mean()),
            "kl_max": float(kl.max()),
            "top1": float(torch.cat(self.top1).double().mean()),
            "top5": float(torch.cat(self.top5).mean()),
            "disagreements": len(worst),
            "largest_margin": worst[0]["margin"] if worst else 0.0,
            "worst_disagreements": worst[:10],
        }
