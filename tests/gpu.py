"""What the GPU tests share: the models, and which implementations the GPU has."""

from pathlib import Path

import jax
import pytest

import jaxfuse
from jaxfuse import Qwen3Config
from jaxfuse.kernels import Implementation, has_mosaic

MOSAIC = jax.default_backend() == "gpu" and has_mosaic()
IMPLEMENTATIONS: list[Implementation] = ["xla", "mosaic"] if MOSAIC else ["xla"]
needs_mosaic = pytest.mark.skipif(not MOSAIC, reason="needs an NVIDIA GPU of compute capability 9.0 or more")

SHIPPED = Path(jaxfuse.__file__).parent / "checkpoint"
QWEN3_06B = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
