"""Which implementation of an op runs: one asked for by name runs or raises, and what None picks, for which device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfuse.kernels import (
    ImplementationError,
    check_implementation,
    dispatch,
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)

Function = Callable[..., Any]


class Device:
    """What the rule reads of a device, as far as a device has it."""

    def __init__(self, **attributes: str):
        self.__dict__.update(attributes)


HOPPER: Any = Device(platform="gpu", compute_capability="9.0")


def draw(seed: int, *shape: int) -> jax.Array:
    """Normal values, float32."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


# Large enough that a GPU's None is the kernel; the first argument has rows.
X, WEIGHT, GATE_UP = draw(1, 3, 512), draw(2, 512), draw(7, 3, 2 * 12288)
Q, K, PLACES, TABLE = draw(3, 3, 8, 128), draw(4, 3, 2, 128), jnp.asarray([1, 9, 4], jnp.int32), draw(5, 10, 128)
CALLS: dict[str, tuple[Function, tuple[jax.Array, ...]]] = {
    "rms_norm": (rms_norm, (X, WEIGHT)),
    "fused_add_rms_norm": (fused_add_rms_norm, (X, draw(6, 3, 512), WEIGHT)),
    "silu_and_mul": (silu_and_mul, (GATE_UP,)),
    "rotary_embedding": (rotary_embedding, (Q, K, PLACES, TABLE)),
}
REFUSED: dict[str, tuple[tuple[jax.Array, ...], str]] = {
    "rms_norm": ((draw(1, 3, 192), draw(2, 192)), "multiple of 128; got 192"),
    "fused_add_rms_norm": ((draw(1, 3, 192), draw(3, 3, 192), draw(2, 192)), "multiple of 128; got 192"),
    "silu_and_mul": ((draw(1, 3, 384),), "multiple of 128; got 192"),
    "rotary_embedding": ((Q, K, PLACES, draw(5, 10, 64)), "rotary_dim 64"),
}
each_op = pytest.mark.parametrize("op", CALLS)


def assert_equal(ours: Any, expected: Any) -> None:
    """The same bits."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)


def has_kernel(function: Function, *values: Any, platform: str = "cuda") -> bool:
    """Whether the program for a platform, which need not be here, has a Mosaic kernel."""
    return "mosaic_gpu" in jax.jit(function).trace(*values).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device is said to run the Mosaic kernels."""
    monkeypatch.setattr(dispatch, "has_mosaic", lambda *_: True)


# By name.


@each_op
def test_a_name_runs_what_it_says(op: str) -> None:
    """ "mosaic" has a kernel in its program and "xla" has none, whatever the device is."""
    run, values = CALLS[op]
    assert has_kernel(partial(run, implementation="mosaic"), *values)
    assert not has_kernel(partial(run, implementation="xla"), *values)


@each_op
def test_mosaic_on_a_cpu(op: str) -> None:
    """Asked for by name on a CPU the kernel raises, and never becomes "xla"; interpret mode runs it."""
    run, values = CALLS[op]
    run = partial(run, implementation="mosaic")
    with pytest.raises(ImplementationError, match=r'needs an NVIDIA GPU .* got cpu; pass implementation="xla"'):
        run(*values)
    with pytest.raises(ValueError, match="CPU"):  # Pallas's own: a program may be compiled for another device
        jax.jit(run)(*values)
    with plgpu.force_gpu_interpret_mode():
        found = run(*values)
    expected = CALLS[op][0](*values, implementation="xla")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * float(jnp.abs(other).max()))


@each_op
def test_a_shape_that_mosaic_refuses(op: str, pretending: None) -> None:
    """By name it raises with the rule, what came and the mend; None and "xla" run it."""
    run, (values, rule) = CALLS[op][0], REFUSED[op]
    message = rf'{op}: implementation "mosaic" .*{rule}.*pass implementation="xla" or None'
    for call in (run, jax.jit(run, static_argnames="implementation")):
        with pytest.raises(ImplementationError, match=message):
            call(*values, implementation="mosaic")
    assert_equal(run(*values), run(*values, implementation="xla"))
    assert not has_kernel(run, *values)


def test_no_heads(pretending: None) -> None:
    """Without a head in q or in k there is no kernel."""
    for q, k in ((Q[:, :0], K), (Q, K[:, :0])):
        with pytest.raises(ImplementationError, match="needs a head"):
            rotary_embedding(q, k, PLACES, TABLE, implementation="mosaic")
        found = rotary_embedding(q, k, PLACES, TABLE)
        assert [part.shape for part in found] == [q.shape, k.shape]


def traced_for_one_mesh(run: Function, axis_type: AxisType, *values: jax.Array) -> Any:
    """The types of an op's outputs in a program of rows that lie along a mesh's axis."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(axis_type,))
    first, *others = values
    with jax.set_mesh(mesh):
        first = jax.device_put(first, NamedSharding(mesh, P("rows")))
        others = [jax.device_put(v, NamedSharding(mesh, P("rows" if len(v) == len(first) else None))) for v in others]
        return run(first, *others)


@each_op
def test_explicit_meshes(op: str, pretending: None) -> None:
    """Outside of shard_map a kernel does not see which rows of a mesh of Explicit axes are its own: None is "xla"."""
    run, values = CALLS[op]
    whole = partial(traced_for_one_mesh, jax.jit(run), AxisType.Explicit)
    found = whole(*values)
    assert all(part.sharding.spec[0] == "rows" for part in jax.tree.leaves(found))
    assert_equal(found, run(*values, implementation="xla"))
    assert not traced_for_one_mesh(partial(has_kernel, partial(run)), AxisType.Explicit, *values)
    assert traced_for_one_mesh(partial(has_kernel, partial(run)), AxisType.Auto, *values)
    plain = partial(run, implementation="xla")
    mapped = jax.vmap(plain, tuple(0 if len(value) == len(values[0]) else None for value in values))
    assert_equal(traced_for_one_mesh(jax.jit(mapped), AxisType.Explicit, *values), plain(*values))
    for call in (run, jax.jit(run, static_argnames="implementation")):
        with pytest.raises(ImplementationError, match=rf"{op}: .*Explicit axes inside jax.shard_map.*@rows"):
            traced_for_one_mesh(partial(call, implementation="mosaic"), AxisType.Explicit, *values)


@each_op
def test_vmap_over_a_mesh(op: str, pretending: None) -> None:
    """A vmap over an axis that 2 devices split, which types inside of it do not say, is "xla" as well, or raises."""
    run, values = CALLS[op]
    mesh = AbstractMesh((2,), ("rows",), axis_types=(AxisType.Explicit,))
    shapes = [(2, *value.shape) if value.shape[0] == 3 else value.shape for value in values]
    mapped = [len(shape) > value.ndim for shape, value in zip(shapes, values, strict=True)]
    types = [
        jax.ShapeDtypeStruct(shape, value.dtype, sharding=NamedSharding(mesh, P("rows") if yes else P()))
        for shape, value, yes in zip(shapes, values, mapped, strict=True)
    ]
    axes = tuple(0 if yes else None for yes in mapped)
    assert not has_kernel(jax.vmap(partial(run), axes), *types)
    with pytest.raises(ImplementationError, match=rf"{op}: .*Explicit axes inside jax.shard_map"):
        jax.eval_shape(jax.vmap(partial(run, implementation="mosaic"), axes), *types)


@each_op
def test_symbolic_shapes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program exported for any number of rows is "xla" under None, on a GPU, too, and "mosaic" raises."""
    run, values = CALLS[op]
    (rows,) = jax.export.symbolic_shape("rows")
    types = [
        jax.ShapeDtypeStruct((rows if len(value) == 3 else len(value), *value.shape[1:]), value.dtype)
        for value in values
    ]
    for answer in (False, True):
        monkeypatch.setattr(dispatch, "has_mosaic", lambda *_, answer=answer: answer)
        exported = jax.export.export(jax.jit(partial(run)), platforms=("cpu",))(*types)
        assert "mosaic" not in exported.mlir_module()
        assert_equal(exported.call(*values), run(*values, implementation="xla"))
        with pytest.raises(ImplementationError, match=f"{op}: .*sides are numbers; got .*rows"):
            jax.export.export(jax.jit(partial(run, implementation="mosaic")), platforms=("cuda",))(*types)


@each_op
def test_pick_checks_names(op: str) -> None:
    """`pick` refuses what the op would, and an op that there is none of."""
    values = CALLS[op][1]
    wrong: list[tuple[Any, Any, str]] = [
        ("cuda", "fused", "must be one of"),
        ("triton", "fused", "not available"),
        ("mosaic", "hf", '"xla" alone'),
        ("mosaic", "nearest", "rounding must be one of"),
    ]
    for implementation, rounding, message in wrong:
        with pytest.raises(ImplementationError, match=f"{op}: .*{message}"):
            dispatch.pick(op, implementation, rounding, *values)
    with pytest.raises(ValueError, match=rf'name must be one of .*"{op}".*; got .layer_norm.\.$'):
        dispatch.pick("layer_norm", None, "fused", *values)


@each_op
def test_names_without_an_implementation(op: str) -> None:
    """ "triton" and names that do not exist raise, in an op and in the check of a whole model."""
    run, values = CALLS[op]
    names: list[tuple[Any, str]] = [("triton", "not available"), ("cuda", "must be one of"), ("", "must be one of")]
    for name, message in names:
        with pytest.raises(ImplementationError, match=message):
            run(*values, implementation=name)
        with pytest.raises(ImplementationError, match=message):
            check_implementation(name, "fused")
    check_implementation("mosaic", "fused")


@each_op
def test_hf_rounding_is_never_mosaic(op: str, pretending: None) -> None:
    """None with "hf" is "xla" on any device; "mosaic" with "hf" raises."""
    run, values = CALLS[op]
    run = partial(run, rounding="hf")
    assert not has_kernel(run, *values)
    assert_equal(run(*values), run(*values, implementation="xla"))
    with pytest.raises(ImplementationError, match='"hf" exists in implementation "xla" alone'):
        run(*values, implementation="mosaic")


# The device.


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ({"platform": "gpu", "compute_capability": "9.0"}, True),
        ({"platform": "gpu", "compute_capability": "10.0"}, True),
        ({"platform": "gpu", "compute_capability": "10.3"}, True),
        ({"platform": "gpu", "compute_capability": "12.0"}, True),
        ({"platform": "gpu", "compute_capability": "8.9"}, False),
        ({"platform": "gpu", "compute_capability": "8.0"}, False),
        ({"platform": "gpu", "compute_capability": "7.5"}, False),
        ({"platform": "gpu", "compute_capability": "gfx942"}, False),
        ({"platform": "gpu", "compute_capability": "gfx90a"}, False),
        ({"platform": "gpu"}, False),
        ({"platform": "cpu"}, False),
        ({"platform": "tpu"}, False),
        ({"platform": "cpu", "compute_capability": "9.0"}, False),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_devices_with_mosaic(monkeypatch: pytest.MonkeyPatch, device: dict[str, str], expected: bool) -> None:
    """NVIDIA's GPUs from Hopper on: 10 is more than 9, another maker's number is none, and a CPU has no say."""
    monkeypatch.setattr(dispatch, "_default_device", lambda: Device(**device))
    assert dispatch.has_mosaic() is expected
    assert dispatch.has_mosaic(np.ones(3), jax.ShapeDtypeStruct((3,), jnp.float32)) is expected


@each_op
@pytest.mark.parametrize("default", ["device", "string", None])
def test_none_is_xla_on_a_cpu(op: str, default: str | None) -> None:
    """With the CPU as the default device, given as such or as "cpu", None holds no kernel and gives "xla"'s bits."""
    run, values = CALLS[op]
    device = {"device": jax.devices("cpu")[0], "string": "cpu", None: None}[default]
    if device is None and jax.default_backend() != "cpu":
        pytest.skip("JAX's own default here is no CPU")
    with jax.default_device(device):
        assert not has_kernel(run, *values)
        assert not has_kernel(run, *map(np.asarray, values))
        assert_equal(run(*values), run(*values, implementation="xla"))
        assert_equal(run(*map(np.asarray, values)), run(*values, implementation="xla"))


def test_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What jax.default_device says, as a device or a platform's name; without it, JAX's first device."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device("cpu"):
        assert dispatch._default_device() is cpu
    # None's device is looked for anew at each call.
    monkeypatch.setattr(jax, "local_devices", lambda **_: [HOPPER])
    with jax.default_device(cpu):
        assert dispatch._default_device() is cpu
        assert not dispatch.has_mosaic()
    with jax.default_device(None):
        assert dispatch._default_device() is HOPPER
        assert dispatch.has_mosaic()


def test_a_committed_array_s_device_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays committed to a CPU run there though the default device is a GPU; JAX moves all others to the default."""
    monkeypatch.setattr(dispatch, "_default_device", lambda: HOPPER)
    cpu = jax.devices("cpu")[0]
    x, weight = jax.device_put((X, WEIGHT), cpu)
    assert x.committed
    assert not X.committed
    assert not dispatch.has_mosaic(x)
    assert not dispatch.has_mosaic(np.ones(3), X, x)
    assert dispatch.has_mosaic(X, np.asarray(X))
    for run, values in CALLS.values():
        assert_equal(run(*jax.device_put(values, cpu)), run(*values, implementation="xla"))

    traced = []
    jax.eval_shape(lambda x: traced.append(dispatch.has_mosaic(x)), x)
    assert traced == [True]
    # A weight that is closed over has a place though the rows have none yet.
    jax.eval_shape(lambda x: traced.append(dispatch.has_mosaic(x, weight)), X)
    assert traced == [True, False]


def test_every_device_must_have_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array over a Hopper and an older GPU, as in a machine of both."""
    older = Device(platform="gpu", compute_capability="8.0")
    for devices, expected in (({HOPPER, older}, False), ({HOPPER}, True), ({older}, False)):
        monkeypatch.setattr(dispatch, "_devices", lambda _, devices=devices: devices)
        assert dispatch.has_mosaic(X) is expected


def test_what_is_missing_is_explained_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another error keeps its words: one about the arguments, one on a device that has the kernels, one of "xla"."""
    refused, other = ImplementationError("takes rows"), ValueError("Only interpret mode")

    def raised(implementation: Any, error: Exception) -> Exception:
        try:
            with dispatch.explaining(implementation):
                raise error
        except ValueError as caught:
            return caught

    assert raised("mosaic", refused) is refused
    assert raised("xla", other) is other
    assert raised(None, other) is other
    said = raised("mosaic", other)
    assert isinstance(said, ImplementationError)
    assert said.__cause__ is other
    monkeypatch.setattr(dispatch, "has_mosaic", lambda *_: True)
    assert raised("mosaic", other) is other


# None, where the device has the kernels.


def number(run: Function) -> Function:
    """One number of all outputs."""

    def total(*values: jax.Array) -> jax.Array:
        return jax.tree.reduce(jnp.add, [jnp.sum(jnp.sin(part)) for part in jax.tree.leaves(run(*values))])

    return total


def repeated(run: Function) -> Function:
    """The op in a loop, its first output carried."""

    def loop(x: jax.Array, *values: jax.Array) -> Any:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, Any]:
            made = jax.tree.leaves(run(carry, *values))
            return (made[0] if made[0].shape == x.shape else carry * made[0].mean()), made

        return jax.lax.scan(step, x, None, length=3)

    return loop


def over_batches(run: Function) -> Function:
    """vmap over two batches of rows; the last of several arguments is the one that they share."""

    def mapped(*values: jax.Array) -> Any:
        rows, shared = (values[:-1], values[-1:]) if len(values) > 1 else (values, ())
        batches = [jnp.stack([value, value[::-1]]) for value in rows]
        return jax.vmap(run, (0,) * len(rows) + (None,) * len(shared))(*batches, *shared)

    return mapped


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "plain": lambda run: lambda *values: run(*values),
    "grad": lambda run: jax.value_and_grad(number(run)),
    "second": lambda run: jax.value_and_grad(number(jax.grad(number(run)))),
    "vmap": over_batches,
    "scan": repeated,
    "checkpoint": lambda run: jax.value_and_grad(jax.checkpoint(number(run))),
}


@each_op
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_none_follows_the_platform(op: str, transform: str, pretending: None) -> None:
    """What was traced for a GPU has the kernel there; lowered for a CPU it has not, and runs to "xla"'s bits."""
    run, values = CALLS[op]
    change = TRANSFORMS[transform]
    # Both through a function of their own: JAX keeps the traces of one that it has seen.
    traced, plain = change(partial(run)), change(partial(run, implementation="xla"))
    assert has_kernel(traced, *values)
    assert not has_kernel(traced, *values, platform="cpu")
    assert_equal(jax.jit(traced)(*values), jax.jit(plain)(*values))
    if transform in ("grad", "vmap", "scan"):  # no jit around it: what is traced inside runs at once
        assert_equal(traced(*values), plain(*values))


@each_op
def test_none_on_other_gpus(op: str, pretending: None) -> None:
    """What was traced for NVIDIA's GPU and is lowered for AMD's has no kernel."""
    run, values = CALLS[op]
    assert not has_kernel(partial(run), *values, platform="rocm")


@each_op
def test_none_is_chosen_before_tracing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no device has the kernels, the program holds no choice between platforms; where one has, it does."""
    run, values = CALLS[op]
    for answer in (False, True):
        monkeypatch.setattr(dispatch, "has_mosaic", lambda *_, answer=answer: answer)
        text = str(jax.make_jaxpr(partial(run))(*values))
        assert ("platform_index" in text) is answer
        assert ("mpmd_map" in text) is answer


def test_none_runs_the_kernel_where_arrays_are(pretending: None) -> None:
    """Outside of any trace None calls the kernel itself: with a CPU that only pretends, that raises."""
    with pytest.raises(ValueError, match=r"(?i)cpu|gpu"):
        silu_and_mul(GATE_UP)
    with plgpu.force_gpu_interpret_mode():
        found = silu_and_mul(GATE_UP)
    np.testing.assert_allclose(found, silu_and_mul(GATE_UP, implementation="xla"), rtol=1e-6)


def test_none_is_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels run, XLA keeps what it was measured to be faster at: norms of heads, few activations."""
    monkeypatch.setattr(dispatch, "has_mosaic", lambda *_: True)

    def picked(op: str, *shapes: tuple[int, ...]) -> str:
        return dispatch.pick(op, None, "fused", *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))

    assert picked("rms_norm", (16, 8, 128), (128,)) == picked("rms_norm", (1, 128), (128,)) == "xla"
    assert picked("rms_norm", (1, 1024), (1024,)) == picked("rms_norm", (64, 256), (256,)) == "mosaic"
    assert picked("fused_add_rms_norm", (1, 256), (1, 256), (256,)) == "mosaic"
    assert picked("silu_and_mul", (1, 1, 6144)) == picked("silu_and_mul", (6144,)) == "xla"
    assert picked("silu_and_mul", (1, 65534)) == "xla"
    assert picked("silu_and_mul", (1, 65536)) == "mosaic"
    assert picked("silu_and_mul", (8, 1, 6144)) == picked("silu_and_mul", (0, 6144)) == "xla"
    assert picked("silu_and_mul", (16, 1, 6144)) == picked("silu_and_mul", (2, 51200)) == "mosaic"
    assert picked("rotary_embedding", (1, 16, 128), (1, 8, 128), (1,), (50, 128)) == "mosaic"
