"""Which implementation of an op runs: chosen from Python values, before the op is traced.

One asked for by name runs or raises. What `None` means is decided in `pick` alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax
from jax import lax
from jax.export import is_symbolic_dim
from jax.sharding import AxisType, NamedSharding

from . import activation, reference, rope
from . import rms_norm as norms
from .reference import Rounding

Implementation = Literal["mosaic", "triton", "xla"]
type _Function = Callable[..., Any]


class ImplementationError(ValueError):
    """An implementation or a rounding that does not exist, or not together, or not here."""


@dataclass(frozen=True)
class _Op:
    """What runs an op. All take its arrays; `xla` takes `rounding` besides."""

    xla: _Function
    mosaic: _Function
    refusal: Callable[..., str | None]
    """Why the Mosaic kernel cannot take these arrays, or None."""
    faster: Callable[..., bool]
    """Whether the Mosaic kernel alone is faster than XLA's, on an H200 (bench/NOTES.md)."""


def _wider_than_a_head(x: jax.Array, *_: jax.Array) -> bool:
    # Rows of 128: the kernel's lead is 0.03 to 0.1 µs up to 1024 of them, and XLA is ahead at more: 5.9 against
    # 6.5 µs for 65,536. Rows of 256: 18.3 against 17.3.
    return x.shape[-1] > 128


def _many_elements(x: jax.Array, *_: jax.Array) -> bool:
    # Up to 2^13 elements XLA takes 0.03 to 0.1 µs less, then to 2^15 neither is ahead by more than 0.04, and in a model
    # XLA joins its own with what is beside it. 64 rows of 3072: 1.95 and 1.18 µs.
    # Under vmap these are the elements of one call, so many small ones batched so are XLA's as well.
    return math.prod(x.shape) // 2 >= 2**15


def _always(*_: jax.Array) -> bool:
    return True


OPS: Mapping[str, _Op] = MappingProxyType(
    {
        "rms_norm": _Op(reference.rms_norm, norms.rms_norm, norms.refusal, _wider_than_a_head),
        "fused_add_rms_norm": _Op(reference.fused_add_rms_norm, norms.fused_add_rms_norm, norms.refusal, _always),
        "silu_and_mul": _Op(reference.silu_and_mul, activation.silu_and_mul, activation.refusal, _many_elements),
        "rotary_embedding": _Op(reference.rotary_embedding, rope.rotary_embedding, rope.refusal, _always),
    }
)
_AVAILABLE: tuple[Implementation, ...] = ("mosaic", "xla")


def check_implementation(implementation: Implementation | None, rounding: Rounding, op: str | None = None) -> None:
    """Raise ImplementationError unless the ops have `implementation` with `rounding`, on some device and shape.

    The message begins with `op`, when given.
    """
    prefix = "" if op is None else f"{op}: "
    if rounding not in get_args(Rounding):
        raise ImplementationError(f"{prefix}rounding must be one of {_names(get_args(Rounding))}; got {rounding!r}.")
    if implementation is None:
        return
    if implementation not in get_args(Implementation):
        raise ImplementationError(
            f"{prefix}implementation must be one of {_names(_AVAILABLE)} or None; got {implementation!r}."
        )
    if rounding == "hf" and implementation != "xla":
        raise ImplementationError(
            f'{prefix}rounding "hf" exists in implementation "xla" alone; got {implementation!r}; '
            'pass implementation="xla" or None, or rounding="fused".'
        )
    if implementation not in _AVAILABLE:
        raise ImplementationError(
            f"{prefix}implementation {implementation!r} is not available; available: {_names(_AVAILABLE)}; "
            "pass one of these, or None for the default."
        )


def pick(name: str, implementation: Implementation | None, rounding: Rounding, *arrays: Any) -> Implementation:
    """The implementation that runs the op called `name`; of the arrays, shapes and dtypes are enough.

    None means "mosaic" where the device has it, it takes the arrays, and it is faster than XLA's own kernels for this
    op alone; else "xla".

    Raises:
      ImplementationError: there is no such implementation, or one asked for by name cannot take these arrays.
      ValueError: no op is called `name`.
    """
    if name not in OPS:
        raise ValueError(f"pick: name must be one of {_names(OPS)}; got {name!r}.")
    check_implementation(implementation, rounding, name)
    op = OPS[name]
    if implementation == "xla" or rounding == "hf":
        return "xla"
    if implementation is None and not has_mosaic(*arrays):
        return "xla"
    refusal = _refusal(op, arrays)
    if implementation is None:
        return "mosaic" if refusal is None and op.faster(*arrays) else "xla"
    if refusal is not None:
        raise ImplementationError(f'{name}: implementation "mosaic" {refusal}; pass implementation="xla" or None.')
    return implementation


def _refusal(op: _Op, arrays: tuple[Any, ...]) -> str | None:
    """Why the Mosaic kernel cannot take these arrays, or None."""
    for array in arrays:
        if any(map(is_symbolic_dim, array.shape)):
            return f"takes shapes whose sides are numbers; got {array.shape}"
        if isinstance(array, jax.Array) and _split(jax.typeof(array).sharding):
            return (
                "takes arrays on a mesh of Explicit axes inside jax.shard_map, where each device has its part; "
                f"got {jax.typeof(array)} outside of it"
            )
    return op.refusal(*arrays)


def _split(sharding: NamedSharding) -> bool:
    """Whether an array so typed may lie in parts on several devices; JAX types no arrays on meshes of Auto axes.

    Under vmap the type does not say whether the axis that is mapped is split, so any Explicit axis counts.
    """
    axes = zip(sharding.mesh.axis_types, sharding.mesh.axis_sizes, strict=True)
    return any(sharding.spec) or any(type_ == AxisType.Explicit and size > 1 for type_, size in axes)


def choose(name: str, implementation: Implementation | None, rounding: Rounding, *arrays: Any) -> _Function:
    """The function of these arrays that computes the op called `name`; what None means, and errors, as in `pick`."""
    op = OPS[name]
    plain = partial(op.xla, rounding=rounding)
    if pick(name, implementation, rounding, *arrays) == "xla":
        return plain
    if implementation is None and any(isinstance(array, jax.core.Tracer) for array in arrays):
        # What is traced here may yet be compiled for another device than the default one.
        return partial(_on_cuda, op.mosaic, plain)
    return partial(_run_mosaic, op.mosaic)


def _run_mosaic(kernel: _Function, *arrays: Any, **options: Any) -> Any:
    with explaining("mosaic", *arrays):
        return kernel(*arrays, **options)


@contextmanager
def explaining(implementation: Implementation | None, *arrays: Any) -> Iterator[None]:
    """Say what is missing where Pallas refuses to compile for a device that has no Mosaic kernels."""
    try:
        yield
    except ValueError as error:
        if implementation != "mosaic" or isinstance(error, ImplementationError) or has_mosaic(*arrays):
            raise
        kinds = " and ".join(sorted({device.device_kind for device in _devices(arrays)}))
        raise ImplementationError(
            'implementation "mosaic" needs an NVIDIA GPU of compute capability 9.0 (Hopper) or more that JAX can use; '
            f'got {kinds}; pass implementation="xla" or None.'
        ) from error


def has_mosaic(*arrays: Any) -> bool:
    """Whether the device runs the Mosaic kernels: an NVIDIA GPU of compute capability 9.0 (Hopper) or more.

    The device is the one that JAX runs an op of these arrays on: where arrays are committed to devices, those; else,
    and while tracing, its default device.
    """
    return all(map(_has_mosaic, _devices(arrays)))


def _devices(arrays: tuple[Any, ...]) -> set[jax.Device]:
    devices = {
        device
        for array in arrays
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.committed
        for device in array.devices()
    }
    return devices or {_default_device()}


def _has_mosaic(device: jax.Device) -> bool:
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; another maker's is "gfx942".
    major = capability.partition(".")[0]
    return device.platform == "gpu" and major.isdecimal() and int(major) >= 9


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def _on_cuda(kernel: _Function, plain: _Function, *arrays: jax.Array, **options: Any) -> Any:
    return lax.platform_dependent(*arrays, cuda=partial(kernel, **options), default=partial(plain, **options))


def _names(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)
