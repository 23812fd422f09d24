"""The configuration of a Qwen3 model, read from a Hugging Face config.json."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxfuse.errors import ConfigError
from jaxfuse.fields import Fields, read_json_object
from jaxfuse.hub import resolve
from jaxfuse.rope import RopeParameters

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """The shape of a dense Qwen3 model; names as in Hugging Face's config.json, defaults as in transformers.

    `dtype` is the checkpoint's ("bfloat16", "float16", "float32", or None when the file does not say).
    `eos_token_ids` is the union of those in config.json and generation_config.json.
    """

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope: RopeParameters = RopeParameters()
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: str | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}; correct config.json"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, at least 2, for RoPE; got {self.head_dim}; correct config.json")
        if self.max_position_embeddings > 2**24:
            raise ConfigError(
                f"max_position_embeddings must be at most {2**24}, beyond which RoPE's float32 skips positions, got "
                f"{self.max_position_embeddings}; correct config.json"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Qwen3Config":
        """Reads the object of a config.json, in the spelling of transformers 4 or 5.

        Raises:
            ConfigError: when a value is missing, mistyped, or asks for something that is not implemented.
        """
        fields = Fields(data, "config.json")
        _refuse_unsupported(fields)
        heads = fields.integer("num_attention_heads", cls.num_attention_heads)
        hidden_size = fields.integer("hidden_size", cls.hidden_size)
        # An explicit null means "derive it", which is not the same as a missing key.
        kv_default = heads if "num_key_value_heads" in data else cls.num_key_value_heads
        head_dim_default = hidden_size // heads if "head_dim" in data else cls.head_dim
        return cls(
            vocab_size=fields.integer("vocab_size", cls.vocab_size),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", cls.intermediate_size),
            num_hidden_layers=fields.integer("num_hidden_layers", cls.num_hidden_layers),
            num_attention_heads=heads,
            num_key_value_heads=fields.integer("num_key_value_heads", kv_default),
            head_dim=fields.integer("head_dim", head_dim_default),
            max_position_embeddings=fields.integer("max_position_embeddings", cls.max_position_embeddings),
            rms_norm_eps=fields.number("rms_norm_eps", cls.rms_norm_eps, above=0.0),
            rope=RopeParameters.from_config(data),
            attention_bias=fields.boolean("attention_bias", False),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            initializer_range=fields.number("initializer_range", cls.initializer_range, at_least=0.0),
            dtype=_dtype_name(data),
            bos_token_id=fields.token_id("bos_token_id"),
            pad_token_id=fields.token_id("pad_token_id"),
            eos_token_ids=fields.token_ids("eos_token_id"),
        )

    @classmethod
    def from_pretrained(cls, path_or_repo_id: str | os.PathLike[str]) -> "Qwen3Config":
        """Reads config.json, and the stop tokens of generation_config.json, from a folder or the hub.

        Raises:
            CheckpointError: when there is no such folder or repository.
            ConfigError: as `from_dict`.
        """
        folder = resolve(path_or_repo_id, weights=False)
        config = cls.from_dict(read_json_object(folder / "config.json"))
        generation_file = folder / "generation_config.json"
        if not generation_file.is_file():
            return config
        extra = Fields(read_json_object(generation_file), "generation_config.json").token_ids("eos_token_id")
        return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + extra)))

    def to_dict(self) -> dict[str, Any]:
        """The object of a config.json that transformers 4 and 5 read to the same model."""
        eos = self.eos_token_ids
        scaled = self.rope.rope_type != "default"
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.rope_theta,
            "rope_scaling": self.rope.to_dict() if scaled else None,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "use_cache": True,
            "use_sliding_window": False,
            "torch_dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        }


def _dtype_name(data: Mapping[str, Any]) -> str | None:
    value = data.get("torch_dtype") if data.get("dtype") is None else data["dtype"]
    if value is None:
        return None
    if value not in DTYPES:
        raise ConfigError(f"dtype in config.json must be one of {', '.join(DTYPES)}, got {value!r}")
    return value


def _refuse_unsupported(fields: Fields) -> None:
    """Refuses, by name, whatever would make another model than the one implemented here."""
    data = fields.data
    model_type = data.get("model_type")
    if model_type != "qwen3":
        raise ConfigError(f"model_type {model_type!r} is not implemented; jaxfuse runs 'qwen3' (dense Qwen3)")
    if data.get("quantization_config") is not None:
        raise ConfigError(
            "a quantized checkpoint (quantization_config) is not implemented; use the bfloat16 version of the model"
        )
    if data.get("is_causal", True) is not True:
        raise ConfigError("is_causal must be true: attention in both directions is not implemented")
    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not implemented; Qwen3 uses 'silu'")
    kinds = data.get("layer_types")
    if kinds is None:
        # As in transformers: without layer_types, layers from max_window_layers on use the window.
        sliding = fields.boolean("use_sliding_window", False) and data.get("sliding_window", 4096) is not None
        first = fields.count("max_window_layers", 28)
        if sliding and first < fields.integer("num_hidden_layers", Qwen3Config.num_hidden_layers):
            raise ConfigError(
                f"a sliding window (use_sliding_window, from layer {first}) is not implemented; jaxfuse runs models "
                "with full attention in every layer"
            )
    elif not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        other = kinds if not isinstance(kinds, list) else next(k for k in kinds if k != "full_attention")
        raise ConfigError(f"layer type {other!r} in layer_types is not implemented; jaxfuse has 'full_attention'")
