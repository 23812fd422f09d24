"""The ops of the fused layer stack, on JAX alone; imported as jaxfuse.kernels.

Each op takes two more arguments:

* `rounding`: "fused" computes in float32 and rounds once, at each output; "hf" rounds where transformers'
  eager Qwen3 does, for comparing bits with it.
* `implementation`: "mosaic" is a Pallas kernel for NVIDIA GPUs from Hopper on; "xla" is plain jax.numpy and runs
  anywhere. None picks, by device and shape and before anything is traced, the one that is faster for the op alone.
  One asked for by name runs or raises ImplementationError, a ValueError; it never becomes another.

Inputs are bfloat16, float16 or float32, and outputs have their dtype. Every op is differentiable in reverse
mode, to any order, and can be vmapped. An argument that does not fit raises TypeError (kind or dtype) or
ValueError (shape or value).

In "mosaic" a row's bits depend neither on the rows beside it nor on their number, and repeat. In "xla" the order of
a norm's sum is XLA's choice, which may follow from the number of rows: a row then differs by float32 roundings from
the same row among others.
"""

# No __version__: where that package is not installed, transformers would take this folder for it.
if __name__ == "kernels":
    # Python that was started in a clone finds this folder when transformers asks for Hugging Face's package kernels.
    from .namesake import give_way

    give_way()
else:
    from .dispatch import Implementation, ImplementationError, check_implementation, has_mosaic, pick
    from .ops import fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
    from .reference import Rounding, round_to

    __all__ = [
        "Implementation",
        "ImplementationError",
        "Rounding",
        "check_implementation",
        "fused_add_rms_norm",
        "has_mosaic",
        "pick",
        "rms_norm",
        "rotary_embedding",
        "round_to",
        "silu_and_mul",
    ]
