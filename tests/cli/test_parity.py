"""`jaxfuse parity`: what it prints, its exit status, and what it refuses."""

import importlib.util
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from command import Run, assert_refused
from jaxfuse import Qwen3, weights

FEW = ("--num-prompts", 2, "--new-tokens", 4)


def test_tables_and_plot(run: Run, folder: Path, tmp_path: Path) -> None:
    """A model that is right: status 0, the verdict last on standard output, a picture."""
    picture = tmp_path / "errors.png"
    result = run("parity", "--model", folder, "--dtype", "float32", "--plot", picture, *FEW)
    assert result.status == 0, result
    assert result.err == f"jaxfuse: wrote {picture}\n"
    lines = result.out.splitlines()
    assert lines[0] == f"Parity of {folder}"
    assert lines[-1].startswith("parity holds: ")
    assert max(map(len, lines)) <= 110
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json(run: Run, folder: Path, tmp_path: Path) -> None:
    """One object, with the prompts of a file."""
    prompts = tmp_path / "prompts.txt"
    lines = ["the cat sat on the mat, " * 12, "", "  ", "the hat is on the cat; " * 14, "one that is not read"]
    prompts.write_text("\n".join(lines))
    options = ("--dtype", "bfloat16", "--prompts", prompts, "--json")
    result = run("parity", "--model", folder, *options, *FEW)
    assert result.err == "" or result.status == 1  # of so few prompts the contract may not hold
    data = result.json
    assert {"ops", "layers", "logits", "tokens", "self_consistency", "passed", "broken"} <= data.keys()
    assert data["prompts"]["count"] == 2
    assert data["passed"] == (data["broken"] == []) == (result.status == 0)
    assert {record["dtype"] for record in data["layers"]} == {"bfloat16"}
    torch_side = data["sides"]["torch"]
    assert torch_side["tf32"] is torch_side["hub_kernels"] is False
    assert torch_side["inv_freq"] == "float32"
    assert torch_side["attention"].startswith("sdpa")
    assert {"torch", "transformers", "device", "threads"} <= torch_side.keys()


def test_a_broken_contract(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 1, one line on standard error that names a line of the contract, the place in the report."""
    load = weights.load

    def faulty(*arguments: Any, **options: Any) -> Qwen3:
        model = load(*arguments, **options)
        up = model.layers[1].mlp.gate_up_proj.weight
        up.set_value(jnp.roll(up[...], up.shape[0] // 2, axis=0))
        return model

    monkeypatch.setattr(weights, "load", faulty)
    result = run("parity", "--model", folder, "--dtype", "float32", *FEW)
    assert result.status == 1
    assert result.err.startswith("jaxfuse: parity is broken: float32 ")
    assert result.err.count("\n") == 1
    assert "First seen in float32: layers.1.gate_up_proj, by its local error" in result.out
    last = [line for line in result.out.splitlines() if line.startswith("parity is broken: ")]
    assert len(last) == 1
    assert "BROKEN" in result.out
    assert "  float32 layers layers.1.gate_up_proj: error: " in result.out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--device", "cuda"), "PyTorch has no GPU"),
        (("--device", "tpu"), "--device"),
        (("--dtype", "int8"), "--dtype"),
        (("--implementation", "triton"), "triton"),
        (("--num-prompts", 0), "positive integer"),
        (("--new-tokens", 4096), "1024 positions"),
        (("--plot", "errors.txt"), "must end in one of"),
        (("--plot", "no/such/folder/errors.png"), "no folder"),
        (("--prompts", "/no/such/file"), "cannot read the prompts"),
        (("--prompts", "/dev/null"), "has no prompts"),
        (("--model", "/no/such/model"), "no folder"),
    ],
)
def test_refusals(run: Run, folder: Path, options: tuple[str, ...], part: str) -> None:
    """Bad input, before any work."""
    assert_refused(run("parity", "--model", folder, *options), part)


def test_prompts_that_do_not_fit(run: Run, folder: Path, bare: Path, tmp_path: Path) -> None:
    """A line of one token, a file that is no text, and text for a model without a tokenizer."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat sat on the mat\n")
    assert_refused(run("parity", "--model", folder, "--prompts", prompts), "at least 64 tokens")
    prompts.write_text("the cat\nx\n")
    assert_refused(run("parity", "--model", folder, "--prompts", prompts), "from 2 to 1024 tokens", "prompt 1")
    assert_refused(run("parity", "--model", bare, "--prompts", prompts), "no tokenizer.json")
    prompts.write_bytes(b"\xff\xfe")
    assert_refused(run("parity", "--model", folder, "--prompts", prompts), "cannot read the prompts")


@pytest.mark.parametrize(("missing", "options"), [("torch", ()), ("matplotlib", ("--plot", "errors.png"))])
def test_what_is_not_installed(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str, options: tuple[str, ...]
) -> None:
    """The base installation has neither."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    assert_refused(run("parity", "--model", folder, *options), "jaxfuse[parity]", missing.replace("torch", "PyTorch"))
