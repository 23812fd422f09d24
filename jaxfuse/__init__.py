"""jaxfuse: the fused layer stack of an LLM engine in JAX, and a Flax NNX Qwen3 built on it."""

from importlib.metadata import version

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
