"""Rotary position embedding: its parameters, and the table of cosines and sines that the kernels read."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from jaxfuse.errors import ConfigError
from jaxfuse.fields import Fields

_SCALED_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
# Files written by older transformers carry these beside the ones above, whatever the type.
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """How positions turn into angles; the names are those of Hugging Face's `rope_parameters`.

    `rope_type` is "default", "linear" or "yarn" (YaRN, arXiv 2309.00071). The fields after `rope_theta` belong
    to the scaled types; those of another type keep their defaults.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        keys = _SCALED_KEYS.get(self.rope_type)
        if keys is None:
            known = ", ".join(sorted(_SCALED_KEYS))
            raise ConfigError(f"RoPE type {self.rope_type!r} is not implemented; jaxfuse has {known}")
        if not 1 < self.rope_theta < math.inf:
            raise ConfigError(f"rope_theta must be a finite number above 1, got {self.rope_theta}")
        given = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default}
        foreign = sorted(given - keys - _COMMON_KEYS)
        if foreign:
            raise ConfigError(f"RoPE type {self.rope_type!r} takes no {', '.join(foreign)}; leave it out")
        if "factor" in keys and (self.factor is None or not 1 <= self.factor < math.inf):
            raise ConfigError(f"RoPE type {self.rope_type!r} needs a factor of at least 1, got {self.factor}")
        if self.rope_type == "yarn" and not self.original_max_position_embeddings:
            raise ConfigError("RoPE type 'yarn' needs original_max_position_embeddings, got none; give it")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RopeParameters":
        """Reads a config.json's RoPE, in the spelling of transformers 4 or 5.

        Transformers 4 writes `rope_theta` at the top and `rope_scaling`; transformers 5 one `rope_parameters`.
        A value inside the group wins over one at the top, as in transformers.

        Raises:
            ConfigError: for a RoPE type that is not implemented, a missing or mistyped value, or an unknown key.
        """
        group = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(group, Mapping):
            raise ConfigError(f"rope_parameters must be an object, got {group!r}; write it as transformers does")
        fields = Fields(group, "config.json's RoPE parameters")
        rope_type = group.get("rope_type", group.get("type", "default"))
        if not isinstance(rope_type, str) or rope_type not in _SCALED_KEYS:
            raise ConfigError(
                f"RoPE type {rope_type!r} is not implemented; jaxfuse has {', '.join(sorted(_SCALED_KEYS))}"
            )
        unknown = sorted(set(group) - _SCALED_KEYS[rope_type] - _COMMON_KEYS)
        if unknown:
            raise ConfigError(
                f"RoPE type {rope_type!r} takes no {', '.join(map(repr, unknown))}; remove it from config.json "
                "if the model does not use it"
            )
        partial = group.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"partial_rotary_factor must be 1 for Qwen3, got {partial!r}")
        top = Fields(config, "config.json")
        theta = fields.number("rope_theta", top.number("rope_theta", 10000.0, above=1.0), above=1.0)
        if rope_type == "default":
            return cls(rope_theta=theta)
        factor = fields.number("factor", at_least=1.0)
        if rope_type == "linear":
            return cls("linear", theta, factor)
        # As in transformers: the top-level key wins; without either, the model's own maximum is taken.
        original = top.integer("original_max_position_embeddings", 0) or fields.integer(
            "original_max_position_embeddings", top.integer("max_position_embeddings", 32768)
        )
        return cls(
            rope_type="yarn",
            rope_theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=fields.optional_number("attention_factor"),
            beta_fast=fields.optional_number("beta_fast") or 32.0,
            beta_slow=fields.optional_number("beta_slow") or 1.0,
            mscale=fields.optional_number("mscale"),
            mscale_all_dim=fields.optional_number("mscale_all_dim"),
            truncate=fields.boolean("truncate", True),
        )

    def to_dict(self) -> dict[str, Any]:
        """The `rope_parameters` object of a config.json."""
        values: dict[str, Any] = {"rope_type": self.rope_type, "rope_theta": self.rope_theta}
        names = sorted(_SCALED_KEYS[self.rope_type])
        values.update({name: getattr(self, name) for name in names if getattr(self, name) is not None})
        return values


def inv_freq(rope: RopeParameters, head_dim: int) -> tuple[np.ndarray, float]:
    """The angle per position of each pair of channels, and the factor on cosine and sine.

    Computed on the host in the rounding order of PyTorch (float64 power, rounded to float32, float32
    reciprocal), since a traced power differs in a quarter of the values.

    Returns:
        `[head_dim / 2]` float32, in radians per position, and the attention factor.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(rope.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    extrapolated = np.float32(1) / wavelengths
    if rope.rope_type == "default":
        return extrapolated, 1.0
    factor = cast(float, rope.factor)  # as every scaled type has
    if rope.rope_type == "linear":
        return extrapolated / np.float32(factor), 1.0
    interpolated = np.float32(1) / (np.float32(factor) * wavelengths)
    keep = np.float32(1) - _yarn_ramp(rope, head_dim)
    return interpolated * (np.float32(1) - keep) + extrapolated * keep, _yarn_attention_factor(rope, factor)


def _yarn_ramp(rope: RopeParameters, head_dim: int) -> np.ndarray:
    """YaRN's ramp (arXiv 2309.00071, section 3.2): 0 where a channel turns often, 1 where it turns seldom."""
    context = cast(int, rope.original_max_position_embeddings)  # as yarn has

    def channel(turns: float) -> float:
        """The channel pair that makes `turns` full turns over the original context."""
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, np.float32(0), np.float32(1))


def _yarn_attention_factor(rope: RopeParameters, factor: float) -> float:
    """The temperature of YaRN (section 3.3), as a factor on cosine and sine; an explicit one is honored."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def cos_sin_table(rope: RopeParameters, head_dim: int, max_position: int) -> np.ndarray:
    """The table that `rotary_embedding` reads.

    The angle is the float32 product of position and `inv_freq`, as in transformers; its cosine and sine are
    taken in float64 and rounded once.

    Returns:
        `[max_position, head_dim]` float32: cosines of the `head_dim / 2` angles, then their sines.
    """
    frequencies, factor = inv_freq(rope, head_dim)
    table = np.empty((max_position, head_dim), np.float32)
    half = head_dim // 2
    for start in range(0, max_position, 65536):  # bounds the float64 scratch of a million positions
        positions = np.arange(start, min(start + 65536, max_position), dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        table[start : start + len(positions), :half] = np.cos(angles) * factor
        table[start : start + len(positions), half:] = np.sin(angles) * factor
    return table
