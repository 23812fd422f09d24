"""Do XLA's products read a layer's weights in place when the layers are stacked in one array?

    python3 bench/layer_stack.py --out bench/results/layer_stack-h200.json

Runs the products and norms of Qwen3-0.6B's 28 layers, without attention, with weights held in four ways, and
says how long a step takes and how many times the compiled program materializes a weight. All four compute the
same function; that is checked first.
"""

import argparse
import datetime
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYERS, HIDDEN, QUERY, KEY_VALUE, INNER = 28, 1024, 2048, 1024, 3072
SHAPES = {
    "qkv": (QUERY + 2 * KEY_VALUE, HIDDEN),
    "o": (HIDDEN, QUERY),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
Weights = Any


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x [B, in] @ weight[out, in].T`."""
    y = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm without a weight."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def layer(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """One layer's products; a sum of q and k, v stands in for attention."""
    qkv = product(norm(x), weights["qkv"])
    x = x + product(qkv[:, :QUERY] + qkv[:, QUERY:], weights["o"])
    gate_up = product(norm(x), weights["gate_up"])
    return x + product(jax.nn.silu(gate_up[:, :INNER]) * gate_up[:, INNER:], weights["down"])


def separate(weights: Weights, x: jax.Array) -> jax.Array:
    """Each layer has arrays of its own."""
    for one in weights:
        x = layer(x, one)
    return x


def static_slices(weights: Weights, x: jax.Array) -> jax.Array:
    """One stack, unrolled, sliced at known indices."""
    for index in range(LAYERS):
        x = layer(x, {name: stack[index] for name, stack in weights.items()})
    return x


def scanned(weights: Weights, x: jax.Array) -> jax.Array:
    """One stack, scanned over."""
    return lax.scan(lambda x, one: (layer(x, one), None), x, weights)[0]


def dynamic_slices(weights: Weights, x: jax.Array) -> jax.Array:
    """One stack, sliced at the index of a loop."""

    def step(index: jax.Array, x: jax.Array) -> jax.Array:
        return layer(x, {name: lax.dynamic_index_in_dim(stack, index, 0, False) for name, stack in weights.items()})

    return lax.fori_loop(0, LAYERS, step, x)


def materialized(program: str) -> int:
    """Instructions outside fusions that write an array of a weight's shape."""
    shapes = {f"bf16[{rows},{columns}]" for rows, columns in SHAPES.values()}
    shapes |= {shape.replace("[", "[1,") for shape in shapes}
    count, fused = 0, False
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            fused = "fused" in line or "_computation" in line
        match = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (\S+?\])\S* ([\w\-]+)\(", line)
        plumbing = {"parameter", "get-tuple-element", "bitcast"}
        if match and not fused and match[1] in shapes and match[2] not in plumbing:
            count += 1
    return count


def main() -> None:
    """Checks, times and records every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file of records to write")
    out: Path = parser.parse_args().out
    if jax.default_backend() != "gpu":
        raise SystemExit(f"bench/layer_stack.py: needs a GPU that JAX can use, got {jax.devices()[0].device_kind}")
    key = jax.random.key(0)
    stack = {
        name: (0.02 * jax.random.normal(key, (LAYERS, *shape), jnp.float32)).astype(jnp.bfloat16)
        for name, shape in SHAPES.items()
    }
    own = [{name: jnp.copy(array[index]) for name, array in stack.items()} for index in range(LAYERS)]
    forms: list[tuple[Callable[[Weights, jax.Array], jax.Array], Weights]] = [
        (separate, own),
        (static_slices, stack),
        (scanned, stack),
        (dynamic_slices, stack),
    ]
    records = []
    for rows in (1, 8, 512):
        x = jax.random.normal(key, (rows, HIDDEN), jnp.bfloat16)
        expected = np.asarray(jax.jit(separate)(own, x), np.float64)
        steps = 40 if rows < 512 else 10
        compiled = []
        for form, weights in forms:
            got = np.asarray(jax.jit(form)(weights, x), np.float64)
            error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
            if not error < 0.05:
                raise RuntimeError(f"{form.__name__} differs from separate by {error}")

            def loop(weights: Weights, x: jax.Array, form: Any = form, steps: int = steps) -> jax.Array:
                return lax.fori_loop(0, steps, lambda _, x: form(weights, x), x)

            compiled.append((form.__name__, jax.jit(loop).lower(weights, x).compile(), weights))
        times: dict[str, list[float]] = {name: [] for name, _, _ in compiled}
        for run in range(16):
            for name, program, weights in compiled:  # in turn, so that a drift meets all alike
                start = time.perf_counter()
                jax.block_until_ready(program(weights, x))
                if run:
                    times[name].append((time.perf_counter() - start) / steps * 1e6)
        for name, program, _ in compiled:
            text = program.as_text()
            if text is None:
                raise RuntimeError("XLA does not show its program here, so weights in it cannot be counted")
            count = materialized(text)
            median, p10, p90 = (float(np.percentile(times[name], q)) for q in (50, 10, 90))
            print(f"{rows:4} rows  {name:15} {median:9.1f} µs/step   weights materialized: {count}", flush=True)
            records.append(
                {
                    "bench": "layer_stack",
                    "case": {"rows": rows, "weights": name, "dtype": "bfloat16"},
                    "impl": "xla",
                    "median_us": median,
                    "p10_us": p10,
                    "p90_us": p90,
                    "runs": len(times[name]),
                    "bytes": 2 * LAYERS * sum(a * b for a, b in SHAPES.values()),
                    "flops": 2 * rows * LAYERS * sum(a * b for a, b in SHAPES.values()),
                    "weights_materialized": count,
                    "device": jax.devices()[0].device_kind,
                    "versions": {"jax": jax.__version__},
                    "date": datetime.date.today().isoformat(),
                }
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
