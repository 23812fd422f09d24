"""Generation against a plain loop over the whole model, and what it promises about rows, streams and programs."""

import contextlib
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.typing import NDArray

import jaxfuse
import tiny
from jaxfuse import Generation, InputError, Qwen3, Sampling, generate, stream
from jaxfuse.generate import begin, bucket, decode, prefill

torch = pytest.importorskip("torch")

# The package's `generate` is the function; tests that watch the programs need the module.
MODULE = importlib.import_module("jaxfuse.generate")

VOCAB = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
STEPS = 40
HOT = Sampling(temperature=0.8)

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]

_all_logits = jax.jit(lambda model, tokens: model(tokens))


def small(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint whose greedy continuations are not monotonous, as those of a tied model would be."""
    return tiny.save(tiny.torch_model("untied", seed=seed, **{**SMALL, **changes}), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of most tests."""
    return small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen3:
    """The model of most tests; it is never changed."""
    return Qwen3.from_pretrained(folder)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids other than 0, which is left for the test that needs a token no prompt has."""
    result: list[int] = np.random.default_rng([seed, length]).integers(1, VOCAB, length).tolist()
    return result


PROMPTS = [prompt_of(5), prompt_of(1), prompt_of(130)]


def by_hand(
    model: Qwen3,
    prompt: Sequence[int],
    steps: int,
    pick: Callable[[Floats, int], int] = lambda logits, step: int(logits.argmax()),
) -> tuple[Ints, Floats]:
    """Tokens and log-probabilities of the plain loop: the whole text through the model, without a cache, each step.

    The text is padded on the right to one length, so that it compiles once; a causal model does not see that.
    """
    size = bucket(len(prompt) + steps, 64)
    tokens, logprobs = list(prompt), []
    for step in range(steps):
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        padded = padded[:, : model.config.max_position_embeddings]
        logits = np.asarray(_all_logits(model, padded))[0, len(tokens) - 1]
        tokens.append(pick(logits, step))
        exact = logits.astype(np.float64)
        logprobs.append(exact[tokens[-1]] - np.logaddexp.reduce(exact))
    return np.array(tokens[len(prompt) :]), np.array(logprobs)


def joined(chunks: Sequence[Generation]) -> tuple[Ints, Floats]:
    """Tokens and log-probabilities of a stream."""
    return np.concatenate([c.tokens for c in chunks], axis=1), np.concatenate([c.logprobs for c in chunks], axis=1)


def assert_same(ours: Generation, theirs: Generation) -> None:
    """Two generations are equal to the bit."""
    for name, value in vars(ours).items():
        np.testing.assert_array_equal(value, getattr(theirs, name), err_msg=name)


def with_nan(model: Qwen3, token: int | slice) -> Qwen3:
    """A copy of a model in which the embedding of a token, or of all, is NaN."""
    copy = nnx.clone(model)
    weight = copy.embed_tokens.weight
    weight.set_value(weight[...].at[token].set(jnp.nan))
    return copy


# --- the right tokens


def test_greedy_is_the_loop_without_a_cache(model: Qwen3) -> None:
    """In float32 the cached loop on the device writes what the whole model, run anew for each token, writes."""
    out = generate(model, PROMPTS[0], max_new_tokens=STEPS)
    tokens, logprobs = by_hand(model, PROMPTS[0], STEPS)
    assert len(set(tokens.tolist())) > 5, "a monotonous text would hide a fault"
    np.testing.assert_array_equal(out.tokens[0], tokens)
    np.testing.assert_allclose(out.logprobs[0], logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=30, top_p=0.95)], ids=["greedy", "sampled"])
def test_unequal_prompts_are_each_alone(model: Qwen3, sampling: Sampling) -> None:
    """A row does not see its neighbors, nor the padding they bring: greedy rows, and the first of a sampled batch."""
    together = generate(model, PROMPTS, max_new_tokens=STEPS, sampling=sampling, key=4)
    for i, prompt in enumerate(PROMPTS if sampling.greedy else PROMPTS[:1]):
        alone = generate(model, prompt, max_new_tokens=STEPS, sampling=sampling, key=4)
        np.testing.assert_array_equal(together.tokens[i], alone.tokens[0], err_msg=f"prompt {i}")
        np.testing.assert_allclose(together.logprobs[i], alone.logprobs[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("key", [11, jax.random.key(11)], ids=["int", "key"])
def test_the_draws_are_those_of_the_contract(model: Qwen3, key: int | jax.Array) -> None:
    """Request i draws its step t with `fold_in(fold_in(key, i), t)`: a whole generation, drawn again by hand.

    Its log-probabilities are of the unmodified logits, whatever temperature and top-k made of them.
    """
    temperature, top_k = 0.8, 20
    out = generate(model, PROMPTS, max_new_tokens=STEPS, sampling=Sampling(temperature, top_k), key=key)
    for i, prompt in enumerate(PROMPTS):
        request = jax.random.fold_in(jax.random.key(11), i)

        def pick(logits: Floats, step: int, request: jax.Array = request) -> int:
            noise = jax.random.gumbel(jax.random.fold_in(request, step), logits.shape)
            kept = logits >= np.sort(logits)[-top_k]
            return int(np.where(kept, logits / np.float32(temperature) + np.asarray(noise), -np.inf).argmax())

        tokens, logprobs = by_hand(model, prompt, STEPS, pick)
        np.testing.assert_array_equal(out.tokens[i], tokens, err_msg=f"request {i}")
        np.testing.assert_allclose(out.logprobs[i], logprobs, rtol=0, atol=1e-4)


def test_keys(model: Qwen3) -> None:
    """The same key gives the same tokens, another key others; equal prompts of one batch are drawn apart."""
    prompts = [PROMPTS[0]] * 3
    first, again, other = (generate(model, prompts, max_new_tokens=20, sampling=HOT, key=k) for k in (5, 5, 6))
    assert_same(first, again)
    assert (first.tokens != other.tokens).any(axis=1).all()
    assert len({tuple(row) for row in first.tokens.tolist()}) == 3


def test_greedy_rows_among_sampled_ones(model: Qwen3) -> None:
    """Temperature 0 in one row of an array gives that row's greedy text; the others are drawn."""
    greedy = generate(model, PROMPTS, max_new_tokens=20)
    mixed = generate(model, PROMPTS, max_new_tokens=20, sampling=Sampling(np.array([0.0, 1.0, 0.0])))
    same = (mixed.tokens == greedy.tokens).all(axis=1)
    np.testing.assert_array_equal(same, [True, False, True])


@pytest.mark.parametrize("rounding", ["fused", "hf"])
def test_bfloat16(folder: Path, rounding: Any) -> None:
    """A bfloat16 model, in both roundings, writes tokens that its own whole run finds most likely.

    bfloat16 sums may be taken in another order with a cache than without, so that nearly equal logits may swap:
    the token's logit may fall short of the largest by two bfloat16 steps of it.
    """
    model = Qwen3.from_pretrained(folder, dtype=jnp.bfloat16, rounding=rounding)
    out = generate(model, PROMPTS[0], max_new_tokens=STEPS)
    text = np.array([[*PROMPTS[0], *out.tokens[0]]], np.int32)
    logits = np.asarray(_all_logits(model, text))[0, len(PROMPTS[0]) - 1 : -1]
    chosen = logits[np.arange(STEPS), out.tokens[0]]
    largest = logits.max(axis=1)
    assert (largest - chosen <= 2 * 2.0**-7 * np.abs(largest)).all()
    assert np.isfinite(out.logprobs).all()


@pytest.mark.parametrize(("length", "steps"), [(290, 10), (299, 1), (120, 180)])
def test_up_to_the_last_position(edge: Qwen3, length: int, steps: int) -> None:
    """A maximum that is no power of two: a padded prompt and the cache must not reach past the RoPE table."""
    out = generate(edge, prompt_of(length), max_new_tokens=steps)
    tokens, logprobs = by_hand(edge, prompt_of(length), steps)
    np.testing.assert_array_equal(out.tokens[0], tokens)
    np.testing.assert_allclose(out.logprobs[0], logprobs, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Qwen3:
    """A model of 300 positions."""
    changes = {"max_position_embeddings": 300, "num_hidden_layers": 1}
    return Qwen3.from_pretrained(small(tmp_path_factory.mktemp("edge"), **changes))


# --- how rows end


def cut(tokens: Ints, stop: set[int]) -> list[int]:
    """A row up to its first stop token, that token included."""
    end = next((i for i, token in enumerate(tokens.tolist()) if token in stop), len(tokens) - 1)
    return tokens[: end + 1].tolist()


def test_each_row_ends_at_its_stop_token(model: Qwen3) -> None:
    """Several stop ids: the token is included and counted; then -1 and 0, while the other rows go on."""
    whole = generate(model, PROMPTS, max_new_tokens=STEPS)
    stop = {int(whole.tokens[0, 3]), int(whole.tokens[2, 17])}
    rows = [cut(row, stop) for row in whole.tokens]
    assert len({len(row) for row in rows}) == 3, "the rows were meant to end at different steps"
    out = generate(model, PROMPTS, max_new_tokens=STEPS, stop_token_ids=sorted(stop))
    assert out.lengths.tolist() == [len(row) for row in rows]
    for i, row in enumerate(rows):
        n = len(row)
        assert out.tokens[i].tolist() == row + [-1] * (STEPS - n)
        np.testing.assert_allclose(out.logprobs[i, :n], whole.logprobs[i, :n], rtol=0, atol=1e-5)
        assert (out.logprobs[i, n:] == 0).all()
        assert out.finish_reasons[i] == ("stop" if row[-1] in stop else "length")
    assert set(out.finish_reasons) == {"stop", "length"}


def test_a_stop_token_may_be_the_first_or_the_last(model: Qwen3) -> None:
    """A row can end with its first token, and the last one counts as a stop too."""
    whole = generate(model, PROMPTS[0], max_new_tokens=STEPS)
    first, last = int(whole.tokens[0, 0]), int(whole.tokens[0, 2])
    assert last not in whole.tokens[0, :2]
    out = generate(model, PROMPTS[0], max_new_tokens=STEPS, stop_token_ids=[first])
    assert (out.lengths.tolist(), out.finish_reasons) == ([1], ["stop"])
    out = generate(model, PROMPTS[0], max_new_tokens=3, stop_token_ids=[last])
    assert (out.lengths.tolist(), out.finish_reasons) == ([3], ["stop"])


def test_nine_stop_tokens(model: Qwen3) -> None:
    """More stop ids than one block of their padding: all of them count."""
    whole = generate(model, PROMPTS[0], max_new_tokens=STEPS)
    target = int(whole.tokens[0, 3])
    absent = [token for token in range(VOCAB) if token not in whole.tokens][:8]
    out = generate(model, PROMPTS[0], max_new_tokens=STEPS, stop_token_ids=[*absent, target])
    assert out.tokens[0, : out.lengths[0]].tolist() == cut(whole.tokens[0], {target})


def test_the_checkpoints_stop_tokens(folder: Path, model: Qwen3, tmp_path: Path) -> None:
    """By default both files' ids end a row, () turns them off, and a list of one's own replaces them."""
    whole = generate(model, PROMPTS, max_new_tokens=STEPS)
    first, second, own = int(whole.tokens[0, 3]), int(whole.tokens[2, 17]), int(whole.tokens[0, 1])
    # An id beyond the vocabulary, as a checkpoint with a cut embedding may have, is harmless.
    files = {"config.json": first, "generation_config.json": [second, VOCAB + 7]}
    for file in folder.iterdir():
        if file.name not in files:
            (tmp_path / file.name).symlink_to(file)
    for name, ids in files.items():
        data = json.loads((folder / name).read_text("utf-8"))
        (tmp_path / name).write_text(json.dumps({**data, "eos_token_id": ids}), encoding="utf-8")
    stopping = Qwen3.from_pretrained(tmp_path)

    def same(ours: Generation, stop: set[int]) -> None:
        rows = [ours.tokens[i, :n].tolist() for i, n in enumerate(ours.lengths)]
        assert rows == [cut(row, stop) for row in whole.tokens]

    assert len({len(cut(row, {first, second})) for row in whole.tokens}) == 3, "each id was meant to end a row"
    same(generate(stopping, PROMPTS, max_new_tokens=STEPS), {first, second})
    same(generate(stopping, PROMPTS, max_new_tokens=STEPS, stop_token_ids=()), set())
    same(generate(stopping, PROMPTS, max_new_tokens=STEPS, stop_token_ids=[own]), {own})


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=9)], ids=["greedy", "sampled"])
def test_nan_weights(model: Qwen3, sampling: Sampling) -> None:
    """A broken model says "nan" and writes nothing, instead of token 0 for ever."""
    out = generate(with_nan(model, slice(None)), PROMPTS, max_new_tokens=STEPS, sampling=sampling)
    assert out.finish_reasons == ["nan"] * 3
    assert out.lengths.tolist() == [0] * 3
    assert (out.tokens == -1).all()
    assert (out.logprobs == 0).all()


def test_nan_ends_its_own_row_alone(model: Qwen3) -> None:
    """A row that meets NaN keeps what it wrote so far; the others are as without it."""
    prompts = [prompt_of(5), prompt_of(7, seed=1), prompt_of(9, seed=2)]
    whole = generate(model, prompts, max_new_tokens=STEPS)
    # Row 0 writes it and then reads it; no other row ever sees it.
    rest = {*whole.tokens[1:].flat, *(token for prompt in prompts for token in prompt)}
    end, token = next((i, int(t)) for i, t in enumerate(whole.tokens[0]) if int(t) not in rest)
    out = generate(with_nan(model, token), prompts, max_new_tokens=STEPS)
    assert end < STEPS - 1
    assert out.finish_reasons == ["nan", "length", "length"]
    assert out.lengths.tolist() == [end + 1, STEPS, STEPS]
    assert out.tokens[0].tolist() == whole.tokens[0, : end + 1].tolist() + [-1] * (STEPS - end - 1)
    np.testing.assert_array_equal(out.tokens[1:], whole.tokens[1:])
    np.testing.assert_array_equal(out.logprobs[1:], whole.logprobs[1:])
    assert (out.logprobs[0, end + 1 :] == 0).all()


def test_padding_brings_no_nan(model: Qwen3) -> None:
    """A token whose embedding is NaN ends the prompts that hold it, and no others, whatever pads them."""
    prompts = [prompt_of(5), prompt_of(7, seed=1), [*prompt_of(3), 0]]
    whole = generate(model, prompts, max_new_tokens=8)
    assert (whole.tokens[:2] > 0).all()
    out = generate(with_nan(model, 0), prompts, max_new_tokens=8)
    assert out.finish_reasons == ["length", "length", "nan"]
    np.testing.assert_array_equal(out.tokens[:2], whole.tokens[:2])


@pytest.mark.parametrize("steps", [1, 2, 64, 65])
@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_shapes_and_dtypes(model: Qwen3, steps: int, sampling: Sampling) -> None:
    """`[B, max_new_tokens]` whatever sizes are compiled; one token needs no decode step."""
    out = generate(model, PROMPTS[:1], max_new_tokens=steps, sampling=sampling)
    assert (out.tokens.shape, out.tokens.dtype) == ((1, steps), np.int32)
    assert (out.logprobs.shape, out.logprobs.dtype) == ((1, steps), np.float32)
    assert (out.lengths.shape, out.lengths.dtype) == ((1,), np.int32)
    assert out.lengths.tolist() == [steps]
    assert out.finish_reasons == ["length"]
    assert all(type(value) is np.ndarray for value in (out.tokens, out.logprobs, out.lengths))
    assert ((out.tokens >= 0) & (out.tokens < VOCAB)).all()
    assert (out.logprobs < 0).all()


def test_the_loop_ends_with_its_last_row(model: Qwen3, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is taken for rows that have all ended: neither beyond a stop token nor for broken weights."""
    steps: list[int] = []

    def watch(*args: Any, **options: Any) -> Any:
        state = decode(*args, **options)
        steps.append(int(state.step))
        return state

    monkeypatch.setattr(MODULE, "decode", watch)
    whole = generate(model, PROMPTS, max_new_tokens=STEPS)
    out = generate(model, PROMPTS, max_new_tokens=STEPS, stop_token_ids=whole.tokens[:, 2].tolist())
    generate(with_nan(model, slice(None)), PROMPTS, max_new_tokens=STEPS)
    assert steps == [STEPS, int(out.lengths.max()), 1]
    assert out.lengths.max() < STEPS


# --- streams


@pytest.mark.parametrize("chunk_size", [1, 7, 39, 100])
@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_a_stream_is_generate_in_pieces(model: Qwen3, chunk_size: int, sampling: Sampling) -> None:
    """One token first, then chunks, the last one what is left; joined they are `generate`'s to the bit."""
    whole = generate(model, PROMPTS, max_new_tokens=STEPS, sampling=sampling, key=3)
    chunks, kept = [], []
    for chunk in stream(model, PROMPTS, max_new_tokens=STEPS, sampling=sampling, key=3, chunk_size=chunk_size):
        chunks.append(chunk)
        kept.append(chunk.tokens.copy())
    sizes = [chunk.tokens.shape[1] for chunk in chunks]
    assert sizes[0] == 1
    assert all(size == chunk_size for size in sizes[1:-1])
    assert 1 <= sizes[-1] <= chunk_size
    tokens, logprobs = joined(chunks)
    np.testing.assert_array_equal(tokens, whole.tokens)
    np.testing.assert_array_equal(logprobs, whole.logprobs)
    np.testing.assert_array_equal(sum(chunk.lengths for chunk in chunks), whole.lengths)
    assert all(chunk.finish_reasons == [None] * 3 for chunk in chunks[:-1])
    assert chunks[-1].finish_reasons == whole.finish_reasons
    for chunk, before in zip(chunks, kept, strict=True):  # the loop's buffers are donated from call to call
        np.testing.assert_array_equal(chunk.tokens, before)


def test_a_stream_ends_with_its_last_row(model: Qwen3) -> None:
    """It stops when every row has stopped; a row's reason is given as soon as it has one."""
    whole = generate(model, PROMPTS[:2], max_new_tokens=STEPS)
    stop = [int(whole.tokens[0, 3]), int(whole.tokens[1, 12])]
    expected = generate(model, PROMPTS[:2], max_new_tokens=STEPS, stop_token_ids=stop)
    assert expected.finish_reasons == ["stop", "stop"]
    ends = expected.lengths.tolist()
    assert max(ends) < STEPS - 5
    assert min(ends) != max(ends)
    chunks = list(stream(model, PROMPTS[:2], max_new_tokens=STEPS, stop_token_ids=stop, chunk_size=2))
    tokens, logprobs = joined(chunks)
    np.testing.assert_array_equal(tokens, expected.tokens[:, : tokens.shape[1]])
    np.testing.assert_array_equal(logprobs, expected.logprobs[:, : tokens.shape[1]])
    assert max(ends) <= tokens.shape[1] < max(ends) + 2
    seen = np.cumsum([chunk.tokens.shape[1] for chunk in chunks])
    for count, chunk in zip(seen, chunks, strict=True):
        assert chunk.finish_reasons == ["stop" if count >= end else None for end in ends]


def test_a_stream_of_one_token(model: Qwen3) -> None:
    """The first chunk may be all there is: no room for more, or a stop token at once."""
    first = int(generate(model, PROMPTS[0], max_new_tokens=1).tokens[0, 0])
    (chunk,) = stream(model, PROMPTS[0], max_new_tokens=1)
    assert (chunk.tokens.tolist(), chunk.finish_reasons) == ([[first]], ["length"])
    (chunk,) = stream(model, PROMPTS[0], max_new_tokens=STEPS, stop_token_ids=[first])
    assert (chunk.tokens.tolist(), chunk.finish_reasons) == ([[first]], ["stop"])


def test_two_streams_at_once(model: Qwen3) -> None:
    """Streams hold their state apart: taken in turn they give what each gives alone."""
    alone = [generate(model, prompt, max_new_tokens=20).tokens for prompt in PROMPTS[:2]]
    both = [stream(model, prompt, max_new_tokens=20, chunk_size=3) for prompt in PROMPTS[:2]]
    pairs = list(zip(*both, strict=True))
    for i in range(2):
        np.testing.assert_array_equal(joined([pair[i] for pair in pairs])[0], alone[i])


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, True, None])
def test_bad_chunk_size(model: Qwen3, chunk_size: Any) -> None:
    """Refused by the call itself, not by the first chunk."""
    with pytest.raises(InputError, match=f"chunk_size must be a positive integer, got {chunk_size!r}"):
        stream(model, PROMPTS[0], chunk_size=chunk_size)


# --- arguments


@pytest.mark.parametrize(
    "prompts",
    [
        PROMPTS[0],
        tuple(PROMPTS[0]),
        [PROMPTS[0]],
        np.array(PROMPTS[0]),
        np.array(PROMPTS[0], np.uint8),
        np.array([PROMPTS[0]], np.int64),
        jnp.array(PROMPTS[0]),
        jnp.array([PROMPTS[0]]),
        [jnp.array(PROMPTS[0])],
        torch.tensor([PROMPTS[0]]),
    ],
    ids=lambda p: f"{type(p).__name__}{np.shape(p)}",
)
def test_forms_of_one_prompt(model: Qwen3, prompts: Any) -> None:
    """A row, or a batch of it, as a list, a tuple or any array."""
    assert_same(generate(model, prompts, max_new_tokens=8), generate(model, PROMPTS[0], max_new_tokens=8))


def test_forms_of_many_prompts(model: Qwen3) -> None:
    """Equal rows as a 2-D array, and rows of mixed kinds, are lists of rows."""
    equal = [prompt_of(6), prompt_of(6, seed=1), prompt_of(6, seed=2)]
    expected = generate(model, equal, max_new_tokens=8)
    assert_same(generate(model, np.array(equal), max_new_tokens=8), expected)
    assert_same(generate(model, jnp.array(equal), max_new_tokens=8), expected)
    mixed: list[Any] = [np.array(equal[0], np.int16), tuple(equal[1]), jnp.array(equal[2])]
    assert_same(generate(model, mixed, max_new_tokens=8), expected)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any program that is run fails the test: an argument is refused before work is done."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done")

    for name in ("prefill", "begin", "decode"):
        monkeypatch.setattr(MODULE, name, refuse)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([], InputError, r"at least one token id, got shape \(0,\)"),
        ([[]], InputError, r"at least one token id, got shape \(0,\) for prompt 0"),
        ([[1, 2], []], InputError, r"at least one token id, got shape \(0,\) for prompt 1"),
        (np.zeros((0, 4), np.int32), InputError, "at least one token id, got shape"),
        (np.zeros((2, 0), np.int32), InputError, "at least one token id, got shape"),
        ([[1, 2], 3], InputError, r"one row of at least one token id, got shape \(\) for prompt 1"),
        ([1, [2]], InputError, r"a prompt must be one row of token ids, got \[1, \[2\]\]"),
        ([[1], [2, [3]]], InputError, "a prompt must be one row of token ids, got"),
        (np.ones((1, 1, 1), np.int32), InputError, r"got shape \(1, 1\) for prompt 0"),
        ("hello", TypeError, "prompts must be rows of token ids, got str; tokenize text first"),
        (b"hello", TypeError, "prompts must be rows of token ids, got bytes; tokenize text first"),
        ({"input_ids": [1, 2]}, TypeError, "prompts must be rows of token ids, got dict"),
        (5, TypeError, "prompts must be rows of token ids, got int"),
        (np.array(5), TypeError, "prompts must be rows of token ids, got ndarray"),
        (None, TypeError, "prompts must be rows of token ids, got NoneType"),
        (["hello"], TypeError, "prompt tokens must be integers, got <U5"),
        ([1.0, 2.0], TypeError, "prompt tokens must be integers, got float64"),
        ([[1], [2.5]], TypeError, "prompt tokens must be integers, got float64"),
        ([True, False], TypeError, "prompt tokens must be integers, got bool"),
        ([None], TypeError, "prompt tokens must be integers, got object"),
        ([1, VOCAB], InputError, rf"prompt tokens must lie in \[0, {VOCAB}\), the vocabulary, got {VOCAB}"),
        ([[1], [2, -1]], InputError, rf"prompt tokens must lie in \[0, {VOCAB}\), the vocabulary, got -1"),
        ([2**40], InputError, f"prompt tokens must lie in .*, got {2**40}"),
        ([10**30], TypeError, "prompt tokens must be integers, got object"),
    ],
)
def test_bad_prompts(model: Qwen3, prompts: Any, error: type[Exception], message: str) -> None:
    """Whatever is not rows of the model's token ids is refused, with the rule and what came."""
    for call in (generate, stream):
        with pytest.raises(error, match=message):
            call(model, prompts, max_new_tokens=2)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, InputError, "max_new_tokens must be a positive integer, got 0"),
        ({"max_new_tokens": -3}, InputError, "max_new_tokens must be a positive integer, got -3"),
        ({"max_new_tokens": 2.0}, InputError, "max_new_tokens must be a positive integer, got 2.0"),
        ({"max_new_tokens": True}, InputError, "max_new_tokens must be a positive integer, got True"),
        ({"sampling": Sampling(-1.0)}, InputError, "temperature must be finite and at least 0"),
        ({"sampling": Sampling(np.ones(2))}, InputError, "one for each of 1 rows"),
        ({"key": 2**70}, InputError, "key must be an int of 64 bits"),
        ({"key": "0"}, TypeError, "key must be an int or one JAX key"),
        ({"stop_token_ids": 5}, TypeError, "stop_token_ids must be a list of token ids, got 5"),
        ({"stop_token_ids": "12"}, TypeError, "stop_token_ids must be a list of token ids, got '12'"),
        ({"stop_token_ids": [[1, 2]]}, TypeError, "stop_token_ids must be a list of token ids, got"),
        ({"stop_token_ids": [1.5]}, TypeError, "stop_token_ids must be integers, got float64"),
        ({"stop_token_ids": [True]}, TypeError, "stop_token_ids must be integers, got bool"),
        ({"stop_token_ids": [-1]}, InputError, "stop_token_ids must lie in .*, got -1"),
        ({"stop_token_ids": [1, VOCAB]}, InputError, f"stop_token_ids must lie in .*, got {VOCAB}"),
        ({"stop_token_ids": [2**40]}, InputError, f"stop_token_ids must lie in .*, got {2**40}"),
    ],
    ids=str,
)
def test_bad_options(model: Qwen3, options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Every other argument too is checked before work is done."""
    for call in (generate, stream):
        with pytest.raises(error, match=message):
            call(model, PROMPTS[0], **options)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("length", "steps"), [(291, 10), (300, 1), (1, 300), (5, 10**12)])
def test_beyond_the_last_position(edge: Qwen3, length: int, steps: int) -> None:
    """What does not fit the model's positions is refused at once, with the three numbers; the longest row counts."""
    message = rf"must fit the model's 300 positions, got {length} \+ {steps}; shorten the prompt or lower"
    with pytest.raises(InputError, match=message):
        generate(edge, prompt_of(length), max_new_tokens=steps)
    with pytest.raises(InputError, match=message):
        generate(edge, [[1], prompt_of(length)], max_new_tokens=steps)


# --- programs


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that XLA compiles meanwhile; checks that the caches of jit grow alike."""
    names: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found = re.match(r"Finished XLA compilation of jit\((\w+)\)", record.getMessage())
            if found:
                names.append(found[1])

    watched: dict[str, Any] = {"prefill": prefill, "begin": begin, "decode": decode}
    before = {name: program._cache_size() for name, program in watched.items()}
    handler, logger = Handler(), logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.removeHandler(handler)
    grown = {name: program._cache_size() - before[name] for name, program in watched.items()}
    assert grown == {name: names.count(name) for name in watched}


def fresh(tmp_path: Path, vocab: int, **changes: Any) -> Qwen3:
    """A model of one layer, of a structure that no other test has, so that nothing is compiled for it yet."""
    return Qwen3.from_pretrained(small(tmp_path, num_hidden_layers=1, vocab_size=vocab, **changes))


def test_few_programs_for_many_lengths(tmp_path: Path) -> None:
    """Ten prompts of 1 to 500 tokens compile one prefill a bucket (128, 256, 512) and two decode programs."""
    model = fresh(tmp_path, 97)
    with compilations() as names:
        for length in (1, 17, 100, 128, 129, 200, 256, 257, 400, 500):
            generate(model, prompt_of(length), max_new_tokens=64)
    assert (names.count("prefill"), names.count("decode")) == (3, 2)
    with compilations() as names:
        for length in (2, 130, 300, 499):
            generate(model, prompt_of(length), max_new_tokens=50 + length % 7)
            list(stream(model, prompt_of(length), max_new_tokens=33, chunk_size=10))
    assert names == []


def test_values_do_not_recompile(tmp_path: Path) -> None:
    """New numbers, keys and stop tokens run the compiled programs; greedy and sampled are two."""
    model = fresh(tmp_path, 98)
    with compilations() as names:
        generate(model, PROMPTS[0], max_new_tokens=10)
        generate(model, PROMPTS[0], max_new_tokens=10, sampling=HOT)
    assert (names.count("prefill"), names.count("decode")) == (1, 2)
    samplings = [
        Sampling(1.3),
        Sampling(0.7, top_k=5),
        Sampling(np.array([0.5]), np.array([3]), np.array([0.9]), np.array([0.1])),
        Sampling(1, 0, 0.5, 0.2),
    ]
    with compilations() as names:
        for key, sampling in enumerate(samplings):
            generate(model, PROMPTS[1], max_new_tokens=10 + key, sampling=sampling, key=key, stop_token_ids=[key])
        generate(model, PROMPTS[1], max_new_tokens=20, sampling=HOT, key=jax.random.key(9), stop_token_ids=())
        generate(model, PROMPTS[1], max_new_tokens=20, sampling=HOT, key=jax.random.PRNGKey(9))
        generate(model, PROMPTS[1], max_new_tokens=20, sampling=Sampling(0, top_k=4), stop_token_ids=range(8))
    assert not {"prefill", "begin", "decode"} & set(names)


def test_models_of_one_structure_share_programs(tmp_path: Path) -> None:
    """A second checkpoint of the same shape compiles nothing, and is not answered with the first one's weights."""
    first, second = (fresh(tmp_path / str(seed), 99, seed=seed) for seed in (0, 1))
    ours = generate(first, PROMPTS[0], max_new_tokens=20)
    with compilations() as names:
        theirs = generate(second, PROMPTS[0], max_new_tokens=20)
    assert names == []
    np.testing.assert_array_equal(ours.tokens[0], by_hand(first, PROMPTS[0], 20)[0])
    np.testing.assert_array_equal(theirs.tokens[0], by_hand(second, PROMPTS[0], 20)[0])
    assert (ours.tokens != theirs.tokens).any()


def test_changed_weights_are_seen(tmp_path: Path) -> None:
    """Weights that were set between two calls are the next call's: no copy is kept, and nothing is compiled."""
    model, other = (Qwen3.from_pretrained(small(tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    before = generate(model, PROMPTS[0], max_new_tokens=20)
    state = nnx.state(other)
    with compilations() as names:
        nnx.update(model, state)
        after = generate(model, PROMPTS[0], max_new_tokens=20)
        assert_same(after, generate(other, PROMPTS[0], max_new_tokens=20))
    assert names == []
    assert (before.tokens != after.tokens).any()


def test_a_call_passes_flat_arrays(model: Qwen3, monkeypatch: pytest.MonkeyPatch) -> None:
    """No module goes into a jitted call, whose tree costs Python far more: the model's own arrays go, in a list."""
    calls: dict[str, tuple[Any, ...]] = {}
    programs: dict[str, Any] = {"prefill": prefill, "decode": decode}
    for name in programs:

        def watch(*args: Any, _name: str = name, **options: Any) -> Any:
            calls.setdefault(_name, (*args, *options.values()))
            return programs[_name](*args, **options)

        monkeypatch.setattr(MODULE, name, watch)
    generate(model, PROMPTS[0], max_new_tokens=3)
    assert set(calls) == {"prefill", "decode"}
    for tree, leaves, *rest in calls.values():
        assert type(leaves) is list
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in jax.tree.leaves(model)]
        nodes = jax.tree.leaves(rest, is_leaf=lambda node: isinstance(node, nnx.Module | nnx.Variable))
        assert not [node for node in nodes if isinstance(node, nnx.Module | nnx.Variable)]
        # The structure goes as a static argument; comparing two by value would walk the tree at each call.
        assert type(tree).__hash__ is object.__hash__
        assert type(tree).__eq__ is object.__eq__
    assert calls["prefill"][0] is calls["decode"][0]


def test_the_front_doors(model: Qwen3) -> None:
    """The front doors are re-exported, and only the documented names are taken."""
    assert (jaxfuse.generate, jaxfuse.stream, jaxfuse.Generation) == (generate, stream, Generation)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        generate(model, PROMPTS[0], top_k=5)  # type: ignore[call-arg]
