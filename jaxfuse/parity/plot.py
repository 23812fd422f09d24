"""The error by layer as a picture."""

import os
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxfuse.errors import InputError
from jaxfuse.parity.report import Report
from jaxfuse.parity.steps import is_coarse

# Okabe and Ito's colors, told apart by most eyes; markers and dashes tell them apart in gray.
_LINES = {
    "end": ("jaxfuse", "#0072B2", "o", "-"),
    "torch_sdpa_end": ("transformers, sdpa", "#D55E00", "s", "--"),
    "torch_eager_end": ("transformers, eager", "#009E73", "^", ":"),
}


def check_target(path: str | os.PathLike[str]) -> None:
    """Refuses a file that `plot` could not write, before any work is done.

    Raises:
        InputError: for an ending that is no format, a folder that is not there, a file that may not be written.
    """
    endings = FigureCanvasAgg(Figure()).get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending not in endings:
        raise InputError(f"a plot's name must end in one of {', '.join(sorted(endings))}, got {os.fspath(path)!r}")
    folder = Path(path).parent
    if not folder.is_dir():
        raise InputError(f"no folder {folder} for the plot; make it first")
    if not os.access(path if Path(path).exists() else folder, os.W_OK) or Path(path).is_dir():
        raise InputError(f"the plot cannot be written to {os.fspath(path)!r}; give another name")


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws the error at the end of each layer, a panel a dtype: jaxfuse, and transformers in the same dtype.

    Raises:
        InputError: as `check_target`.
        OSError: when the file cannot be written.
    """
    check_target(path)
    dtypes = list(dict.fromkeys(record["dtype"] for record in report.layers))
    figure = Figure(figsize=(6.4 * len(dtypes), 4.8), layout="constrained")
    for dtype, axes in zip(dtypes, figure.subplots(1, len(dtypes), squeeze=False)[0], strict=True):
        _panel(report, dtype, axes)
    torch, ours = report.sides["torch"], report.sides["jaxfuse"]
    figure.suptitle(f"Error by layer of {Path(report.model).name or report.model}")
    figure.supxlabel(
        f"{report.prompts['tokens']:,} tokens; jaxfuse {ours['jaxfuse']}, jax {ours['jax']} on {ours['device']}; "
        f"transformers {torch['transformers']}, torch {torch['torch']} on {torch['device']}",
        fontsize=7,
    )
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=150)


def _panel(report: Report, dtype: str, axes: Axes) -> None:
    # The embedding is a copy, without an error that a logarithm could show.
    records = [r for r in report.layers if r["dtype"] == dtype and is_coarse(r["step"]) and r["step"] != "embed_tokens"]
    places = range(len(records))
    for key, (label, color, marker, dashes) in _LINES.items():
        if key not in records[0]:
            continue
        medians = [record[key]["median"] or float("nan") for record in records]
        axes.plot(places, medians, color=color, marker=marker, linestyle=dashes, markersize=4, label=f"{label}, median")
        if key == "end":
            tops = [record[key]["p99"] or float("nan") for record in records]
            axes.fill_between(places, medians, tops, color=color, alpha=0.15, label=f"{label}, to the 99th percentile")
    axes.set_yscale("log")
    axes.set_title(dtype if dtype != "float32" else "float32 (eager: torch against itself)")
    axes.set_xlabel("after layer, then the last norm and the logits")
    axes.set_ylabel("relative L2 error of a token\nagainst transformers' float32 with sdpa")
    blocks = len(records) - 2
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xticks([*range(0, blocks, max(1, blocks // 8)), blocks + 1])
    axes.set_xticklabels([*map(str, range(0, blocks, max(1, blocks // 8))), "logits"])
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
