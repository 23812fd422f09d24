"""The cases of bench/ops.py: their arrays, and what a right result is."""

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers import EPS

type Case = dict[str, Any]
type Wide = NDArray[np.float64]

HEADS = {1024: 16, 4096: 32}
"""Query heads by hidden width, as in Qwen3-0.6B and 8B; there are 8 of keys, and I is three times the width."""
KV_HEADS, HEAD_DIM, MAX_POSITION = 8, 128, 40960


# The cases.


def cases(ops: Iterable[str], hidden: Iterable[int], rows: Iterable[int]) -> Iterator[Case]:
    """One for each op, width and number of rows."""
    hidden, rows = list(hidden), list(rows)
    for op in ops:
        for width in hidden:
            for count in rows:
                case: Case = {"op": op, "rows": count}
                if op == "rotary_embedding":
                    case |= {"heads": HEADS[width], "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
                else:
                    case["width"] = 3 * width if op == "silu_and_mul" else width
                yield case | {"dtype": "bfloat16", "cache": "warm"}


def work(case: Case) -> tuple[int, int]:
    """The bytes that must be read and written once, and the operations on numbers."""
    rows, width = case["rows"], case.get("width", 0)
    match case["op"]:
        case "rms_norm":
            return 2 * (2 * rows * width + width), 4 * rows * width
        case "fused_add_rms_norm":
            return 2 * (4 * rows * width + width), 5 * rows * width
        case "silu_and_mul":
            return 2 * 3 * rows * width, 5 * rows * width
        case "rotary_embedding":
            elements = rows * (case["heads"] + case["kv_heads"]) * case["head_dim"]
            table = 4 * min(rows, MAX_POSITION) * case["head_dim"]
            return 2 * 2 * elements + 4 * rows + table, 3 * elements
        case op:
            raise ValueError(f"no op is called {op!r}")


def draw(case: Case) -> list[NDArray[Any]]:
    """The op's arrays, the same in every process: float32 values that bfloat16 holds exactly; positions int32."""
    rng = np.random.default_rng(zlib.crc32(json.dumps(case, sort_keys=True).encode()))

    def heavy_tailed(*shape: int) -> NDArray[Any]:
        values = rng.standard_normal(shape, np.float32)
        values *= np.exp(rng.standard_normal(shape, np.float32))
        bits = values.view(np.uint32)  # to nearest even, and the low half cleared
        bits += 0x7FFF + ((bits >> 16) & 1)
        bits &= 0xFFFF0000
        return values

    rows, width = case["rows"], case.get("width", 0)
    match case["op"]:
        case "rms_norm":
            return [heavy_tailed(rows, width), heavy_tailed(width)]
        case "fused_add_rms_norm":
            return [heavy_tailed(rows, width), heavy_tailed(rows, width), heavy_tailed(width)]
        case "silu_and_mul":
            return [heavy_tailed(rows, 2 * width)]
        case "rotary_embedding":
            dim = case["head_dim"]
            # Neighbors, as in a prompt.
            positions = ((rng.integers(MAX_POSITION) + np.arange(rows)) % MAX_POSITION).astype(np.int32)
            angles = np.arange(MAX_POSITION)[:, None] * 1e6 ** (-np.arange(0, dim, 2) / dim)
            table = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
            return [heavy_tailed(rows, case["heads"], dim), heavy_tailed(rows, case["kv_heads"], dim), positions, table]
        case op:
            raise ValueError(f"no op is called {op!r}")


# The check.


def sampled_rows(rows: int) -> NDArray[Any]:
    """The first, the last, and up to 64 others."""
    others = np.random.default_rng(rows).permutation(rows)[:64]
    return np.unique([0, rows - 1, *others])


HALF_ULP, FLOAT32 = 2.0**-8, 2.0**-24
"""One rounding to bfloat16 and one to float32, relative to the value."""

ROUNDINGS = {
    ("rms_norm", "torch"): (1,),  # before the weight multiplies
    ("rms_norm", "torch_rms_norm"): (1,),  # there, too, or not, by version
    ("fused_add_rms_norm", "torch"): (3, 0),  # the sum, which acts on an element and on the mean; then as above
    ("fused_add_rms_norm", "torch_rms_norm"): (3, 0),
    ("silu_and_mul", "torch"): (1,),  # the silu
    ("rotary_embedding", "torch"): (2, 2),  # cosine or sine, and each product
}
"""Roundings to bfloat16 before the last one, for each output. Whatever is not here rounds once, at its outputs."""


def expected(case: Case, arrays: list[Wide]) -> list[tuple[Wide, Wide, Wide]]:
    """Each output in float64, the size that a rounding on the way is relative to, and float32's own error."""
    match case["op"], arrays:
        case "rms_norm", [x, weight]:
            exact = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * weight
            return [(exact, np.abs(exact), _norm_error(exact))]
        case "fused_add_rms_norm", [x, residual, weight]:
            total = x + residual
            exact = total / np.sqrt(np.mean(total * total, -1, keepdims=True) + EPS) * weight
            return [
                (exact, np.abs(exact), _norm_error(exact)),
                (total, np.abs(total), FLOAT32 * np.abs(total)),
            ]
        case "silu_and_mul", [x]:
            gate, up = np.split(x, 2, -1)
            exact = gate / (1 + np.exp(-gate)) * up
            # exp(-g) by way of a power of two errs by |g| roundings. Beyond 2^126 it, or a quotient by it, may
            # overflow, and the silu, then below 88 x 2^-126, be zero.
            error = FLOAT32 * (np.minimum(np.abs(gate), 128) + 16) * np.abs(exact) + 2.0**-119 * np.abs(up)
            return [(exact, np.abs(exact), error)]
        case "rotary_embedding", [q, k, cos_sin]:
            cos, sin = np.split(cos_sin[:, None, :], 2, -1)
            outputs = []
            for x in (q, k):
                first, second = np.split(x, 2, -1)
                exact = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
                size = np.concatenate(
                    [np.abs(first * cos) + np.abs(second * sin), np.abs(second * cos) + np.abs(first * sin)], -1
                )
                outputs.append((exact, size, 8 * FLOAT32 * size))
            return outputs
        case op, _:
            raise ValueError(f"no op is called {op!r}")


def _norm_error(exact: Wide) -> Wide:
    # A thread adds width / 32 squares at most, then a few sums across threads; half of that, by the square root.
    return FLOAT32 * (exact.shape[-1] / 64 + 16) * np.abs(exact)


def worst_error(case: Case, impl: str, drawn: list[NDArray[Any]], rows: NDArray[Any], outputs: list[Wide]) -> float:
    """The largest error of the outputs' `rows`, as a part of what is allowed; NaN if there is a NaN.

    Allowed is what float32 arithmetic and roundings on the way may add, and half an ulp of the result.
    """
    if case["op"] == "rotary_embedding":
        q, k, positions, table = drawn
        arrays = [q[rows], k[rows], table[positions[rows]]]
    else:
        arrays = [array[rows] if array.ndim > 1 else array for array in drawn]
    wanted = expected(case, [array.astype(np.float64) for array in arrays])
    on_the_way = ROUNDINGS.get((case["op"], impl), (0,) * len(wanted))
    worst = []
    for output, (exact, size, float32), roundings in zip(outputs, wanted, on_the_way, strict=True):
        if output.shape != exact.shape:
            raise ValueError(f"an output has shape {output.shape} where {exact.shape} is right")
        before = float32 + 1.02 * roundings * HALF_ULP * size + 2.0**-126  # smaller numbers may be flushed
        exponent = np.maximum(np.frexp(np.abs(exact) + before)[1] - 1, -126)
        worst.append(np.max(np.abs(output - exact) / (before + 2.0 ** (exponent - 8))))
    return float(np.max(worst))
