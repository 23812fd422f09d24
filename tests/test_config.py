"""Reading config.json: two spellings, transformers' defaults, and refusal by name of what is not implemented."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers import Qwen3ForCausalLM

from jaxfuse import CheckpointError, ConfigError, Qwen3, Qwen3Config, RopeParameters

# Qwen3-0.6B's, in the spelling of transformers 4, which wrote it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}

# hidden, intermediate, layers, heads, kv heads, tied, parameters (an embedding that is tied counted once).
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, True, 596_049_920),
    "1.7B": (2048, 6144, 28, 16, 8, True, 1_720_574_976),
    "4B": (2560, 9728, 36, 32, 8, True, 4_022_468_096),
    "8B": (4096, 12288, 36, 32, 8, False, 8_190_735_360),
    "14B": (5120, 17408, 40, 40, 8, False, 14_768_307_200),
    "32B": (5120, 25600, 64, 64, 8, False, 32_762_123_264),
}


def published(**changes: Any) -> dict[str, Any]:
    """A published config.json with changes; `...` removes a key."""
    return {name: value for name, value in (PUBLISHED | changes).items() if value is not ...}


def as_transformers_5(data: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as transformers 5 writes it."""
    moved = {"rope_scaling", "rope_theta", "torch_dtype"}
    group = {"rope_type": "default", **(data["rope_scaling"] or {}), "rope_theta": data["rope_theta"]}
    group.pop("type", None)
    return {k: v for k, v in data.items() if k not in moved} | {
        "rope_parameters": group,
        "dtype": data["torch_dtype"],
        "layer_types": ["full_attention"] * data["num_hidden_layers"],
    }


def write(folder: Path, data: Any, name: str = "config.json") -> Path:
    """Puts a JSON file into a folder, and gives the folder."""
    (folder / name).write_text(json.dumps(data), encoding="utf-8")
    return folder


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, which must be one line."""
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", **YARN, "attention_factor": 1.25}],
    ids=["default", "linear", "yarn"],
)
def test_both_spellings_are_one_configuration(scaling: dict[str, Any] | None) -> None:
    """A checkpoint means the same whether transformers 4 or 5 wrote its config.json."""
    old = published(rope_scaling=scaling)
    ours = Qwen3Config.from_dict(old)
    assert ours == Qwen3Config.from_dict(as_transformers_5(old))
    assert ours.rope.rope_theta == 1e6
    assert ours.rope.rope_type == ("default" if scaling is None else scaling["rope_type"])
    assert ours.dtype == "bfloat16"
    assert (ours.hidden_size, ours.num_key_value_heads, ours.eos_token_ids) == (1024, 8, (151645,))


def test_older_key_for_the_rope_type() -> None:
    """`type` in rope_scaling, which transformers 4 once wrote, names the RoPE type too."""
    data = published(rope_scaling={"type": "linear", "factor": 2.0})
    assert Qwen3Config.from_dict(data).rope == RopeParameters("linear", 1e6, 2.0)


def test_what_stands_in_two_places() -> None:
    """Where transformers looks in two places, the same one wins here."""
    grouped = {"rope_type": "default", "rope_theta": 5e5}
    both = published(rope_parameters=grouped, dtype="float16")
    ours, theirs = Qwen3Config.from_dict(both), transformers.Qwen3Config(**both)
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"] == 5e5
    assert (ours.dtype, theirs.dtype) == ("float16", torch.float16)
    # A null in the new spelling leaves the word to the old one.
    both = published(dtype=None)
    assert Qwen3Config.from_dict(both).dtype == "bfloat16"
    assert transformers.Qwen3Config(**both).dtype == torch.bfloat16


def test_absent_keys_take_transformers_defaults() -> None:
    """A config.json that says nothing but its type describes the model that transformers makes of it."""
    ours, theirs = Qwen3Config.from_dict({"model_type": "qwen3"}), transformers.Qwen3Config()
    same = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "attention_bias",
        "tie_word_embeddings",
        "initializer_range",
        "dtype",
        "bos_token_id",
        "pad_token_id",
    ]
    assert {name: getattr(ours, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert {"rope_type": ours.rope.rope_type, "rope_theta": ours.rope.rope_theta} == theirs.rope_parameters
    assert ours.eos_token_ids == ()
    assert Qwen3Config() == ours


def test_head_dim_absent_is_not_null() -> None:
    """Absent, head_dim is Qwen3's 128; null asks for hidden_size / heads, and kv heads for as many as heads."""
    assert Qwen3Config.from_dict(published(head_dim=...)).head_dim == 128
    assert Qwen3Config.from_dict(published(head_dim=None)).head_dim == 1024 // 16
    assert Qwen3Config.from_dict(published(num_key_value_heads=None)).num_key_value_heads == 16
    theirs = transformers.Qwen3Config(**published(num_key_value_heads=None))
    assert theirs.num_key_value_heads == 16


def test_stop_tokens_of_both_files(tmp_path: Path) -> None:
    """Stop tokens are those of config.json and of generation_config.json, each once."""
    write(tmp_path, published())
    assert Qwen3Config.from_pretrained(tmp_path).eos_token_ids == (151645,)
    write(tmp_path, {"eos_token_id": [151645, 151643]}, "generation_config.json")
    assert Qwen3Config.from_pretrained(tmp_path).eos_token_ids == (151645, 151643)
    write(tmp_path, {"eos_token_id": 7}, "generation_config.json")
    assert Qwen3Config.from_pretrained(str(tmp_path)).eos_token_ids == (151645, 7)
    write(tmp_path, published(eos_token_id=None))
    write(tmp_path, {}, "generation_config.json")
    assert Qwen3Config.from_pretrained(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 96, "attention_bias": True, "tie_word_embeddings": False, "torch_dtype": None},
        {"eos_token_id": [3, 5], "pad_token_id": 9, "bos_token_id": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {
            "rope_scaling": {
                "rope_type": "yarn",
                **YARN,
                "attention_factor": 1.3,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
                "truncate": False,
            }
        },
    ],
    ids=["published", "other", "stops", "linear", "yarn", "yarn_all"],
)
def test_round_trip(changes: dict[str, Any]) -> None:
    """What `to_dict` writes is read back to the same configuration, here and by transformers."""
    data = published(**changes)
    config = Qwen3Config.from_dict(data)
    written = json.loads(json.dumps(config.to_dict()))
    assert Qwen3Config.from_dict(written) == config
    theirs, original = transformers.Qwen3Config(**written), transformers.Qwen3Config(**data)
    for name in ("vocab_size", "hidden_size", "head_dim", "attention_bias", "tie_word_embeddings", "dtype"):
        assert getattr(theirs, name) == getattr(original, name)
    assert theirs.eos_token_id == original.eos_token_id
    assert (theirs.pad_token_id, theirs.bos_token_id) == (original.pad_token_id, original.bos_token_id)
    # Written out, a default is there where the file had none.
    assert original.rope_parameters.items() <= theirs.rope_parameters.items()
    assert set(theirs.layer_types) == {"full_attention"}


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    """The file that this transformers saves is read to the same configuration."""
    data = published(rope_scaling={"rope_type": "yarn", **YARN})
    transformers.Qwen3Config(**data).save_pretrained(tmp_path)
    assert Qwen3Config.from_pretrained(tmp_path) == Qwen3Config.from_dict(data)


SLIDING = {"use_sliding_window": True, "sliding_window": 4096}
KINDS = ["full_attention"] * 27 + ["sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3'"),
        ({"rope_scaling": {"type": "longrope", "factor": 8.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "nonsense"}}, "'nonsense'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "['yarn']"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "'beta_fast'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({**SLIDING, "max_window_layers": 27}, "use_sliding_window"),
        ({**SLIDING, "max_window_layers": 0}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": ..., "max_window_layers": 0}, "use_sliding_window"),
        ({**SLIDING, "num_hidden_layers": ..., "max_window_layers": ...}, "use_sliding_window"),
        ({**SLIDING, "layer_types": KINDS}, "'sliding_attention'"),
        ({"layer_types": ["linear_attention"] * 28}, "'linear_attention'"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"is_causal": False}, "is_causal"),
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": "qwen2"}, "'qwen2'"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe'"),
        ({"model_type": ...}, "model_type"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value).strip("'[]"),
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """A configuration that asks for another model is refused, and the message names what it asked for."""
    with pytest.raises(ConfigError) as error:
        Qwen3Config.from_dict(published(**changes))
    assert named in one_line(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {**SLIDING, "max_window_layers": 28},
        {**SLIDING, "max_window_layers": 40},
        {**SLIDING, "max_window_layers": 0, "layer_types": ["full_attention"] * 28},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_accepted(changes: dict[str, Any]) -> None:
    """Files name a window although every layer has full attention: transformers then gives none a window."""
    assert Qwen3Config.from_dict(published(**changes)) == Qwen3Config.from_dict(published())
    assert set(transformers.Qwen3Config(**published(**changes)).layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(({name: value}, name) for name in ("vocab_size", "hidden_size", "head_dim") for value in ("8", 8.0, -8, 0)),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": [16]}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 32}, "num_key_value_heads"),
        ({"head_dim": 65}, "head_dim"),
        ({"head_dim": None, "hidden_size": 8}, "head_dim"),
        ({"intermediate_size": {}}, "intermediate_size"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        *(({"rms_norm_eps": value}, "rms_norm_eps") for value in (0, -1e-6, "1e-6", True, float("nan"), 10**400)),
        ({"initializer_range": -0.1}, "initializer_range"),
        ({"initializer_range": float("inf")}, "initializer_range"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings"),
        ({"use_sliding_window": "false"}, "use_sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": "28"}, "max_window_layers"),
        ({"torch_dtype": 16}, "dtype"),
        ({"torch_dtype": ["bfloat16"]}, "dtype"),
        *(({"eos_token_id": value}, "eos_token_id") for value in ("151645", -1, [1, 2.0], [True], {"id": 1})),
        ({"bos_token_id": [1, 2]}, "bos_token_id"),
        ({"max_position_embeddings": 2**24 + 1}, "max_position_embeddings"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", **YARN}}, "rope_theta"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": -1.0}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": "no"}}, "truncate"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN}, "original_max_position_embeddings": 0}, "original_max"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_wrong_types_and_signs(changes: dict[str, Any], named: str) -> None:
    """A value of the wrong type or sign is one line that names its key, never a traceback from deep inside."""
    with pytest.raises(ConfigError) as error:
        Qwen3Config.from_dict(published(**changes))
    assert named in one_line(error)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"model_type": "qwen3", ', "JSON"),
        (b"", "JSON"),
        (b"[]", "object"),
        (b'"qwen3"', "object"),
        (b"null", "object"),
        ('{"model_type": "qwen3", "x": "é"}'.encode("latin-1"), "utf-8"),
        (b'{"vocab_size": ' + b"1" * 5000 + b"}", "JSON"),
        (b"[" * 200_000, "JSON"),
    ],
    ids=["truncated", "empty", "list", "string", "null", "latin-1", "digits", "nested"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_bad_json(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    """A damaged file is one line with the file's path and what is wrong with it."""
    write(tmp_path, published())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Qwen3Config.from_pretrained(tmp_path)
    message = one_line(error)
    assert str(tmp_path / name) in message
    assert named in message


def test_no_config(tmp_path: Path) -> None:
    """A folder without config.json is one line with the path that was looked for; so is a path to nothing."""
    with pytest.raises(ConfigError) as error:
        Qwen3Config.from_pretrained(tmp_path)
    assert str(tmp_path / "config.json") in one_line(error)
    with pytest.raises(CheckpointError) as missing:
        Qwen3Config.from_pretrained(tmp_path / "nowhere" / "else")
    assert "nowhere" in one_line(missing)


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(name: str) -> None:
    """Every published dense model builds abstractly, each with its right number of parameters."""
    hidden, inner, layers, heads, kv_heads, tied, expected = SHAPES[name]
    data = published(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )
    config = Qwen3Config.from_dict(data)
    model = nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0)))
    count = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    with torch.device("meta"):
        theirs = Qwen3ForCausalLM(transformers.Qwen3Config(**data))
    assert count == theirs.num_parameters() == expected
    assert all(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    logits = jax.eval_shape(lambda model, tokens: model(tokens), model, jax.ShapeDtypeStruct((2, 3), "int32"))
    assert (logits.shape, logits.dtype) == ((2, 3, 151936), "float32")
