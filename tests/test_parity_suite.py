"""`jaxfuse.parity.compare` over a table of configurations: a new feature of the loader is covered by adding a row.

Each is a small random checkpoint made by transformers, or the trained one that ships. Of the published sizes the ratios
are kept: query heads to key-value heads, intermediate to hidden width, heads that are not the hidden width, tied or
not; depth and width are not.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxfuse
import tiny
from jaxfuse.parity import compare
from jaxfuse.parity.steps import is_coarse, names
from jaxfuse.sizes import SIZES

SHIPPED = Path(jaxfuse.__file__).parent / "checkpoint"
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}


def published(name: str) -> dict[str, Any]:
    """A published size at a sixteenth of its width and heads of a quarter, two layers deep."""
    size = SIZES[name]
    return {
        "hidden_size": size.hidden_size // 16,
        "intermediate_size": size.intermediate_size // 16,
        "num_attention_heads": size.num_attention_heads // 4,
        "num_key_value_heads": size.num_key_value_heads // 4,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "tie_word_embeddings": size.tie_word_embeddings,
        "rms_norm_eps": size.rms_norm_eps,
        "rope_parameters": _ROPE,
    }


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **{f"Qwen3-{name}": published(name) for name in SIZES},
    **{name: {"num_hidden_layers": 2, **changes} for name, changes in tiny.VARIANTS.items() if name != "tied"},
    "one layer": {"num_hidden_layers": 1},
    "large eps": {"num_hidden_layers": 1, "rms_norm_eps": 1e-3},
    "small theta": {"num_hidden_layers": 1, "rope_parameters": {**_ROPE, "rope_theta": 100.0}},
    "odd sizes": {"num_hidden_layers": 2, "hidden_size": 72, "intermediate_size": 100, "vocab_size": 331},
}


# In float32 a fault shows best; in bfloat16 what rounds in its own way: tied, untied and biased.
IN_BFLOAT16 = ("Qwen3-0.6B", "Qwen3-32B", "attention_bias")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_contract_holds(name: str, tmp_path: Path) -> None:
    """Every step of a model, on weights that are rounded to bfloat16."""
    dtypes = ("float32", "bfloat16") if name in IN_BFLOAT16 else ("float32",)
    model = tiny.torch_model("tied", **CONFIGURATIONS[name])
    folder = tiny.save(model.bfloat16(), tmp_path)
    # Another length costs more programs, so one row has one.
    lengths = [48] * 8 + [21] * 2 * (name == "odd sizes")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, length) for length in lengths]
    report = compare(folder, prompts=prompts, dtypes=dtypes, new_tokens=8)
    assert report.passed, str(report)
    assert report.located == []

    # That it looked at all of it.
    config = jaxfuse.Qwen3Config.from_pretrained(folder)
    for dtype in dtypes:
        assert [record["step"] for record in report.layers if record["dtype"] == dtype] == names(config)
        ops = {record["op"] for record in report.ops if record["dtype"] == dtype}
        assert ops == {"rms_norm", "head_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul"}
        assert {record["what"] for record in report.self_consistency if record["dtype"] == dtype} >= {
            "decode against prefill",
            "padded batch against rows alone",
        }
        assert len([record for record in report.sensitivity if record["dtype"] == dtype]) == 3
    assert report.prompts == {"count": len(lengths), "tokens": sum(lengths), "enough": False, "step_by_step": 4 * 48}
    of_all = {record["tokens"] for record in report.layers if is_coarse(record["step"])}
    assert of_all == {sum(lengths) - len(lengths)}
    for record in report.sensitivity:
        assert record["relative"] is not None
        assert record["relative"] < {"float32": 1e-2, "bfloat16": 1e3}[record["dtype"]]
    float32 = next(record for record in report.sensitivity if record["fault"] == "attention scale")
    assert float32["relative"] < 1e-5


def test_the_shipped_checkpoint() -> None:
    """On text, with the tool's own prompts: the trained model is inside the contract."""
    report = compare(SHIPPED, new_tokens=32)
    assert report.passed, str(report)
    assert report.prompts == {"count": 64, "tokens": 8192, "enough": True, "step_by_step": 512}
    logits = {record["dtype"]: record for record in report.logits}
    assert logits["float32"]["jaxfuse"]["top1"] == 1.0
    assert logits["bfloat16"]["ratio_upper"] < 1.0
    # The figures are of something: a bfloat16 model does lose some places.
    assert 0.9 < logits["bfloat16"]["jaxfuse"]["top1"] < 1.0
    tokens = {record["dtype"]: record for record in report.tokens}
    assert tokens["float32"]["agreed"] == tokens["float32"]["of"] == 4 * 32
    assert tokens["float32"]["smallest_margin"] > 0
