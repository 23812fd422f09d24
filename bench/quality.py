"""How good a checkpoint is: bits per byte of a text, and whether what it writes is made of the corpus's words."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx

import jaxfuse
from chat import SAMPLING, chat_text
from tokens import IGNORED, Chapters, plain, read_chapters, windows

Logits = Callable[[jax.Array], jax.Array]


def token_nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log p(target), 0 where the target is IGNORED: float32, the shape of targets; logits are float32."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.where(targets == IGNORED, 0.0, nats)


class BitsPerByte:
    """Measures a model on texts: total bits over total UTF-8 bytes, in rows as windows() makes them."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, texts: list[str], length: int = 512) -> None:
        batch = 16
        rows = [windows(tokenizer, text, length) for text in texts]
        inputs, targets = (np.concatenate(part) for part in zip(*rows, strict=True))
        padding = -len(inputs) % batch
        self.inputs = np.pad(inputs, ((0, padding), (0, 0))).reshape(-1, batch, length)
        self.targets = np.pad(targets, ((0, padding), (0, 0)), constant_values=IGNORED).reshape(-1, batch, length)
        self.bytes = sum(len(text.encode()) for text in texts)

    def __call__(self, logits: Logits) -> float:
        """Bits per byte under a function from `[B, T]` tokens to `[B, T, vocab]` logits."""
        total = 0.0
        for inputs, targets in zip(self.inputs, self.targets, strict=True):
            total += float(token_nats(logits(jnp.asarray(inputs)), jnp.asarray(targets)).sum())
        return total / math.log(2) / self.bytes


def words(text: str) -> list[str]:
    """A text's words, in small letters."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def write_words(
    model: jaxfuse.Qwen3, tokenizer: tokenizers.Tokenizer, chapters: Chapters, *, at_least: int, seed: int
) -> list[tuple[str, str]]:
    """(opening, what the model wrote) through the chat form, until at_least words are written."""
    sampling = jaxfuse.Sampling(**SAMPLING)
    long = [paragraph for chapter in chapters for paragraph in chapter if paragraph.count(" ") > 20]
    written: list[tuple[str, str]] = []
    batch = 8
    for turn in range(100):
        openings = [" ".join(long[(turn * batch + i) % len(long)].split(" ")[:8]) for i in range(batch)]
        prompts = [tokenizer.encode(chat_text(o, "").removesuffix("<|im_end|>\n")).ids for o in openings]
        out = jaxfuse.generate(model, prompts, max_new_tokens=256, sampling=sampling, key=seed + turn)
        for opening, row, count in zip(openings, np.asarray(out.tokens), np.asarray(out.lengths), strict=True):
            written.append((opening, tokenizer.decode(row[:count].tolist())))
        if sum(len(words(text)) for _, text in written) >= at_least:
            return written
    raise RuntimeError(f"{at_least} words were not written in 100 rounds: the model ends its answers at once")


def check(folder: Path, data: Path, *, at_least: int, seed: int) -> dict[str, Any]:
    """The figures of a written folder: its bfloat16 weights, computed in float32."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    heldout = read_chapters(data / "heldout.txt")
    text = (folder / "heldout_excerpt.txt").read_text("utf-8")
    model = jaxfuse.Qwen3.from_pretrained(str(folder), dtype=jnp.float32)
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    logits = functools.partial(run, state)
    figures: dict[str, Any] = {
        "safetensors_bytes": (folder / "model.safetensors").stat().st_size,
        "heldout_bytes": sum(len(plain(chapter).encode()) for chapter in heldout),
        "heldout_bits_per_byte": round(BitsPerByte(tokenizer, [plain(c) for c in heldout])(logits), 4),
        "excerpt_bits_per_byte": round(BitsPerByte(tokenizer, [text])(logits), 4),
        "context_tokens": "256 to 512, from the start of the chapter",
    }
    if at_least:
        parts = [(data / f"{part}.txt").read_text("utf-8") for part in ("train", "valid", "heldout")]
        corpus = {word for part in parts for word in words(part)}
        written = write_words(model, tokenizer, heldout, at_least=at_least, seed=seed)
        for opening, text in written[:8]:
            print(f"\n> {opening}\n{text}")
        spoken = [word for _, text in written for word in words(text)]
        figures["words_generated"] = len(spoken)
        figures["words_in_corpus"] = round(sum(word in corpus for word in spoken) / len(spoken), 4)
        figures["words_not_in_corpus"] = sorted({word for word in spoken if word not in corpus})
    return figures
