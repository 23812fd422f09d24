"""How the next token is drawn from logits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.errors import InputError
from jaxfuse.fields import Fields

# Controls of transformers' generate that are not implemented, with the value that turns each off.
_OFF: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "penalty_alpha": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": None,
    "bad_words_ids": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "stop_strings": None,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters, each one number for all rows or an array `[B]`; the default is greedy.

    They are applied in transformers' order: temperature, top-k, top-p, min-p. They travel as arrays, so a new
    value compiles nothing anew. What is kept is a range of logits: of equal ones at its end all are kept.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keeps the k most likely tokens; 0 keeps all.
        top_p: keeps the most likely tokens whose probabilities first reach this sum; 1 keeps all.
        min_p: keeps tokens at least this many times as likely as the most likely one; 0 keeps all.
    """

    temperature: jax.typing.ArrayLike = 0.0
    top_k: jax.typing.ArrayLike = 0
    top_p: jax.typing.ArrayLike = 1.0
    min_p: jax.typing.ArrayLike = 0.0

    @classmethod
    def from_generation_config(cls, data: Mapping[str, Any]) -> "Sampling":
        """The parameters of a generation_config.json: greedy unless `do_sample`; what is absent is off.

        Raises:
            ConfigError: when a value is of the wrong type.
        """
        fields = Fields(data, "generation_config.json")
        if not fields.boolean("do_sample", False):
            return cls()
        return cls(
            temperature=fields.number("temperature", 1.0, at_least=0.0),
            top_k=fields.count("top_k", 0),
            top_p=fields.number("top_p", 1.0, above=0.0),
            min_p=fields.number("min_p", 0.0, at_least=0.0),
        )

    @staticmethod
    def unsupported(data: Mapping[str, Any]) -> list[str]:
        """The names of what a generation_config.json turns on and this class does not have."""
        return sorted(name for name, off in _OFF.items() if data.get(name) not in (None, off))

    @property
    def greedy(self) -> bool:
        """Whether every row takes the most likely token."""
        return bool(np.all(np.asarray(self.temperature) == 0))

    def for_batch(self, batch: int) -> "Sampling":
        """Checked float32 and int32 arrays `[B]`.

        Raises:
            InputError: when a value is out of range or an array has another length.
        """
        return Sampling(
            _rows("temperature", self.temperature, batch, np.float32, lambda v: v >= 0, "at least 0"),
            _rows("top_k", self.top_k, batch, np.int32, lambda v: v >= 0, "at least 0"),
            _rows("top_p", self.top_p, batch, np.float32, lambda v: (v > 0) & (v <= 1), "in (0, 1]"),
            _rows("min_p", self.min_p, batch, np.float32, lambda v: (v >= 0) & (v <= 1), "in [0, 1]"),
        )


def _rows(name: str, value: Any, batch: int, dtype: type, valid: Any, rule: str) -> np.ndarray:
    whole = dtype is np.int32
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{name} must be one number or one for each row, got {value!r}") from None
    # jnp's notion of a float includes bfloat16.
    if not (jnp.issubdtype(array.dtype, np.integer) or (jnp.issubdtype(array.dtype, np.floating) and not whole)):
        raise InputError(f"{name} must be {'integers' if whole else 'real numbers'}, got {value!r}")
    if array.ndim > 1 or (array.ndim == 1 and len(array) != batch):
        raise InputError(f"{name} must be one number or one for each of {batch} rows, got shape {array.shape}")
    if whole:
        array = np.minimum(array, np.iinfo(dtype).max)  # more than any vocabulary, where a cast would wrap
    with np.errstate(over="ignore"):
        rows: np.ndarray = array.astype(dtype)
    if not (np.isfinite(rows) & valid(array)).all():
        raise InputError(f"{name} must be finite and {rule}, got {value!r}")
    return np.broadcast_to(rows, (batch,))


def request_keys(key: int | jax.Array, batch: int) -> jax.Array:
    """A key for each request, `[B]`: request i draws its step t with `fold_in(fold_in(key, i), t)`.

    An int makes a threefry key. Keys of JAX's rbg kinds draw otherwise when several requests draw at once.

    Raises:
        InputError: for an int of more than 64 bits.
        TypeError: for anything but an int or one JAX key, of the new style or the old.
    """
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        key = int(key)
        if not -(2**63) <= key < 2**63:
            raise InputError(f"key must be an int of 64 bits, got {key}")
        # jax.random.key(key), which without 64-bit types would drop the upper half.
        halves = np.array([key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF], np.uint32)
        key = jax.random.wrap_key_data(jnp.asarray(halves), impl="threefry2x32")
    elif isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim == 1:
        key = jax.random.wrap_key_data(key)  # jax.random.PRNGKey's
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.ndim:
        got = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else repr(key)
        raise TypeError(f"key must be an int or one JAX key, got {got}; make one with jax.random.key")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))


def sample(logits: jax.Array, sampling: Sampling, keys: jax.Array) -> jax.Array:
    """Draws one token a row: an argmax of logits plus Gumbel noise, which needs neither a sum nor a sort.

    Args:
        logits: `[B, vocab]` float32.
        sampling: arrays `[B]`.
        keys: one for each row, `[B]`.

    Returns:
        `[B]` int32.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))(keys)
    drawn = jnp.argmax(filtered(logits, sampling) + noise, axis=1)
    greedy = jnp.asarray(sampling.temperature) == 0
    return jnp.where(greedy, jnp.argmax(logits, axis=1), drawn).astype(jnp.int32)


def filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The logits of the distribution that is drawn from, `[B, vocab]`, -inf where a token is not kept.

    They count from the row's largest, which no temperature, however small, then makes infinite; a temperature
    of 0 is taken as 1. Only top-k and top-p sort, and only when a row asks for one of them.
    """
    temperature, top_k, top_p, min_p = (jnp.asarray(v)[:, None] for v in dataclasses.astuple(sampling))
    scaled = (logits - jnp.max(logits, axis=1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)
    cutoff = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: _cutoff(scaled, top_k, top_p),
        lambda: jnp.full_like(scaled[:, :1], -jnp.inf),
    )
    return jnp.where(scaled >= jnp.maximum(cutoff, jnp.log(min_p)), scaled, -jnp.inf)


def _cutoff(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The smallest logit that top-k and then top-p keep, `[B, 1]`."""
    vocab = scaled.shape[1]
    ordered = jnp.sort(scaled, axis=1, descending=True)
    kept = jnp.arange(vocab)[None] < jnp.where(top_k > 0, top_k, vocab)
    probabilities = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=1)
    before = jnp.cumsum(probabilities, axis=1) - probabilities  # of the tokens more likely than this one
    # Rounding can push the sum past 1 before the last token, which top_p = 1 must keep.
    kept &= (before < top_p) | (top_p >= 1)
    last = jnp.maximum(jnp.sum(kept, axis=1, keepdims=True) - 1, 0)  # a top_p of 1e-50 is 0 in float32
    return jnp.take_along_axis(ordered, last, axis=1)
