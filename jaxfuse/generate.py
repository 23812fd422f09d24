"""Text generation: prefill the prompts, then decode in one loop on the device. This is the main path."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.cache import KVCache
from jaxfuse.errors import InputError
from jaxfuse.kernels.dispatch import explaining
from jaxfuse.model import Qwen3, check_ids
from jaxfuse.sampling import Sampling, request_keys, sample

RUNNING, STOP, NAN = 0, 1, 2
_REASONS = {RUNNING: "length", STOP: "stop", NAN: "nan"}

Row = Sequence[int] | np.ndarray | jax.Array
Prompts = Row | Sequence[Row]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated, or one chunk of it.

    Attributes:
        tokens: `[B, N]` int32; a stop token is included, after a row's end there is -1.
        lengths: `[B]` int32, tokens of each row.
        logprobs: `[B, N]` float32, log-probability of each token under the unmodified logits; 0 after the end.
        finish_reasons: for each row "stop" (a stop token), "length" (no room for more), "nan" (the model's
            logits were NaN), or None while a stream goes on.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    finish_reasons: list[str | None]


def generate(
    model: Qwen3,
    prompts: Prompts,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    stop_token_ids: Sequence[int] | None = None,
    key: int | jax.Array = 0,
) -> Generation:
    """Continues one prompt or several.

    Args:
        model: the model; its weights are read anew at each call.
        prompts: one row of token ids, or several of different lengths.
        max_new_tokens: the most tokens a row gets.
        sampling: how tokens are drawn; greedy by default.
        stop_token_ids: tokens that end a row; None takes the model's (`config.eos_token_ids`), () none.
        key: an int or a JAX key; request i draws step t with `fold_in(fold_in(key, i), t)`.

    Returns:
        The tokens, `[B, max_new_tokens]`.

    Raises:
        InputError, TypeError: when an argument does not fit, or the longest prompt and `max_new_tokens` together
            exceed the model's maximum; before any work is done.
        ImplementationError: when the device cannot run the implementation that the model asks for by name.
    """
    run = _Run(model, prompts, max_new_tokens, sampling, stop_token_ids, key)
    run.advance(max_new_tokens)
    return run.chunk(0, max_new_tokens)


def stream(
    model: Qwen3,
    prompts: Prompts,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    stop_token_ids: Sequence[int] | None = None,
    key: int | jax.Array = 0,
    chunk_size: int = 8,
) -> Iterator[Generation]:
    """Yields what `generate` returns, piece by piece; arguments and errors as there.

    The first chunk is the first token alone, ready as soon as the prompt is read; the others have `chunk_size`
    tokens, the last one what is left. Joined along their last axis they are `generate`'s tokens, up to the end of
    the longest row.
    """
    chunk_size = _positive("chunk_size", chunk_size)
    run = _Run(model, prompts, max_new_tokens, sampling, stop_token_ids, key)
    return _chunks(run, max_new_tokens, chunk_size)


def _chunks(run: "_Run", max_new_tokens: int, chunk_size: int) -> Iterator[Generation]:
    start, stop = 0, 1
    while start < max_new_tokens:
        run.advance(stop)
        yield run.chunk(start, stop)
        if run.finished:
            return
        start, stop = stop, min(stop + chunk_size, max_new_tokens)


class _Run:
    """One call: checked arguments, then prefill, then `advance` as far as wanted."""

    def __init__(
        self,
        model: Qwen3,
        prompts: Prompts,
        max_new_tokens: int,
        sampling: Sampling,
        stop_token_ids: Sequence[int] | None,
        key: int | jax.Array,
    ):
        rows = prompt_rows(prompts)
        config = model.config
        for row in rows:
            check_ids("prompt tokens", row, config.vocab_size, "the vocabulary")
        lengths = np.array([len(row) for row in rows], np.int32)
        longest = int(lengths.max())
        limit = config.max_position_embeddings
        max_new_tokens = _positive("max_new_tokens", max_new_tokens)
        if longest + max_new_tokens > limit:
            raise InputError(
                f"prompt and continuation must fit the model's {limit} positions, got {longest} + "
                f"{max_new_tokens}; shorten the prompt or lower max_new_tokens"
            )
        self.limit = max_new_tokens
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a jaxfuse.Sampling, got {type(sampling).__name__}")
        self.sampling = sampling.for_batch(len(rows))
        self.keys = request_keys(key, len(rows))
        if stop_token_ids is None:  # one outside the vocabulary is never drawn
            stop_token_ids = [token for token in config.eos_token_ids if token < config.vocab_size]
        self.stop = _stop_ids(stop_token_ids, config.vocab_size)
        self.greedy = sampling.greedy

        # A module tree costs a Python call far more than flat arrays do, so it is flattened once.
        self.leaves, treedef = jax.tree.flatten(model)
        self.tree = interned(treedef)
        padded = np.zeros((len(rows), min(bucket(longest, 128), limit)), np.int32)
        for row, tokens in zip(padded, rows, strict=True):
            # Padded with a token of its own: one whose embedding is NaN must not reach a prompt without it.
            row[:] = tokens[-1]
            row[: len(tokens)] = tokens
        with explaining(model.numerics.implementation, *self.leaves):
            self.logits, self.cache = prefill(self.tree, self.leaves, padded, lengths)
        self.capacity = min(bucket(longest + max_new_tokens, 512), limit)
        self.state: State | None = None

    def advance(self, limit: int) -> None:
        """Decodes until `limit` tokens a row, or until every row has ended."""
        options = (self.sampling, self.stop, self.keys)
        if self.state is None:
            size = bucket(self.limit, 64)
            self.state = begin(self.logits, self.cache, *options, capacity=self.capacity, size=size, greedy=self.greedy)
            del self.logits, self.cache
        if limit > 1:
            self.state = decode(self.tree, self.leaves, self.state, *options, np.int32(limit), greedy=self.greedy)

    @property
    def finished(self) -> bool:
        """Whether every row has ended; waits for the device."""
        return self.state is not None and bool(np.all(np.asarray(self.state.finish) != RUNNING))

    def chunk(self, start: int, stop: int) -> Generation:
        """Tokens `[start, stop)` of each row; waits for the device."""
        if self.state is None:
            raise RuntimeError("advance before reading a chunk")
        tokens = np.asarray(self.state.tokens)[:, start:stop]
        finish = np.asarray(self.state.finish)
        over = stop >= self.limit
        return Generation(
            tokens=tokens,
            lengths=np.sum(tokens >= 0, axis=1, dtype=np.int32),
            logprobs=np.asarray(self.state.logprobs)[:, start:stop],
            finish_reasons=[_REASONS[int(f)] if over or f != RUNNING else None for f in finish],
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the decode loop carries, for B rows and room for N tokens.

    Attributes:
        cache: keys and values of all tokens but the last one.
        token: `[B]` int32, each row's last token, which the model reads next.
        step: int32 scalar, tokens generated so far.
        tokens: `[B, N]` int32, -1 where there is none.
        logprobs: `[B, N]` float32.
        finish: `[B]` int32, RUNNING, STOP or NAN.
    """

    cache: KVCache
    token: jax.Array
    step: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    finish: jax.Array


@functools.partial(jax.jit, static_argnames="tree")
def prefill(tree: "_Tree", leaves: list[jax.Array], tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, KVCache]:
    """Reads right-padded prompts `[B, T]` of true `lengths [B]`; logits `[B, vocab]` after each, and the cache."""
    model: Qwen3 = tree.treedef.unflatten(leaves)
    batch, capacity = tokens.shape
    hidden, cache = model.hidden(tokens, cache=model.init_cache(batch, capacity))
    last = hidden[jnp.arange(batch), lengths - 1]
    return model.logits(last), cache.replace(lengths=lengths)


@functools.partial(jax.jit, static_argnames=("capacity", "size", "greedy"))
def begin(
    logits: jax.Array,
    cache: KVCache,
    sampling: Sampling,
    stop: jax.Array,
    keys: jax.Array,
    *,
    capacity: int,
    size: int,
    greedy: bool,
) -> State:
    """The state after the first token: a cache of full capacity, and room for `size` tokens."""
    batch = logits.shape[0]
    state = State(
        cache=cache.grown(capacity),
        token=jnp.zeros(batch, jnp.int32),
        step=jnp.int32(0),
        tokens=jnp.full((batch, size), -1, jnp.int32),
        logprobs=jnp.zeros((batch, size), jnp.float32),
        finish=jnp.full(batch, RUNNING, jnp.int32),
    )
    return _emit(state, logits, sampling, stop, keys, greedy)


@functools.partial(jax.jit, static_argnames=("tree", "greedy"), donate_argnames="state")
def decode(
    tree: "_Tree",
    leaves: list[jax.Array],
    state: State,
    sampling: Sampling,
    stop: jax.Array,
    keys: jax.Array,
    limit: jax.Array,
    *,
    greedy: bool,
) -> State:
    """Generates on the device until `limit` tokens a row, or until every row has ended."""
    model: Qwen3 = tree.treedef.unflatten(leaves)

    def unfinished(state: State) -> jax.Array:
        return (state.step < limit) & jnp.any(state.finish == RUNNING)

    def step(state: State) -> State:
        logits, cache = model(state.token[:, None], cache=state.cache)
        state = dataclasses.replace(state, cache=cache)
        return _emit(state, logits[:, 0], sampling, stop, keys, greedy)

    return jax.lax.while_loop(unfinished, step, state)


def _emit(state: State, logits: jax.Array, sampling: Sampling, stop: jax.Array, keys: jax.Array, greedy: bool) -> State:
    """Appends each running row's next token, drawn from its logits `[B, vocab]`."""
    if greedy:  # a program of its own: no noise, no sort
        token = jnp.argmax(logits, axis=1).astype(jnp.int32)
    else:
        token = sample(logits, sampling, jax.vmap(jax.random.fold_in, (0, None))(keys, state.step))
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=1), token[:, None], axis=1)[:, 0]
    running = state.finish == RUNNING
    nan = jnp.isnan(logprob)
    stopped = jnp.any(token[:, None] == stop[None, :], axis=1)
    emitted = running & ~nan
    return dataclasses.replace(
        state,
        token=jnp.where(emitted, token, 0),
        step=state.step + 1,
        tokens=state.tokens.at[:, state.step].set(jnp.where(emitted, token, -1)),
        logprobs=state.logprobs.at[:, state.step].set(jnp.where(emitted, logprob, 0)),
        finish=jnp.where(running, jnp.where(nan, NAN, jnp.where(stopped, STOP, RUNNING)), state.finish),
    )


class _Tree:
    """A model's tree structure as a static argument that hashes by identity, hence at no cost."""

    def __init__(self, treedef: Any):
        self.treedef = treedef


@functools.cache
def interned(treedef: Any) -> _Tree:
    """One `_Tree` for each structure, so that equal models share their compiled programs."""
    return _Tree(treedef)


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def bucket(size: int, smallest: int) -> int:
    """The power of two, at least `smallest`, that holds `size`: a new length seldom compiles again."""
    return max(smallest, 1 << (size - 1).bit_length())


def prompt_rows(prompts: Prompts) -> list[np.ndarray]:
    """One or many prompts as arrays of ids.

    Raises:
        InputError, TypeError: for no prompts, an empty prompt, or something that is not token ids.
    """
    no_rows = isinstance(prompts, str | bytes | Mapping) or getattr(prompts, "ndim", 1) == 0
    if no_rows or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts must be rows of token ids, got {type(prompts).__name__}; tokenize text first")
    try:
        many = len(prompts) > 0 and np.ndim(prompts[0]) > 0
        rows = [np.asarray(row) for row in (prompts if many else [prompts])]
    except ValueError:  # NumPy's, for rows inside a row
        raise InputError(f"a prompt must be one row of token ids, got {prompts!r}") from None
    for index, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise InputError(
                f"a prompt must be one row of at least one token id, got shape {row.shape} for prompt {index}"
            )
    return rows


def _stop_ids(ids: Sequence[int], vocab: int) -> np.ndarray:
    """Stop tokens padded with -1, which no token equals, to a multiple of 8: their number seldom recompiles."""
    if isinstance(ids, str | bytes) or np.ndim(ids) != 1:
        raise TypeError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    check_ids("stop_token_ids", np.asarray(ids, None if len(ids) else np.int32), vocab, "the vocabulary")
    values = np.asarray(ids, np.int32)
    return np.pad(values, (0, -len(values) % 8 or 8 * (len(values) == 0)), constant_values=-1)
