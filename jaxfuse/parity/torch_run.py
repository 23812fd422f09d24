"""The PyTorch side of a comparison: what transformers gives, and how far it is from the truth itself."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jaxfuse.parity import float64
from jaxfuse.parity.activations import Activations
from jaxfuse.parity.errors import Errors, LogitFigures
from jaxfuse.parity.prompts import Group
from jaxfuse.parity.steps import is_coarse
from jaxfuse.parity.torch_side import Attention, TorchSide, pinned, torch_dtype
from jaxfuse.parity.yardstick import root_mean_square, token_errors

Tick = Callable[[], None]
type Ends = dict[Attention, dict[str, Errors]]
type TokenErrors = dict[str, torch.Tensor]


@dataclasses.dataclass
class Plan:
    """What is run: the same for both sides and every dtype.

    Attributes:
        folder: the checkpoint.
        device: of the PyTorch side.
        groups: all prompts, by length.
        detail: `[rows, T]`, the prompts whose every step is compared.
        continued: `[rows, T]`, the prompts that are continued greedily.
        new_tokens: by so many tokens.
        files: where activations go.
    """

    folder: Path
    device: str
    groups: Sequence[Group]
    detail: np.ndarray
    continued: np.ndarray
    new_tokens: int
    files: Activations


@dataclasses.dataclass
class TorchRun:
    """What is kept in memory of one run in one dtype.

    Attributes:
        settings: versions, device, threads, flags.
        ends: by attention and step, the error at the end of all steps so far, against transformers' float32 (sdpa).
            In float32 that leaves eager alone, and is the distance of torch from itself.
        logits: by attention, the same for the logits.
        local: by step, the error of each token against float64, given the inputs that the step had; of the two
            attentions the one that errs more.
        whole: in float32, by step, the error of each token against float64 from the tokens on; else empty.
        tokens: `[rows, new_tokens]`, the greedy continuation.
        margins: `[rows, new_tokens]`, how far the first logit is ahead of the second.
    """

    settings: dict[str, Any]
    ends: Ends
    logits: dict[Attention, LogitFigures]
    local: TokenErrors
    whole: TokenErrors
    tokens: np.ndarray
    margins: np.ndarray


def run_torch(plan: Plan, dtype: str, tick: Tick) -> TorchRun:
    """Runs transformers in a dtype over all prompts.

    In float32, which is the truth of the other dtypes, the coarse steps of every group are kept on disk. The fine
    steps of the detail are kept in every dtype, with what each is short of float64.
    """
    side = TorchSide(plan.folder, torch_dtype(dtype), plan.device)
    attentions: tuple[Attention, ...] = ("eager",) if dtype == "float32" else ("sdpa", "eager")
    ends: Ends = {attention: {} for attention in attentions}
    logits: dict[Attention, LogitFigures] = {attention: LogitFigures() for attention in attentions}
    with pinned():
        for group, prompts in enumerate(plan.groups):
            tokens = torch.from_numpy(prompts.rows).long()
            if dtype == "float32":
                plan.files.save(group_name(group), side.blocks(tokens))
            true = plan.files.load(group_name(group), plan.device)
            for attention in attentions:
                given = side.blocks(tokens, attention)
                add_ends(ends[attention], given, true)
                logits[attention].add(given["lm_head"], true["lm_head"], prompts.numbers)
            tick()
        local, whole = _detail(plan, side, dtype, ends)
        tick()
        continued, margins = side.greedy(torch.from_numpy(plan.continued).long(), plan.new_tokens)
        tick()
    run = TorchRun(side.settings(), ends, logits, local, whole, continued.cpu().numpy(), margins.cpu().numpy())
    del side
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    return run


def add_ends(ends: dict[str, Errors], given: float64.Steps, true: float64.Steps) -> None:
    """Adds a batch to the errors of its steps."""
    for name, value in given.items():
        ends.setdefault(name, Errors()).add(value, true[name])


def _detail(
    plan: Plan, side: TorchSide, dtype: str, ends: Ends
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Keeps every step of the detail, and returns the errors of each step alone and of all up to it."""
    tokens = torch.from_numpy(plan.detail).long().to(plan.device)
    steps = side.steps(tokens)
    truth = float64.truth_of(side.model, tokens, steps)
    short, local, whole = {}, {}, {}
    for name, exact in truth.items():
        difference = steps[value_name(name)].double() - exact
        short[short_of_truth(name)] = -difference.float()
        local[name] = token_errors(difference, exact).cpu()
    if dtype == "float32":
        for name, exact in float64.truth_of(side.model, tokens).items():
            difference = steps[value_name(name)].double() - exact
            short[short_of_truth(name, whole=True)] = -difference.float()
            whole[name] = token_errors(difference, exact).cpu()
    for name, mixed in side.eager_attention(steps).items():
        eager = token_errors(mixed.double() - truth[name], truth[name]).cpu()
        if root_mean_square(eager) > root_mean_square(local[name]):
            local[name] = eager
    plan.files.save(detail_name(dtype), {**steps, **short})

    true = steps if dtype == "float32" else plan.files.load(detail_name("float32"), plan.device)
    for attention, errors in ends.items():
        given = side.steps(tokens, attention)
        add_ends(errors, {name: value for name, value in given.items() if not is_coarse(name)}, true)
    return local, whole


def value_name(name: str) -> str:
    """The step whose value a truth is about: RoPE alone gives what norm and RoPE give."""
    return name.replace("rotary.q", "q_rope").replace("rotary.k", "k_rope")


def group_name(group: int) -> str:
    """The file of a group's coarse steps in float32."""
    return f"group-{group}"


def detail_name(dtype: str) -> str:
    """The file of the detail's fine steps."""
    return f"detail-{dtype}"


def short_of_truth(name: str, *, whole: bool = False) -> str:
    """The name under which a detail file keeps truth minus value, float32; `whole`: the truth from the tokens on."""
    return f"{name} short of float64{' from the tokens on' if whole else ''}"
