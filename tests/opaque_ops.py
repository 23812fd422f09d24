"""The ops on their Mosaic kernels, under JAX's transformations and beside "xla", and what their programs hold.

The Mosaic kernels run here in interpret mode, on the CPU; "xla" is what they are compared with.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from op_inputs import OPS

WIDTH, POSITIONS = 128, 10
KERNEL = "mpmd_map"  # the primitive that plgpu.kernel binds
CALLS = {"jit", "custom_vjp_call", "custom_vmap_call"}


Function = Callable[..., Any]
interpreted = plgpu.force_gpu_interpret_mode


def draw(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Normal values."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def places(*shape: int) -> jax.Array:
    """Positions in the table, int32."""
    return jnp.asarray(np.random.default_rng(0).integers(0, POSITIONS, shape).astype(np.int32))


def arguments(leading: tuple[int, ...], dtype: Any = jnp.float32) -> dict[str, tuple[jax.Array, ...]]:
    """Those of each op, for rows of a leading shape."""
    rows = partial(draw, dtype=dtype)
    return {
        "rms_norm": (rows(1, *leading, WIDTH), rows(2, WIDTH)),
        "fused_add_rms_norm": (rows(1, *leading, WIDTH), rows(2, *leading, WIDTH), rows(3, WIDTH)),
        "silu_and_mul": (rows(1, *leading, 2 * WIDTH),),
        "rotary_embedding": (
            rows(1, *leading, 2, WIDTH),
            rows(2, *leading, 1, WIDTH),
            places(*leading),
            draw(3, POSITIONS, WIDTH),
        ),
    }


SHARED = {"rms_norm": 1, "fused_add_rms_norm": 2, "silu_and_mul": None, "rotary_embedding": 3}
each_op = pytest.mark.parametrize("op", OPS)


def mosaic(op: str) -> Function:
    """The op on its kernel."""
    return partial(OPS[op], implementation="mosaic")


def floats(values: tuple[jax.Array, ...]) -> tuple[int, ...]:
    """The places of the arguments to differentiate by."""
    return tuple(i for i, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.floating))


def loss(run: Function) -> Function:
    """One number of all outputs, whose second and third derivatives are not zero."""

    def total(*values: jax.Array) -> jax.Array:
        parts = [jnp.sum(jnp.sin(part.astype(jnp.float32))) for part in jax.tree.leaves(run(*values))]
        return jax.tree.reduce(jnp.add, parts)

    return total


def curved(run: Function, by: tuple[int, ...]) -> Function:
    """Reverse over reverse: the gradient of one number of the gradient."""
    return jax.grad(loss(jax.grad(loss(run), by)), by)


def assert_close(ours: Any, expected: Any, ulps: int = 8) -> None:
    """Equal shapes and dtypes; values to a few roundings of the largest (a sum in another order)."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.size and one.dtype != jax.dtypes.float0:
            one, other = (np.asarray(value).astype(np.float64) for value in (one, other))
            assert np.abs(other).max() > 0
            np.testing.assert_allclose(one, other, rtol=0, atol=ulps * 2.0**-23 * np.abs(other).max())


def assert_equal(ours: Any, expected: Any) -> None:
    """The same bits."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def both(op: str, transform: Callable[[Function], Function], *values: Any, ulps: int = 8) -> Any:
    """What a transformed op gives on its kernel, after comparing it with "xla"."""
    with interpreted():
        ours = jax.block_until_ready(jax.jit(transform(mosaic(op)))(*values))
    assert_close(ours, jax.jit(transform(partial(OPS[op], implementation="xla")))(*values), ulps)
    return ours


def equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a jaxpr and of what it calls, but not those inside a kernel."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != KERNEL:
            for inner in jax.tree.leaves(list(equation.params.values())):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def primitives(function: Function, *values: Any) -> Counter[str]:
    """How often each primitive is in the function's jaxpr."""
    return Counter(equation.primitive.name for equation in equations(jax.make_jaxpr(function)(*values)))


def lowered(function: Function, *values: Any) -> str:
    """The StableHLO for an NVIDIA GPU, which need not be here."""
    return str(jax.jit(function).trace(*values).lower(lowering_platforms=("cuda",)).as_text())


def kernels(text: str) -> list[str]:
    """The hash of the kernel of each call of one."""
    found = re.findall(r'@mosaic_gpu\w*\(.*?kernel_hash = "([^"]*)"', text)
    assert len(found) == len(re.findall(r"custom_call @mosaic_gpu", text))
    return found
