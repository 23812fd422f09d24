"""Derivatives pass through a kernel: reverse mode to any order, through loops and under jax.checkpoint.

Interpret mode stands for the kernel by a call back to Python, whose effect `jax.checkpoint` cannot differentiate, so
there a stand-in of jax.numpy takes the kernel's place, and the kernel itself is traced and lowered.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxfuse.kernels import reference
from jaxfuse.kernels.opaque import opaque
from op_inputs import OPS
from opaque_ops import (
    KERNEL,
    SHARED,
    WIDTH,
    Function,
    arguments,
    assert_close,
    both,
    curved,
    draw,
    each_op,
    floats,
    kernels,
    loss,
    lowered,
    mosaic,
    primitives,
)


@each_op
def test_gradients(op: str) -> None:
    """Reverse mode gives the reference's gradient, weight and table included; integers get float0."""
    values = arguments((3,))[op]
    every = tuple(range(len(values)))
    _, gradients = both(op, lambda run: jax.value_and_grad(loss(run), every, allow_int=True), *values)
    for value, gradient in zip(values, gradients, strict=True):
        integer = jnp.issubdtype(value.dtype, jnp.integer)
        assert gradient.dtype == (jax.dtypes.float0 if integer else value.dtype)


@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm"])
def test_gradients_by_another_eps(op: str) -> None:
    """The derivative is that of the caller's eps, which is not the default and most of the mean square here."""
    values = tuple(0.1 * value for value in arguments((3,))[op])
    both(op, lambda run: jax.value_and_grad(loss(partial(run, eps=0.1)), floats(values)), *values)


@each_op
def test_narrow_gradients(op: str) -> None:
    """In 16 bits too, in each argument's own dtype; a value that rounds the other way moves them by an ulp or two."""
    values = arguments((3,), jnp.bfloat16)[op]
    ulps = round(2 * float(jnp.finfo(jnp.bfloat16).eps) * 2**23)
    gradients = both(op, lambda run: jax.grad(loss(run), floats(values)), *values, ulps=ulps)
    assert [g.dtype for g in gradients] == [values[i].dtype for i in floats(values)]


@each_op
def test_second_derivatives(op: str) -> None:
    """Reverse over reverse gives the reference's: the forward rule calls the op, which has a derivative."""
    values = arguments((2,))[op]
    both(op, lambda run: curved(run, floats(values)), *values)


def test_third_derivatives() -> None:
    """A third reverse gives the reference's."""
    values = arguments((1,))["rms_norm"]
    both("rms_norm", lambda run: jax.grad(loss(curved(run, (0, 1))), (0, 1)), *values, ulps=32)


@each_op
def test_forward_mode_raises(op: str) -> None:
    """Forward mode raises and says why: a custom_vjp has a reverse rule alone."""
    x, *others = arguments((2,))[op]
    run = mosaic(op)
    for forward in (lambda x: jax.jvp(lambda x: run(x, *others), (x,), (x,)), jax.jacfwd(lambda x: run(x, *others))):
        with pytest.raises(TypeError, match="forward-mode"):
            lowered(forward, x)


# Loops and rematerialization.


def test_grad_through_scan() -> None:
    """Backward through a loop of kernels."""

    def layers(run: Function) -> Function:
        return lambda x, weights: loss(lambda x: jax.lax.scan(lambda c, w: (run(c, w), None), x, weights)[0])(x)

    x, weights = draw(1, 2, WIDTH), draw(2, 3, WIDTH)
    both("rms_norm", lambda run: jax.value_and_grad(layers(run), (0, 1)), x, weights)


def stand_in(op: str) -> Function:
    """The op made opaque as its kernel is, with jax.numpy in the kernel's place."""
    plain: Function = {
        "rms_norm": partial(reference.rms_norm, eps=1e-6, rounding="fused"),
        "fused_add_rms_norm": partial(reference.fused_add_rms_norm, eps=1e-6, rounding="fused"),
        "silu_and_mul": partial(reference.silu_and_mul, rounding="fused"),
        "rotary_embedding": partial(reference.rotary_embedding, rounding="fused"),
    }[op]
    place = SHARED[op]
    return opaque(plain, plain, shared=() if place is None else (place,))


@each_op
def test_checkpoint(op: str) -> None:
    """Under jax.checkpoint the gradient is the same, and the backward pass runs the kernel a second time.

    The values are the stand-in's: interpret mode does not go through jax.checkpoint.
    """
    values = arguments((2,))[op]
    by = floats(values)
    plain = partial(OPS[op], implementation="xla")
    found = jax.jit(jax.value_and_grad(jax.checkpoint(loss(stand_in(op))), by))(*values)
    assert_close(found, jax.jit(jax.value_and_grad(loss(plain), by))(*values))

    def kept(run: Function) -> Function:
        return jax.value_and_grad(run, by)

    assert primitives(kept(loss(mosaic(op))), *values)[KERNEL] == 1
    again = kept(jax.checkpoint(loss(mosaic(op))))
    assert primitives(again, *values)[KERNEL] == 2
    assert len(set(kernels(lowered(again, *values)))) == 1
