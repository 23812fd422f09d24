"""What a kernel as an op promises: the program holds one opaque call of it, wherever it stands, in a model too.

Derivatives, vmap and meshes have files of their own.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfuse
import tiny
from jaxfuse import Qwen3, Qwen3Config
from jaxfuse.generate import begin, decode, interned, prefill
from jaxfuse.kernels import fused_add_rms_norm, silu_and_mul
from op_inputs import DTYPES, OPS
from opaque_ops import (
    CALLS,
    KERNEL,
    SHARED,
    WIDTH,
    Function,
    arguments,
    assert_close,
    assert_equal,
    each_op,
    interpreted,
    kernels,
    lowered,
    mosaic,
    primitives,
)

CHECKPOINT = Path(jaxfuse.__file__).parent / "checkpoint"


# What the program holds.


@each_op
@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3)])
def test_one_opaque_call(op: str, leading: tuple[int, ...]) -> None:
    """The jaxpr has one kernel, and beside it reshapes and calls: none of the op's arithmetic is outside."""
    found = primitives(mosaic(op), *arguments(leading, jnp.bfloat16)[op])
    assert found.pop(KERNEL) == 1
    assert set(found) <= {*CALLS, "reshape"}


@each_op
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (0,), (3, 0), (5,), (2, 3), (2**18, 2**10)])
def test_shapes_need_no_gpu(op: str, dtype: Any, leading: tuple[int, ...]) -> None:
    """jax.eval_shape gives shapes and dtypes on a machine without a GPU; zero rows need no kernel."""
    small = arguments((), dtype)[op]
    values = [
        jax.ShapeDtypeStruct(value.shape if i == SHARED[op] else (*leading, *value.shape), value.dtype)
        for i, value in enumerate(small)
    ]
    found: list[Any] = jax.tree.leaves(jax.eval_shape(mosaic(op), *values))
    shapes: dict[str, list[tuple[int, ...]]] = {
        "rms_norm": [(WIDTH,)],
        "fused_add_rms_norm": [(WIDTH,), (WIDTH,)],
        "silu_and_mul": [(WIDTH,)],
        "rotary_embedding": [(2, WIDTH), (1, WIDTH)],
    }
    assert [leaf.shape for leaf in found] == [(*leading, *shape) for shape in shapes[op]]
    assert {leaf.dtype for leaf in found} == {np.dtype(dtype)}
    assert primitives(mosaic(op), *values)[KERNEL] == (0 if 0 in leading else 1)


@each_op
def test_zero_rows_are_not_weakly_typed(op: str) -> None:
    """Results of no rows promote as any others do, weakly typed arguments or not."""
    two = jax.jit(lambda: 2.0)()
    weak = [
        jnp.broadcast_to(two, value.shape) if value.size == 0 and value.dtype == jnp.float32 else value
        for value in arguments((0,))[op]
    ]
    assert any(value.weak_type for value in weak)
    for run in (mosaic(op), partial(OPS[op], implementation="xla")):
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(run(*weak)))


@each_op
def test_equal_calls_lower_once(op: str) -> None:
    """Ten calls at one shape and one at another are two kernels in the program for the GPU."""

    def program(many: list[tuple[jax.Array, ...]], other: tuple[jax.Array, ...]) -> list[Any]:
        return [mosaic(op)(*values) for values in (*many, other)]

    text = lowered(program, [arguments((3,))[op]] * 10, arguments((4,))[op])
    assert len(kernels(text)) == len(set(kernels(text))) == 2


@pytest.mark.parametrize("layers", [2, 4])
def test_programs_hold_six_kernels(layers: int) -> None:
    """Prefill and decode hold six kernels, whatever the number of layers: three norms, add-norm, silu, RoPE.

    The last add-norm, whose sum nobody reads, is lowered a second time; it is the same kernel, by its hash.
    """
    config = dataclasses.replace(Qwen3Config.from_pretrained(CHECKPOINT), num_hidden_layers=layers)
    model = Qwen3(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, implementation="mosaic")
    leaves, treedef = jax.tree.flatten(model)
    tree = interned(treedef)
    tokens, lengths = np.ones((1, 64), np.int32), np.full(1, 50, np.int32)
    logits, cache = jax.eval_shape(lambda *values: prefill(tree, *values), leaves, tokens, lengths)
    sampling = jaxfuse.Sampling().for_batch(1)
    options: tuple[Any, ...] = (sampling, np.full(8, -1, np.int32), jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(
        lambda logits, cache: begin(logits, cache, *options, capacity=256, size=64, greedy=True), logits, cache
    )
    programs = {
        "prefill": prefill.trace(tree, leaves, tokens, lengths),
        "decode": decode.trace(tree, leaves, state, *options, np.int32(64), greedy=True),
    }
    for name, traced in programs.items():
        found = kernels(traced.lower(lowering_platforms=("cuda",)).as_text())
        assert len(set(found)) == 6, name
        assert len(found) <= 7, name


# Loops and donation.


def repeated(step: Function, loop: str) -> Function:
    """x -> step(step(step(x))), in a loop of JAX's."""
    if loop == "scan":
        return lambda x: jax.lax.scan(lambda carry, _: (step(carry), carry), x, None, length=3)
    if loop == "fori_loop":
        return lambda x: jax.lax.fori_loop(0, 3, lambda _, carry: step(carry), x)
    first = jnp.int32(0)
    return lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (first, x))[1]


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_loops(loop: str) -> None:
    """A carry that goes through kernels gives what "xla" gives, and the loop holds each kernel once."""
    x, residual, weight = arguments((2,))["fused_add_rms_norm"]

    def step(implementation: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, residual = fused_add_rms_norm(*carry, weight, implementation=implementation)
        x = silu_and_mul(jnp.concatenate([x, residual], axis=-1), implementation=implementation)
        return x, residual

    ours, expected = (repeated(partial(step, name), loop) for name in ("mosaic", "xla"))
    with interpreted():
        found = jax.jit(ours)((x, residual))
    assert_close(found, jax.jit(expected)((x, residual)))
    assert len(kernels(lowered(ours, (x, residual)))) == 2


@each_op
def test_donated_arguments(op: str) -> None:
    """Donated rows are consumed, and the results are those of rows that are kept."""
    values = arguments((2,))[op]
    with interpreted():
        kept = jax.jit(mosaic(op))(*values)
        if op == "silu_and_mul":  # its result is half as large, so no buffer can be used again
            with pytest.warns(UserWarning, match="donated"):
                given = jax.jit(mosaic(op), donate_argnums=0)(*map(jnp.copy, values))
        else:
            first = jnp.copy(values[0])
            given = jax.jit(mosaic(op), donate_argnums=0)(first, *values[1:])
            assert first.is_deleted()
    assert_equal(given, kept)


# Models.


def greedy(model: Qwen3, prompt: list[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, and the logits [1, prompt + count - 1, vocab]: a prefill, then steps with a cache."""
    forward = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache))
    cache = model.init_cache(1, len(prompt) + count)
    tokens, chosen, seen = np.array([prompt], np.int32), [], []
    for _ in range(count):
        logits, cache = forward(model, tokens, cache)
        seen.append(np.asarray(logits))
        tokens = np.argmax(seen[-1][:, -1:], axis=-1).astype(np.int32)
        chosen.append(tokens)
    return np.concatenate(chosen, axis=1), np.concatenate(seen, axis=1)


def test_the_shipped_checkpoint() -> None:
    """In float32 the shipped checkpoint says the same on the kernels: tokens identical, logits to roundings."""
    names: tuple[Any, Any] = ("mosaic", "xla")
    ours, plain = (Qwen3.from_pretrained(CHECKPOINT, dtype=jnp.float32, implementation=name) for name in names)
    prompt = [5, 1900, 60]
    with interpreted():
        tokens, logits = greedy(ours, prompt, 2)
    expected, expected_logits = greedy(plain, prompt, 2)
    np.testing.assert_array_equal(tokens, expected)
    assert_close(logits, expected_logits, ulps=16)


def test_generate_on_a_tiny_model(tmp_path: Path) -> None:
    """generate runs prompts of two lengths on the kernels, and gives the tokens of "xla"."""
    theirs = tiny.torch_model("untied", num_hidden_layers=1, head_dim=128, max_position_embeddings=5)
    folder = tiny.save(theirs, tmp_path)
    results = []
    for name in ("mosaic", "xla"):
        model = Qwen3.from_pretrained(folder, implementation=name)
        with interpreted():
            results.append(jaxfuse.generate(model, [[5, 60], [8]], max_new_tokens=3))
    ours, expected = results
    np.testing.assert_array_equal(ours.tokens, expected.tokens)
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, rtol=0, atol=1e-5)
