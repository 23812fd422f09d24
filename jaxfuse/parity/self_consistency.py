"""jaxfuse against itself: one model, one prompt, and several ways to its logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxfuse.kernels import Implementation, ImplementationError
from jaxfuse.model import Qwen3
from jaxfuse.parity.errors import Errors
from jaxfuse.parity.ops import implementations
from jaxfuse.parity.taps import JaxSide, to_torch
from jaxfuse.parity.yardstick import STEP, Line, geometric_ratio

_DECODED = 32
_ROWS = 4


def compare_with_itself(
    side: JaxSide,
    rows: np.ndarray,
    true: torch.Tensor,
    torch_errors: torch.Tensor,
    dtype: str,
    logit_bound: float,
) -> tuple[list[dict[str, Any]], list[Line]]:
    """Token by token against prefill, a padded batch against its rows alone, the model's kernels against "xla".

    In float32 the largest difference of a logit is held against the bound of the contract; in 16 bits each way's error
    against transformers' float32 may be 1.10 times transformers' own.

    Args:
        side: the model.
        rows: `[B, T]` prompts of one length.
        true: `[B, T, vocab]`, transformers' float32 logits.
        torch_errors: `[B, T]`, the errors of transformers' own logits in this dtype.
        dtype: of the run.
        logit_bound: what a float32 logit may differ by, of the largest.
    """
    group = rows  # the shape that the forward pass is compiled for
    rows, true, torch_errors = rows[:_ROWS], true[:_ROWS], torch_errors[:_ROWS]
    records: list[dict[str, Any]] = []
    lines: list[Line] = []

    def judge(what: str, one: jax.Array, other: jax.Array, true: torch.Tensor, theirs: torch.Tensor) -> None:
        first, second = to_torch(one, str(true.device)), to_torch(other, str(true.device))
        largest = float((first.double() - second.double()).abs().max())
        relative = largest / float(true.abs().max())
        errors = Errors()
        errors.add(first, true)
        ratio = geometric_ratio(errors.tokens, [theirs])[0] if dtype != "float32" else None
        value, bound = (relative, logit_bound) if ratio is None else (ratio, STEP)
        line = Line(f"{dtype} self_consistency {what}", value, bound)
        lines.append(line)
        records.append(
            {
                "what": what,
                "dtype": dtype,
                "tokens": theirs.numel(),
                "largest": largest,
                "of_largest_logit": relative,
                "error_ratio": ratio,
                "same_token": float((first.argmax(-1) == second.argmax(-1)).double().mean()),
                "passed": line.passed,
            }
        )

    whole = side.logits(group)[:_ROWS]
    count = min(_DECODED, rows.shape[1])
    by_token = _token_by_token(side, rows[:, :count])
    judge("decode against prefill", by_token, whole[:, :count], true[:, :count], torch_errors[:, :count])

    padded, alone, places = _padded_and_alone(side, rows)
    judge("padded batch against rows alone", padded, alone, true[places][None], torch_errors[places][None])

    if type(side.model) is Qwen3 and side.model.numerics.rounding == "fused":
        baseline = JaxSide(_with_implementation(side.model, "xla")).logits(group)[:_ROWS]
        for name in implementations():
            if name == "xla":
                continue
            try:
                other = JaxSide(_with_implementation(side.model, name))
            except ImplementationError as error:
                records.append({"what": f"{name} against xla", "dtype": dtype, "refused": str(error)})
                continue
            judge(f"{name} against xla", other.logits(group)[:_ROWS], baseline, true, torch_errors)
        if side.model.numerics.implementation is None and implementations() != ["xla"]:
            judge("default against xla", whole, baseline, true, torch_errors)
    return records, lines


def _with_implementation(model: Qwen3, name: Implementation) -> Qwen3:
    """The same weights, not copied, in a model whose fused ops another implementation runs."""
    numerics = model.numerics
    shape = nnx.eval_shape(
        lambda: Qwen3(
            model.config, rngs=nnx.Rngs(0), dtype=numerics.dtype, rounding=numerics.rounding, implementation=name
        )
    )
    return nnx.merge(nnx.graphdef(shape), nnx.state(model))


def _token_by_token(side: JaxSide, rows: np.ndarray) -> jax.Array:
    """`[B, T, vocab]`: each token read alone, the ones before it in a cache."""
    cache = side.model.init_cache(len(rows), rows.shape[1])
    logits = []
    for place in range(rows.shape[1]):
        one, cache = side.logits_with_cache(rows[:, place : place + 1], cache)
        logits.append(one)
    return jnp.concatenate(logits, axis=1)


def _padded_and_alone(side: JaxSide, rows: np.ndarray) -> tuple[jax.Array, jax.Array, tuple[np.ndarray, np.ndarray]]:
    """Logits `[1, N, vocab]` of rows of unequal lengths, as one batch and one by one, and the places they are of."""
    batch, length = rows.shape
    lengths = [max(1, length - i * length // batch) for i in range(batch)]
    filled = rows.copy()
    for row, end in zip(filled, lengths, strict=True):
        row[end:] = row[0]  # padding has some token's id
    together, _ = side.logits_with_cache(filled, side.model.init_cache(batch, length))
    # A row alone is read whole, one program for all; what comes after `end` is not seen before it.
    parts = [side.logits(row[None])[0, :end] for row, end in zip(rows, lengths, strict=True)]
    places = (
        np.concatenate([np.full(end, i) for i, end in enumerate(lengths)]),
        np.concatenate([np.arange(end) for end in lengths]),
    )
    return together[places][None], jnp.concatenate(parts)[None], places
