"""RoPE's frequencies and tables are those of transformers, for each type that is implemented."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from jaxfuse import ConfigError, RopeParameters
from jaxfuse.rope import cos_sin_table, inv_freq

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
# config.json's RoPE, beside head_dim and max_position_embeddings.
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "default_theta": {},
    "linear": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "yarn": {"rope_parameters": YARN},
    "yarn_attention_factor": {"rope_parameters": {**YARN, "attention_factor": 1.3}},
    "yarn_attention_factor_0": {"rope_parameters": {**YARN, "attention_factor": 0.0}},
    "yarn_mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1}},
    "yarn_mscale_alone": {"rope_parameters": {**YARN, "mscale": 0.7}},
    "yarn_not_truncated": {"rope_parameters": {**YARN, "truncate": False}},
    "yarn_betas": {"rope_parameters": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0}},
    "yarn_betas_0": {"rope_parameters": {**YARN, "beta_fast": 0, "beta_slow": 0}},
    "yarn_factor_1": {"rope_parameters": {**YARN, "factor": 1.0}},
    "yarn_original_at_top": {"rope_parameters": YARN, "original_max_position_embeddings": 8192},
    "yarn_original_absent": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    "yarn_short": {"rope_parameters": {**YARN, "rope_theta": 1e4, "original_max_position_embeddings": 6}},
}


def both(case: str, head_dim: int = 128) -> tuple[RopeParameters, Qwen3RotaryEmbedding]:
    """One config.json, read here and by transformers."""
    data = {"model_type": "qwen3", "head_dim": head_dim, "max_position_embeddings": 40960, **CASES[case]}
    # transformers keeps, and fills, the group that it is given.
    theirs = {name: dict(value) if isinstance(value, dict) else value for name, value in data.items()}
    return RopeParameters.from_config(data), Qwen3RotaryEmbedding(transformers.Qwen3Config(**theirs))


def their_table(rotary: Qwen3RotaryEmbedding, positions: torch.Tensor) -> np.ndarray:
    """transformers' cosines, then sines, of each channel pair, `[positions, head_dim]` float32."""
    cos, sin = rotary(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    table: np.ndarray = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).numpy()
    return table


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 5e6])
def test_default_frequencies_have_torchs_bits(theta: float, head_dim: int) -> None:
    """They are torch's bits, and at most one in 64 is an ulp from what torch's vectorized power makes of it.

    torch rounds a power of one element correctly. Where it has AVX2 or AVX-512, it takes those of eight or more
    elements from SLEEF, which is allowed one ulp, and is off in one value of Qwen3's 64.
    """
    ours, factor = inv_freq(RopeParameters(rope_theta=theta), head_dim)
    assert (ours.dtype, ours.shape, factor) == (np.float32, (head_dim // 2,), 1.0)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    one_by_one = torch.cat([1.0 / (theta**exponent) for exponent in exponents.split(1)])
    np.testing.assert_array_equal(ours, one_by_one.numpy())

    theirs = Qwen3RotaryEmbedding(transformers.Qwen3Config(head_dim=head_dim, rope_theta=theta)).inv_freq.numpy()
    ulps = np.abs(ours.view(np.int32) - theirs.view(np.int32))
    assert ulps.max() <= 1
    assert ulps.sum() <= max(1, len(ours) // 64)


@pytest.mark.parametrize("case", CASES)
def test_frequencies(case: str) -> None:
    """Each type's frequencies are transformers', to the roundings of yarn's blend, and so is its factor."""
    rope, theirs = both(case)
    ours, factor = inv_freq(rope, 128)
    # Three float32 roundings on either side: the ramp's quotient, two products, a sum.
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=4 * 2.0**-23)
    np.testing.assert_allclose(factor, theirs.attention_scaling, rtol=1e-15)


@pytest.mark.parametrize("case", CASES)
def test_tables(case: str) -> None:
    """The tables equal transformers' to 1e-4, up to position 131,071, the ends of both pieces included."""
    rope, theirs = both(case)
    table = cos_sin_table(rope, 128, 131072)
    assert (table.shape, table.dtype) == ((131072, 128), np.float32)
    places = torch.cat([torch.arange(2048), torch.arange(2048, 131072, 31), torch.arange(65500, 65600)])
    places = torch.cat([places, torch.arange(131000, 131072)])
    assert np.abs(table[places.numpy()] - their_table(theirs, places)).max() <= 1e-4


def test_cases_differ() -> None:
    """The comparison can fail: no two types, and no two options of yarn, have the same table."""
    tables = {case: cos_sin_table(both(case)[0], 128, 4096)[1024:] for case in CASES}
    # An mscale needs mscale_all_dim, and a beta of 0 means its default.
    same = {"yarn_mscale_alone": "yarn", "yarn_betas_0": "yarn", "yarn_factor_1": "default"}
    for case, table in tables.items():
        for other in set(CASES) - {case}:
            equal = np.abs(table - tables[other]).max() <= 1e-4
            assert equal == (same.get(case, case) == same.get(other, other)), (case, other)


def test_table_of_a_million_positions() -> None:
    """Position 1,048,575, far beyond a piece of the table, still has transformers' angle."""
    rope, theirs = both("default", head_dim=32)
    table = cos_sin_table(rope, 32, 1_048_576)
    places = torch.cat([torch.arange(65530, 65550), torch.arange(1_048_500, 1_048_576)])
    assert np.abs(table[places.numpy()] - their_table(theirs, places)).max() <= 1e-4


def test_table_is_the_float64_truth_of_its_angles() -> None:
    """Cosine and sine are rounded once: they are the nearest float32 to those of the float32 angle."""
    rope, _ = both("default")
    frequencies, _ = inv_freq(rope, 128)
    places = np.array([0, 1, 1000, 40959])
    angles = (places[:, None].astype(np.float32) * frequencies).astype(np.float64)
    truth = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    np.testing.assert_array_equal(cos_sin_table(rope, 128, 40960)[places], truth)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 4096}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"rope_type": "default", "factor": 4.0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 16.0}, "beta_fast"),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, "llama3"),
        ({"rope_type": "Yarn", "factor": 8.0, "original_max_position_embeddings": 8192}, "Yarn"),
        ({"rope_theta": 1.0}, "rope_theta"),
    ],
)
def test_parameters_made_by_hand(fields: dict[str, Any], named: str) -> None:
    """RopeParameters of another type, or with too little or too much for theirs, are refused by name."""
    with pytest.raises(ConfigError, match=named):
        RopeParameters(**fields)
