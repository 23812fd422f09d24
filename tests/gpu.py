"""What the GPU tests share: the models, and which implementations the GPU has."""

from pathlib import Path

import jax
import pytest

import jaxfuse
from jaxfuse.kernels import Implementation, has_mosaic
from jaxfuse.sizes import SIZES

MOSAIC = jax.default_backend() == "gpu" and has_mosaic()
IMPLEMENTATIONS: list[Implementation] = ["xla", "mosaic"] if MOSAIC else ["xla"]
needs_mosaic = pytest.mark.skipif(not MOSAIC, reason="needs an NVIDIA GPU of compute capability 9.0 or more")

SHIPPED = Path(jaxfuse.__file__).parent / "checkpoint"
QWEN3_06B = SIZES["0.6B"]
