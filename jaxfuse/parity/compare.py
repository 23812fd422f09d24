"""The comparison of a checkpoint in jaxfuse with the same in transformers: the main path."""

import os
from collections.abc import Callable, Sequence
from typing import cast

import jax
import numpy as np

import jaxfuse
from jaxfuse import devices, weights
from jaxfuse.config import DTYPES, Qwen3Config
from jaxfuse.errors import InputError
from jaxfuse.fused_ops import fused_ops
from jaxfuse.generate import Prompts, generate
from jaxfuse.hub import resolve
from jaxfuse.kernels import Implementation, check_implementation
from jaxfuse.model import Qwen3
from jaxfuse.parity.activations import Activations, scratch_folder
from jaxfuse.parity.errors import Errors, LogitFigures
from jaxfuse.parity.local import compare_steps, errors_of, step_record
from jaxfuse.parity.ops import compare_ops
from jaxfuse.parity.prompts import Group, default_prompts, grouped
from jaxfuse.parity.report import Record, Report
from jaxfuse.parity.self_consistency import compare_with_itself
from jaxfuse.parity.sensitivity import smallest_faults
from jaxfuse.parity.steps import is_coarse, names, values_per_token
from jaxfuse.parity.taps import JaxSide, to_torch
from jaxfuse.parity.torch_run import Plan, TorchRun, add_ends, detail_name, group_name, run_torch
from jaxfuse.parity.torch_side import choose_device
from jaxfuse.parity.yardstick import (
    FLOAT32_STEP,
    LARGEST_LOGIT,
    LOGITS,
    PROMPTS,
    STEP,
    TOKENS,
    Line,
    geometric_ratio,
    judge_step,
)

# Every step of so many float32 values is kept for the prompts that are compared step by step; at least one prompt.
_DETAIL_VALUES = 2**28
_DETAIL_PROMPTS = 4
_DETAIL_TOKENS = 64
_CONTINUED = 4

_SHAPE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

Progress = Callable[[str, int, int], None]


def compare(
    model_path: str | os.PathLike[str],
    *,
    prompts: Prompts | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    implementation: Implementation | None = None,
    device: str | None = None,
    new_tokens: int = 64,
    model: Callable[[str], Qwen3] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Says how far a checkpoint in jaxfuse is from the same in transformers: op by op, step by step, token by token.

    Transformers runs first, in float32 and in each dtype; its activations wait in a temporary folder, so that the two
    models are never in memory together.

    Args:
        model_path: a folder, or a repository of the hub.
        prompts: rows of token ids, at least two each, the longest ones 64 together; None takes 64 pieces of 128 tokens
            of held-out text, or random tokens when the checkpoint has no tokenizer. The contract in 16 bits is about
            at least so many.
        dtypes: of "float32", "bfloat16" and "float16".
        implementation: of jaxfuse's fused ops.
        device: of the PyTorch side, "cpu" or "cuda"; None takes a GPU that PyTorch can use.
        new_tokens: how many tokens are continued greedily, after the first halves of up to four of the longest prompts.
        model: makes the jaxfuse model for a dtype, in place of loading the checkpoint: to compare a model of your own.
        progress: called with what is done next, the steps done and their number.

    Returns:
        The report; `report.passed` says whether the contract holds.

    Raises:
        JaxfuseError: for a checkpoint, prompts or an argument that does not fit, or a disk without room.
        ImplementationError: when the implementation cannot run.
    """
    check_implementation(implementation, "fused")
    folder = resolve(model_path)
    config = Qwen3Config.from_pretrained(folder)
    _check_dtypes(dtypes)
    if prompts is None:
        prompts = default_prompts(folder, config)
    groups = grouped(prompts, config)
    longest = groups[0].rows
    _check_enough(longest)
    detail = longest[: _detail_prompts(config, longest)]
    continued = _continued(longest, config, new_tokens)
    device = choose_device(device)

    def load(dtype: str) -> Qwen3:
        if model is None:
            return weights.load(folder, dtype=dtype, implementation=implementation)
        made = model(dtype)
        _check_model(made, config, dtype)
        return made

    with scratch_folder() as scratch:
        files = Activations(scratch, _expected_bytes(config, groups, detail, len(dtypes)))
        plan = Plan(folder, device, groups, detail, continued, new_tokens, files)
        torch_dtypes = list(dict.fromkeys(["float32", *dtypes]))
        ticks = _Ticks(progress, (len(groups) + 2) * len(torch_dtypes) + (len(groups) + 3) * len(dtypes))
        torch_runs = {}
        for dtype in torch_dtypes:
            ticks.what = f"transformers, {dtype}"
            torch_runs[dtype] = run_torch(plan, dtype, ticks)
        comparisons = []
        for dtype in dtypes:
            ticks.what = f"jaxfuse, {dtype}"
            comparisons.append(_Comparison(plan, dtype, load(dtype), torch_runs[dtype], ticks))
    return _report(str(model_path), config, plan, torch_runs, comparisons)


def _check_dtypes(dtypes: Sequence[str]) -> None:
    if isinstance(dtypes, str) or not dtypes or not all(dtype in DTYPES for dtype in dtypes):
        raise InputError(f"dtypes must be some of {', '.join(DTYPES)}, in a list, got {dtypes!r}")
    if len(set(dtypes)) < len(dtypes):
        raise InputError(f"dtypes must differ, got {dtypes!r}")


def _check_enough(longest: np.ndarray) -> None:
    count = longest[:_DETAIL_PROMPTS].size
    if count < _DETAIL_TOKENS:
        raise InputError(
            f"the longest prompts, up to {_DETAIL_PROMPTS} of one length, must have at least {_DETAIL_TOKENS} tokens "
            f"together, got {count}: the errors of fewer are single roundings, and their ratio is chance; give longer "
            "prompts"
        )


def _check_model(made: object, config: Qwen3Config, dtype: str) -> None:
    if not isinstance(made, Qwen3):
        raise TypeError(f"model must make a jaxfuse.Qwen3, got {type(made).__name__}")
    if made.numerics.dtype.name != dtype:
        raise InputError(f"model must make a model in the dtype it is given, {dtype}, got {made.numerics.dtype.name}")
    for name in _SHAPE:
        expected, got = getattr(config, name), getattr(made.config, name)
        if got != expected:
            raise InputError(f"model must make one of the checkpoint's shape: {name} is {expected} there, got {got}")


def _detail_prompts(config: Qwen3Config, rows: np.ndarray) -> int:
    fit = _DETAIL_VALUES // (rows.shape[1] * (values_per_token(config) + config.vocab_size))
    return max(1, min(fit, _DETAIL_PROMPTS))


def _continued(rows: np.ndarray, config: Qwen3Config, new_tokens: int) -> np.ndarray:
    """The beginnings of the first prompts, half of each, with room for what follows."""
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 1:
        raise InputError(f"new_tokens must be a positive integer, got {new_tokens!r}")
    length = -(-rows.shape[1] // 2)
    limit = config.max_position_embeddings
    if length + new_tokens > limit:
        raise InputError(
            f"prompt and continuation must fit the model's {limit} positions, got {length} + {new_tokens}; lower "
            "new_tokens"
        )
    return rows[:_CONTINUED, :length]


def _expected_bytes(config: Qwen3Config, groups: Sequence[Group], detail: np.ndarray, dtypes: int) -> int:
    coarse = (config.num_hidden_layers + 2) * config.hidden_size + config.vocab_size
    fine = 3 * (values_per_token(config) + config.vocab_size)
    return 4 * (coarse * sum(group.rows.size for group in groups) + fine * detail.size * dtypes)


class _Ticks:
    """Counts what is done, and tells it."""

    def __init__(self, progress: Progress | None, total: int):
        self.what = ""
        self._progress, self._done, self._total = progress, 0, total

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self.what, self._done, self._total)


class _Comparison:
    """jaxfuse in one dtype against what transformers left; all figures are in its attributes."""

    def __init__(self, plan: Plan, dtype: str, model: Qwen3, torch_run: TorchRun, tick: Callable[[], None]):
        self.dtype, self.torch = dtype, torch_run
        self.contract: list[Line] = []
        self.located: list[Record] = []
        self.whole: dict[str, Record] = {}
        self.implementations = fused_ops(model.config, model.numerics)
        side = JaxSide(model)
        every = names(model.config)

        self.ends: dict[str, Errors] = {}
        self.figures = LogitFigures()
        coarse = tuple(name for name in every if is_coarse(name) and name != "lm_head")
        for group, prompts in enumerate(plan.groups):
            true = plan.files.load(group_name(group), plan.device)
            given = {name: to_torch(value, plan.device) for name, value in side.steps(prompts.rows, coarse).items()}
            given["lm_head"] = to_torch(side.logits(prompts.rows), plan.device)
            add_ends(self.ends, given, true)
            self.figures.add(given["lm_head"], true["lm_head"], prompts.numbers)
            tick()
        del true, given

        self._steps(plan, side, every)
        tick()
        self.tokens = self._continue(plan, model)
        tick()
        true = plan.files.load(group_name(0), plan.device)["lm_head"]
        theirs = _logits_of(torch_run)
        self.self_consistency, lines = compare_with_itself(
            side, plan.groups[0].rows, true, theirs.errors.tokens[0], dtype, self.logit_bound
        )
        self.contract += lines
        tick()
        self._judge_ends(every)

    def _steps(self, plan: Plan, side: JaxSide, every: list[str]) -> None:
        """Each step alone; then the fine steps at the end of all before them."""
        detail = plan.files.load(detail_name(self.dtype), plan.device)
        local = compare_steps(side, plan.detail, detail, self.torch, self.dtype, every)
        self.local = local.records
        self.contract += local.lines
        fault = local.first_fault
        if fault is not None:
            self.located.append({"dtype": self.dtype, "step": fault, "by": "local error", **local.records[fault]})
        self.sensitivity = smallest_faults(side.model, local.values, detail, self.torch, self.dtype)
        self.ops, lines = compare_ops(side.model, detail, self.torch, self.dtype)
        self.contract += lines
        del detail, local

        true = plan.files.load(detail_name("float32"), plan.device)
        for name, value in side.steps(plan.detail, tuple(every)).items():
            if not is_coarse(name):  # those have been added over all prompts
                given = to_torch(value, plan.device).reshape(true[name].shape)
                self.ends.setdefault(name, Errors()).add(given, true[name])
            if self.dtype == "float32":
                self._judge_whole(name, errors_of(value, true, name, whole=True))

    def _judge_whole(self, name: str, errors: Errors) -> None:
        """A step of float32 at the end of all before it, against float64."""
        theirs = self.torch.whole[name]
        lines = judge_step(f"float32 layers {name} at the end", "float32", errors.tokens[0], theirs)
        self.whole[name] = record = step_record(errors, theirs, lines)
        self.contract += lines
        if not record["passed"] and not self.located:
            self.located.append({"dtype": "float32", "step": name, "by": "error at the end", **record})

    def _continue(self, plan: Plan, model: Qwen3) -> Record:
        """Greedy tokens of both sides."""
        out = generate(model, list(plan.continued), max_new_tokens=plan.new_tokens, stop_token_ids=())
        ours, theirs, margins = out.tokens, self.torch.tokens, self.torch.margins
        apart = np.where((ours != theirs).any(axis=1), (ours != theirs).argmax(axis=1), plan.new_tokens)
        agreed = np.arange(plan.new_tokens) < apart[:, None]
        row = int(apart.argmin())
        step = int(apart[row])
        first = None
        if step < plan.new_tokens:
            first = {
                "prompt": plan.groups[0].numbers[row],
                "step": step,
                "token": int(ours[row, step]),
                "expected": int(theirs[row, step]),
                "margin": float(margins[row, step]),
            }
        if self.dtype == "float32":
            self.contract.append(Line("float32 tokens that differ", int((ours != theirs).sum()), 0))
        return {
            "dtype": self.dtype,
            "prompts": len(ours),
            "prompt_tokens": plan.continued.shape[1],
            "new_tokens": plan.new_tokens,
            "agreed": int(agreed.sum()),
            "of": agreed.size,
            "first_difference": first,
            "smallest_margin": float(margins[agreed].min()) if agreed.any() else None,
            "median_margin": float(np.median(margins)),
        }

    def _judge_ends(self, every: list[str]) -> None:
        """The lines about the whole model, and where it parts if no single step is at fault."""
        if self.dtype == "float32":
            value = self.figures.figures()["of_largest_logit"]
            name = "float32 logits: largest difference of the largest logit"
            self.contract.append(Line(name, value, self.logit_bound))
            return
        for name in filter(is_coarse, every):
            bound = LOGITS if name == "lm_head" else STEP
            upper = cast(float, self.ratio(name)[1])  # as in 16 bits
            what = "logits" if name == "lm_head" else f"layers {name}"
            line = Line(f"{self.dtype} {what}: error at the end", upper, bound)
            self.contract.append(line)
            if not line.passed and not self.located:
                self.located.append({"dtype": self.dtype, "step": name, "by": "error at the end", "ratio": upper})

    @property
    def logit_bound(self) -> float:
        """Of the largest logit: 2e-5, or three times what torch's two attentions differ by, where that is more."""
        return max(LARGEST_LOGIT, FLOAT32_STEP * _logits_of(self.torch).figures()["of_largest_logit"])

    def ratio(self, name: str) -> tuple[float | None, float | None]:
        """The geometric mean of our error over torch's at the end of a step, and its upper bound.

        None in float32, where torch's is itself what is compared with.
        """
        if self.dtype == "float32":
            return None, None
        theirs = next(iter(self.torch.ends.values()))[name]
        return geometric_ratio(self.ends[name].rest, theirs.rest)

    def layer(self, name: str) -> Record:
        """A step's record for the report."""
        mean, upper = self.ratio(name)
        record: Record = {
            "dtype": self.dtype,
            "step": name,
            "local": self.local[name],
            "end": self.ends[name].figures(),
            "end_float64": self.whole.get(name),
            "ratio": mean,
            "ratio_upper": upper,
            "tokens": self.ends[name].all.numel(),
        }
        for attention, ends in self.torch.ends.items():
            record[f"torch_{attention}_end"] = ends[name].figures()
        return record


def _logits_of(torch_run: TorchRun) -> LogitFigures:
    return next(iter(torch_run.logits.values()))


def _report(
    model_path: str, config: Qwen3Config, plan: Plan, torch_runs: dict[str, TorchRun], comparisons: list[_Comparison]
) -> Report:
    tokens = sum(group.rows.size for group in plan.groups)
    count = sum(len(group.numbers) for group in plan.groups)
    every = names(config)
    return Report(
        model=model_path,
        prompts={
            "count": count,
            "tokens": tokens,
            "enough": count >= PROMPTS and tokens >= TOKENS,
            "step_by_step": plan.detail.size,
        },
        sides={
            "torch": torch_runs["float32"].settings,
            "jaxfuse": {
                "jaxfuse": jaxfuse.__version__,
                "jax": jax.__version__,
                "device": devices.describe(),
                "fused_ops": {comparison.dtype: comparison.implementations for comparison in comparisons},
            },
        },
        ops=[record for comparison in comparisons for record in comparison.ops],
        layers=[comparison.layer(name) for comparison in comparisons for name in every],
        logits=[
            {
                "dtype": comparison.dtype,
                "ratio": comparison.ratio("lm_head")[0],
                "ratio_upper": comparison.ratio("lm_head")[1],
                "jaxfuse": comparison.figures.figures(),
                **{f"torch_{name}": figures.figures() for name, figures in comparison.torch.logits.items()},
            }
            for comparison in comparisons
        ],
        tokens=[comparison.tokens for comparison in comparisons],
        self_consistency=[record for comparison in comparisons for record in comparison.self_consistency],
        sensitivity=[record for comparison in comparisons for record in comparison.sensitivity],
        located=[record for comparison in comparisons for record in comparison.located],
        contract=[line for comparison in comparisons for line in comparison.contract],
    )
