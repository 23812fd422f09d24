"""The dense Qwen3 models that are published, by their shapes (arXiv 2505.09388, table 1, and their config.json)."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxfuse.config import Qwen3Config
from jaxfuse.rope import RopeParameters


def _size(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope=RopeParameters(rope_theta=1e6),
        tie_word_embeddings=tied,
        dtype="bfloat16",
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    )


SIZES: Mapping[str, Qwen3Config] = MappingProxyType(
    {
        "0.6B": _size(1024, 3072, 28, 16, tied=True),
        "1.7B": _size(2048, 6144, 28, 16, tied=True),
        "4B": _size(2560, 9728, 36, 32, tied=True),
        "8B": _size(4096, 12288, 36, 32, tied=False),
        "14B": _size(5120, 17408, 40, 40, tied=False),
        "32B": _size(5120, 25600, 64, 64, tied=False),
    }
)
"""By name, "0.6B" to "32B"."""
