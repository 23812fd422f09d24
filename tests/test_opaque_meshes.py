"""A kernel runs under shard_map as without a mesh: on 8 CPU devices, in a process that has them."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfuse.kernels import dispatch
from op_inputs import OPS
from opaque_ops import (
    POSITIONS,
    SHARED,
    WIDTH,
    Function,
    arguments,
    assert_close,
    draw,
    floats,
    interpreted,
    kernels,
    loss,
    lowered,
    mosaic,
    places,
)

DEVICES = 8
ROWS, WHOLE = P("rows"), P()
Case = tuple[str, Callable[[Function], Function], tuple[P, ...], P | tuple[P, ...], tuple[jax.Array, ...]]


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

    def weights_alone(run: Function) -> Function:
        def normed_by_each(x: jax.Array, residual: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            normed = [run(x, residual, weight) for weight in weights]
            return jnp.stack([one for one, _ in normed]), normed[0][1]

        return normed_by_each

    result: dict[str, Case] = {}
    for op in OPS:
        specs = tuple(WHOLE if place == SHARED[op] else ROWS for place in range(len(arguments(())[op])))
        result[op] = op, alone, specs, ROWS, arguments((2 * DEVICES,))[op]
    return result | {
        "scan": ("rms_norm", scanned, (ROWS, WHOLE), ROWS, (x, weight)),
        "vmap": ("rms_norm", lambda run: jax.vmap(run, (0, None)), (ROWS, WHOLE), ROWS, (x, weight)),
        "vmap_over_weights": ("rms_norm", lambda run: jax.vmap(run, (None, 0)), (WHOLE, ROWS), ROWS, (few, x)),
        "keys_whole": (
            "rotary_embedding",
            alone,
            (heads, WHOLE, WHOLE, WHOLE),
            (heads, WHOLE),
            (q, k, places(3), table),
        ),
        "sum_whole": ("fused_add_rms_norm", weights_alone, (WHOLE, WHOLE, ROWS), (ROWS, WHOLE), (few, few + 1, x)),
        "keys_on_each": ("rotary_embedding", summed, (heads, WHOLE, WHOLE, WHOLE), heads, (q, k, places(3), table)),
    }


EXPLICIT = ["fused_add_rms_norm", "vmap"]
# Results that vary less than others, which JAX knows of alone when it checks.
CHECKED = ["keys_whole", "sum_whole"]
SHARDED = [
    (name, axis_type, check_vma)
    for name in cases()
    for axis_type in ("Auto", "Explicit")[: 1 + (name in EXPLICIT)]
    for check_vma in (False, True)[name in CHECKED :]
]


def sharded() -> None:
    """Runs in a process with 8 CPU devices, and prints "same: ..." of each case that is, a traceback of others."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert len(jax.devices()) == DEVICES
    # None is then a choice at each lowering, of two branches that must agree on what varies.
    dispatch.has_mosaic = lambda *_: True
    always = {name: dataclasses.replace(op, faster=lambda *_: True) for name, op in dispatch.OPS.items()}
    dispatch.OPS = MappingProxyType(always)
    everything = cases()
    for name, axis_type, check_vma in SHARDED:
        op, surround, specs, made, values = everything[name]
        plain = gradients_and_outputs(surround(partial(OPS[op], implementation="xla")), values)
        mesh = jax.make_mesh((DEVICES,), ("rows",), axis_types=(AxisType[axis_type],))
        put = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(values, specs, strict=True)]
        for implementation in ("mosaic", None):
            inner = surround(partial(OPS[op], implementation=implementation))
            run = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=made, check_vma=check_vma)
            try:
                with jax.set_mesh(mesh), interpreted() if implementation else contextlib.nullcontext():
                    found = gradients_and_outputs(run, tuple(put))
                assert_close(jax.device_get(found), jax.device_get(plain), ulps=32)
                assert implementation or kernels(lowered(run, *put))
            except Exception:  # told by the test of this case
                print(f"failed: {name} {axis_type} {check_vma} {implementation}\n{traceback.format_exc()}")
            else:
                print(f"same: {name} {axis_type} {check_vma} {implementation}")


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
    command = [sys.executable, "-c", "import test_opaque_meshes; test_opaque_meshes.sharded()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("implementation", ["mosaic", None])
@pytest.mark.parametrize(("name", "axis_type", "check_vma"), SHARDED)
def test_shard_map(on_8_devices: str, name: str, axis_type: str, check_vma: bool, implementation: str | None) -> None:
    """On 8 CPU devices, the kernel interpreted, or None's choice made for them, values and gradients are those without.

    The gradient by what each device has a copy of (a weight, a table, keys) is so summed over the mesh.
    """
    assert f"same: {name} {axis_type} {check_vma} {implementation}\n" in on_8_devices, on_8_devices


def test_a_mesh_of_gpus() -> None:
    """Under shard_map over 8 GPUs that need not be here, a gradient lowers with the kernel in it."""
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("rows",), axis_types=(AxisType.Explicit,))
    run = jax.shard_map(mosaic("rms_norm"), mesh=mesh, in_specs=(ROWS, WHOLE), out_specs=ROWS)
    x = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32, sharding=NamedSharding(mesh, ROWS))
    weight = jax.ShapeDtypeStruct((WIDTH,), jnp.float32, sharding=NamedSharding(mesh, WHOLE))
    text = lowered(jax.value_and_grad(loss(run), (0, 1)), x, weight)
    assert len(kernels(text)) == 1
    assert "all_reduce" in text
