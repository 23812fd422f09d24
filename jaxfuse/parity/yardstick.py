"""How far apart two computations may lie: the bounds of the contract, and the figures they are stated in.

A token's error is a relative L2 distance: the length of the difference over the length of the true value, both over
all values that a step gives for that token.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch

LARGEST_LOGIT = 2e-5
"""float32: the largest difference of a logit from transformers', of the largest |logit|.

A deep model can amplify one float32 rounding to more than that: where torch's own two attentions differ by more than a
third of it, three times their difference is allowed."""

FLOAT32_STEP = 3.0
"""float32: a step's error over torch's own, both against float64."""

LOGITS = 1.00
"""16 bits: the error of the logits over transformers' own in that dtype, both against its float32."""

STEP = 1.10
"""16 bits: the error of a layer, or of one step of it, over transformers' own."""

PROMPTS, TOKENS = 64, 8192
"""What the contract in 16 bits is judged over, at least."""

# A step whose error is one rounding of float32 is right, even where torch's happens to be exact.
_FLOAT32_UNIT = 2.0**-24
# Where ours is exact and torch's is not, the logarithm of their ratio needs an end.
_LEAST_RATIO = 1e-3


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the contract: what was measured, and the most that it may be. A NaN breaks it."""

    name: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether it holds."""
        return self.value <= self.bound

    @property
    def strain(self) -> float:
        """The value over its bound: above 1 it is broken."""
        if self.passed:
            return self.value / self.bound if self.bound else 0.0
        return self.value / self.bound if self.bound and not math.isnan(self.value) else math.inf


def token_errors(difference: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """The relative L2 error of each token.

    Args:
        difference: `[B, T, ...]`, value minus true value.
        true: the same shape.

    Returns:
        `[B, T]` float64; 0 where nothing differs, infinite where the true value is zero and the other is not.
    """
    lengths = [torch.linalg.vector_norm(x.double().flatten(2), dim=2) for x in (difference, true)]
    return torch.where(lengths[0] == 0, 0.0, lengths[0] / lengths[1])


def root_mean_square(errors: torch.Tensor) -> float:
    """Of the errors of tokens; one token that is far off shows in it."""
    return math.sqrt(float(errors.double().square().mean()))


def geometric_ratio(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The geometric mean of our error over theirs, and its upper 95 % bound, by bootstrap over prompts.

    Tokens without error on both sides are left out; where theirs is zero and ours is not, the ratio is infinite.

    Args:
        ours, theirs: the errors of the tokens, `[rows, T]` for each group of prompts of one length.

    Returns:
        Both 0 when no token has an error.
    """
    means = []
    for mine, yours in zip(ours, theirs, strict=True):
        ratios = torch.where((mine == 0) & (yours == 0), torch.nan, mine / yours).clamp(min=_LEAST_RATIO)
        means.append(torch.nanmean(ratios.log(), dim=1))
    by_prompt = torch.cat(means)
    # A row of NaN alone is one without errors, unless an error itself is NaN: that must show.
    broken = torch.cat([(mine + yours).isnan().any(dim=1) for mine, yours in zip(ours, theirs, strict=True)])
    by_prompt = by_prompt[broken | ~by_prompt.isnan()]
    if not len(by_prompt):
        return 0.0, 0.0
    if bool(broken.any()):
        return math.nan, math.nan
    draws = torch.randint(len(by_prompt), (1000, len(by_prompt)), generator=torch.Generator().manual_seed(0))
    upper = torch.quantile(by_prompt[draws].mean(dim=1), 0.95, interpolation="higher")
    return float(by_prompt.mean().exp()), float(upper.exp())


def judge_step(name: str, dtype: str, ours: torch.Tensor, theirs: torch.Tensor) -> list[Line]:
    """Whether a step that was given transformers' own inputs is right.

    In float32 the root mean square of our errors is held against three times theirs; in 16 bits that too, and the
    geometric mean of the ratio against 1.10.

    Args:
        name: of the step.
        dtype: its name, such as "bfloat16".
        ours, theirs: `[B, T]`, the errors of the tokens against float64.
    """
    mine, yours = root_mean_square(ours), root_mean_square(theirs)
    unit = _FLOAT32_UNIT if dtype == "float32" else 0.0
    lines = [Line(f"{name}: error", mine, max(FLOAT32_STEP * yours, unit))]
    if dtype != "float32":
        lines.append(Line(f"{name}: ratio", geometric_ratio([ours], [theirs])[0], STEP))
    return lines
