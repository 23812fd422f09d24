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

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tokenizers
from flax import nnx

import jaxfuse
from chat import chat_rows
from folder import write_folder
from quality import BitsPerByte, check, token_nats
from tokens import END_OF_TEXT, IGNORED, IM_END, VOCAB, Chapters, plain, read_chapters, stream, train_tokenizer

PACKAGES = ("jax", "flax", "optax", "tokenizers", "numpy")


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
