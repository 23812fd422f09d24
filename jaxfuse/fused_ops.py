"""The fused ops of a model: at which shapes it calls them, and what runs them."""

import jax

from jaxfuse.config import Qwen3Config
from jaxfuse.kernels import Implementation, pick
from jaxfuse.numerics import Numerics


def fused_ops(config: Qwen3Config, numerics: Numerics, *, rows: int = 1) -> dict[str, Implementation]:
    """The implementation of each fused op for so many tokens, on JAX's default device.

    "head_norm" is the `rms_norm` of q and k.

    Raises:
        ImplementationError: when the one that the model asks for by name cannot take the model's shapes.
    """

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, numerics.dtype)

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, k = array(rows, config.num_attention_heads, head_dim), array(rows, config.num_key_value_heads, head_dim)
    positions = jax.ShapeDtypeStruct((rows,), "int32")
    table = jax.ShapeDtypeStruct((config.max_position_embeddings, head_dim), "float32")
    calls: dict[str, tuple[str, *tuple[jax.ShapeDtypeStruct, ...]]] = {
        "rms_norm": ("rms_norm", array(rows, hidden), array(hidden)),
        "fused_add_rms_norm": ("fused_add_rms_norm", array(rows, hidden), array(rows, hidden), array(hidden)),
        "head_norm": ("rms_norm", q, array(head_dim)),
        "rotary_embedding": ("rotary_embedding", q, k, positions, table),
        "silu_and_mul": ("silu_and_mul", array(rows, 2 * inner)),
    }
    return {
        name: pick(op, numerics.implementation, numerics.rounding, *arrays) for name, (op, *arrays) in calls.items()
    }
