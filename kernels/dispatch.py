"""Which implementation of an op runs: chosen from Python values, before anything is traced.

A new implementation is one more entry in `FUNCTIONS`; what `None` means is decided in `choose` alone.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from . import reference
from .reference import Rounding

Implementation = Literal["mosaic", "triton", "xla"]


class ImplementationError(ValueError):
    """An implementation or a rounding that does not exist, or not together, or not here."""


FUNCTIONS: Mapping[str, Mapping[Implementation, Callable[..., Any]]] = MappingProxyType(
    {
        "rms_norm": MappingProxyType({"xla": reference.rms_norm}),
        "fused_add_rms_norm": MappingProxyType({"xla": reference.fused_add_rms_norm}),
        "silu_and_mul": MappingProxyType({"xla": reference.silu_and_mul}),
        "rotary_embedding": MappingProxyType({"xla": reference.rotary_embedding}),
    }
)


def choose(op: str, implementation: Implementation | None, rounding: Rounding) -> Callable[..., Any]:
    """The function that computes `op`. One asked for by name is given or refused, never replaced.

    Raises ImplementationError for a name that is unknown, that `op` does not have, or that cannot round as asked.
    """
    if rounding not in get_args(Rounding):
        raise ImplementationError(f"{op}: rounding must be one of {_names(get_args(Rounding))}; got {rounding!r}.")
    if implementation is None:
        return FUNCTIONS[op]["xla"]
    if implementation not in get_args(Implementation):
        raise ImplementationError(
            f"{op}: implementation must be one of {_names(get_args(Implementation))} or None; got {implementation!r}."
        )
    if rounding == "hf" and implementation != "xla":
        raise ImplementationError(
            f'{op}: rounding "hf" exists in implementation "xla" alone; got {implementation!r}; '
            'pass implementation="xla" or None, or rounding="fused".'
        )
    if implementation not in FUNCTIONS[op]:
        raise ImplementationError(
            f"{op}: implementation {implementation!r} is not available; available: {_names(FUNCTIONS[op])}; "
            "pass one of these, or None for the default."
        )
    return FUNCTIONS[op][implementation]


def check_implementation(implementation: Implementation | None, rounding: Rounding) -> None:
    """Raise ImplementationError unless every op has `implementation` with `rounding`: for a model, when it is made."""
    for op in FUNCTIONS:
        choose(op, implementation, rounding)


def _names(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)
