"""Train the small checkpoint that ships with jaxfuse, on the text that bench/corpus.py prepared.

    python3 bench/train.py --data DIR --out FOLDER          # trains, writes FOLDER, checks it
    python3 bench/train.py --data DIR --out FOLDER --check  # checks a folder that is already there

FOLDER becomes a Hugging Face Qwen3 checkpoint: config.json, generation_config.json, tokenizer.json,
tokenizer_config.json, model.safetensors (bfloat16), and beside them training.json (every figure of the run)
and heldout_excerpt.txt (the text that the test-suite measures again).

Half of each batch is windows of the plain text, half is chat turns in which the user begins a passage and the
assistant goes on to the end of a sentence or paragraph. The data and every random choice follow from --seed;
on a GPU the order of some sums does not, so that two runs agree closely, not bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

import jaxfuse

# The last ids, in this order. As with Qwen3, the marks of thought are no special tokens: decoding shows them.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THOUGHT = ["<think>", "</think>"]
VOCAB = 2048
END_OF_TEXT, IM_START, IM_END = range(VOCAB - len(SPECIAL) - len(THOUGHT), VOCAB - len(THOUGHT))
# Where Qwen's tokenizers split text before byte pairs are joined; part of the format, as the special tokens.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
EXCERPT_BYTES = 16_000
PACKAGES = ("jax", "flax", "optax", "tokenizers", "numpy")
IGNORED = -1  # a target that carries no loss

Chapters = list[list[str]]  # of paragraphs


# --- text to tokens


def read_chapters(path: Path) -> Chapters:
    """A file of bench/corpus.py."""
    return [chapter.split("\n") for chapter in path.read_text("utf-8").rstrip("\n").split("\n\n")]


def plain(chapter: list[str]) -> str:
    """A chapter as the text that is trained and measured."""
    return "\n\n".join(chapter)


def train_tokenizer(chapters: Chapters) -> tokenizers.Tokenizer:
    """A byte-level BPE in Qwen's form: any text in NFC comes back from decode(encode(text))."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=END_OF_TEXT, initial_alphabet=alphabet, show_progress=False)
    # A role opens every chat turn: counted often enough that each becomes one token.
    roles = ["system\n", "user\n", "assistant\n"] * 10_000
    tokenizer.train_from_iterator([*map(plain, chapters), *roles], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in THOUGHT])
    if tokenizer.get_vocab_size() != VOCAB or tokenizer.token_to_id("<|im_end|>") != IM_END:
        got = tokenizer.get_vocab_size()
        raise RuntimeError(f"the text is too small for a vocabulary of {VOCAB}: it gives {got}")
    return tokenizer


SENTENCE_END = re.compile(
    r"(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)"  # not after a title
    r"(?:(?<=[.!?])|(?<=[.!?][\"')])) (?=[\"'(]?[A-Z])"
)


def sentences(paragraph: str) -> list[str]:
    """A paragraph's sentences; joined with spaces they are the paragraph again."""
    return SENTENCE_END.split(paragraph)


def chat_sample(chapters: Chapters, weights: np.ndarray, rng: np.random.Generator) -> tuple[str, str]:
    """A passage cut in two: the opening, which the user gives, and what the assistant makes follow."""
    chapter = chapters[rng.choice(len(chapters), p=weights)]
    start = int(rng.integers(len(chapter)))
    first, later = chapter[start], chapter[start + 1 :]
    if rng.random() < 0.3:  # begin inside the paragraph, at a sentence
        parts = sentences(first)
        first = " ".join(parts[int(rng.integers(len(parts))) :])

    kind = rng.random()
    if kind < 0.3:  # one or two whole sentences
        opening = " ".join(sentences(first)[: int(rng.integers(1, 3))])
    else:  # some words
        words = first.split(" ")
        opening = " ".join(words[: int(rng.integers(2, 7) if kind < 0.65 else rng.integers(7, 21))])
    if rng.random() < 0.5:  # people seldom type the comma
        opening = opening.rstrip(",;:-") or opening
    rest = first[len(opening) :]

    # Whole paragraphs while there is room, then whole sentences: the answer ends where the prose pauses.
    room = int(rng.integers(30, 160))
    answer = ""
    for paragraph in [rest, *later]:
        if room <= 0:
            break
        taken = ""
        for sentence in sentences(paragraph):
            if room <= 0 and len(paragraph) - len(taken) > 300:
                break
            taken += (" " if taken else "") + sentence
            room -= sentence.count(" ") + 1
        answer += ("\n\n" if answer.strip() else "") + taken
    return opening, answer.strip()


def chat_text(opening: str, answer: str) -> str:
    """The two turns as CHAT_TEMPLATE writes them."""
    return f"<|im_start|>user\n{opening}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def chat_rows(
    tokenizer: tokenizers.Tokenizer, chapters: Chapters, *, samples: int, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Packed chat turns: (inputs, targets), each [rows, length] int32.

    Only what the assistant says, its closing token included, is a target: openings are drawn over and over,
    and their text is trained by the prose half already.
    """
    rng = np.random.default_rng(seed)
    weights = np.array([len(chapter) for chapter in chapters], float)
    weights /= weights.sum()
    pairs = [chat_sample(chapters, weights, rng) for _ in range(samples)]
    texts = [chat_text(opening, answer) for opening, answer in pairs if answer]
    head = 1 + len(tokenizer.encode("assistant\n").ids)

    rows: list[tuple[list[int], list[int]]] = [([], [])]
    for encoding in tokenizer.encode_batch(texts):
        ids = encoding.ids[: length + 1]  # what is cut off a long answer is simply not learnt
        begin = ids.index(IM_START, 1) + head
        # The newline after the closing token is the template's, not the assistant's.
        end = ids.index(IM_END, begin) + 1 if IM_END in ids[begin:] else len(ids)
        target = [token if begin <= i < end else IGNORED for i, token in enumerate(ids)]
        if len(rows[-1][0]) + len(ids) > length + 1:
            rows.append(([], []))
        rows[-1][0].extend(ids)
        rows[-1][1].extend(target)
    tokens = np.full((len(rows), length + 1), END_OF_TEXT, np.int32)
    targets = np.full((len(rows), length + 1), IGNORED, np.int32)
    for i, (ids, target) in enumerate(rows):
        tokens[i, : len(ids)], targets[i, : len(ids)] = ids, target
    return tokens[:, :-1], targets[:, 1:]


def stream(tokenizer: tokenizers.Tokenizer, chapters: Chapters) -> np.ndarray:
    """All chapters in a row, each between two <|endoftext|>, [tokens] int32."""
    ids = [END_OF_TEXT]
    for encoding in tokenizer.encode_batch([plain(chapter) for chapter in chapters]):
        ids += [*encoding.ids, END_OF_TEXT]
    return np.array(ids, np.int32)


# --- measuring

Logits = Callable[[jax.Array], jax.Array]


def token_nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log p(target), 0 where the target is IGNORED: float32, the shape of targets; logits are float32."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.where(targets == IGNORED, 0.0, nats)


def windows(tokenizer: tokenizers.Tokenizer, text: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A text as overlapping rows (inputs, targets), [rows, length] int32, every token a target just once.

    A text starts after <|endoftext|>. Rows step by half a length and score their second half, so that a token
    has length/2 to length tokens before it; the first row scores all it has.
    """
    ids = [END_OF_TEXT, *tokenizer.encode(text).ids]
    inputs, targets = [], []
    for start in range(0, max(len(ids) - 1 - length // 2, 1), length // 2):
        row, target = ids[start : start + length], ids[start + 1 : start + length + 1]
        if start:
            target = [IGNORED] * (length // 2) + target[length // 2 :]
        inputs.append(row + [END_OF_TEXT] * (length - len(row)))
        targets.append(target + [IGNORED] * (length - len(target)))
    return np.array(inputs, np.int32), np.array(targets, np.int32)


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


def excerpt(chapters: Chapters) -> str:
    """The beginning of the longest held-out chapter: the paragraphs that fit in EXCERPT_BYTES."""
    text = ""
    for paragraph in max(chapters, key=lambda chapter: len(plain(chapter))):
        longer = f"{text}\n\n{paragraph}" if text else paragraph
        if len(longer.encode()) > EXCERPT_BYTES:
            break
        text = longer
    return text


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


# --- training


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run does; every field is an option of the command line and is written to training.json."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 512
    steps: int = 3000
    batch: int = 64  # rows a step, half prose, half chat
    length: int = 512  # tokens a row
    learning_rate: float = 2e-3
    warm_up: int = 100
    weight_decay: float = 1.0
    clip: float = 1.0
    average: float = 0.995  # decay of the running mean of the weights, which is measured and kept
    drop_weights: float = 0.1  # share of the projections' weights left out of a step
    drop_tokens: float = 0.05  # share of input tokens replaced by a random one
    compute: str = "bfloat16"  # dtype of the forward and backward pass; the weights are float32
    chat_samples: int = 40_000
    every: int = 100  # steps between looks at valid.txt
    patience: int = 15  # looks without a better one before it stops
    seed: int = 0


def model_config(plan: Plan) -> dict[str, Any]:
    """config.json, in Hugging Face's spelling."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": plan.intermediate,
        "max_position_embeddings": 2048,
        "num_attention_heads": plan.heads,
        "num_hidden_layers": plan.layers,
        "num_key_value_heads": plan.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def train(
    plan: Plan, tokenizer: tokenizers.Tokenizer, train_chapters: Chapters, valid_chapters: Chapters
) -> tuple[jaxfuse.Qwen3, dict[str, Any]]:
    """The model with the weights that did best on the valid text, and the run's figures."""
    prose = jnp.asarray(stream(tokenizer, train_chapters))
    rows = chat_rows(tokenizer, train_chapters, samples=plan.chat_samples, length=plan.length, seed=plan.seed)
    chat_inputs, chat_targets = map(jnp.asarray, rows)
    print(f"{prose.size} tokens of prose, {len(chat_inputs)} rows of chat", flush=True)
    valid = BitsPerByte(tokenizer, [plain(chapter) for chapter in valid_chapters])
    valid_chat = chat_rows(tokenizer, valid_chapters, samples=400, length=plan.length, seed=plan.seed)

    config = jaxfuse.Qwen3Config.from_dict(model_config(plan))
    model = jaxfuse.Qwen3(config, rngs=nnx.Rngs(plan.seed), dtype=jnp.float32)
    parts: Any = nnx.split(model, nnx.Param, ...)
    graphdef, params, rest = parts
    fast = jaxfuse.Qwen3(config, rngs=nnx.Rngs(plan.seed), dtype=plan.compute)
    parts = nnx.split(fast, nnx.Param, ...)
    fast_graphdef, _, fast_rest = parts
    parameters = sum(x.size for x in jax.tree.leaves(params))
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    warm_up = min(plan.warm_up, plan.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, plan.learning_rate, warm_up, plan.steps, plan.learning_rate / 20)
    optimizer = optax.chain(
        optax.clip_by_global_norm(plan.clip),
        optax.adamw(
            schedule,
            b1=0.9,
            b2=0.98,
            weight_decay=plan.weight_decay,
            mask=jax.tree.map(lambda name: "norm" not in name, names),
        ),
    )

    def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits: jax.Array = nnx.merge(graphdef, params, rest)(tokens)
        return logits

    def fast_logits_of(params: Any, tokens: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda x: x.astype(plan.compute), params)
        logits: jax.Array = nnx.merge(fast_graphdef, cast, fast_rest)(tokens)
        return logits

    def thinned(params: Any, key: jax.Array) -> Any:
        """Projections with a random share of their weights at 0, the others scaled up to make good for it."""

        def thin(index: int, name: str, x: jax.Array) -> jax.Array:
            if "proj" not in name or not plan.drop_weights:
                return x
            kept = jax.random.bernoulli(jax.random.fold_in(key, index), 1 - plan.drop_weights, x.shape)
            return jnp.where(kept, x / (1 - plan.drop_weights), 0)

        leaves, tree = jax.tree.flatten(params)
        named = zip(jax.tree.leaves(names), leaves, strict=True)
        return jax.tree.unflatten(tree, [thin(i, name, x) for i, (name, x) in enumerate(named)])

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One batch: (inputs, targets), [batch, length] int32."""
        where, which, hit, other = jax.random.split(key, 4)
        half = plan.batch // 2
        starts = jax.random.randint(where, (plan.batch - half,), 0, prose.size - plan.length)
        rows = jax.random.randint(which, (half,), 0, len(chat_inputs))
        cut = prose[starts[:, None] + jnp.arange(plan.length + 1)]
        inputs = jnp.concatenate([cut[:, :-1], chat_inputs[rows]])
        targets = jnp.concatenate([cut[:, 1:], chat_targets[rows]])
        replaced = jax.random.bernoulli(hit, plan.drop_tokens, inputs.shape) & (inputs < END_OF_TEXT)
        return jnp.where(replaced, jax.random.randint(other, inputs.shape, 0, END_OF_TEXT), inputs), targets

    def step(carry: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        params, state, average = carry
        batch_key, thin_key = jax.random.split(jax.random.fold_in(jax.random.key(plan.seed), number))
        inputs, targets = draw(batch_key)

        def loss(params: Any) -> jax.Array:
            nats = token_nats(fast_logits_of(thinned(params, thin_key), inputs), targets)
            return nats.sum() / (targets != IGNORED).sum()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        keep = jnp.minimum(plan.average, (1 + number) / (10 + number))
        average = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, average, params)
        return (params, state, average), value

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(carry: Any, numbers: jax.Array) -> tuple[Any, jax.Array]:
        carry, losses = jax.lax.scan(step, carry, numbers)
        return carry, losses.mean()

    measure = jax.jit(logits_of)

    def chat_nats(average: Any) -> float:
        inputs, targets = (part[: len(part) // 8 * 8].reshape(-1, 8, plan.length) for part in valid_chat)
        total = 0.0
        for row, target in zip(inputs, targets, strict=True):
            total += float(token_nats(measure(average, row), jnp.asarray(target)).sum())
        return total / int((targets != IGNORED).sum())

    carry = (params, optimizer.init(params), jax.tree.map(jnp.copy, params))
    best, best_bits, best_step = jax.tree.map(jnp.copy, params), math.inf, 0
    curve: list[dict[str, float]] = []
    began = time.perf_counter()
    for start in range(0, plan.steps, plan.every):
        numbers = jnp.arange(start, min(start + plan.every, plan.steps))
        carry, mean = steps(carry, numbers)
        done, bits = start + len(numbers), valid(functools.partial(measure, carry[2]))
        point = {"step": done, "train_nats": round(float(mean), 4), "valid_bits_per_byte": round(bits, 4)}
        curve.append(point)
        print(point, f"{time.perf_counter() - began:.0f} s", flush=True)
        if bits < best_bits:
            best, best_bits, best_step = jax.tree.map(jnp.copy, carry[2]), bits, done
        elif done - best_step >= plan.patience * plan.every or not math.isfinite(bits):
            break
    figures = {
        "kept_step": best_step,
        "valid_bits_per_byte": round(best_bits, 4),
        "valid_chat_nats_per_token": round(chat_nats(best), 4),
        "prose_tokens": int(prose.size),
        "parameters": parameters,
        "seconds": round(time.perf_counter() - began, 1),
        "curve": curve,
    }
    return nnx.merge(graphdef, best, rest), figures


def write_folder(folder: Path, model: jaxfuse.Qwen3, tokenizer: tokenizers.Tokenizer, heldout: Chapters) -> None:
    """Everything of a checkpoint but training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder), dtype=jnp.bfloat16)
    tokenizer.save(str(folder / "tokenizer.json"))
    plainly = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(END_OF_TEXT + i): {"content": token, **plainly, "special": token in SPECIAL}
        for i, token in enumerate(SPECIAL + THOUGHT)
    }
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": 2048,
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
        "generation_config.json": {
            "do_sample": True,
            "eos_token_id": [IM_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
            **SAMPLING,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    (folder / "heldout_excerpt.txt").write_text(excerpt(heldout), "utf-8")


def main() -> None:
    """The command."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--data", type=Path, required=True, help="the folder that bench/corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--check", action="store_true", help="train nothing: check the folder that is there")
    parser.add_argument("--words", type=int, default=1000, help="write so many words to check; 0: none")
    for field in dataclasses.fields(Plan):
        option = "--" + field.name.replace("_", "-")
        default = field.default
        parser.add_argument(option, type=type(default), default=default, help=f"default {default}")
    args = parser.parse_args()
    plan = Plan(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Plan)})
    parts = ("train.txt", "valid.txt", "heldout.txt")
    missing = [name for name in parts if not (args.data / name).is_file()]
    if missing:
        sys.exit(f"train.py: --data must be a folder that bench/corpus.py wrote; {args.data} lacks {missing}")
    if plan.compute not in ("float32", "bfloat16"):
        sys.exit(f"train.py: --compute is float32 or bfloat16, not {plan.compute!r}")

    if args.check:
        print(json.dumps(check(args.out, args.data, at_least=args.words, seed=plan.seed), indent=2))
        return
    train_chapters, valid_chapters = (read_chapters(args.data / name) for name in ("train.txt", "valid.txt"))
    tokenizer = train_tokenizer(train_chapters)
    model, figures = train(plan, tokenizer, train_chapters, valid_chapters)
    write_folder(args.out, model, tokenizer, read_chapters(args.data / "heldout.txt"))
    record = {
        **check(args.out, args.data, at_least=args.words, seed=plan.seed),
        **figures,
        "plan": dataclasses.asdict(plan),
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(json.dumps({name: value for name, value in record.items() if name != "curve"}, indent=2))


if __name__ == "__main__":
    main()
