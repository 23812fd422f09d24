"""How a model computes: its dtype, its rounding, and the implementation of its fused ops."""

import dataclasses
from typing import TypedDict

import jax
import jax.numpy as jnp

from jaxfuse.kernels import Implementation, Rounding, round_to


class OpArguments(TypedDict):
    """The keyword arguments that every fused op takes."""

    rounding: Rounding
    implementation: Implementation | None


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Shared by all layers of a model. `dtype` is that of weights and activations."""

    dtype: jnp.dtype
    rounding: Rounding = "fused"
    implementation: Implementation | None = None

    @property
    def op(self) -> OpArguments:
        """What a fused op is called with."""
        return {"rounding": self.rounding, "implementation": self.implementation}

    def round(self, x: jax.Array) -> jax.Array:
        """A float32 array in the model's dtype."""
        return round_to(x, self.dtype, self.rounding)


def precision_of(dtype: jax.typing.DTypeLike) -> jax.lax.Precision:
    """Float32 means float32: a GPU would otherwise multiply float32 matrices in TF32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT
