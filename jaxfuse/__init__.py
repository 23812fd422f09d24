"""jaxfuse: the fused layer stack of an LLM engine in JAX, and a Flax NNX Qwen3 built on it."""

import importlib
from importlib.metadata import version
from types import ModuleType

from jaxfuse.cache import KVCache
from jaxfuse.config import Qwen3Config
from jaxfuse.errors import CheckpointError, ConfigError, InputError, JaxfuseError
from jaxfuse.generate import Generation, generate, stream
from jaxfuse.model import Qwen3
from jaxfuse.rope import RopeParameters
from jaxfuse.sampling import Sampling

__version__ = version("jaxfuse")

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Generation",
    "InputError",
    "JaxfuseError",
    "KVCache",
    "Qwen3",
    "Qwen3Config",
    "RopeParameters",
    "Sampling",
    "generate",
    "stream",
]


def __getattr__(name: str) -> ModuleType:
    """`jaxfuse.parity`, which needs PyTorch, is imported at its first use."""
    if name == "parity":
        return importlib.import_module("jaxfuse.parity")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
