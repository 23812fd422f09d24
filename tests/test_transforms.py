"""The model inside a person's own JAX and NNX transformations, and what it answers to arguments that do not fit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
import pytest
import torch
from flax import nnx
from transformers import Qwen3ForCausalLM

import tiny
from jaxfuse import InputError, KVCache, Qwen3
from jaxfuse.layers import Table

VOCAB, MAX_POSITION = 320, 1024
TOKENS: Any = np.random.default_rng(0).integers(0, VOCAB, (3, 12)).astype(np.int32)

forward = jax.jit(lambda model, tokens: model(tokens))


def loaded(variant: str, folder: Path) -> tuple[Qwen3, Qwen3ForCausalLM]:
    """One float32 checkpoint in both frameworks."""
    theirs = tiny.torch_model(variant, num_hidden_layers=2)
    return Qwen3.from_pretrained(tiny.save(theirs, folder)), theirs


@pytest.fixture(scope="module", params=["tied", "untied", "attention_bias"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3, Qwen3ForCausalLM]:
    """The models whose gradients are compared."""
    return loaded(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen3:
    """An untied model, which tests do not change."""
    return loaded("untied", tmp_path_factory.mktemp("model"))[0]


@pytest.fixture(scope="module")
def expected(model: Qwen3) -> np.ndarray:
    """The logits of TOKENS."""
    return np.asarray(forward(model, TOKENS))


def close(ours: Any, theirs: Any) -> None:
    """Equal to float32's roundings: another program may order its sums in another way."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


def loss(model: Qwen3, tokens: jax.Array | np.ndarray = TOKENS) -> jax.Array:
    """The mean cross-entropy of each next token, in nats."""
    logits = jax.nn.log_softmax(model(jnp.asarray(tokens)[:, :-1]))
    return -jnp.take_along_axis(logits, jnp.asarray(tokens)[:, 1:, None], axis=-1).mean()


def torch_gradients(model: Qwen3ForCausalLM) -> tuple[float, dict[str, np.ndarray]]:
    """The same loss and its gradients by torch's autograd."""
    model.zero_grad()
    tokens = torch.from_numpy(TOKENS.astype(np.int64))
    logits = model(tokens[:, :-1]).logits
    value = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
    value.backward()
    return value.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def assert_same_gradients(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Every parameter's gradient, none of them zero, to 1e-5 of its length (measured: 2e-6)."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        size = np.linalg.norm(expected)
        assert size > 0, name
        assert np.isfinite(ours[name]).all(), name
        assert np.linalg.norm(ours[name] - expected) <= 1e-5 * size, name


def test_jit(model: Qwen3, expected: np.ndarray) -> None:
    """As an argument of jax.jit and nnx.jit, closed over, and split and merged: one and the same answer."""
    close(jax.jit(lambda tokens: model(tokens))(TOKENS), expected)
    close(jax.jit(model)(TOKENS), expected)
    close(nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS), expected)
    graph, state = nnx.split(model)
    close(jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, TOKENS), expected)
    graph, params, *tables = nnx.split(model, nnx.Param, ...)
    close(jax.jit(lambda params: nnx.merge(graph, params, *tables)(TOKENS))(params), expected)


def test_jit_leaves_no_tracer_behind(model: Qwen3, expected: np.ndarray) -> None:
    """Nothing that happens inside a trace stays in the module."""
    before = jax.tree.leaves(model)
    jax.eval_shape(lambda: model(TOKENS))
    jax.eval_shape(jax.grad(loss), model)
    assert all(a is b for a, b in zip(jax.tree.leaves(model), before, strict=True))
    close(forward(model, TOKENS), expected)


def test_a_trace_is_kept(model: Qwen3) -> None:
    """A second call with equal shapes, and an equal model made anew, trace nothing again."""
    traced = []

    @jax.jit
    def run(model: Qwen3, tokens: jax.Array) -> jax.Array:
        traced.append(tokens.shape)
        return model.embed_tokens(tokens)

    twin = nnx.merge(*nnx.split(model))
    for other in (model, model, twin, copy.deepcopy(model)):
        run(other, TOKENS)
    assert traced == [TOKENS.shape]


def test_gradients_are_torchs(pair: tuple[Qwen3, Qwen3ForCausalLM]) -> None:
    """jax.value_and_grad and nnx.value_and_grad give torch's loss and gradients, merged rows and ties included."""
    ours, theirs = pair
    value, expected = torch_gradients(theirs)
    value_and_grad = jax.jit(jax.value_and_grad(loss))
    found, gradients = value_and_grad(ours)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    assert_same_gradients(tiny.unmerged(gradients), expected)

    found, state = nnx.jit(nnx.value_and_grad(loss))(ours)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    assert {type(leaf) for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))} == {nnx.Param}
    graph, _, *tables = nnx.split(ours, nnx.Param, ...)
    assert_same_gradients(tiny.unmerged(nnx.merge(graph, state, *tables)), expected)


def test_tied_embedding_gets_both_gradients(model: Qwen3, tmp_path: Path) -> None:
    """A tied model has one array, and its gradient is that of the embedding plus that of the head."""
    tied, _ = loaded("tied", tmp_path)
    assert not hasattr(tied, "lm_head")
    leaves = jax.tree.leaves(tied)
    assert sum(leaf.shape == (VOCAB, 128) for leaf in leaves) == 1
    untied = copy.deepcopy(model)
    pairs = zip(jax.tree.leaves(nnx.state(tied.layers)), jax.tree.leaves(nnx.state(untied.layers)), strict=True)
    assert all((a == b).all() for a, b in pairs), "both variants draw the same layers"
    untied.embed_tokens.weight.set_value(tied.embed_tokens.weight[...])
    untied.lm_head.weight.set_value(tied.embed_tokens.weight[...])
    untied.norm.weight.set_value(tied.norm.weight[...])

    grad = jax.jit(jax.grad(loss))
    both, apart = grad(tied), grad(untied)
    embedding, head = apart.embed_tokens.weight[...], apart.lm_head.weight[...]
    assert min(float(jnp.abs(part).max()) for part in (embedding, head)) > 1e-3
    close(both.embed_tokens.weight[...], embedding + head)


def test_bfloat16_gradients(model: Qwen3, tmp_path: Path) -> None:
    """In bfloat16 gradients are finite, in the weights' dtype, and near those of float32."""
    model.save_pretrained(tmp_path)
    narrow = Qwen3.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    ours, wide = (tiny.unmerged(jax.jit(jax.grad(loss))(m)) for m in (narrow, model))
    for name, gradient in ours.items():
        assert gradient.dtype == jnp.bfloat16
        distance = np.linalg.norm(gradient.astype(np.float32) - wide[name]) / np.linalg.norm(wide[name])
        assert distance <= 0.05, name  # measured: 0.02 at most; a wrong sign or scale makes it 1


def test_checkpoint(model: Qwen3) -> None:
    """jax.checkpoint, around the model or around each layer, changes no gradient."""
    whole = jax.jit(jax.grad(loss))(model)
    again = jax.jit(jax.grad(jax.checkpoint(loss)))(model)

    def by_layer(model: Qwen3) -> jax.Array:
        rematerialized = copy.copy(model)
        layers: list[Any] = [Rematerialized(layer) for layer in model.layers]
        rematerialized.layers = nnx.List(layers)
        return loss(rematerialized)

    layered = jax.jit(jax.grad(by_layer))(model)
    for other in (again, layered):
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(whole), strict=True):
            close(a, b)
    text = str(jax.make_jaxpr(jax.grad(by_layer))(model))
    assert text.count("remat") >= 2


class Rematerialized(nnx.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(self, *args: Any) -> Any:
        """The layer's answer."""
        *arrays, rotary, cache, index = args
        run = jax.checkpoint(lambda layer, *arrays: layer(*arrays, rotary, cache, index))
        return run(self.layer, *arrays)


def test_vmap(model: Qwen3, expected: np.ndarray) -> None:
    """Over the rows of a batch, over positions too, and over caches, vmap gives what the batch gives."""
    one = jax.vmap(lambda row: model(row[None])[0])
    close(jax.jit(one)(TOKENS), expected)
    places = np.tile(np.arange(12), (3, 1))
    close(jax.jit(jax.vmap(lambda row, place: model(row[None], positions=place[None])[0]))(TOKENS, places), expected)

    def with_cache(row: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        return model(row[None], cache=cache)

    caches = jax.vmap(lambda _: model.init_cache(1, 16))(jnp.arange(3))
    logits, caches = jax.jit(jax.vmap(with_cache))(TOKENS[:, :8], caches)
    close(logits[:, 0], expected[:, :8])
    logits, _ = jax.jit(jax.vmap(with_cache))(TOKENS[:, 8:], caches)
    close(logits[:, 0], expected[:, 8:])


def test_vmap_over_models(model: Qwen3) -> None:
    """An ensemble: stacked weights, one call."""
    graph, state = nnx.split(model)
    halved = jax.tree.map(lambda leaf: leaf / 2, state)
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), state, halved)
    logits = jax.jit(jax.vmap(lambda state: nnx.merge(graph, state)(TOKENS)))(stacked)
    for answer, one in zip(logits, (state, halved), strict=True):
        close(answer, forward(nnx.merge(graph, one), TOKENS))


def test_orbax_round_trip(model: Qwen3, expected: np.ndarray, tmp_path: Path) -> None:
    """The state goes through Orbax into a model that was only shaped, to the same bits."""
    graph, state = nnx.split(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        shaped = nnx.eval_shape(lambda: Qwen3(model.config, rngs=nnx.Rngs(1)))
        restored = checkpointer.restore(tmp_path / "state", nnx.state(shaped))
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(forward(nnx.merge(graph, restored), TOKENS), expected)


def test_the_table_is_not_learnt(model: Qwen3) -> None:
    """cos_sin_cache is a Variable of its own and no Param, in float32 whatever the model's dtype."""
    table = model.rotary_emb.cos_sin_cache
    assert isinstance(table, Table)
    assert not isinstance(table, nnx.Param)
    assert (table.shape, table.dtype) == ((MAX_POSITION, 64), jnp.float32)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert len(paths) == len(jax.tree.leaves(model)) - 1
    assert not any("rotary_emb" in path for path in paths)


def test_deep_copies(model: Qwen3, expected: np.ndarray) -> None:
    """A deep copy is a model of its own."""
    other = copy.deepcopy(model)
    weight = other.layer(0).mlp.down_proj.weight
    weight.set_value(weight[...] * 2)
    assert np.abs(forward(other, TOKENS) - expected).max() > 1e-2
    close(forward(model, TOKENS), expected)
    assert other.config == model.config


OUTSIDE = [-1, -VOCAB, VOCAB, VOCAB + 7, 2**31 - 1, -(2**31)]
cached = jax.jit(lambda model, tokens, positions, cache: model(tokens, positions=positions, cache=cache))


@pytest.mark.parametrize("wrong", OUTSIDE)
def test_traced_tokens_outside(model: Qwen3, expected: np.ndarray, wrong: int) -> None:
    """A traced id outside the vocabulary answers NaN, not another token's logits; other rows do not notice."""
    tokens = TOKENS.copy()
    tokens[1, -1] = wrong
    logits = np.asarray(forward(model, tokens))
    assert np.isnan(logits[1, -1]).all()
    close(logits[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("wrong", [-1, -MAX_POSITION, MAX_POSITION, MAX_POSITION + 7, 2**31 - 1, -(2**31)])
def test_traced_positions_outside(model: Qwen3, expected: np.ndarray, wrong: int) -> None:
    """A traced position outside the RoPE table answers NaN, with a cache and without; other rows do not notice."""
    positions = np.tile(np.arange(12, dtype=np.int32), (3, 1))
    positions[1, -1] = wrong
    plain = jax.jit(lambda model, positions: model(TOKENS, positions=positions))(model, positions)
    with_cache, cache = cached(model, TOKENS, positions, model.init_cache(3, 16))
    for logits in (plain, with_cache):
        assert np.isnan(logits[1, -1]).all()
        close(logits[jnp.array([0, 2])], expected[[0, 2]])
    # Nothing was stored, at another place least of all.
    assert not np.asarray(cache.keys[:, 1, 11:]).any()
    assert not np.asarray(cache.values[:, 1, 11:]).any()
    assert np.asarray(cache.keys[:, 0, 11]).any()


GAPS = ([5, *range(6, 17)], [*range(6), *range(7, 13)], [3, 2, 1, 0, *range(1, 9)], [0] * 12)


@pytest.mark.parametrize("row", GAPS)
def test_positions_with_a_gap(model: Qwen3, expected: np.ndarray, row: list[int]) -> None:
    """With a cache, positions that leave a slot empty raise; traced ones answer NaN from there on."""
    positions = np.tile(np.arange(12, dtype=np.int32), (3, 1))
    positions[1] = row
    with pytest.raises(InputError, match="consecutive"):
        model(TOKENS, positions=positions, cache=model.init_cache(3, 32))
    logits, _ = cached(model, TOKENS, positions, model.init_cache(3, 32))
    unbroken = np.cumprod(positions[1] == (row[0] if row[0] == 0 else -99) + np.arange(12)).astype(bool)
    if unbroken.any():
        close(logits[1, unbroken], expected[1, unbroken])
    assert np.isnan(logits[1, ~unbroken]).all()
    close(logits[jnp.array([0, 2])], expected[[0, 2]])


def test_positions_may_go_back(model: Qwen3, expected: np.ndarray) -> None:
    """A row may be rewound: what is written again is what is seen."""
    _, cache = model(TOKENS, cache=model.init_cache(3, 32))
    places = np.tile(np.arange(8, 12, dtype=np.int32), (3, 1))
    logits, cache = model(TOKENS[:, 8:], positions=places, cache=cache)
    close(logits, expected[:, 8:])
    assert cache.lengths.tolist() == [12, 12, 12]


@pytest.mark.parametrize("wrong", [16, 17, 500])
def test_traced_positions_beyond_the_cache(model: Qwen3, expected: np.ndarray, wrong: int) -> None:
    """A traced position that the RoPE table has and the cache has not answers NaN, and is stored nowhere."""
    positions = np.tile(np.arange(12, dtype=np.int32), (3, 1))
    positions[1, -1] = wrong
    logits, cache = cached(model, TOKENS, positions, model.init_cache(3, 16))
    assert np.isnan(logits[1, -1]).all()
    close(logits[jnp.array([0, 2])], expected[[0, 2]])
    close(logits[1, :-1], expected[1, :-1])
    assert not np.asarray(cache.keys[:, 1, 11:]).any()
    # The row stays over: what follows is NaN too.
    after, _ = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache))(model, TOKENS[:, :1], cache)
    assert np.isnan(after[1]).all()
    assert np.isfinite(after[jnp.array([0, 2])]).all()


@pytest.mark.parametrize("wrong", OUTSIDE)
def test_concrete_tokens_outside(model: Qwen3, wrong: int) -> None:
    """A concrete id outside the vocabulary raises before anything runs, and the message has the limit and the id."""
    tokens = TOKENS.copy()
    tokens[1, -1] = wrong
    for given in (tokens, jnp.asarray(tokens)):
        with pytest.raises(InputError, match=rf"tokens.*320.*{wrong}"):
            model(given)
        with pytest.raises(InputError, match=str(wrong)):
            model.hidden(given)


def test_concrete_positions_outside(model: Qwen3) -> None:
    """Concrete positions outside the model's or the cache's range raise; so does a cache that is full."""
    positions: Any = np.tile(np.arange(12), (3, 1))
    for wrong in (-1, MAX_POSITION, 2**40):
        positions[1, -1] = wrong
        with pytest.raises(InputError, match=rf"positions.*1024.*{wrong}"):
            model(TOKENS, positions=positions)
    positions[1, -1] = 16
    with pytest.raises(InputError, match=r"16\).*capacity.*16"):
        model(TOKENS, positions=positions, cache=model.init_cache(3, 16))
    full = model.init_cache(3, 16).replace(lengths=jnp.array([0, 5, 0], jnp.int32))
    with pytest.raises(InputError, match="capacity"):
        model(TOKENS, cache=full)
    with pytest.raises(InputError, match="maximum"):
        model(jnp.zeros((1, MAX_POSITION + 1), jnp.int32))


@pytest.mark.parametrize(
    ("tokens", "error", "named"),
    [
        (TOKENS.astype(np.float32), TypeError, "float32"),
        (TOKENS.astype(bool), TypeError, "bool"),
        (TOKENS[0], InputError, r"\(12,\)"),
        (TOKENS[None], InputError, r"\(1, 3, 12\)"),
        (TOKENS[:, :0], InputError, r"\(3, 0\)"),
        (TOKENS[:0], InputError, r"\(0, 12\)"),
    ],
    ids=["float", "bool", "row", "rank", "no_tokens", "no_rows"],
)
def test_tokens_that_do_not_fit(model: Qwen3, tokens: Any, error: type[Exception], named: str) -> None:
    """Tokens of another dtype or shape raise with what came, traced or not."""
    for call in (model, jax.jit(lambda tokens: model(tokens))):
        with pytest.raises(error, match=named):
            call(tokens)


def test_positions_that_do_not_fit(model: Qwen3) -> None:
    """Positions of another shape or dtype raise with what came."""
    with pytest.raises(InputError, match=r"\(3, 12\).*\(12,\)"):
        model(TOKENS, positions=jnp.arange(12))
    with pytest.raises(TypeError, match="float32"):
        model(TOKENS, positions=jnp.zeros((3, 12)))


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: jax.tree.map(lambda leaf: leaf[:, :2] if leaf.ndim > 1 else leaf[:2], cache),
        lambda cache: cache.replace(keys=cache.keys.astype(jnp.bfloat16), values=cache.values.astype(jnp.bfloat16)),
        lambda cache: cache.replace(keys=cache.keys[:1], values=cache.values[:1]),
        lambda cache: cache.replace(keys=cache.keys[..., :1, :], values=cache.values[..., :1, :]),
        lambda cache: cache.replace(values=cache.values[:, :, :8]),
        lambda cache: cache.replace(lengths=cache.lengths.astype(jnp.float32)),
        lambda cache: cache.replace(lengths=cache.lengths[:1]),
    ],
    ids=["batch", "dtype", "layers", "kv_heads", "capacities", "lengths_dtype", "lengths_shape"],
)
def test_a_cache_of_another_model(model: Qwen3, change: Callable[[KVCache], KVCache]) -> None:
    """A cache of another batch, dtype or shape is refused, traced or not, with how to make the right one."""
    cache = change(model.init_cache(3, 16))
    for call in (model.__call__, jax.jit(lambda tokens, cache: model(tokens, cache=cache))):
        with pytest.raises(InputError, match="init_cache"):
            call(TOKENS, cache=cache)


def test_dtypes_of_ids(model: Qwen3, expected: np.ndarray) -> None:
    """Ids of any integer dtype that holds them are taken."""
    small = (TOKENS % 100).astype(np.int32)
    wanted = forward(model, small)
    for dtype in (np.int8, np.uint32, np.int64):
        close(forward(model, small.astype(dtype)), wanted)
    close(jax.jit(lambda p: model(TOKENS, positions=p))(np.tile(np.arange(12, dtype=np.uint8), (3, 1))), expected)
