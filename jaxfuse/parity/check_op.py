"""The yardstick for code of one's own: any JAX function against any PyTorch function, over a table of shapes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from jaxfuse.config import DTYPES
from jaxfuse.errors import InputError
from jaxfuse.parity.taps import to_jax, to_torch
from jaxfuse.parity.torch_side import pinned, torch_dtype
from jaxfuse.parity.yardstick import LARGEST_LOGIT, Line, judge_step, root_mean_square, token_errors

type Argument = tuple[int, ...] | np.ndarray | jax.Array
"""What a case gives for one argument: the shape of an array to draw, or an array."""

type Cases = Sequence[tuple[Argument, ...]] | Mapping[str, tuple[Argument, ...]]

_MOST_TOLD = 10

# PyTorch errs by roundings; where it is further than this from a truth that was given, that is of something else.
_PLAUSIBLE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.3}


@dataclasses.dataclass(frozen=True)
class OpCase:
    """How far one output of one case is from PyTorch's.

    Attributes:
        case: its name.
        dtype: of the drawn arrays.
        output: its place among the function's outputs.
        error: of the JAX side, and `torch_error` of the PyTorch side: root mean square over rows of the relative L2
            error against the truth; both None where PyTorch's float32 is itself what is compared with.
        largest: the largest difference between the two sides, and `index` where it is.
        line: the measured figure that is worst, and what it may be.
    """

    case: str
    dtype: str
    output: int
    error: float | None
    torch_error: float | None
    largest: float
    index: tuple[int, ...]
    line: Line


def check_op(
    jax_fn: Callable[..., Any],
    torch_fn: Callable[..., Any],
    shapes: Cases,
    truth: Callable[..., Any] | None = None,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    seed: int = 0,
) -> list[OpCase]:
    """Asserts that a JAX function computes what a PyTorch function does, as exactly as PyTorch itself.

    What is compared, per row (the last axis), as relative L2 error:

    * with a truth, in every dtype: both sides against it. The root mean square over rows may be three times PyTorch's
      own (or one rounding of float32); in 16 bits the geometric mean of the ratios may besides be at most 1.10. PyTorch
      itself may be 1e-3 from it in float32 (0.1 in float16, 0.3 in bfloat16), else the truth is of another function.
    * without, in float32: the largest difference may be 2e-5 of PyTorch's largest value.
    * without, in 16 bits: as with a truth, which then is `torch_fn` in float32 on the same values.

    Outputs that are not floating-point must be equal, whatever the width of integers; NaN and infinities must lie in
    the same places.

    Args:
        jax_fn: takes jax arrays, returns one or several; jit it if that is what you run.
        torch_fn: the same of tensors on the CPU.
        shapes: the cases, in a list, or by name. A case has an entry for each argument: a shape, to be drawn normally
            with rows of scales from 0.1 to 10 and rounded to the dtype; or an array, of which a floating-point one is
            rounded to the dtype and any other, such as positions, is passed as it is.
        truth: the same function of float64 NumPy arrays.
        dtypes: of "float32", "bfloat16" and "float16".
        seed: another draws other values.

    Returns:
        The figures of each output of each case.

    Raises:
        AssertionError: when a comparison fails; the message begins with the worst one.
        TypeError, InputError: for a table or dtypes that do not fit, or a function that returns no arrays.

    Example:
        ```
        def test_my_norm():
            check_op(my_norm, torch_norm, [((4, 1024), (1024,)), ((1, 5, 128), (128,))], truth=numpy_norm)
        ```
    """
    if isinstance(dtypes, str) or not dtypes or not all(dtype in DTYPES for dtype in dtypes):
        raise InputError(f"dtypes must be at least one of {', '.join(DTYPES)}, in a list, got {dtypes!r}")
    found: list[OpCase] = []
    for number, (name, case) in enumerate(_named(shapes)):
        for dtype in dtypes:
            values = [_draw(argument, np.random.default_rng([seed, number, i])) for i, argument in enumerate(case)]
            found += _compare(jax_fn, torch_fn, truth, values, name, dtype)
    broken = sorted((case for case in found if not case.line.passed), key=lambda case: -case.line.strain)
    if broken:
        others = [f"  {_described(case)}" for case in broken[1 : 1 + _MOST_TOLD]]
        left = len(broken) - 1 - len(others)
        rest = [f"  and {left} more"] if left > 0 else []
        count = f"{len(broken)} of {len(found)} comparisons fail (seed {seed})"
        raise AssertionError("\n".join([f"{_described(broken[0])}; {count}", *others, *rest]))
    return found


def _named(shapes: Cases) -> list[tuple[str, tuple[Argument, ...]]]:
    if isinstance(shapes, Mapping):
        cases = list(shapes.items())
    else:
        names = [", ".join(str(getattr(argument, "shape", argument)) for argument in _tuple(case)) for case in shapes]
        # Cases may differ in the values of their arrays alone.
        cases = [
            (f"{name} (case {number})" if names.count(name) > 1 else name, case)
            for number, (name, case) in enumerate(zip(names, shapes, strict=True))
        ]
    if not cases:
        raise InputError("the table of shapes has no cases; give at least one")
    return [(name, _tuple(case)) for name, case in cases]


def _tuple(case: Any) -> tuple[Argument, ...]:
    rule = (
        "a case must be a tuple with a shape (a tuple of positive integers) or a NumPy or JAX array for each argument"
    )
    if not isinstance(case, tuple):
        raise TypeError(f"{rule}, got {case!r}")
    for argument in case:
        if isinstance(argument, np.ndarray | jax.Array):
            continue
        if not isinstance(argument, tuple) or not all(isinstance(n, int) and n > 0 for n in argument):
            raise TypeError(f"{rule}, got {argument!r} in {case!r}; ((4, 128),) is a case of one argument")
    return case


def _draw(argument: Argument, rng: np.random.Generator) -> np.ndarray:
    if not isinstance(argument, tuple):
        return np.asarray(argument)
    scales = 10 ** rng.uniform(-1, 1, (*argument[:-1], 1)) if len(argument) > 1 else 1.0
    return np.asarray(rng.standard_normal(argument) * scales, np.float32)


def _compare(
    jax_fn: Callable[..., Any],
    torch_fn: Callable[..., Any],
    truth: Callable[..., Any] | None,
    values: list[np.ndarray],
    case: str,
    dtype: str,
) -> list[OpCase]:
    """One case in one dtype; each function gets copies of its own, since one may work in place."""

    def given(to: torch.dtype | None = None) -> list[torch.Tensor]:
        arguments = [to_torch(value) for value in values]
        rounded = [x.to(torch_dtype(dtype)) if x.is_floating_point() else x for x in arguments]
        return rounded if to is None else [x.to(to) if x.is_floating_point() else x for x in rounded]

    where = f"{case} in {dtype}"
    ours = _called("the JAX function", where, jax_fn, [to_jax(x) for x in given()])
    with pinned():
        theirs = _called("the PyTorch function", where, torch_fn, given())
    exact: list[Any] | None = None
    if truth is not None:
        exact = _called("the truth", where, truth, [x.numpy() for x in given(torch.float64)])
    elif dtype != "float32":
        with pinned():
            exact = _called("the PyTorch function in float32", where, torch_fn, given(torch.float32))
    for name, outputs in (("PyTorch", theirs), ("the truth", exact)):
        if outputs is not None:
            described = [[(tuple(x.shape)) for x in some] for some in (ours, outputs)]
            assert described[0] == described[1], f"{where}: JAX returns shapes {described[0]}, {name} {described[1]}"
    mine = [to_torch(x) for x in ours]
    dtypes = [[_kind(x.dtype) for x in some] for some in (mine, theirs)]
    assert dtypes[0] == dtypes[1], f"{where}: JAX returns {dtypes[0]}, PyTorch {dtypes[1]}"
    return [
        _output(case, dtype, i, x, theirs[i], None if exact is None else torch.as_tensor(exact[i]), truth is not None)
        for i, x in enumerate(mine)
    ]


def _kind(dtype: torch.dtype) -> str:
    """Its name; integers of any width are one kind, since JAX has no 64 bits unless it is told to."""
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return "integers" if whole else str(dtype).removeprefix("torch.")


def _called(what: str, where: str, function: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    try:
        out = function(*arguments)
    except Exception as error:
        error.add_note(f"raised by {what} for {where}")
        raise
    outputs = list(out) if isinstance(out, tuple | list) else [out]
    for output in outputs:
        if not isinstance(output, jax.Array | np.ndarray | np.generic | torch.Tensor):
            raise TypeError(
                f"{what} must return an array, or several in a tuple or list, got {type(output).__name__} for {where}"
            )
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]


def _output(
    case: str,
    dtype: str,
    output: int,
    mine: torch.Tensor,
    yours: torch.Tensor,
    exact: torch.Tensor | None,
    given: bool,
) -> OpCase:
    """One output of both sides; `given`: the exact values are a truth's, not PyTorch's in float32."""
    name = f"output {output} of {case} in {dtype}"
    if not mine.is_floating_point():
        apart = mine != yours
        line = Line(f"{name}: values that differ", int(apart.sum()), 0)
        largest, index = _largest(mine, yours)
        return OpCase(case, dtype, output, None, None, largest, index, line)
    sides = [x.double() for x in ((mine, yours) if exact is None else (mine, yours, exact))]
    odd = [torch.where(x.isfinite(), 0, torch.where(x.isnan(), 1, x.sign() * 2)) for x in sides]
    apart = (odd[0] != odd[1]) | (odd[0] != odd[-1])
    largest, index = _largest(*(torch.where(x.isfinite(), x, 0.0) for x in sides[:2]))
    if bool(apart.any()):
        line = Line(f"{name}: NaN or infinities that differ", int(apart.sum()), 0)
        return OpCase(case, dtype, output, None, None, math.inf, _place(apart.double()), line)
    sides = [torch.where(x.isfinite(), x, 0.0) for x in sides]
    if exact is None:
        most = float(sides[1].abs().max()) if sides[1].numel() else 0.0
        value = largest / most if most else largest
        line = Line(f"{name}: largest difference of the largest value", value, LARGEST_LOGIT)
        return OpCase(case, dtype, output, None, None, largest, index, line)
    rows = [x.reshape(1, -1, x.shape[-1] if x.ndim else 1) for x in sides]
    errors = [token_errors(x - rows[2], rows[2]) for x in rows[:2]]
    figures = [root_mean_square(x) if x.numel() else 0.0 for x in errors]
    lines = judge_step(name, dtype, *errors)
    if given:
        what = f"{name}: PyTorch's own error, so the truth is another function"
        lines.append(Line(what, figures[1], _PLAUSIBLE[dtype]))
    return OpCase(case, dtype, output, figures[0], figures[1], largest, index, max(lines, key=lambda line: line.strain))


def _largest(mine: torch.Tensor, yours: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    difference = (mine.double() - yours.double()).abs()
    return (float(difference.max()), _place(difference)) if difference.numel() else (0.0, ())


def _place(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(values.argmax()), values.shape))


def _described(case: OpCase) -> str:
    errors = "" if case.error is None else f" (error {case.error:.3g}, PyTorch's {case.torch_error:.3g})"
    value = "NaN" if math.isnan(case.line.value) else f"{case.line.value:.3g}"
    return (
        f"{case.line.name}: {value}, at most {case.line.bound:.3g}{errors}; largest difference {case.largest:.3g} at "
        f"{case.index}"
    )
