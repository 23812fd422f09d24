"""The command `jaxfuse`.

Standard output carries the answer alone; notes and progress go to standard error. Exit status: 0 done, 1 a
comparison failed, 2 bad input, 130 interrupted.
"""

import argparse
import dataclasses
import errno
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax
import numpy as np

import jaxfuse
from jaxfuse import compile_cache, devices, weights
from jaxfuse.config import DTYPES, Qwen3Config
from jaxfuse.errors import JaxfuseError
from jaxfuse.fields import read_json_object
from jaxfuse.fused_ops import fused_ops
from jaxfuse.generate import Generation, stream
from jaxfuse.hub import resolve
from jaxfuse.kernels import Implementation, ImplementationError, Rounding, check_implementation, has_mosaic
from jaxfuse.model import model_dtype
from jaxfuse.numerics import Numerics
from jaxfuse.sampling import Sampling
from jaxfuse.terminal import Stopwatch, loading_bar, note, transient
from jaxfuse.text import Tokenizer

SHIPPED = Path(__file__).parent / "checkpoint"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the hub's library is imported
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks is no reason to stop
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        print(end="", flush=True)  # at exit it would be too late to answer a closed pipe
        return status
    except (JaxfuseError, ImplementationError) as error:
        note(f"error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        note(f"error: cannot write the answer ({error.strerror}); make room")
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        note(f"error: {' '.join(message.split())}; see `{self.prog} --help`")
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxfuse", description="Run Qwen3 in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxfuse {jaxfuse.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="continue a prompt")
    command.set_defaults(run=_generate)
    command.add_argument("prompt", nargs="?", metavar="PROMPT", help="text, put in the model's chat template")
    _add_model(command)
    command.add_argument("--tokens", type=_token_ids, metavar="1,2,3", help="token ids instead of a PROMPT")
    command.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N", help="default: 256")
    command.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    command.add_argument("--top-k", type=int, metavar="K", help="0 is off")
    command.add_argument("--top-p", type=float, metavar="P", help="1 is off")
    command.add_argument("--min-p", type=float, metavar="P", help="0 is off")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, another answer; default: 0")
    command.add_argument("--raw", action="store_true", help="give PROMPT as it is, without the chat template")
    command.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    command.add_argument("--rounding", choices=get_args(Rounding), default="fused", help="hf: as transformers rounds")
    command.add_argument(
        "--implementation",
        choices=get_args(Implementation),
        help="of the fused ops; default: by device and shape, what is faster for the op alone; triton is not in this "
        "release",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    command = commands.add_parser(
        "parity",
        help="compare a model with the same in PyTorch, step by step",
        description="Say how far a model in jaxfuse is from the same in transformers: each op, each step of each "
        "layer, logits, greedy tokens. Exit status 1 when the contract is broken.",
    )
    command.set_defaults(run=_parity)
    _add_model(command)
    command.add_argument("--dtype", choices=DTYPES, help="default: float32, then bfloat16")
    command.add_argument("--prompts", metavar="FILE", help="one prompt a line; default: pieces of a novel")
    command.add_argument("--num-prompts", type=_positive, default=64, metavar="N", help="at most; default: 64")
    command.add_argument(
        "--new-tokens", type=_positive, default=64, metavar="N", help="greedy tokens to compare; default: 64"
    )
    command.add_argument("--implementation", choices=get_args(Implementation), help="of the fused ops")
    command.add_argument("--device", choices=("cpu", "cuda"), help="of the PyTorch side; default: cuda if it is there")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    command.add_argument("--plot", metavar="FILE.png", help="draw the error by layer; svg and pdf too")

    command = commands.add_parser("info", help="describe a model and this machine")
    command.set_defaults(run=_info)
    _add_model(command)
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", default=SHIPPED, metavar="DIR|REPO", help="default: the small model that ships with jaxfuse"
    )


def _token_ids(text: str) -> list[int]:
    try:
        return np.array([int(part) for part in text.split(",")], np.int64).tolist()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"must be integers with commas between, got {text!r}") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _generate(options: argparse.Namespace) -> int:
    if (options.prompt is None) == (options.tokens is None):
        raise JaxfuseError("give either a PROMPT or --tokens")
    if options.raw and options.tokens is not None:
        raise JaxfuseError("--raw is about a PROMPT; --tokens are taken as they are: leave one out")
    check_implementation(options.implementation, options.rounding)
    devices.start()
    if options.implementation == "mosaic" and not has_mosaic():
        raise JaxfuseError(
            "--implementation mosaic needs an NVIDIA GPU of compute capability 9.0 (Hopper) or more, this is "
            f'{devices.describe()}; pass "xla", or leave it out'
        )
    for message in (compile_cache.enable(), devices.unused_gpu()):
        if message is not None:
            note(message)
    folder = resolve(options.model)
    Qwen3Config.from_pretrained(folder)  # another model is refused before its tokenizer is looked at
    sampling = _sampling(options, folder)
    with Stopwatch() as watch:
        has_tokenizer = options.tokens is None or (folder / "tokenizer.json").is_file()
        tokenizer = Tokenizer(folder) if has_tokenizer else None
        prompt = options.tokens if tokenizer is None else _prompt(options, tokenizer)
        with loading_bar() as progress:
            model = weights.load(
                folder,
                dtype=options.dtype,
                rounding=options.rounding,
                implementation=options.implementation,
                progress=progress,
            )
        load_s = watch.lap()
        transient("compiling the model for this prompt's length (kept for the next run)")
        chunks = stream(model, prompt, max_new_tokens=options.max_new_tokens, sampling=sampling, key=options.seed)
        answer = _answer(chunks, tokenizer, watch, quiet=options.json)
    if options.json:
        result = {
            "model": str(options.model),
            "device": devices.describe(),
            "dtype": model.numerics.dtype.name,
            "rounding": model.numerics.rounding,
            "implementation": "mosaic" if "mosaic" in fused_ops(model.config, model.numerics).values() else "xla",
            "prompt_tokens": [prompt],
            "tokens": [answer.tokens],
            "text": None if tokenizer is None else [tokenizer.decode(answer.tokens)],
            "finish_reason": [answer.finish_reason],
            "timings": {
                "load_s": load_s,
                "compile_s": watch.compile_s,
                "prefill_s": answer.prefill_s,
                "decode_s": answer.decode_s,
                "decode_tokens_per_s": answer.decode_tokens_per_s,
            },
        }
        print(json.dumps(result, ensure_ascii=False))
    elif answer.finish_reason == "nan":
        note("stopped: the model's logits are NaN; check its weights, or try --dtype float32")
    elif answer.finish_reason == "length":
        transient(f"cut after {len(answer.tokens)} tokens; --max-new-tokens allows more")
    return 130 if answer.finish_reason == "cancelled" else 0


@dataclasses.dataclass
class _Answer:
    """What came of one prompt, and how long it took."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    prefill_s: float | None = None
    decode_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the tokens after the first, which the prefill gives."""
        return (len(self.tokens) - 1) / self.decode_s if len(self.tokens) > 1 and self.decode_s > 0 else 0.0


def _answer(chunks: Iterator[Generation], tokenizer: Tokenizer | None, watch: Stopwatch, *, quiet: bool) -> _Answer:
    """Takes an answer chunk by chunk and, unless quiet, prints it as it comes; Ctrl-C ends it."""
    answer = _Answer()
    text = None if tokenizer is None else tokenizer.streamer()
    try:
        for chunk in chunks:
            new = [int(token) for token in chunk.tokens[0] if token >= 0]
            answer.tokens += new
            answer.finish_reason = chunk.finish_reasons[0]
            if answer.prefill_s is None:
                answer.prefill_s = watch.lap()
            if not quiet:
                _show(new if text is None else text.push(new), first=len(answer.tokens) == len(new))
    except KeyboardInterrupt:
        answer.finish_reason = "cancelled"
    answer.decode_s = watch.lap()
    if not quiet:
        print("" if text is None else text.flush(), flush=True)
    return answer


def _prompt(options: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    if options.tokens is not None:
        return list(options.tokens)
    prompt = tokenizer.encode(options.prompt, raw=options.raw)
    if not prompt:
        raise JaxfuseError("the PROMPT has no tokens; give some text")
    return prompt


def _show(new: str | list[int], *, first: bool) -> None:
    """Text as it comes; token ids, with commas between, when there is no tokenizer."""
    if isinstance(new, list):
        new = ("" if first or not new else ",") + ",".join(map(str, new))
    print(new, end="", flush=True)


def _sampling(options: argparse.Namespace, folder: Path) -> Sampling:
    """The flags given; what is not given comes from the checkpoint's generation_config.json."""
    file = folder / "generation_config.json"
    data = read_json_object(file) if file.is_file() else {}
    unsupported = Sampling.unsupported(data)
    if unsupported:
        note(f"not applied, since jaxfuse does not have it: {', '.join(unsupported)} of generation_config.json")
    default = Sampling.from_generation_config(data)
    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p")
        if (value := getattr(options, name)) is not None
    }
    sampling = Sampling(**{**vars(default), **given})
    sampling.for_batch(1)  # refused here, before a large model is loaded
    return sampling


def _parity(options: argparse.Namespace) -> int:
    for package, name in (("torch", "PyTorch"), ("matplotlib", "matplotlib"))[: 1 + (options.plot is not None)]:
        if importlib.util.find_spec(package) is None:
            raise JaxfuseError(f'this needs {name}, which is not installed; pip install "jaxfuse[parity]"')
    from jaxfuse.parity.command import run  # imported here: only this command needs PyTorch

    return run(options)


def _info(options: argparse.Namespace) -> int:
    devices.start()
    folder = resolve(options.model, weights=False)
    config = Qwen3Config.from_pretrained(folder)
    parameters = sum(math.prod(shape) for entry in weights.table(config) for _, shape in entry.tensors)
    rows: dict[str, Any] = {
        "model": folder,
        "parameters": f"{parameters:,}",
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
        "heads": f"{config.num_attention_heads} query, {config.num_key_value_heads} key-value, of {config.head_dim}",
        "vocabulary": f"{config.vocab_size:,}" + (", tied" if config.tie_word_embeddings else ""),
        "positions": f"{config.max_position_embeddings:,}, RoPE {config.rope.rope_type}",
        "dtype": config.dtype or "that of the weights",
        "fused ops": _fused_ops(config),
        "device": devices.describe(),
        "versions": f"jaxfuse {jaxfuse.__version__}, jax {jax.__version__}",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    message = devices.unused_gpu()
    if message is not None:
        note(message)
    return 0


def _fused_ops(config: Qwen3Config) -> str:
    """What runs them by default: "mosaic: rms_norm, silu_and_mul; xla: head_norm; of few tokens silu_and_mul: xla"."""
    numerics = Numerics(model_dtype(config, None))
    one, many = (fused_ops(config, numerics, rows=rows) for rows in (1, 4096))
    parts = [f"{name}: {', '.join(op for op in many if many[op] == name)}" for name in sorted({*many.values()})]
    parts += [f"of few tokens {op}: {one[op]}" for op in many if one[op] != many[op]]
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
