"""A kernel as a JAX op: one call that jit, grad, vmap and shard_map can pass through without looking inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

type Arrays = Callable[..., Any]


def opaque(launch: Arrays, reference: Arrays, *, shared: tuple[int, ...]) -> Arrays:
    """`launch`, differentiated as `reference` and batched by giving it more rows.

    Args:
      launch: arrays to arrays; every argument but the shared ones has leading axes of rows.
      reference: computes the same in jax.numpy. Its derivative is the op's, in reverse mode and to any order.
      shared: the positions of arguments that all rows share, such as a norm's weight.
    """

    @jax.custom_batching.custom_vmap
    def batched(*arrays: jax.Array) -> Any:
        return _varying_alike(launch(*arrays), arrays)

    @batched.def_vmap
    def _rule(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> Any:
        if any(in_batched[i] for i in shared):
            # Rows that do not share these: Pallas makes the batch an axis of the kernel's grid.
            run = jax.vmap(launch, [0 if yes else None for yes in in_batched])
            if axis_size == 0:  # no kernel takes a grid of none
                result = jax.tree.map(lambda r: jnp.zeros(r.shape, r.dtype), jax.eval_shape(run, *arrays))
            else:
                result = run(*arrays)
            result = _varying_alike(result, arrays)
        else:
            result = batched(
                *(
                    array if yes or i in shared else jnp.broadcast_to(array, (axis_size, *array.shape))
                    for i, (yes, array) in enumerate(zip(in_batched, arrays, strict=True))
                )
            )
        return result, jax.tree.map(lambda _: True, result)

    @jax.custom_vjp
    def differentiable(*arrays: jax.Array) -> Any:
        return batched(*arrays)

    def forward(*arrays: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        # The op itself, not the kernel: it is differentiated again for a second derivative.
        return differentiable(*arrays), arrays

    def backward(arrays: tuple[jax.Array, ...], cotangents: Any) -> Any:
        return jax.vjp(reference, *arrays)[1](cotangents)

    differentiable.defvjp(forward, backward)
    # All alike, so that every result and every gradient varies as the reference's does.
    return lambda *arrays: differentiable(*_varying_alike(arrays, arrays))


def _varying_alike(values: Any, arrays: tuple[jax.Array, ...]) -> Any:
    """Under shard_map, values that vary over the mesh axes that any of the arrays varies over.

    Pallas does not say so of a kernel's results. Elsewhere this does nothing.
    """

    def varying(array: jax.Array) -> frozenset[Any]:
        axes: frozenset[Any] = jax.typeof(array).manual_axis_type.varying
        return axes

    axes = frozenset[Any]().union(*map(varying, arrays))
    return jax.tree.map(lambda value: lax.pcast(value, tuple(axes - varying(value)), to="varying"), values)
