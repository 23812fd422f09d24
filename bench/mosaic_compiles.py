"""How many Mosaic kernels a model's programs compile, how often equal calls share one, and how long it takes.

    python3 bench/mosaic_compiles.py
    python3 bench/mosaic_compiles.py --random-0.6b

Compiles prefill and the decode loop under JAX's profiler, in a process that has compiled nothing else, then runs
them. Status 1: the counts do not agree.
"""

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import jaxfuse
from jaxfuse import Qwen3
from jaxfuse.generate import RUNNING, begin, decode, interned, prefill
from jaxfuse.sizes import SIZES

SHIPPED = Path(jaxfuse.__file__).parent / "checkpoint"
QWEN3_06B = SIZES["0.6B"]
COMPILE_EVENT = "Compile"
"""What Mosaic GPU calls a kernel's compilation in a trace."""
BACKEND_EVENT = "/jax/core/compile/backend_compile_duration"
TARGET = "mosaic_gpu_v2"
STEPS = 4


def traced(model: Qwen3, tokens: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """The programs of a greedy generation from prompts `[B, T]`, of which only the shapes matter."""
    leaves, treedef = jax.tree.flatten(model)
    tree, options = interned(treedef), greedily(len(tokens))
    first = prefill.trace(tree, leaves, tokens, lengths)
    start = begin.trace(*first.out_info, *options, capacity=512, size=64, greedy=True)
    loop = decode.trace(tree, leaves, start.out_info, *options, np.int32(STEPS), greedy=True)
    return {"prefill": first, "begin": start, "decode": loop}


def greedily(batch: int) -> tuple[Any, ...]:
    """Sampling, no stop tokens, and keys, as the programs take them."""
    return jaxfuse.Sampling().for_batch(batch), np.full(8, -1, np.int32), jax.random.split(jax.random.key(0), batch)


def kernels(program: str) -> Counter[str]:
    """The Mosaic kernels of a lowered program: hash, and how many calls it has in the text."""
    return Counter(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', program))


def calls(program: str) -> int:
    """The Mosaic calls of a compiled program, a loop's body counted once."""
    return program.count(f'custom_call_target="{TARGET}"')


def host_events(folder: Path) -> Iterator[tuple[str, float]]:
    """The name and the seconds of each event on the host in the trace below `folder`."""
    for path in folder.glob("plugins/profile/*/*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if "/host:" in plane.name:
                for line in plane.lines:
                    for event in line.events:
                        yield event.name, event.duration_ns / 1e9


def main() -> None:
    """Compiles, counts, runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default=str(SHIPPED), help="a checkpoint's folder; the shipped one by default")
    which.add_argument("--random-0.6b", dest="random", action="store_true", help="Qwen3-0.6B with random weights")
    parser.add_argument("--implementation", choices=["mosaic", "xla"], help="by default what None means")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"bench/mosaic_compiles.py: needs a GPU that JAX can use, got {jax.devices()[0].device_kind}")
    # One that holds programs would hide their compilation.
    jax.config.update("jax_enable_compilation_cache", False)
    if options.random:
        model = Qwen3(QWEN3_06B, rngs=nnx.Rngs(0), implementation=options.implementation)
    else:
        model = Qwen3.from_pretrained(options.model, implementation=options.implementation)
    tokens, lengths = np.ones((1, 128), np.int32), np.full(1, 100, np.int32)
    programs = {name: program.lower() for name, program in traced(model, tokens, lengths).items()}
    hashes = {name: kernels(program.as_text()) for name, program in programs.items()}

    backend: list[float] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == BACKEND_EVENT:
            backend.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    quietly = jax.profiler.ProfileOptions()
    quietly.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=quietly)
        try:
            compiled = {name: program.compile() for name, program in programs.items()}
        finally:
            jax.profiler.stop_trace()
        events = list(host_events(Path(folder)))

    for name, program in compiled.items():
        text = program.as_text()
        if text is None:
            raise SystemExit(
                "bench/mosaic_compiles.py: XLA does not show its programs here, so calls cannot be counted"
            )
        print(
            f"{name:8} {calls(text):4} Mosaic calls compiled, {hashes[name].total():4} lowered, "
            f"{len(hashes[name]):4} distinct kernels"
        )
    distinct = len(set().union(*hashes.values()))
    seconds = [duration for name, duration in events if name == COMPILE_EVENT]
    print(f"all      {distinct} distinct Mosaic kernels, {len(seconds)} compiled in {sum(seconds):.2f} s")
    print(f"         {len(backend)} programs compiled in {sum(backend):.2f} s, Mosaic's time included")
    run(model, tokens, lengths, compiled)
    if distinct and not seconds:
        like = Counter(name for name, _ in events if "ompil" in name or "osaic" in name)
        raise SystemExit(
            f"bench/mosaic_compiles.py: the programs hold Mosaic kernels, but no event of the trace is called "
            f'"{COMPILE_EVENT}", so their compilations are not counted; of {len(events)} events on the host these come '
            f"near: {dict(like.most_common(20))}"
        )
    if distinct != len(seconds):
        raise SystemExit(
            f"bench/mosaic_compiles.py: {len(seconds)} compilations for {distinct} distinct kernels: some kernel was "
            f'compiled more than once, or something else calls its events "{COMPILE_EVENT}", too'
        )


def run(model: Qwen3, tokens: np.ndarray, lengths: np.ndarray, compiled: dict[str, Any]) -> None:
    """Generates with the compiled programs, and raises unless numbers come out."""
    leaves, options = jax.tree.leaves(model), greedily(len(tokens))
    state = compiled["begin"](*compiled["prefill"](leaves, tokens, lengths), *options)
    state = compiled["decode"](leaves, state, *options, np.int32(STEPS))
    if not (np.asarray(state.finish) == RUNNING).all() or not np.isfinite(state.logprobs).all():
        raise SystemExit(f"bench/mosaic_compiles.py: the programs computed no tokens: {np.asarray(state.tokens)}")


if __name__ == "__main__":
    main()
