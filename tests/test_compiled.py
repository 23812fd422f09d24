"""What the compiled programs do: read on the CPU, from XLA's own text and memory accounting."""

import copy
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfuse
from jaxfuse import KVCache, Qwen3, Qwen3Config
from jaxfuse.generate import State
from jaxfuse.products import dense
from jaxfuse.sampling import Sampling

# No activation has the shape of a weight: 3 rows of 128 tokens are 384, which is no weight's side.
CONFIG = Qwen3Config(
    vocab_size=416,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=8192,
)
BATCH, CAPACITIES = 3, (1024, 4096)
# They move no data; what they name is looked at where it is made.
PLUMBING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}


def instructions(compiled: jax.stages.Compiled) -> Iterator[tuple[str, set[tuple[int, ...]], str]]:
    """Each instruction of a program, those inside fusions too: its opcode, the shapes it makes, its line."""
    text = compiled.as_text()
    assert text is not None
    pattern = re.compile(r"^ *(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
    count = 0
    for line in text.splitlines():
        if found := pattern.match(line):
            shapes = re.findall(r"[a-z]\w*\[([\d,]*)\]", found[1])
            yield found[2], {tuple(int(n) for n in shape.split(",") if n) for shape in shapes}, line.strip()
            count += 1
    assert count > 10, "the text was not understood"


def memory(compiled: jax.stages.Compiled) -> Any:
    """XLA's own account of a program's bytes."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return stats


def made(compiled: jax.stages.Compiled, shapes: set[tuple[int, ...]]) -> list[str]:
    """The lines that make an array of one of these shapes, of any dtype, or of one transposed; sides of 1 apart."""
    wanted = shapes | {shape[::-1] for shape in shapes}
    return [
        line
        for opcode, results, line in instructions(compiled)
        if opcode not in PLUMBING and {tuple(n for n in shape if n > 1) for shape in results} & wanted
    ]


def weight_shapes(model: Qwen3) -> set[tuple[int, ...]]:
    """The shapes of its matrices."""
    return {leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim > 1}


def programs(
    model: Qwen3,
    capacity: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    batch: int = BATCH,
    sampling: Sampling = Sampling(),
) -> dict[str, jax.stages.Compiled]:
    """The programs that `generate` compiles for a cache of this capacity; the decode loop is not run."""
    module = sys.modules["jaxfuse.generate"]
    found: dict[str, jax.stages.Compiled] = {}

    def compiling(name: str) -> Callable[..., Any]:
        function = getattr(module, name)

        def run(*args: Any, **options: Any) -> Any:
            found[name] = function.lower(*args, **options).compile()
            if name == "decode":
                return next(arg for arg in args if isinstance(arg, State))
            return function(*args, **options)

        return run

    with monkeypatch.context() as patch:
        for name in ("prefill", "decode"):
            patch.setattr(module, name, compiling(name))
        prompts = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (batch, 5))
        jaxfuse.generate(model, prompts, max_new_tokens=capacity - 5, sampling=sampling)
    return found


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Where JAX has a GPU, too: another compiler writes another text."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest) -> Qwen3:
    """An untied model, in both of the dtypes that matter."""
    return Qwen3(CONFIG, rngs=nnx.Rngs(0), dtype=request.param)


@pytest.fixture(scope="module")
def greedy(model: Qwen3) -> dict[int, dict[str, jax.stages.Compiled]]:
    """Greedy generation's programs, for two capacities."""
    with pytest.MonkeyPatch.context() as patch:
        return {capacity: programs(model, capacity, patch) for capacity in CAPACITIES}


def test_no_copy_of_a_weight(
    model: Qwen3, greedy: dict[int, dict[str, jax.stages.Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and decode, of one row too, read each weight where it lies: nothing makes an array of its shape."""
    shapes = weight_shapes(model)
    assert shapes == {(416, 128), (512, 128), (128, 256), (640, 128), (128, 320)}
    for program in [*greedy[1024].values(), programs(model, 1024, monkeypatch, batch=1)["decode"]]:
        read = [line for opcode, results, line in instructions(program) if opcode == "parameter" and results & shapes]
        assert len(read) >= 4 * CONFIG.num_hidden_layers + 2
        assert made(program, shapes) == []


def test_a_copy_would_be_seen(model: Qwen3) -> None:
    """The check finds each copy in a model whose layers are cut from a stack, and in one whose weights are cast."""
    tokens = np.zeros((BATCH, 1), np.int32)
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)

    def unstacked(model: Qwen3, stack: nnx.Module, tokens: jax.Array) -> jax.Array:
        model = copy.copy(model)
        cut = [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(CONFIG.num_hidden_layers)]
        model.layers = nnx.List(cut)
        return model(tokens)

    copies = made(jax.jit(unstacked).lower(model, stack, tokens).compile(), weight_shapes(model))
    assert sum("slice(" in line for line in copies) == 4 * CONFIG.num_hidden_layers

    def scanned(x: jax.Array, stack: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, weight: (jnp.tanh(dense(x, weight)), None), x, stack)[0]

    x, weights = jnp.ones((3, 128)), jnp.ones((6, 128, 128))
    assert any("dynamic-slice(" in line for line in made(jax.jit(scanned).lower(x, weights).compile(), {(128, 128)}))

    def cast(model: Qwen3, tokens: jax.Array) -> jax.Array:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16).astype(leaf.dtype), model)(tokens)

    copies = made(jax.jit(cast).lower(model, tokens).compile(), weight_shapes(model))
    assert sum("convert(" in line for line in copies) >= 4 * CONFIG.num_hidden_layers


def cache_shape(capacity: int) -> tuple[int, ...]:
    """The shape of a cache's keys."""
    return (CONFIG.num_hidden_layers, BATCH, capacity, CONFIG.num_key_value_heads, CONFIG.head_dim)


def write_program(
    write: Callable[[KVCache, jax.Array, jax.Array], KVCache], capacity: int, dtype: jnp.dtype
) -> jax.stages.Compiled:
    """A donated cache, written at one position a row."""
    cache = jax.eval_shape(lambda: KVCache.zeros(cache_shape(capacity), dtype))  # type: ignore[arg-type]
    new = jax.ShapeDtypeStruct((BATCH, 1, *cache_shape(capacity)[3:]), dtype)
    positions = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32)
    return jax.jit(write, donate_argnums=0).lower(cache, positions, new).compile()


def test_a_write_is_in_place(model: Qwen3) -> None:
    """A write makes no array of the cache's size or of a layer's, and is one program whatever the capacity."""
    dtype = model.numerics.dtype

    def write(cache: KVCache, positions: jax.Array, new: jax.Array) -> KVCache:
        return cache.write(2, positions, new, 2 * new)

    def copying(cache: KVCache, positions: jax.Array, new: jax.Array) -> KVCache:
        def put(row: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(row, new, (place, 0, 0))

        layer = jax.vmap(put)(cache.keys[2], new, positions[:, 0])
        return cache.replace(keys=cache.keys.at[2].set(layer))

    small, large = (write_program(write, capacity, dtype) for capacity in CAPACITIES)
    assert [opcode for opcode, *_ in instructions(small)] == [opcode for opcode, *_ in instructions(large)]
    assert memory(small).temp_size_in_bytes == memory(large).temp_size_in_bytes
    for capacity, program in zip(CAPACITIES, (small, large), strict=True):
        layer = cache_shape(capacity)[1:]
        assert made(program, {layer}) == []
        assert {line.split("(")[0].split()[-1] for line in made(program, {cache_shape(capacity)})} <= IN_PLACE
        assert memory(program).alias_size_in_bytes >= cache_bytes(capacity, dtype)

    # The check can fail: another way to write makes a layer anew.
    assert made(write_program(copying, 1024, dtype), {cache_shape(1024)[1:]})


# A fusion's own instructions are looked at one by one.
IN_PLACE = {"scatter", "fusion"}


def cache_bytes(capacity: int, dtype: jnp.dtype) -> int:
    """The bytes of keys and values."""
    return 2 * math.prod(cache_shape(capacity)) * dtype.itemsize


def test_decode_writes_in_place(model: Qwen3, greedy: dict[int, dict[str, jax.stages.Compiled]]) -> None:
    """The decode loop takes over the donated cache and never makes another: it grows by what attention reads.

    Of the four layers, attention holds one layer's keys and values at a time.
    """
    dtype = model.numerics.dtype
    small, large = (greedy[capacity]["decode"] for capacity in CAPACITIES)
    assert [opcode for opcode, *_ in instructions(small)] == [opcode for opcode, *_ in instructions(large)]
    for capacity, program in zip(CAPACITIES, (small, large), strict=True):
        lines = made(program, {cache_shape(capacity)})
        assert {line.split("(")[0].split()[-1] for line in lines} <= IN_PLACE
        assert sum(" scatter(" in line for line in lines) == 2 * CONFIG.num_hidden_layers
        assert memory(program).alias_size_in_bytes >= cache_bytes(capacity, dtype)
    grown = memory(large).temp_size_in_bytes - memory(small).temp_size_in_bytes
    assert grown < (cache_bytes(4096, dtype) - cache_bytes(1024, dtype)) / 3


def test_one_row_writes_in_place(model: Qwen3) -> None:
    """A batch of one token, which XLA's CPU would write by copying the cache, writes in place too."""
    cache = model.init_cache(1, 1024)
    step = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache), donate_argnums=2)
    program = step.lower(model, np.ones((1, 1), np.int32), cache).compile()
    assert {
        line.split("(")[0].split()[-1] for line in made(program, {tuple(n for n in cache.keys.shape if n > 1)})
    } <= IN_PLACE
    assert memory(program).temp_size_in_bytes < cache.keys.nbytes


def test_ones_own_loop_writes_in_place(model: Qwen3) -> None:
    """A donated cache comes back in the same memory."""
    step = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache), donate_argnums=2)
    cache = model.init_cache(BATCH, 64)
    for _ in range(3):
        before = {part.unsafe_buffer_pointer() for part in (cache.keys, cache.values)}
        given = cache
        _, cache = step(model, np.ones((BATCH, 1), np.int32), cache)
        assert given.keys.is_deleted()
        assert {part.unsafe_buffer_pointer() for part in (cache.keys, cache.values)} == before


def test_greedy_pays_for_no_sort(
    model: Qwen3, greedy: dict[int, dict[str, jax.stages.Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding sorts nothing and draws no noise; sampling does both."""

    def costly(program: jax.stages.Compiled) -> set[str]:
        return {"sort", "xor"} & {opcode for opcode, *_ in instructions(program)}

    assert not costly(greedy[1024]["decode"])
    sampled = programs(model, 1024, monkeypatch, sampling=Sampling(0.7, 5))["decode"]
    assert costly(sampled) == {"sort", "xor"}


def products(jaxpr: Any) -> Iterator[Any]:
    """Every dot_general of a jaxpr, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from products(getattr(inner, "jaxpr", inner))


def test_float32_means_float32(model: Qwen3) -> None:
    """Each product of a float32 model is asked for in full precision, also in its gradient; bfloat16's are not."""
    cache = model.init_cache(BATCH, 8)
    tokens = jnp.ones((BATCH, 4), jnp.int32)

    def loss(model: Qwen3) -> jax.Array:
        return model(tokens).sum()

    forward = jax.make_jaxpr(lambda model, cache: model(tokens, cache=cache))(model, cache)
    found = list(products(forward))
    # Four matrices and two products of attention a layer, and the head.
    assert len(found) == 6 * CONFIG.num_hidden_layers + 1
    backward = list(products(jax.make_jaxpr(jax.grad(loss))(model)))
    assert len(backward) >= 3 * len(found) - 1
    wanted = jax.lax.Precision.HIGHEST if model.numerics.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    for equation in found + backward:
        assert equation.params["precision"] == (wanted, wanted)
        assert equation.params["preferred_element_type"] == jnp.float32
    assert {operand.aval.dtype for equation in found for operand in equation.invars} == {model.numerics.dtype}
