"""A report as text."""

import io
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxfuse.parity.report import Record, Report
from jaxfuse.parity.steps import is_coarse
from jaxfuse.parity.yardstick import PROMPTS, TOKENS

_PIPED = 110
_MOST_BROKEN = 20


def table(report: Report, width: int | None = None) -> str:
    """All sections of a report; `width` in columns, None takes the terminal's, or 110 when there is none."""
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    for section in (_head, _ops, _steps, _ends, _logits, _tokens, _itself, _sensitivity, _verdict):
        for part in section(report):
            console.print(part)
        console.print()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def _size(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.2e}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _ok(passed: bool) -> str:
    return "ok" if passed else "BROKEN"


def _head(report: Report) -> Iterable[str]:
    prompts, torch, ours = report.prompts, report.sides["torch"], report.sides["jaxfuse"]
    yield f"Parity of {report.model}"
    few = (
        "" if prompts["enough"] else f"; fewer than the {PROMPTS} and {TOKENS:,} that the contract in 16 bits is about"
    )
    yield f"prompts      {prompts['count']}, {prompts['tokens']:,} tokens{few}; step by step {prompts['step_by_step']}"
    yield (
        f"transformers {torch['transformers']}, torch {torch['torch']} on {torch['device']}, "
        f"threads {torch['threads']}; attention {torch['attention']}; TF32 {_on(torch['tf32'])}, "
        f"kernels of the hub {_on(torch['hub_kernels'])}, inv_freq in {torch['inv_freq']}"
    )
    yield f"jaxfuse      {ours['jaxfuse']}, jax {ours['jax']}, on {ours['device']}"
    for dtype, ops in ours["fused_ops"].items():
        by_name: dict[str, list[str]] = {}
        for op, name in ops.items():
            by_name.setdefault(name, []).append(op)
        yield f"fused ops    {dtype}: " + "; ".join(f"{name}: {', '.join(found)}" for name, found in by_name.items())
    yield (
        "An error is the relative L2 distance of a token's values; a ratio is jaxfuse's error over torch's; largest is "
        "the largest difference of one value."
    )


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _ops(report: Report) -> Iterable[Table | str]:
    rows = [
        [
            record["op"],
            record["implementation"],
            record["dtype"],
            record["worst"].replace("layers.", "").replace("rotary.", ""),
            _size(record["error"]),
            _size(record["torch_error"]),
            _ratio(record["ratio"]),
            _size(record["largest"]),
            _ok(record["passed"]),
        ]
        for record in report.ops
        if "refused" not in record
    ]
    columns = ("op", "runs as", "dtype", "worst at", "error", "torch", "ratio", "largest", "")
    yield _table("Each op on activations of the model, against float64", columns, rows)
    for record in report.ops:
        if "refused" in record:
            yield f"{record['op']} as {record['implementation']}, {record['dtype']}, cannot run: {record['refused']}"


def _steps(report: Report) -> Iterable[Table]:
    for dtype in _dtypes(report.layers):
        worst: dict[str, Record] = {}
        for record in report.layers:
            if record["dtype"] != dtype:
                continue
            kind = record["step"].rpartition(".")[2]
            if kind not in worst or _rank(record["local"]) > _rank(worst[kind]["local"]):
                worst[kind] = record
        rows = [
            [
                kind,
                record["step"].rpartition(".")[0].replace("layers.", "layer ") or "–",
                _size(record["local"]["error"]),
                _size(record["local"]["torch_error"]),
                _ratio(record["local"]["ratio"]),
                _size(record["local"]["largest"]),
                _ok(record["local"]["passed"]),
            ]
            for kind, record in worst.items()
        ]
        columns = ("step", "worst in", "error", "torch", "ratio", "largest", "")
        yield _table(f"Each step alone, given transformers' own input, {dtype}, against float64", columns, rows)


def _rank(local: Record) -> tuple[bool, float]:
    return not local["passed"], local["ratio"]


def _ends(report: Report) -> Iterable[Table]:
    for dtype in _dtypes(report.layers):
        records = [r for r in report.layers if r["dtype"] == dtype and is_coarse(r["step"])]
        title = f"Error at the end of each layer, {dtype}, against transformers' float32"
        if dtype == "float32":
            columns: tuple[str, ...] = (
                *("after", "median", "p99", "max", "largest", "torch eager"),
                *("from float64", "torch's", "ratio", ""),
            )
            rows = [
                [
                    _after(r),
                    *_spread(r["end"]),
                    _size(r["torch_eager_end"]["median"]),
                    _size(r["end_float64"]["error"]),
                    _size(r["end_float64"]["torch_error"]),
                    _ratio(r["end_float64"]["ratio"]),
                    _ok(r["end_float64"]["passed"]),
                ]
                for r in records
            ]
        else:
            columns = ("after", "median", "p99", "max", "largest", "torch sdpa", "eager", "ratio", "at most")
            rows = [
                [
                    _after(r),
                    *_spread(r["end"]),
                    _size(r["torch_sdpa_end"]["median"]),
                    _size(r["torch_eager_end"]["median"]),
                    _ratio(r["ratio"]),
                    _ratio(r["ratio_upper"]),
                ]
                for r in records
            ]
        yield _table(title, columns, rows)


def _after(record: Record) -> str:
    return str(record["step"]).removesuffix(".block").replace("layers.", "layer ")


def _spread(figures: Record) -> list[str]:
    return [_size(figures[name]) for name in ("median", "p99", "max", "largest")]


def _logits(report: Report) -> Iterable[Table]:
    rows = []
    for record in report.logits:
        for side, title in (("jaxfuse", "jaxfuse"), ("torch_sdpa", "torch sdpa"), ("torch_eager", "torch eager")):
            if side not in record:
                continue
            figures = record[side]
            rows.append(
                [
                    title,
                    record["dtype"],
                    _size(figures["largest"]),
                    _size(figures["of_largest_logit"]),
                    _size(figures["median"]),
                    _size(figures["kl_mean"]),
                    _size(figures["kl_max"]),
                    f"{100 * figures['top1']:.2f} %",
                    f"{100 * figures['top5']:.2f} %",
                    f"{figures['largest_margin']:.3g}" if figures["disagreements"] else "–",
                ]
            )
    columns = (
        "logits of",
        "dtype",
        "largest",
        "of largest logit",
        "median error",
        "KL, nats",
        "max",
        "top-1",
        "top-5",
        "margin lost",
    )
    yield _table("Logits, against transformers' float32 with sdpa", columns, rows)


def _tokens(report: Report) -> Iterable[str]:
    yield "Greedy tokens, against transformers in the same dtype"
    for record in report.tokens:
        first = record["first_difference"]
        line = (
            f"{record['dtype']}: {record['agreed']} of {record['of']} tokens before a difference "
            f"({record['prompts']} prompts of {record['prompt_tokens']}, {record['new_tokens']} tokens each)"
        )
        if record["smallest_margin"] is not None:
            line += (
                f"; smallest margin among them {record['smallest_margin']:.3g}, median {record['median_margin']:.3g}"
            )
        if first is not None:
            line += (
                f"; first difference: prompt {first['prompt']}, step {first['step']}, token {first['token']} for "
                f"{first['expected']}, which was ahead by {first['margin']:.3g}"
            )
        yield line


def _itself(report: Report) -> Iterable[Table | str]:
    rows = [
        [
            record["what"],
            record["dtype"],
            _size(record["largest"]),
            _size(record["of_largest_logit"]),
            _ratio(record["error_ratio"]),
            f"{100 * record['same_token']:.2f} %",
            _ok(record["passed"]),
        ]
        for record in report.self_consistency
        if "refused" not in record
    ]
    columns = ("logits of", "dtype", "largest", "of largest logit", "over torch", "top-1", "")
    yield _table("jaxfuse against itself", columns, rows)
    for record in report.self_consistency:
        if "refused" in record:
            yield f"{record['what']}, {record['dtype']}, cannot run: {record['refused']}"


def _sensitivity(report: Report) -> Iterable[Table]:
    rows = [
        [
            record["fault"],
            record["dtype"],
            record["step"],
            f"{record['value']:.6g}",
            "none" if record["relative"] is None else f"{record['relative']:.1e}",
        ]
        for record in report.sensitivity
    ]
    columns = ("parameter", "dtype", "shows in", "value", "relative change")
    yield _table("The smallest faults that these prompts would have shown", columns, rows)


def _verdict(report: Report) -> Iterable[str]:
    for record in report.located:
        figures = {name: record[name] for name in ("error", "torch_error", "ratio") if name in record}
        described = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in figures.items())
        yield f"First seen in {record['dtype']}: {record['step']}, by its {record['by']} ({described})"
    if report.passed:
        yield f"parity holds: {len(report.contract)} lines of the contract"
        return
    yield f"parity is broken: {len(report.broken)} of {len(report.contract)} lines of the contract"
    lines = sorted((line for line in report.contract if not line.passed), key=lambda line: -line.strain)
    for line in lines[:_MOST_BROKEN]:
        yield f"  {line.name}: {line.value:.3g}, at most {line.bound:.3g}"
    if len(lines) > _MOST_BROKEN:
        yield f"  and {len(lines) - _MOST_BROKEN} more"


def _dtypes(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(record["dtype"] for record in records))
