"""A kernel as a JAX op: one call that jit, grad, vmap and shard_map can pass through without looking inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

type Arrays = Callable[..., Any]


MOST_PROGRAMS = 65_535
"""Of a CUDA grid, along its second and its third axis."""


def opaque(launch: Arrays, reference: Arrays, *, shared: tuple[int, ...]) -> Arrays:
    """`launch`, differentiated as `reference` and batched by giving it more rows.

    Args:
      launch: arrays to arrays; every argument but the shared ones has leading axes of rows.
      reference: computes the same in jax.numpy. Its derivative is the op's, in reverse mode and to any order.
      shared: the positions of arguments that all rows share, such as a norm's weight.
    """

    def run(*arrays: jax.Array) -> Any:
        return _varying_as_in(reference, arrays, launch(*arrays))

    @jax.custom_batching.custom_vmap
    def batched(*arrays: jax.Array) -> Any:
        return run(*arrays)

    @batched.def_vmap
    def _rule(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> Any:
        if any(in_batched[i] for i in shared):
            return _another_axis(run, 1)(axis_size, in_batched, *arrays)
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
    return differentiable


def _another_axis(run: Arrays, programs: int) -> Callable[..., tuple[Any, Any]]:
    """The batching rule of a `run` whose rows do not share what they usually do.

    Under vmap Pallas makes the batch one more axis of the kernel's grid. `programs` is the size of such axes so far.
    """

    def rule(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        mapped = jax.vmap(run, [0 if yes else None for yes in in_batched])
        if axis_size == 0:  # no kernel takes a grid of none
            types = jax.eval_shape(mapped, *arrays)
            result = _varying_as(types, jax.tree.map(lambda type_: jnp.zeros(type_.shape, type_.dtype), types))
        elif programs * axis_size > MOST_PROGRAMS:

            def one(batched: list[jax.Array]) -> Any:
                rest = iter(batched)
                return again(run, programs)(
                    *(next(rest) if yes else array for yes, array in zip(in_batched, arrays, strict=True))
                )

            batches = [array for yes, array in zip(in_batched, arrays, strict=True) if yes]
            result = lax.map(one, batches, batch_size=MOST_PROGRAMS // programs)
        else:
            result = again(mapped, programs * axis_size)(*arrays)
        return result, jax.tree.map(lambda _: True, result)

    def again(run: Arrays, programs: int) -> Arrays:
        call = jax.custom_batching.custom_vmap(run)
        call.def_vmap(_another_axis(run, programs))
        return call

    return rule


def _varying_as_in(reference: Arrays, arrays: tuple[jax.Array, ...], results: Any) -> Any:
    """Under shard_map, `results` varying over the mesh axes over which the reference's do; Pallas does not say it."""
    if not any(_varying(jax.typeof(array)) for array in arrays):
        return results
    return _varying_as(jax.eval_shape(reference, *arrays), results)


def _varying_as(types: Any, values: Any) -> Any:
    def cast(type_: Any, value: jax.Array) -> jax.Array:
        return lax.pcast(value, tuple(_varying(type_) - _varying(jax.typeof(value))), to="varying")

    return jax.tree.map(cast, types, values)


def _varying(type_: Any) -> frozenset[Any]:
    """The mesh axes over which a value of this type varies, under shard_map."""
    axes: frozenset[Any] = getattr(type_.manual_axis_type, "varying", frozenset())
    return axes
