"""The Mosaic kernels without a GPU: run by JAX's interpreter, which watches what they do, and lowered for CUDA."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # Where the interpreter keeps what it saw.
from jax.experimental.pallas import mosaic_gpu as plgpu
from numpy.typing import NDArray

from jaxfuse.kernels import fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
from op_inputs import draw, make_cache

EPS = 3e-5  # not the default, which a call that forgot its own would take
TINY = float(jnp.finfo(jnp.float32).tiny)  # XLA turns smaller results into zero on a CPU.
NORMS: dict[str, Callable[..., Any]] = {
    "rms_norm": partial(rms_norm, eps=EPS, implementation="mosaic"),
    "fused_add_rms_norm": partial(fused_add_rms_norm, eps=EPS, implementation="mosaic"),
}
silu = partial(silu_and_mul, implementation="mosaic")
rope = partial(rotary_embedding, implementation="mosaic")

# JAX 0.12 raises at a race unless told to warn; 0.11 only notes it. Noting it does for both.
_WARN = {"on_race": "warn"} if hasattr(plgpu.InterpretGPUParams, "on_race") else {}
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True, **_WARN)  # type: ignore[arg-type]


def interpreted(run: Callable[..., Any], *arguments: Any) -> Any:
    """`run(*arguments)`, which launches one kernel, by JAX's interpreter: no race, each element written once.

    Uninitialized memory reads as NaN there, and a read out of bounds raises.
    """
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        results = jax.block_until_ready(run(*arguments))
    if all(result.size for result in jax.tree.leaves(results)):
        assert_written_once(jax.tree.leaves(results))
    return results


def assert_written_once(results: list[jax.Array]) -> None:
    """The last kernel wrote each element of its results once, and nothing else, and no race was found."""
    races = gpu_callbacks.get_races()
    assert not races.races_found
    written = sorted((key for key, writes in races.writes.items() if writes), key=lambda key: key.buffer_id)
    assert len(written) == len(results)
    for key, result in zip(written, results, strict=True):
        places = [place for _, _, place, _ in races.writes[key]]
        # The kernel sees the leading axes as one.
        times = np.zeros(result.shape, np.int64).reshape(-1, *result.shape[1 - len(places[0]) :])
        for place in places:
            times[place] += 1
        np.testing.assert_array_equal(times, 1)


def assert_lowers(run: Callable[..., Any], *arguments: Any) -> None:
    """`run` lowers for CUDA, to one Mosaic kernel."""
    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2(") == 1


def rope_inputs(dtype: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
    """q and k of 8 tokens, and a table of 50 positions."""
    return draw(1, (8, 4, 128), dtype), draw(2, (8, 2, 128), dtype), make_cache(50, 128)


def bits(x: Any) -> NDArray[Any]:
    """The bits of an array, as integers."""
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")
