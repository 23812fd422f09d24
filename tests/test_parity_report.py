"""A report as text, as JSON and as a picture, right or broken, of few layers or many."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

import tiny
from jaxfuse import Qwen3Config
from jaxfuse.errors import InputError
from jaxfuse.parity import Report, compare
from jaxfuse.parity.plot import check_target
from jaxfuse.parity.prompts import grouped
from jaxfuse.parity.yardstick import Line

SECTIONS = (
    "Parity of ",
    "Each op on activations of the model",
    "Each step alone, given transformers' own input, float32",
    "Each step alone, given transformers' own input, bfloat16",
    "Error at the end of each layer, float32",
    "Error at the end of each layer, bfloat16",
    "Logits, against transformers' float32",
    "Greedy tokens",
    "jaxfuse against itself",
    "The smallest faults",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of a small model, one layer deep."""
    folder = tiny.save(tiny.torch_model("tied", num_hidden_layers=1).bfloat16(), tmp_path_factory.mktemp("model"))
    prompts = np.random.default_rng(0).integers(0, 320, (4, 16))
    seen: list[tuple[int, int]] = []
    found = compare(
        folder, prompts=prompts, new_tokens=3, progress=lambda what, done, total: seen.append((done, total))
    )
    total = seen[0][1]
    assert seen == [(done, total) for done in range(1, total + 1)]
    return found


def broken(report: Report) -> Report:
    """The same with a step that is wrong, lines that are broken, an op that cannot run, and NaN among the figures."""
    layers = copy.deepcopy(report.layers)
    layers[3]["local"] |= {"error": math.nan, "ratio": math.inf, "passed": False}
    op = {"op": "rms_norm", "implementation": "mosaic", "dtype": "float32", "refused": "the width must be 128"}
    itself = {"what": "mosaic against xla", "dtype": "float32", "refused": "no such width"}
    lines = [Line(f"line {i}", 2.0 + i, 1.0) for i in range(30)]
    return dataclasses.replace(
        report,
        layers=layers,
        ops=[*report.ops, op],
        self_consistency=[*report.self_consistency, itself],
        located=[{"dtype": "float32", "step": "layers.0.q_rope", "by": "local error", "ratio": math.inf}],
        contract=[*report.contract, Line("a NaN", math.nan, 1.0), *lines],
    )


@pytest.mark.parametrize("width", [80, 110, 200])
def test_table(report: Report, width: int) -> None:
    """Every section, in order, within the width."""
    text = report.table(width)
    places = [text.index(section) for section in SECTIONS]
    assert places == sorted(places)
    assert max(map(len, text.splitlines())) <= width
    assert "BROKEN" not in text
    assert "fewer than the 64" in text
    if width >= 110:
        assert str(report) == report.table(110)
        for name in ("embed_tokens", "q_rope", "down_proj", "lm_head", "rms_norm_eps", "decode against prefill"):
            assert name in text


def test_table_of_a_broken_contract(report: Report) -> None:
    """The place, the worst lines first, and how many more."""
    wrong = broken(report)
    text = wrong.table(110)
    total = len(report.contract) + 31
    assert f"parity is broken: 31 of {total} lines of the contract" in text
    assert "First seen in float32: layers.0.q_rope, by its local error (ratio inf)" in text
    assert text.index("  a NaN: nan, at most 1\n") < text.index("  line 29: 31, at most 1\n")
    assert text.endswith("  line 11: 13, at most 1\n  and 11 more")
    assert "rms_norm as mosaic, float32, cannot run: the width must be 128" in text
    assert "mosaic against xla, float32, cannot run: no such width" in text
    assert text.count("BROKEN") == 1
    assert wrong.broken[:3] == ["a NaN", "line 29", "line 28"]
    assert not wrong.passed


def test_json(report: Report) -> None:
    """Numbers stay numbers; what JSON has no number for is text."""

    def refuse(text: str) -> Any:
        raise AssertionError(text)

    text = broken(report).to_json()
    assert "\n" not in text
    data = json.loads(text, parse_constant=refuse)
    assert data["layers"][3]["local"]["error"] == "nan"
    assert data["layers"][3]["local"]["ratio"] == "inf"
    assert data["broken"][0] == "a NaN"
    right = json.loads(report.to_json(), parse_constant=refuse)
    assert right["layers"] == report.layers
    assert right["passed"] is True
    assert len(right["contract"]) == len(report.contract)


def test_the_contract_has_its_lines(report: Report) -> None:
    """A part that is measured and printed, and that nothing is held to."""
    lines = {line.name: line.bound for line in report.contract}
    coarse = ("embed_tokens", "layers.0.block", "norm")
    assert {lines[f"bfloat16 layers {name}: error at the end"] for name in coarse} == {1.10}
    assert lines["bfloat16 logits: error at the end"] == 1.00
    assert lines["float32 logits: largest difference of the largest logit"] >= 2e-5
    assert lines["float32 tokens that differ"] == 0
    for dtype in ("float32", "bfloat16"):
        for what in ("decode against prefill", "padded batch against rows alone"):
            assert f"{dtype} self_consistency {what}" in lines
        for name in ("embed_tokens", "layers.0.q_rope", "lm_head"):
            assert f"{dtype} layers {name}: error" in lines
        for op in ("rms_norm", "head_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul"):
            assert any(name.startswith(f"{dtype} ops {op} xla ") for name in lines)
    for name in (*coarse, "layers.0.attention", "lm_head"):
        assert f"float32 layers {name} at the end: error" in lines
    assert lines["bfloat16 layers layers.0.o_proj: ratio"] == 1.10


def deep(report: Report, layers: int) -> Report:
    """The same figures of so many layers."""
    records = []
    for record in report.layers:
        copies = range(layers) if record["step"].startswith("layers.") else [0]
        records += [record | {"step": record["step"].replace("layers.0.", f"layers.{i}.")} for i in copies]
    records.sort(key=lambda record: record["dtype"] != "float32")
    return dataclasses.replace(report, layers=records)


@pytest.mark.parametrize("layers", [1, 4, 36])
def test_plot(report: Report, tmp_path: Path, layers: int) -> None:
    """A picture with lines in it, and in SVG the names of what is drawn as text."""
    deeper = deep(report, layers)
    deeper.plot(tmp_path / "a.png")
    pixels = matplotlib.image.imread(tmp_path / "a.png")
    assert pixels.shape[1] > pixels.shape[0] > 300
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50
    deeper.plot(str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    for name in ("jaxfuse, median", "transformers, sdpa, median", "transformers, eager, median", "bfloat16", "logits"):
        assert f">{name}<" in text
    assert "relative L2 error of a token" in text
    assert f">{(layers - 1) // 4 * 4 if layers > 16 else layers - 1}<" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_dtype(report: Report, tmp_path: Path, dtype: str) -> None:
    """Tables and picture of a comparison in one dtype, with an error of zero, which a logarithm does not show."""
    layers = copy.deepcopy([record for record in report.layers if record["dtype"] == dtype])
    for record in layers:
        record["end"] |= {"median": 0.0}
    one = dataclasses.replace(report, layers=layers)
    one.plot(tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").stat().st_size > 5000
    assert f"Error at the end of each layer, {dtype}" in one.table(110)


@pytest.mark.parametrize("name", ["a.txt", "a", "a.npy", "no/a.png"])
def test_files_that_cannot_be_drawn(report: Report, tmp_path: Path, name: str) -> None:
    """An ending that is no format, a folder that is not there."""
    with pytest.raises(InputError, match=r"must end in one of|no folder"):
        check_target(tmp_path / name)
    with pytest.raises(InputError):
        report.plot(tmp_path / name)


def test_prompts_keep_their_numbers() -> None:
    """Prompts are grouped by length, the longest first, and named by their place in what was given."""
    config = Qwen3Config(vocab_size=50)
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9], *[[i, i] for i in range(9)], [9, 8, 7, 6]]
    groups = grouped(rows, config)
    assert [group.numbers for group in groups] == [[2, 12], [0], [1, *range(3, 10)], [10, 11]]
    for group in groups:
        np.testing.assert_array_equal(group.rows, [rows[i] for i in group.numbers])
        assert group.rows.dtype == np.int32
    misfits: list[Any] = [[[1]], [[1, 50]], [[-1, 2]], [1.0, 2.0], [], [[]], "text"]
    for wrong in misfits:
        with pytest.raises((InputError, TypeError)):
            grouped(wrong, config)
