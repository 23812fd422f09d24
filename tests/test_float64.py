"""jaxfuse and transformers in float32 against a Qwen3 in float64 that owes nothing to either.

A token's error is the relative L2 distance of its values. The contract: at each step, jaxfuse's error over all tokens
is at most three times torch's own.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jaxfuse
import tiny
from jaxfuse.parity import float64
from jaxfuse.parity.steps import names
from jaxfuse.parity.taps import JaxSide, to_torch
from jaxfuse.parity.torch_side import TorchSide, pinned
from jaxfuse.parity.yardstick import FLOAT32_STEP, root_mean_square, token_errors
from qwen3_float64 import Model64, load

SHIPPED = Path(jaxfuse.__file__).parent / "checkpoint"
UNIT = 2.0**-24
TORCHS_OWN = 5e-6
"""What float32 itself may do to a value over all steps; measured at most 2.2e-6 (yarn_attention_factor)."""


@pytest.fixture(scope="module", params=[*tiny.VARIANTS, "shipped"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each kind."""
    if request.param == "shipped":
        return SHIPPED
    return tiny.save(tiny.torch_model(request.param), tmp_path_factory.mktemp(request.param))


def draw(model: Model64, *shape: int) -> np.ndarray:
    """Random tokens."""
    return np.random.default_rng(0).integers(0, model.config["vocab_size"], shape, np.int32)


def test_each_step_errs_at_most_three_times_as_much_as_torchs(folder: Path) -> None:
    """From the tokens on: an error that grows over the layers faster than torch's, or a step that is another."""
    exact = load(folder)
    tokens = draw(exact, 2, 160)
    truth = exact.steps(tokens)
    ours = JaxSide(jaxfuse.Qwen3.from_pretrained(folder, dtype="float32"))
    every = names(ours.model.config)
    given = ours.steps(tokens, tuple(every))
    with pinned():
        theirs = TorchSide(folder, torch.float32, "cpu").steps(torch.from_numpy(tokens).long())
    for name in every:
        true = torch.from_numpy(truth[name])
        mine, yours = (
            root_mean_square(token_errors(x.double().reshape(true.shape) - true, true))
            for x in (to_torch(given[name]), theirs[name])
        )
        assert yours < TORCHS_OWN, name
        assert mine <= max(FLOAT32_STEP * yours, UNIT), f"{name}: {mine:.3g}, torch {yours:.3g}"


def test_the_tools_own_float64_agrees(folder: Path) -> None:
    """The truth that the tool takes for a step, given transformers' inputs, is this model's step for the same."""
    exact = load(folder)
    tokens = draw(exact, 1, 24)
    # In float64 throughout, so that one step's output is the next one's input and nothing is rounded between.
    steps = {name: torch.from_numpy(value) for name, value in exact.steps(tokens).items()}
    side = TorchSide(folder, torch.float32, "cpu")
    for i in range(exact.config["num_hidden_layers"]):
        for head in ("q", "k"):
            steps[f"layers.{i}.{head}_norm"] = torch.zeros_like(steps[f"layers.{i}.{head}_rope"])
    with pinned():
        truth = float64.truth_of(side.model, torch.from_numpy(tokens).long(), steps)
    for name in names(jaxfuse.Qwen3Config.from_pretrained(folder)):
        true = steps[name]
        error = float(token_errors(truth[name].reshape(true.shape) - true, true).max())
        # RoPE's frequencies are transformers' float32 ones there: up to 24 positions of a rounding each.
        assert error < (24 * UNIT if name.endswith("_rope") else 1e-13), name


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"truncate": False},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"mscale": 1.2, "mscale_all_dim": 0.8},
        {"factor": 40.0},
    ],
    ids=str,
)
def test_yarn_over_a_long_prompt(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each parameter of YaRN, beyond the original context: both sides near the truth, so the truth reads it."""
    folder = tiny.save(tiny.torch_model("tied", num_hidden_layers=1, rope_parameters={**YARN, **options}), tmp_path)
    exact = load(folder)
    tokens = draw(exact, 1, 520)
    true = torch.from_numpy(exact.steps(tokens)["lm_head"])
    ours = JaxSide(jaxfuse.Qwen3.from_pretrained(folder, dtype="float32")).logits(tokens)
    with pinned():
        theirs = TorchSide(folder, torch.float32, "cpu").logits(torch.from_numpy(tokens).long())
    mine, yours = (root_mean_square(token_errors(x.double() - true, true)) for x in (to_torch(ours), theirs))
    assert yours < TORCHS_OWN
    assert mine <= FLOAT32_STEP * yours


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other values in config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text("utf-8"))
    (target / "config.json").write_text(json.dumps(config | changes), "utf-8")
    return target


def transposed(model: Model64) -> None:
    """A square weight."""
    model.weights["model.layers.1.self_attn.o_proj.weight"] = model.weights["model.layers.1.self_attn.o_proj.weight"].T


def swapped(model: Model64) -> None:
    """k's rows for v's."""
    at = "model.layers.0.self_attn."
    k, v = f"{at}k_proj.weight", f"{at}v_proj.weight"
    model.weights[k], model.weights[v] = model.weights[v], model.weights[k]


@pytest.mark.parametrize("change", [{"rope_theta": 1.1e4, "rope_parameters": None}, {"rms_norm_eps": 1e-5}])
def test_another_configuration_shows(tmp_path: Path, change: dict[str, Any]) -> None:
    """A truth that does not read a value of its configuration."""
    tokens = draw(load(SHIPPED), 1, 64)
    logits, other = (load(f).steps(tokens)["lm_head"] for f in (SHIPPED, changed(SHIPPED, tmp_path / "m", **change)))
    assert np.linalg.norm(logits - other) > 100 * TORCHS_OWN * np.linalg.norm(logits)


@pytest.mark.parametrize("fault", [transposed, swapped])
def test_another_weight_shows(tmp_path: Path, fault: Callable[[Model64], None]) -> None:
    """A truth that does not use a weight."""
    model = load(tiny.save(tiny.torch_model("square_heads"), tmp_path))
    tokens = draw(model, 1, 32)
    logits = model.steps(tokens)["lm_head"]
    fault(model)
    assert np.linalg.norm(logits - model.steps(tokens)["lm_head"]) > 0.01 * np.linalg.norm(logits)
