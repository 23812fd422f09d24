"""What a kernel as an op promises: JAX's transformations pass through it, and the program holds one opaque call.

The Mosaic kernels run here in interpret mode, on the CPU; "xla" is what they are compared with. Interpret mode
stands for the kernel by a call back to Python, whose effect `jax.checkpoint` cannot differentiate, so there a
stand-in of jax.numpy takes the kernel's place, and the kernel itself is traced and lowered.
"""

import dataclasses
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfuse
import tiny
from jaxfuse import Qwen3, Qwen3Config
from jaxfuse.generate import begin, decode, interned, prefill
from jaxfuse.kernels import fused_add_rms_norm, reference, rms_norm, rotary_embedding, silu_and_mul
from jaxfuse.kernels.opaque import opaque

CHECKPOINT = Path(jaxfuse.__file__).parent / "checkpoint"
WIDTH, POSITIONS = 128, 10
KERNEL = "mpmd_map"  # the primitive that plgpu.kernel binds
CALLS = {"jit", "custom_vjp_call", "custom_vmap_call"}
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]

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


OPS: dict[str, Function] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "rotary_embedding": rotary_embedding,
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


def operands(function: Function, *values: Any) -> list[tuple[int, ...]]:
    """The shapes that go into the function's kernels."""
    found = [equation for equation in equations(jax.make_jaxpr(function)(*values)) if equation.primitive.name == KERNEL]
    return [operand.aval.shape for equation in found for operand in equation.invars]


def lowered(function: Function, *values: Any) -> str:
    """The StableHLO for an NVIDIA GPU, which need not be here."""
    return str(jax.jit(function).trace(*values).lower(lowering_platforms=("cuda",)).as_text())


def kernels(text: str) -> list[str]:
    """The hash of the kernel of each call of one."""
    found = re.findall(r'@mosaic_gpu\w*\(.*?kernel_hash = "([^"]*)"', text)
    assert len(found) == len(re.findall(r"custom_call @mosaic_gpu", text))
    return found


# Derivatives.


@each_op
def test_gradients(op: str) -> None:
    """Reverse mode gives the reference's gradient, weight and table included; integers get float0."""
    values = arguments((3,))[op]
    every = tuple(range(len(values)))
    _, gradients = both(op, lambda run: jax.value_and_grad(loss(run), every, allow_int=True), *values)
    for value, gradient in zip(values, gradients, strict=True):
        integer = jnp.issubdtype(value.dtype, jnp.integer)
        assert gradient.dtype == (jax.dtypes.float0 if integer else value.dtype)


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


# Batches.


def batches(op: str, *sizes: int, shared: bool = False, weight_sizes: tuple[int, ...] = ()) -> tuple[jax.Array, ...]:
    """Arguments of [*sizes, 2] rows; with `shared` the weight or table has leading axes `weight_sizes` too."""
    values = list(arguments((*sizes, 2))[op])
    if shared:
        place = SHARED[op]
        assert place is not None
        values[place] = draw(7, *weight_sizes, *values[place].shape)
    return tuple(values)


def axes(op: str, rows: int | None, shared: int | None) -> tuple[int | None, ...]:
    """in_axes that give every argument of rows one axis, and the shared one another."""
    return tuple(shared if place == SHARED[op] else rows for place in range(len(arguments(())[op])))


@each_op
def test_vmap_over_rows(op: str) -> None:
    """With the weight shared vmap is more rows for one kernel, and a row has the bits that it has without vmap."""
    values = batches(op, 3)
    mapped = both(op, lambda run: jax.vmap(run, axes(op, 0, None)), *values)
    with interpreted():
        assert_equal(mapped, mosaic(op)(*values))
        alone = mosaic(op)(*(value if i == SHARED[op] else value[1] for i, value in enumerate(values)))
    assert_equal(jax.tree.map(lambda part: part[1], mapped), alone)
    batched = jax.vmap(mosaic(op), axes(op, 0, None))
    found = primitives(batched, *values)
    assert found[KERNEL] == 1
    assert set(found) <= {*CALLS, KERNEL, "reshape"}
    assert operands(batched, *values) == operands(mosaic(op), *values)


WITH_SHARED = [op for op in OPS if SHARED[op] is not None]


@pytest.mark.parametrize("op", WITH_SHARED)
@pytest.mark.parametrize("rows", [0, None], ids=["with_rows", "alone"])
def test_vmap_over_the_weight(op: str, rows: int | None) -> None:
    """A weight or table of its own for each row of the batch, and many for the same rows: still one kernel."""
    values = batches(op, *([3] if rows == 0 else []), shared=True, weight_sizes=(3,))
    both(op, lambda run: jax.vmap(run, axes(op, rows, 0)), *values)
    assert len(kernels(lowered(jax.vmap(mosaic(op), axes(op, rows, 0)), *values))) == 1


@pytest.mark.parametrize(
    ("outer", "inner"),
    [((0, None), (0, None)), ((None, 0), (0, None)), ((0, None), (None, 0)), ((None, 0), (None, 0)), ((0, 0), (0, 0))],
    ids=["rows_rows", "weight_rows", "rows_weight", "weight_weight", "both_both"],
)
def test_nested_vmap(outer: tuple[int | None, int | None], inner: tuple[int | None, int | None]) -> None:
    """Two axes, of the rows, of the weight or of both, each in turn."""
    x_sizes = [size for size, pair in ((3, outer), (2, inner)) if pair[0] == 0]
    weight_sizes = [size for size, pair in ((3, outer), (2, inner)) if pair[1] == 0]
    values = draw(1, *x_sizes, 2, WIDTH), draw(2, *weight_sizes, WIDTH)
    both("rms_norm", lambda run: jax.vmap(jax.vmap(run, inner), outer), *values)
    assert len(kernels(lowered(jax.vmap(jax.vmap(mosaic("rms_norm"), inner), outer), *values))) == 1


def test_vmap_over_other_axes() -> None:
    """in_axes and out_axes anywhere, the axis of the width behind them."""
    x, weight = draw(1, 3, WIDTH, 4), draw(2, WIDTH)
    both("rms_norm", lambda run: jax.vmap(run, (-1, None), -1), x, weight)
    both("rms_norm", lambda run: jax.vmap(run, (2, 1), 1), x, draw(2, WIDTH, 4))
    both("silu_and_mul", lambda run: jax.vmap(run, 1, 1), draw(1, 3, 4, 2 * WIDTH))
    q, k, table = draw(1, 3, 2, 4, WIDTH), draw(2, 3, 2, 1, WIDTH), draw(3, POSITIONS, WIDTH)
    both("rotary_embedding", lambda run: jax.vmap(run, (1, 1, None, None), 1), q, k, places(3), table)


def test_vmap_over_some_arguments() -> None:
    """What is not mapped is repeated: a residual, one token's keys, its position."""
    x, weight = draw(1, 3, 2, WIDTH), draw(2, WIDTH)
    both("fused_add_rms_norm", lambda run: jax.vmap(run, (0, None, None)), x, x[1], weight)
    both("fused_add_rms_norm", lambda run: jax.vmap(run, (None, 1, 0)), x[1], x.swapaxes(0, 1), draw(4, 3, WIDTH))
    q, k, table = draw(1, 3, 2, WIDTH), draw(2, 1, WIDTH), draw(3, POSITIONS, WIDTH)
    both("rotary_embedding", lambda run: jax.vmap(run, (0, None, None, None)), q, k, jnp.int32(3), table)
    both("rotary_embedding", lambda run: jax.vmap(run, (None, None, 0, None)), q[0], k, places(3), table)


@each_op
def test_vmap_of_none_and_one(op: str) -> None:
    """An axis of size 1, and of size 0, which runs no kernel; zero rows for several weights."""
    both(op, lambda run: jax.vmap(run, axes(op, 0, None)), *batches(op, 1))
    none = batches(op, 0)
    both(op, lambda run: jax.vmap(run, axes(op, 0, None)), *none)
    assert primitives(jax.vmap(mosaic(op), axes(op, 0, None)), *none)[KERNEL] == 0
    place = SHARED[op]
    if place is not None:
        both(op, lambda run: jax.vmap(run, axes(op, 0, 0)), *batches(op, 1, shared=True, weight_sizes=(1,)))
        values = list(arguments((0,))[op])
        values[place] = draw(7, 3, *values[place].shape)
        both(op, lambda run: jax.vmap(run, axes(op, None, 0)), *values)


@pytest.mark.parametrize("op", WITH_SHARED)
@pytest.mark.parametrize("rows", [0, None], ids=["with_rows", "alone"])
def test_vmap_over_no_weights(op: str, rows: int | None) -> None:
    """An axis of size 0 that the weight has, too."""
    values = batches(op, *([0] if rows == 0 else []), shared=True, weight_sizes=(0,))
    both(op, lambda run: jax.vmap(run, axes(op, rows, 0)), *values)


@each_op
def test_vmap_of_grad(op: str) -> None:
    """Gradients for each row of the batch."""
    values = batches(op, 3)
    both(op, lambda run: jax.vmap(jax.value_and_grad(loss(run), floats(values)), axes(op, 0, None)), *values)


@pytest.mark.parametrize("op", WITH_SHARED)
def test_grad_of_vmap(op: str) -> None:
    """The gradient by a shared weight is summed over the batch; by weights of their own, it is not."""
    values = batches(op, 3)
    both(op, lambda run: jax.value_and_grad(loss(jax.vmap(run, axes(op, 0, None))), floats(values)), *values)
    values = batches(op, 3, shared=True, weight_sizes=(3,))
    both(op, lambda run: jax.value_and_grad(loss(jax.vmap(run)), floats(values)), *values)


def test_vmap_of_second_derivatives() -> None:
    """vmap of reverse over reverse, the weights batched too, and the other way round."""
    values = batches("rms_norm", 2, shared=True, weight_sizes=(2,))
    both("rms_norm", lambda run: jax.vmap(curved(run, (0, 1))), *values)
    both("rms_norm", lambda run: curved(jax.vmap(run), (0, 1)), *values)


# Control flow, rematerialization, donation.


def repeated(step: Function, loop: str) -> Function:
    """x -> step(step(step(x))), in a loop of JAX's."""
    if loop == "scan":
        return lambda x: jax.lax.scan(lambda carry, _: (step(carry), carry), x, None, length=3)
    if loop == "fori_loop":
        return lambda x: jax.lax.fori_loop(0, 3, lambda _, carry: step(carry), x)
    first = jnp.int32(0)
    return lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (first, x))[1]


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_loops(loop: str) -> None:
    """A carry that goes through kernels gives what "xla" gives, and the loop holds each kernel once."""
    x, residual, weight = arguments((2,))["fused_add_rms_norm"]

    def step(implementation: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, residual = fused_add_rms_norm(*carry, weight, implementation=implementation)
        x = silu_and_mul(jnp.concatenate([x, residual], axis=-1), implementation=implementation)
        return x, residual

    ours, expected = (repeated(partial(step, name), loop) for name in ("mosaic", "xla"))
    with interpreted():
        found = jax.jit(ours)((x, residual))
    assert_close(found, jax.jit(expected)((x, residual)))
    assert len(kernels(lowered(ours, (x, residual)))) == 2


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


@each_op
def test_donated_arguments(op: str) -> None:
    """Donated rows are consumed, and the results are those of rows that are kept."""
    values = arguments((2,))[op]
    with interpreted():
        kept = jax.jit(mosaic(op))(*values)
        if op == "silu_and_mul":  # its result is half as large, so no buffer can be used again
            with pytest.warns(UserWarning, match="donated"):
                given = jax.jit(mosaic(op), donate_argnums=0)(*map(jnp.copy, values))
        else:
            first = jnp.copy(values[0])
            given = jax.jit(mosaic(op), donate_argnums=0)(first, *values[1:])
            assert first.is_deleted()
    assert_equal(given, kept)


# Meshes.

DEVICES = 8
ROWS, WHOLE = P("rows"), P()
Case = tuple[str, Callable[[Function], Function], tuple[P, ...], P, tuple[jax.Array, ...]]


def cases() -> dict[str, Case]:
    """What runs under shard_map: an op, what surrounds it, in_specs, out_specs, arguments."""
    x, few, weight = draw(1, 2 * DEVICES, WIDTH), draw(6, 2, WIDTH), draw(7, WIDTH)
    q, k, table = draw(3, 3, DEVICES, WIDTH), draw(4, 3, 1, WIDTH), draw(5, POSITIONS, WIDTH)
    heads = P(None, "rows")

    def alone(run: Function) -> Function:
        return run

    def summed(run: Function) -> Function:
        return lambda *values: jnp.add(*run(*values))

    def scanned(run: Function) -> Function:
        return lambda x, weight: jax.lax.scan(lambda c, _: (run(c, weight), None), x, None, length=2)[0]

    result: dict[str, Case] = {}
    for op in OPS:
        specs = tuple(WHOLE if place == SHARED[op] else ROWS for place in range(len(arguments(())[op])))
        result[op] = op, alone, specs, ROWS, arguments((2 * DEVICES,))[op]
    return result | {
        "scan": ("rms_norm", scanned, (ROWS, WHOLE), ROWS, (x, weight)),
        "vmap": ("rms_norm", lambda run: jax.vmap(run, (0, None)), (ROWS, WHOLE), ROWS, (x, weight)),
        "vmap_over_weights": ("rms_norm", lambda run: jax.vmap(run, (None, 0)), (WHOLE, ROWS), ROWS, (few, x)),
        "keys_on_each": ("rotary_embedding", summed, (heads, WHOLE, WHOLE, WHOLE), heads, (q, k, places(3), table)),
    }


EXPLICIT = ["fused_add_rms_norm", "vmap"]
SHARDED = [(name, axis_type) for name in cases() for axis_type in ("Auto", "Explicit")[: 1 + (name in EXPLICIT)]]


def sharded() -> None:
    """Runs in a process with 8 CPU devices, and prints "same: ..." of each case that is, a traceback of others."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert len(jax.devices()) == DEVICES
    everything = cases()
    for name, axis_type in SHARDED:
        op, surround, specs, made, values = everything[name]
        plain = gradients_and_outputs(surround(partial(OPS[op], implementation="xla")), values)
        mesh = jax.make_mesh((DEVICES,), ("rows",), axis_types=(AxisType[axis_type],))
        put = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(values, specs, strict=True)]
        for check_vma in (False, True):
            run = jax.shard_map(surround(mosaic(op)), mesh=mesh, in_specs=specs, out_specs=made, check_vma=check_vma)
            try:
                with jax.set_mesh(mesh), interpreted():
                    found = gradients_and_outputs(run, tuple(put))
                assert_close(jax.device_get(found), jax.device_get(plain), ulps=32)
            except Exception:  # told by the test of this case
                print(f"failed: {name} {axis_type} {check_vma}\n{traceback.format_exc()}")
            else:
                print(f"same: {name} {axis_type} {check_vma}")


def gradients_and_outputs(run: Function, values: tuple[jax.Array, ...]) -> Any:
    """By every argument of floats."""

    def total(*values: jax.Array) -> tuple[jax.Array, Any]:
        outputs = run(*values)
        return loss(lambda: outputs)(), outputs

    return jax.jit(jax.grad(total, floats(values), has_aux=True))(*values)


@pytest.fixture(scope="module")
def on_8_devices() -> str:
    """What `sharded` prints."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", "import test_opaque; test_opaque.sharded()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(("name", "axis_type"), SHARDED)
def test_shard_map(on_8_devices: str, name: str, axis_type: str, check_vma: bool) -> None:
    """Interpreted on 8 CPU devices, values and gradients are those without a mesh.

    The gradient by what each device has a copy of (a weight, a table, keys) is so summed over the mesh.
    """
    assert f"same: {name} {axis_type} {check_vma}\n" in on_8_devices, on_8_devices


def test_a_mesh_of_gpus() -> None:
    """Under shard_map over 8 GPUs that need not be here, a gradient lowers with the kernel in it."""
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("rows",), axis_types=(AxisType.Explicit,))
    run = jax.shard_map(mosaic("rms_norm"), mesh=mesh, in_specs=(ROWS, WHOLE), out_specs=ROWS)
    x = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32, sharding=NamedSharding(mesh, ROWS))
    weight = jax.ShapeDtypeStruct((WIDTH,), jnp.float32, sharding=NamedSharding(mesh, WHOLE))
    text = lowered(jax.value_and_grad(loss(run), (0, 1)), x, weight)
    assert len(kernels(text)) == 1
    assert "all_reduce" in text


# What the program holds.


@each_op
@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3)])
def test_one_opaque_call(op: str, leading: tuple[int, ...]) -> None:
    """The jaxpr has one kernel, and beside it reshapes and calls: none of the op's arithmetic is outside."""
    found = primitives(mosaic(op), *arguments(leading, jnp.bfloat16)[op])
    assert found.pop(KERNEL) == 1
    assert set(found) <= {*CALLS, "reshape"}


@each_op
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (0,), (3, 0), (5,), (2, 3), (2**18, 2**10)])
def test_shapes_need_no_gpu(op: str, dtype: Any, leading: tuple[int, ...]) -> None:
    """jax.eval_shape gives shapes and dtypes on a machine without a GPU; zero rows need no kernel."""
    small = arguments((), dtype)[op]
    values = [
        jax.ShapeDtypeStruct(value.shape if i == SHARED[op] else (*leading, *value.shape), value.dtype)
        for i, value in enumerate(small)
    ]
    found: list[Any] = jax.tree.leaves(jax.eval_shape(mosaic(op), *values))
    shapes: dict[str, list[tuple[int, ...]]] = {
        "rms_norm": [(WIDTH,)],
        "fused_add_rms_norm": [(WIDTH,), (WIDTH,)],
        "silu_and_mul": [(WIDTH,)],
        "rotary_embedding": [(2, WIDTH), (1, WIDTH)],
    }
    assert [leaf.shape for leaf in found] == [(*leading, *shape) for shape in shapes[op]]
    assert {leaf.dtype for leaf in found} == {np.dtype(dtype)}
    assert primitives(mosaic(op), *values)[KERNEL] == (0 if 0 in leading else 1)


@each_op
def test_equal_calls_lower_once(op: str) -> None:
    """Ten calls at one shape and one at another are two kernels in the program for the GPU."""

    def program(many: list[tuple[jax.Array, ...]], other: tuple[jax.Array, ...]) -> list[Any]:
        return [mosaic(op)(*values) for values in (*many, other)]

    text = lowered(program, [arguments((3,))[op]] * 10, arguments((4,))[op])
    assert len(kernels(text)) == len(set(kernels(text))) == 2


@pytest.mark.parametrize("layers", [2, 4])
def test_programs_hold_six_kernels(layers: int) -> None:
    """Prefill and decode hold six kernels, whatever the number of layers: three norms, add-norm, silu, RoPE.

    The last add-norm, whose sum nobody reads, is lowered a second time; it is the same kernel, by its hash.
    """
    config = dataclasses.replace(Qwen3Config.from_pretrained(CHECKPOINT), num_hidden_layers=layers)
    model = Qwen3(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, implementation="mosaic")
    leaves, treedef = jax.tree.flatten(model)
    tree = interned(treedef)
    tokens, lengths = np.ones((1, 64), np.int32), np.full(1, 50, np.int32)
    logits, cache = jax.eval_shape(lambda *values: prefill(tree, *values), leaves, tokens, lengths)
    sampling = jaxfuse.Sampling().for_batch(1)
    options: tuple[Any, ...] = (sampling, np.full(8, -1, np.int32), jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(
        lambda logits, cache: begin(logits, cache, *options, capacity=256, size=64, greedy=True), logits, cache
    )
    programs = {
        "prefill": prefill.trace(tree, leaves, tokens, lengths),
        "decode": decode.trace(tree, leaves, state, *options, np.int32(64), greedy=True),
    }
    for name, traced in programs.items():
        found = kernels(traced.lower(lowering_platforms=("cuda",)).as_text())
        assert len(set(found)) == 6, name
        assert len(found) <= 7, name


# Models.


def greedy(model: Qwen3, prompt: list[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, and the logits [1, prompt + count - 1, vocab]: a prefill, then steps with a cache."""
    forward = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache))
    cache = model.init_cache(1, len(prompt) + count)
    tokens, chosen, seen = np.array([prompt], np.int32), [], []
    for _ in range(count):
        logits, cache = forward(model, tokens, cache)
        seen.append(np.asarray(logits))
        tokens = np.argmax(seen[-1][:, -1:], axis=-1).astype(np.int32)
        chosen.append(tokens)
    return np.concatenate(chosen, axis=1), np.concatenate(seen, axis=1)


def test_the_shipped_checkpoint() -> None:
    """In float32 the shipped checkpoint says the same on the kernels: tokens identical, logits to roundings."""
    names: tuple[Any, Any] = ("mosaic", "xla")
    ours, plain = (Qwen3.from_pretrained(CHECKPOINT, dtype=jnp.float32, implementation=name) for name in names)
    prompt = [5, 1900, 60]
    with interpreted():
        tokens, logits = greedy(ours, prompt, 2)
    expected, expected_logits = greedy(plain, prompt, 2)
    np.testing.assert_array_equal(tokens, expected)
    assert_close(logits, expected_logits, ulps=16)


def test_generate_on_a_tiny_model(tmp_path: Path) -> None:
    """generate runs prompts of two lengths on the kernels, and gives the tokens of "xla"."""
    theirs = tiny.torch_model("untied", num_hidden_layers=1, head_dim=128, max_position_embeddings=5)
    folder = tiny.save(theirs, tmp_path)
    results = []
    for name in ("mosaic", "xla"):
        model = Qwen3.from_pretrained(folder, implementation=name)
        with interpreted():
            results.append(jaxfuse.generate(model, [[5, 60], [8]], max_new_tokens=3))
    ours, expected = results
    np.testing.assert_array_equal(ours.tokens, expected.tokens)
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, rtol=0, atol=1e-5)
