"""How tokens are drawn: what is kept is what transformers keeps, and draws follow the distribution of the rest."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from jaxfuse import ConfigError, InputError, Sampling
from jaxfuse.sampling import filtered, request_keys, sample

torch = pytest.importorskip("torch")
warpers = pytest.importorskip("transformers.generation.logits_process")

VOCAB = 41

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.integer[Any]]

_filtered = jax.jit(filtered)
_draws = jax.jit(jax.vmap(sample, (None, None, 0), out_axes=1))


def random_logits(seed: int, *shape: int, spread: float = 3.0) -> Floats:
    """Normal logits without ties in a row, far from zero on average, as a model's may be."""
    logits = (40 + np.random.default_rng(seed).normal(0, spread, shape)).astype(np.float32)
    assert all(len(np.unique(row)) == shape[-1] for row in logits)
    return logits


def kept(logits: Floats, sampling: Sampling) -> Bools:
    """Which tokens may be drawn, `[B, VOCAB]`."""
    return np.isfinite(np.asarray(_filtered(logits, sampling.for_batch(len(logits)))))


def transformers_scores(row: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> Floats:
    """One row after transformers' warpers, in the order of its `generate`."""
    chain = [warpers.TemperatureLogitsWarper(temperature)]
    if top_k > 0:
        chain.append(warpers.TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(warpers.TopPLogitsWarper(top_p))
    if min_p > 0:
        chain.append(warpers.MinPLogitsWarper(min_p))
    scores = torch.from_numpy(row[None])
    for warp in chain:
        scores = warp(None, scores)
    result: Floats = scores[0].numpy()
    return result


def draws(logits: Floats, sampling: Sampling, count: int, seed: int = 0) -> Ints:
    """`[B, count]` tokens, drawn with as many keys."""
    keys = jax.random.split(jax.random.key(seed), (count, len(logits)))
    return np.asarray(_draws(logits, sampling.for_batch(len(logits)), keys))


# --- what is kept


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.1, 5.0),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 5)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
def test_keeps_what_transformers_keeps(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Each filter, alone and with the others, keeps the tokens that transformers' warpers keep, at their scores."""
    logits = random_logits(seed, 1, VOCAB)
    expected = transformers_scores(logits[0], temperature, top_k, top_p, min_p)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    np.testing.assert_array_equal(kept(logits, sampling)[0], np.isfinite(expected))
    ours = np.asarray(_filtered(logits, sampling.for_batch(1)))[0]
    # Ours count from the largest logit. A rounding of either is an ulp of a logit near 40, over the temperature.
    np.testing.assert_allclose(ours, expected - expected.max(), rtol=0, atol=2 * 2**-18 / temperature)


def test_rows_are_filtered_by_their_own_values() -> None:
    """Arrays of parameters: each row keeps what it keeps alone, among rows of every other kind."""
    logits = random_logits(1, 7, VOCAB, spread=2.0)
    sampling = Sampling(
        temperature=np.array([1.0, 0.5, 2.0, 1.0, 0.0, 1.0, 0.7]),
        top_k=np.array([0, 3, 0, 0, 4, 1, 20]),
        top_p=np.array([1.0, 1.0, 0.5, 1.0, 0.2, 0.9, 0.8]),
        min_p=np.array([0.0, 0.0, 0.0, 0.01, 0.5, 0.0, 0.02]),
    )
    together = kept(logits, sampling)
    for i, row in enumerate(logits):
        if i == 4:  # greedy: nothing is drawn from what it keeps
            continue
        one: dict[str, Any] = {name: value[i].item() for name, value in vars(sampling).items()}
        alone = np.isfinite(transformers_scores(row, **one))
        np.testing.assert_array_equal(together[i], alone, err_msg=str(one))
    assert len({int(row.sum()) for row in together}) >= 5, "the rows were meant to differ"


def test_equal_logits_at_the_end_are_all_kept() -> None:
    """Ties, as the docstring has them: top-k keeps what equals its last token."""
    logits = np.array([[1.0, 3.0, 2.0, 2.0, 0.0]], np.float32)
    np.testing.assert_array_equal(kept(logits, Sampling(1.0, top_k=2))[0], [False, True, True, True, False])


@pytest.mark.parametrize("top_k", [0, 120_000])
def test_top_p_of_one_keeps_the_tail(top_k: int) -> None:
    """In a large vocabulary float32's running sum passes 1 early; top_p = 1 keeps the rest all the same."""
    vocab = 151_936
    rng = np.random.default_rng(2)
    logits = np.stack([rng.permutation(np.linspace(0, width, vocab)) for width in (24, 8)]).astype(np.float32)
    ordered = np.sort(logits[0])[::-1]
    sums = np.asarray(jnp.cumsum(jax.nn.softmax(jnp.asarray(ordered[: top_k or None]))))
    assert (sums[:-1000] >= 1).any(), "this case was meant to pass 1 early"
    # The other row's top_p makes both go through the sort.
    sampling = Sampling(1.0, top_k=top_k, top_p=np.array([1.0, 0.9]))
    result = kept(logits, sampling)
    assert result[0].sum() == (top_k or logits.shape[1])
    ordered = np.exp(np.sort(logits[1].astype(np.float64))[::-1][: top_k or None])
    before = (ordered.cumsum() - ordered) / ordered.sum()
    assert abs(int(result[1].sum()) - int((before < 0.9).sum())) <= 2


# --- what is drawn


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7),
        Sampling(1.3, top_k=5),
        Sampling(1.0, top_p=0.8),
        Sampling(1.5, min_p=0.1),
        Sampling(1.2, top_k=9, top_p=0.95, min_p=0.03),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """100,000 draws fit the softmax of transformers' scores (chi-squared); none is of a token that is not kept."""
    logits = random_logits(3, 1, 11, spread=0.8)
    scores = transformers_scores(logits[0], **vars(sampling)).astype(np.float64)
    expected = 100_000 * np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    counts = np.bincount(draws(logits, sampling, 100_000)[0], minlength=11)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert (expected[possible] > 20).all(), "too rare for the chi-squared test"
    assert scipy.stats.chisquare(counts[possible], expected[possible]).pvalue > 0.001


def test_rows_are_drawn_apart() -> None:
    """Equal rows with keys of their own are drawn independently (chi-squared of the pairs)."""
    logits = np.broadcast_to(random_logits(4, 1, 5, spread=0.5), (2, 5))
    first, second = draws(logits, Sampling(1.0), 100_000)
    pairs = np.zeros((5, 5), int)
    np.add.at(pairs, (first, second), 1)
    assert scipy.stats.chi2_contingency(pairs).pvalue > 0.001


def test_greedy_rows_among_sampled_ones() -> None:
    """A row of temperature 0 takes its largest logit, whatever its other values; the rest are drawn."""
    logits = random_logits(5, 4, VOCAB)
    tokens = draws(logits, Sampling(np.array([0.0, 1.0, 0.0, 2.0]), np.array([0, 0, 9, 9]), min_p=0.001), 300)
    best = logits.argmax(axis=1)
    assert (tokens[[0, 2]] == best[[0, 2], None]).all()
    assert (tokens[1] != best[1]).any()
    assert (tokens[3] != best[3]).any()


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-40, 1e-60])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    """A temperature that would make logits overflow, or is 0 in float32, gives the most likely token."""
    logits = random_logits(6, 3, VOCAB)
    assert (draws(logits, Sampling(temperature), 20) == logits.argmax(axis=1)[:, None]).all()


@pytest.mark.parametrize("top_p", [1e-6, 1e-40, 1e-60])
def test_tiny_top_p_keeps_the_most_likely(top_p: float) -> None:
    """One token is always kept, even by a top_p that is 0 in float32."""
    logits = random_logits(7, 3, VOCAB)
    assert (draws(logits, Sampling(1.0, top_p=top_p), 50) == logits.argmax(axis=1)[:, None]).all()


def test_huge_top_k_keeps_all() -> None:
    """A k beyond int32 keeps all tokens: it does not wrap around to a small one."""
    logits = random_logits(8, 2, VOCAB)
    assert kept(logits, Sampling(1.0, top_k=2**32 + 1)).all()
    assert kept(logits, Sampling(1.0, top_k=np.array([2**40, 2**63 - 1]))).all()


# --- keys


def key_data(keys: jax.Array) -> list[list[int]]:
    """Keys as numbers."""
    result: list[list[int]] = jax.random.key_data(keys).tolist()
    return result


def test_request_keys() -> None:
    """Request i gets `fold_in(key, i)`, whatever the number of requests."""
    base = jax.random.key(7)
    expected = [key_data(jax.random.fold_in(base, i)) for i in range(4)]
    assert key_data(request_keys(7, 4)) == expected
    assert key_data(request_keys(base, 2)) == expected[:2]


@pytest.mark.parametrize("key", [0, 7, 2**31, 2**32 - 1])
def test_an_int_key_is_that_of_jax(key: int) -> None:
    """An int of 32 bits is taken as `jax.random.key` takes it, a NumPy one too."""
    expected = key_data(request_keys(jax.random.key(key), 2))
    assert key_data(request_keys(key, 2)) == expected
    assert key_data(request_keys(np.int64(key), 2)) == expected  # type: ignore[arg-type]


def test_int_keys_do_not_alias() -> None:
    """All 64 bits of an int count, where `jax.random.key` drops the upper half without 64-bit types."""
    ints = [5, 2**32 + 5, 2**40 + 5, -5, 2**32 - 5, -(2**63), 2**63 - 1]
    assert len({str(key_data(request_keys(key, 1))) for key in ints}) == len(ints)


def test_old_style_key() -> None:
    """`jax.random.PRNGKey` draws as the new-style key of the same seed, and compiles nothing of its own."""
    old, new = request_keys(jax.random.PRNGKey(3), 2), request_keys(jax.random.key(3), 2)
    assert (key_data(old), old.dtype) == (key_data(new), new.dtype)


@pytest.mark.parametrize("key", [2**63, -(2**63) - 1, 2**200])
def test_an_int_key_of_more_bits_is_refused(key: int) -> None:
    """What `jax.random.key` would answer with an OverflowError is bad input."""
    with pytest.raises(InputError, match="key must be an int of 64 bits, got"):
        request_keys(key, 1)


@pytest.mark.parametrize(
    "key",
    [
        True,
        None,
        1.0,
        "0",
        np.zeros(2, np.uint32),
        jnp.int32(3),
        jax.random.split(jax.random.key(0), 2),
        jax.random.split(jax.random.PRNGKey(0), 2),
    ],
    ids=repr,
)
def test_what_is_no_key_is_refused(key: Any) -> None:
    """One error in words of the argument, instead of one from inside JAX."""
    with pytest.raises(TypeError, match=r"key must be an int or one JAX key, got .*; make one with jax\.random\.key"):
        request_keys(key, 2)


# --- arguments


def test_for_batch() -> None:
    """One number goes to every row, an array to its own; dtypes are those that travel to the device."""
    sampling = Sampling(0.5, np.array([1, 2, 3]), jnp.float32(0.25), np.array([0.0, 0.5, 1.0])).for_batch(3)
    expected: dict[str, tuple[type, list[float]]] = {
        "temperature": (np.float32, [0.5, 0.5, 0.5]),
        "top_k": (np.int32, [1, 2, 3]),
        "top_p": (np.float32, [0.25, 0.25, 0.25]),
        "min_p": (np.float32, [0.0, 0.5, 1.0]),
    }
    for name, (dtype, values) in expected.items():
        array = getattr(sampling, name)
        assert array.dtype == dtype
        assert array.tolist() == values
    assert Sampling(ml_dtypes.bfloat16(0.5)).for_batch(1).temperature.tolist() == [0.5]  # type: ignore[union-attr]


def test_the_default_is_greedy() -> None:
    """Without arguments nothing is drawn and nothing is filtered; one warm row makes it a sampled batch."""
    assert dataclasses.asdict(Sampling()) == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert Sampling().greedy
    assert Sampling(np.zeros(3), top_k=5).greedy
    assert not Sampling(np.array([0.0, 0.1])).greedy


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be finite and at least 0, got -0.1"),
        ("temperature", NAN, "temperature must be finite and at least 0, got nan"),
        ("temperature", INF, "temperature must be finite and at least 0, got inf"),
        ("temperature", 1e300, r"temperature must be finite and at least 0, got 1e\+300"),
        ("temperature", [1.0, NAN], "temperature must be finite and at least 0, got "),
        ("top_k", -1, "top_k must be finite and at least 0, got -1"),
        ("top_k", [1, -(2**40)], "top_k must be finite and at least 0, got "),
        ("top_p", 0, r"top_p must be finite and in \(0, 1\], got 0"),
        ("top_p", 1.01, r"top_p must be finite and in \(0, 1\], got 1.01"),
        ("top_p", NAN, r"top_p must be finite and in \(0, 1\], got nan"),
        ("min_p", -1e-9, r"min_p must be finite and in \[0, 1\], got -1e-09"),
        ("min_p", 2, r"min_p must be finite and in \[0, 1\], got 2"),
        ("temperature", True, "temperature must be real numbers, got True"),
        ("temperature", "1", "temperature must be real numbers, got '1'"),
        ("temperature", None, "temperature must be real numbers, got None"),
        ("temperature", 1j, "temperature must be real numbers, got 1j"),
        ("top_k", 2.0, "top_k must be integers, got 2.0"),
        ("top_k", False, "top_k must be integers, got False"),
        ("top_p", ["a", "b"], r"top_p must be real numbers, got \['a', 'b'\]"),
        ("min_p", [0.1, [0.2]], r"min_p must be one number or one for each row, got \[0.1, \[0.2\]\]"),
        ("top_k", [1, 2, 3], r"top_k must be one number or one for each of 2 rows, got shape \(3,\)"),
        ("top_k", [], "top_k must be"),
        ("top_p", [[0.5, 0.5]], r"top_p must be one number or one for each of 2 rows, got shape \(1, 2\)"),
    ],
)
def test_bad_values_are_refused(name: str, value: Any, message: str) -> None:
    """Out of range, not finite, of the wrong type or length: named, with the rule and what came."""
    with pytest.raises(InputError, match=message):
        Sampling(**{name: value}).for_batch(2)


# --- generation_config.json


def test_from_generation_config() -> None:
    """The file's values when it samples; what is absent or null is off, and other keys are not read."""
    data: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    assert Sampling.from_generation_config(data) == Sampling(0.6, 20, 0.95, 0.0)
    assert Sampling.from_generation_config({"do_sample": True, "min_p": 0.1}) == Sampling(1.0, 0, 1.0, 0.1)
    nulls = {"do_sample": True, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    assert Sampling.from_generation_config(nulls) == Sampling(1.0)
    assert Sampling.from_generation_config({"do_sample": True, "top_k": 0}) == Sampling(1.0)


@pytest.mark.parametrize("data", [{}, {"do_sample": False}, {"do_sample": None}], ids=str)
def test_greedy_generation_config(data: dict[str, Any]) -> None:
    """Without do_sample the values are not in use, as in transformers."""
    assert Sampling.from_generation_config({**data, "temperature": 0.6, "top_k": 20}) == Sampling()


@pytest.mark.parametrize(
    "data",
    [{"do_sample": "yes"}]
    + [{"do_sample": True, **bad} for bad in ({"temperature": "hot"}, {"top_k": 1.5}, {"top_p": 0}, {"min_p": [0.1]})],
    ids=str,
)
def test_bad_generation_config(data: dict[str, Any]) -> None:
    """A mistyped value is an error that names it and the file."""
    name = list(data)[-1]
    with pytest.raises(ConfigError, match=f"'{name}' in generation_config.json must be .*, got"):
        Sampling.from_generation_config(data)
