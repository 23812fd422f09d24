"""jaxfuse against transformers at full size: the tables of `jaxfuse parity`, for models that need no download.

    python3 bench/parity.py --models shipped,0.6B,4B --out build/parity

The shipped checkpoint is trained. A published size is made with random weights, drawn twice:

* random: normal, as transformers initializes.
* heavy: Student's t with 4 degrees of freedom, norm weights spread by a factor of e, one channel of the residual
  thirty times the others, and a first token that is a thousand times larger still there, as trained models have them
  (Sun et al., Massive Activations in Large Language Models, 2024).

Writes `parity-MODEL-INIT.json` and `.log` for each. Status 1: a contract is broken.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when JAX starts: PyTorch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfuse
from jaxfuse import Qwen3, Qwen3Config, compile_cache
from jaxfuse.parity import compare
from jaxfuse.parity.prompts import default_prompts
from jaxfuse.sizes import SIZES

SHIPPED = Path(jaxfuse.__file__).parent / "checkpoint"
OUTLIER, SINK = 7, 11
"""The channel that is large everywhere, and the token that is large there."""


def make(config: Qwen3Config, init: str, folder: Path) -> None:
    """Writes a model with random weights."""
    model = Qwen3(config, rngs=nnx.Rngs(0))
    if init == "heavy":
        weights, tree = jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))
        keys = jax.random.split(jax.random.key(1), len(weights))
        drawn = [heavy(key, jax.tree_util.keystr(path), x) for key, (path, x) in zip(keys, weights, strict=True)]
        nnx.update(model, jax.tree.unflatten(tree, drawn))
    model.save_pretrained(folder)


def heavy(key: jax.Array, path: str, weight: jax.Array) -> jax.Array:
    """A heavy-tailed weight of the shape and about the size of this one."""
    if weight.ndim == 1:
        spread = jnp.exp(0.5 * jax.random.normal(key, weight.shape))
        if "layernorm" in path:  # what reads the residual turns the outlier down, as trained norms do
            spread = spread.at[OUTLIER].set(0.05)
        elif weight.shape[0] > 128:  # the last norm: with tied embeddings the sink would be every next token
            spread = spread.at[OUTLIER].set(0.0)
        return spread.astype(weight.dtype)
    drawn = 0.02 / 2**0.5 * jax.random.t(key, 4.0, weight.shape)
    if "o_proj" in path or "down_proj" in path:
        drawn = drawn.at[OUTLIER].multiply(30.0)
    if "embed_tokens" in path:
        drawn = drawn.at[:, OUTLIER].multiply(30.0).at[SINK, OUTLIER].multiply(1000.0)
    return drawn.astype(weight.dtype)


def prompts_for(config: Qwen3Config, init: str, folder: Path) -> list[np.ndarray]:
    """The tool's own; those of a heavy model begin with its sink."""
    prompts = default_prompts(folder, config)
    if init == "heavy":
        for row in prompts:
            row[0] = SINK
    return prompts


@contextlib.contextmanager
def checkpoint(name: str, init: str) -> Iterator[Path]:
    """The folder of a model."""
    if name == "shipped":
        yield SHIPPED
        return
    with tempfile.TemporaryDirectory() as scratch:
        make(SIZES[name], init, Path(scratch))
        yield Path(scratch)


def main() -> int:
    """Compares and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="shipped,0.6B,4B", help="shipped, or sizes; default: shipped,0.6B,4B")
    parser.add_argument("--inits", default="random,heavy", help="of the sizes; default: random,heavy")
    parser.add_argument("--new-tokens", type=int, default=64, help="greedy tokens; default: 64")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    compile_cache.enable()
    broken = 0
    for name in options.models.split(","):
        for init in ["trained"] if name == "shipped" else options.inits.split(","):
            start = time.perf_counter()
            with checkpoint(name, init) as folder:
                made = time.perf_counter()
                report = compare(
                    folder,
                    prompts=prompts_for(Qwen3Config.from_pretrained(folder), init, folder),
                    new_tokens=options.new_tokens,
                    progress=lambda what, done, total: print(f"{what} {done}/{total}", file=sys.stderr, flush=True),
                )
            report = dataclasses.replace(report, model=f"{name}, {init} weights")
            target = f"parity-{name}-{init}"
            (options.out / f"{target}.json").write_text(report.to_json() + "\n", "utf-8")
            (options.out / f"{target}.log").write_text(report.table(110) + "\n", "utf-8")
            verdict = "holds" if report.passed else f"broken: {', '.join(report.broken[:5])}"
            seconds = f"made in {made - start:.0f} s, compared in {time.perf_counter() - made:.0f} s"
            print(f"{name} {init}: {verdict} ({seconds})", flush=True)
            broken += not report.passed
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
