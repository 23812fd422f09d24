"""The command: what it prints and where, what it refuses, and what it does to the machine."""

import dataclasses
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxfuse
import tiny
from jaxfuse import Qwen3, Sampling, cli, compile_cache, devices, generate, hub, terminal, weights
from jaxfuse.text import Tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = "the cat"
CHAT = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
FILE_SAMPLING = {"do_sample": True, "temperature": 3.0, "top_k": 200, "top_p": 0.99, "min_p": 0.0001}
KEYS = {
    "model",
    "device",
    "dtype",
    "rounding",
    "implementation",
    "prompt_tokens",
    "tokens",
    "text",
    "finish_reason",
    "timings",
}
TIMINGS = {"load_s", "compile_s", "prefill_s", "decode_s", "decode_tokens_per_s"}


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run of the command left."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on standard output, which is one line of its own."""
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        result: dict[str, Any] = json.loads(self.out)
        return result


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process, without a compilation cache, on a machine without an idle GPU."""
    monkeypatch.setenv("JAXFUSE_CACHE", "0")
    monkeypatch.setattr(devices, "unused_gpu", lambda: None)

    def call(*arguments: str | Path) -> Result:
        capsys.readouterr()
        try:
            status: Any = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # how argparse ends
            status = end.code
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


def spawn(*arguments: str | Path, cache: str | Path = "0", **environment: str) -> Result:
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "jaxfuse.cli", *map(str, arguments)]
    env = {**os.environ, "JAXFUSE_CACHE": str(cache), **environment}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env, check=False, timeout=120)
    return Result(done.returncode, done.stdout, done.stderr)


def assert_refused(result: Result, *parts: str) -> None:
    """Bad input: status 2, one line on standard error that says what, nothing on standard output."""
    assert result.status == 2, result
    assert result.out == ""
    assert result.err.startswith("jaxfuse: error: ")
    assert result.err.endswith("\n")
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err


def small_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with the 256 bytes, a few merges and the special tokens; fewer ids than the model has."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the hat"] * 10, trainer)
    assert tokenizer.get_vocab_size() < SMALL["vocab_size"]
    return tokenizer


@pytest.fixture(scope="module")
def plain() -> tokenizers.Tokenizer:
    """The tokenizer of the checkpoint, without transformers."""
    return small_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, plain: tokenizers.Tokenizer) -> Path:
    """A whole checkpoint; its generation_config.json samples."""
    path = tiny.save(tiny.torch_model("untied", **SMALL), tmp_path_factory.mktemp("model"))
    plain.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "model_max_length": 40}
    (path / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps(FILE_SAMPLING), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The same checkpoint without tokenizer and generation_config.json."""
    return part_of(folder, tmp_path_factory.mktemp("bare"), "config.json", "model.safetensors")


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen3:
    """The checkpoint's model."""
    return Qwen3.from_pretrained(folder)


def part_of(folder: Path, target: Path, *names: str) -> Path:
    """A folder with links to some files of another; all, if none is named."""
    for name in names or [file.name for file in folder.iterdir()]:
        (target / name).symlink_to(folder / name)
    return target


def replaced(folder: Path, target: Path, name: str, content: str | bytes | None) -> Path:
    """A checkpoint in which one file has other content, or is missing."""
    part_of(folder, target)
    (target / name).unlink()
    if content is not None:
        (target / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return target


def written(model: Qwen3, prompt: Sequence[int], steps: int, sampling: Sampling, key: int = 0) -> list[int]:
    """The tokens that the library writes."""
    out = generate(model, prompt, max_new_tokens=steps, sampling=sampling, key=key)
    tokens: list[int] = out.tokens[0, : out.lengths[0]].tolist()
    return tokens


FROM_FILE = Sampling.from_generation_config(FILE_SAMPLING)


# --- generate


@pytest.mark.parametrize("seed", [0, 9])
def test_text(run: Run, folder: Path, model: Qwen3, plain: tokenizers.Tokenizer, seed: int) -> None:
    """Standard output is the answer's text and a line end; with no terminal, standard error is empty."""
    result = run("generate", PROMPT, "--model", folder, "--max-new-tokens", "40", "--seed", str(seed))
    tokens = written(model, plain.encode(CHAT).ids, 40, FROM_FILE, key=seed)
    assert result == Result(0, plain.decode(tokens) + "\n", "")
    assert len(result.out) > 10


def test_json(run: Run, folder: Path, model: Qwen3, plain: tokenizers.Tokenizer) -> None:
    """One object with exactly the keys of the contract, each of its type, and what it says is so."""
    result = run("generate", PROMPT, "--model", folder, "--max-new-tokens", "21", "--json")
    assert (result.status, result.err) == (0, "")
    data = result.json
    assert set(data) == KEYS
    tokens = written(model, plain.encode(CHAT).ids, 21, FROM_FILE)
    assert data["model"] == str(folder)
    assert data["device"] == devices.describe()
    assert (data["dtype"], data["rounding"], data["implementation"]) == ("float32", "fused", "xla")
    assert data["prompt_tokens"] == [plain.encode(CHAT).ids]
    assert data["tokens"] == [tokens]
    assert data["text"] == [plain.decode(tokens)]
    assert data["finish_reason"] == ["length"]
    assert set(data["timings"]) == TIMINGS
    assert all(type(value) is float and value >= 0 for value in data["timings"].values())
    assert data["timings"]["load_s"] > 0
    assert data["timings"]["decode_tokens_per_s"] == pytest.approx(20 / data["timings"]["decode_s"])


def test_json_of_one_token(run: Run, bare: Path) -> None:
    """Without a decode step there is no speed, and no division by zero."""
    data = run("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "1", "--json").json
    assert len(data["tokens"][0]) == 1
    assert data["timings"]["decode_tokens_per_s"] == 0.0


def test_json_of_no_time(run: Run, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock too coarse to see the decode steps gives no speed, and no division by zero."""
    monkeypatch.setattr(terminal.Stopwatch, "lap", lambda _: 0.0)
    data = run("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "5", "--json").json
    assert len(data["tokens"][0]) == 5
    assert data["timings"]["decode_tokens_per_s"] == 0.0


def test_tokens_need_no_tokenizer(run: Run, bare: Path, model: Qwen3) -> None:
    """Ids in, ids out, with commas between; text is null in JSON."""
    arguments = ("generate", "--tokens", "5,6, 7", "--model", bare, "--max-new-tokens", "20")
    tokens = written(model, [5, 6, 7], 20, Sampling())
    assert run(*arguments) == Result(0, ",".join(map(str, tokens)) + "\n", "")
    data = run(*arguments, "--json").json
    assert (data["prompt_tokens"], data["tokens"], data["text"]) == ([[5, 6, 7]], [tokens], None)


def test_tokens_with_a_tokenizer(run: Run, folder: Path, model: Qwen3, plain: tokenizers.Tokenizer) -> None:
    """A tokenizer in the folder turns what is written into text; ids that it lacks are no text."""
    tokens = written(model, [5, 6], 40, FROM_FILE)
    assert any(token >= plain.get_vocab_size() for token in tokens), "an unknown id was meant to be written"
    arguments = ("generate", "--tokens", "5,6", "--model", folder, "--max-new-tokens", "40")
    assert run(*arguments).out == plain.decode(tokens) + "\n"
    assert run(*arguments, "--json").json["text"] == [plain.decode(tokens)]


def test_chat_template_and_raw(run: Run, folder: Path, plain: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """A prompt goes through the template, unless --raw is given or there is none."""

    def prompt_tokens(model: Path, *flags: str) -> Any:
        return run("generate", PROMPT, "--model", model, "--max-new-tokens", "2", "--json", *flags).json[
            "prompt_tokens"
        ]

    without = replaced(folder, tmp_path, "tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert prompt_tokens(folder) == [plain.encode(CHAT).ids]
    assert prompt_tokens(folder, "--raw") == [plain.encode(PROMPT).ids]
    assert prompt_tokens(without) == [plain.encode(PROMPT).ids]


def test_an_empty_prompt_is_a_turn(run: Run, folder: Path, plain: tokenizers.Tokenizer) -> None:
    """With a chat template even nothing can be said."""
    data = run("generate", "", "--model", folder, "--max-new-tokens", "2", "--json").json
    assert data["prompt_tokens"] == [plain.encode(CHAT.replace(PROMPT, "")).ids]


def test_seed(run: Run, folder: Path) -> None:
    """The same seed gives the same text, 0 by default; another seed another; a negative one is a seed too."""
    common = ("generate", PROMPT, "--model", folder, "--max-new-tokens", "20")
    texts = [
        run(*common, *more).out for more in ((), ("--seed", "0"), ("--seed", "5"), ("--seed", "5"), ("--seed=-5",))
    ]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    "flags",
    [
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"top_k": 1},
        {"top_k": 0, "temperature": 9.0},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_flags_override_the_file(run: Run, folder: Path, model: Qwen3, flags: dict[str, Any]) -> None:
    """What is given wins; what is not given stays as generation_config.json has it."""
    given_flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    data = run(
        "generate", "--tokens", "3,4,5", "--model", folder, "--max-new-tokens", "20", "--json", *given_flags
    ).json
    expected = written(model, [3, 4, 5], 20, dataclasses.replace(FROM_FILE, **flags))
    assert data["tokens"] == [expected]
    assert expected != written(model, [3, 4, 5], 20, FROM_FILE), "the flag was meant to matter"


def test_stop(run: Run, folder: Path, model: Qwen3, plain: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """A stop token of generation_config.json ends the answer and is in `tokens`; special tokens are no text."""
    common = ("--tokens", "3,4,5", "--max-new-tokens", "30", "--json")
    tokens = written(model, [3, 4, 5], 6, FROM_FILE)
    assert tokens[-1] not in tokens[:-1]
    settings = json.dumps({**FILE_SAMPLING, "eos_token_id": [tokens[-1]]})
    stops = replaced(folder, tmp_path, "generation_config.json", settings)
    data = run("generate", "--model", stops, *common).json
    assert (data["tokens"], data["finish_reason"]) == ([tokens], ["stop"])
    assert data["text"] == [plain.decode(tokens)]


@pytest.mark.parametrize(
    "flags",
    [("--dtype", "bfloat16"), ("--dtype", "float16"), ("--rounding", "hf"), ("--implementation", "xla")],
    ids=" ".join,
)
def test_numerics_flags(run: Run, bare: Path, flags: tuple[str, str]) -> None:
    """A dtype, a rounding and an implementation go to the model, and are reported."""
    common = ("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "3", "--json")
    data = run(*common, *flags).json
    assert data[flags[0].removeprefix("--")] == flags[1]
    assert len(data["tokens"][0]) == 3


def test_bfloat16_hf_is_the_librarys(run: Run, bare: Path) -> None:
    """Both flags together give the tokens of the model made with both arguments."""
    flags = ("--dtype", "bfloat16", "--rounding", "hf")
    data = run("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "20", "--json", *flags).json
    model = Qwen3.from_pretrained(bare, dtype=jnp.bfloat16, rounding="hf")
    assert data["tokens"] == [written(model, [5, 6], 20, Sampling())]


@pytest.mark.parametrize("rounding", ["fused", "hf"])
@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_an_implementation_that_cannot_run_is_refused(run: Run, bare: Path, name: str, rounding: str) -> None:
    """One asked for by name never becomes another."""
    if jax.default_backend() == "gpu" and rounding == "fused":
        pytest.skip("may run on this machine")
    flags = ("--implementation", name, "--rounding", rounding)
    assert_refused(run("generate", "--tokens", "5", "--model", bare, *flags), name, '"xla"')


def test_nan(run: Run, folder: Path, model: Qwen3, tmp_path: Path) -> None:
    """A broken model writes nothing; JSON has the reason, and text mode a note on standard error."""
    broken = nnx.clone(model)
    broken.norm.weight.set_value(broken.norm.weight[...] * jnp.nan)
    broken.save_pretrained(tmp_path)
    part_of(folder, tmp_path, "tokenizer.json", "tokenizer_config.json")
    result = run("generate", PROMPT, "--model", tmp_path)
    assert (result.status, result.out) == (0, "\n")
    assert result.err == ("jaxfuse: stopped: the model's logits are NaN; check its weights, or try --dtype float32\n")
    data = run("generate", PROMPT, "--model", tmp_path, "--json").json
    assert (data["tokens"], data["text"], data["finish_reason"]) == ([[]], [""], ["nan"])


def test_default_model(run: Run) -> None:
    """Without --model the checkpoint that ships with the package writes text, and ends by itself or at the limit."""
    assert (cli.SHIPPED / "model.safetensors").is_file()
    result = run("generate", "Once upon a time", "--json", "--max-new-tokens", "24")
    assert (result.status, result.err) == (0, "")
    data = result.json
    assert data["model"] == str(cli.SHIPPED)
    assert data["finish_reason"][0] in ("stop", "length")
    assert any(character.isalpha() for character in data["text"][0])
    assert "positions" in run("info").out


# --- what is refused

BAD_FLAGS = {
    "no prompt": ([], ["give either a PROMPT or --tokens"]),
    "both": ([PROMPT, "--tokens", "1,2"], ["give either a PROMPT or --tokens"]),
    "words as tokens": (["--tokens", "1,a"], ["--tokens", "must be integers with commas between, got '1,a'"]),
    "no tokens": (["--tokens", ""], ["--tokens", "must be integers with commas between, got ''"]),
    "a gap in tokens": (["--tokens", "1,,2"], ["--tokens", "must be integers"]),
    "a huge token": (["--tokens", f"1,{10**30}"], ["--tokens", "must be integers"]),
    "lines in tokens": (["--tokens", "1\n2"], ["--tokens", "must be integers"]),
    "a token outside": (["--tokens", "1,320"], ["[0, 320)", "got 320"]),
    "a negative token": (["--tokens", "1,-1"], ["[0, 320)", "got -1"]),
    "temperature": ([PROMPT, "--temperature", "-1"], ["temperature must be finite and at least 0, got -1.0"]),
    "temperature nan": ([PROMPT, "--temperature", "nan"], ["temperature must be finite and at least 0, got nan"]),
    "temperature word": ([PROMPT, "--temperature", "hot"], ["--temperature", "'hot'"]),
    "top-k": ([PROMPT, "--top-k", "-1"], ["top_k must be finite and at least 0, got -1"]),
    "top-k real": ([PROMPT, "--top-k", "1.5"], ["--top-k", "'1.5'"]),
    "top-p": ([PROMPT, "--top-p", "0"], ["top_p must be finite and in (0, 1], got 0.0"]),
    "top-p high": ([PROMPT, "--top-p", "1.5"], ["top_p must be finite and in (0, 1], got 1.5"]),
    "min-p": ([PROMPT, "--min-p", "2"], ["min_p must be finite and in [0, 1], got 2.0"]),
    "seed": ([PROMPT, "--seed", str(2**64)], ["key must be an int of 64 bits"]),
    "seed word": ([PROMPT, "--seed", "x"], ["--seed", "'x'"]),
    "no new tokens": ([PROMPT, "--max-new-tokens", "0"], ["--max-new-tokens", "must be a positive integer, got '0'"]),
    "fewer new tokens": ([PROMPT, "--max-new-tokens=-5"], ["must be a positive integer, got '-5'"]),
    "half a new token": ([PROMPT, "--max-new-tokens", "1.5"], ["must be a positive integer, got '1.5'"]),
    "odd digits": ([PROMPT, "--max-new-tokens", "²"], ["must be a positive integer, got '²'"]),
    "too long": (["--tokens", "1,2,3", "--max-new-tokens", "1022"], ["1024 positions", "3 + 1022"]),
    "far too long": (["--tokens", "1", "--max-new-tokens", str(10**15)], ["1024 positions", f"1 + {10**15}"]),
    "empty raw prompt": (["", "--raw"], ["the PROMPT has no tokens"]),
    "not UTF-8": ([b"caf\xe9".decode("utf-8", "surrogateescape")], ["a prompt must be Unicode text"]),
    "dtype": ([PROMPT, "--dtype", "int8"], ["--dtype", "'int8'"]),
    "rounding": ([PROMPT, "--rounding", "up"], ["--rounding", "'up'"]),
    "implementation": ([PROMPT, "--implementation", "cuda"], ["--implementation", "'cuda'"]),
    "unknown flag": ([PROMPT, "--top-q\n", "1"], ["unrecognized arguments"]),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(run: Run, folder: Path, case: str) -> None:
    """Each is one line that says what, and status 2."""
    arguments, parts = BAD_FLAGS[case]
    assert_refused(run("generate", *arguments, "--model", folder), *parts)


def test_bad_sampling_is_refused_before_loading(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error costs no minute of loading."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(weights, "load", load)
    assert_refused(run("generate", PROMPT, "--model", folder, "--top-p", "0"), "top_p")
    assert_refused(
        run("generate", PROMPT, "--model", folder, "--rounding", "hf", "--implementation", "triton"), "triton"
    )


@pytest.mark.parametrize(
    "arguments",
    [[], ["dream"], ["generate", PROMPT, "--model"], ["info", "more"], ["generate", "--tokens", "1", "--raw"]],
    ids=str,
)
def test_bad_commands(run: Run, arguments: list[str]) -> None:
    """No command, an unknown one, a flag without its value, a word too many."""
    assert_refused(run(*arguments))


def test_bad_folders(run: Run, folder: Path, tmp_path: Path) -> None:
    """What is no folder of a checkpoint is named, by both commands."""
    names = {
        str(tmp_path / "none"): "no folder",
        str(folder / "config.json"): "is a file",
        "~nobody-of-this-name/model": "no folder",
        "x" * 400: "no folder",
        "": "empty",
    }
    for name, part in names.items():
        assert_refused(run("generate", PROMPT, "--raw", "--model", name), part)
        assert_refused(run("info", "--model", name), part)
    assert_refused(run("generate", PROMPT, "--model", tmp_path), "config.json")
    assert_refused(run("generate", "--tokens", "1", "--model", tmp_path), "config.json")
    assert_refused(run("info", "--model", tmp_path), "config.json")


def test_a_checkpoint_runs_no_code_of_its_own(folder: Path, tmp_path: Path) -> None:
    """A model with code is refused by its type, without a question, whatever its tokenizer asks for."""
    code = tmp_path / "code"
    code.mkdir()
    part_of(folder, code, *(file.name for file in folder.iterdir()))
    for name, changes in {
        "config.json": {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}},
    }.items():
        data = json.loads((code / name).read_text("utf-8"))
        (code / name).unlink()
        (code / name).write_text(json.dumps(data | changes), encoding="utf-8")
    ran = tmp_path / "ran"
    (code / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n", encoding="utf-8")
    assert_refused(spawn("generate", PROMPT, "--model", code), "model_type 'evil' is not implemented")
    config = json.loads((code / "config.json").read_text("utf-8"))
    (code / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}), encoding="utf-8")
    spawn("generate", PROMPT, "--model", code, "--max-new-tokens", "2")
    assert not ran.exists()


def test_a_platform_that_is_not_there(bare: Path) -> None:
    """JAX_PLATFORMS that this machine lacks is one line, not JAX's traceback."""
    for command in (["info"], ["generate", "--tokens", "1"]):
        result = spawn(*command, "--model", bare, JAX_PLATFORMS="tpu")
        assert_refused(result, "JAX cannot start on JAX_PLATFORMS=tpu")


def test_a_full_disk(bare: Path) -> None:
    """An answer that cannot be written is one line and status 2."""
    command = [sys.executable, "-m", "jaxfuse.cli", "info", "--model", str(bare)]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "cannot write the answer" in done.stderr


def test_controls_that_are_not_there_are_named(run: Run, folder: Path, tmp_path: Path) -> None:
    """What generation_config.json turns on and jaxfuse lacks is said; what it turns off is not."""
    data = {"do_sample": True, "repetition_penalty": 1.3, "num_beams": 4, "typical_p": 1.0, "length_penalty": None}
    other = replaced(folder, tmp_path, "generation_config.json", json.dumps(data))
    err = run("generate", PROMPT, "--model", other, "--max-new-tokens", "2").err
    assert "num_beams, repetition_penalty of generation_config.json" in err
    assert "typical_p" not in err


DAMAGES: dict[str, tuple[str, str | bytes | None, str]] = {
    "no tokenizer": (
        "tokenizer.json",
        None,
        "has no tokenizer.json; add the checkpoint's tokenizer, or give token ids",
    ),
    "half a tokenizer": ("tokenizer.json", '{"version": "1.0", "model"', "cannot read the tokenizer"),
    "no JSON tokenizer": ("tokenizer.json", b"\xff\xfe", "cannot read the tokenizer"),
    "a broken template": (
        "tokenizer_config.json",
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{% for %}"}),
        "the chat template fails",
    ),
    "a template that refuses": (
        "tokenizer_config.json",
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": "{{ raise_exception('no user\nallowed') }}",
            }
        ),
        "the chat template fails (no user allowed)",
    ),
    "no weights": ("model.safetensors", None, "has neither model.safetensors nor"),
    "empty weights": ("model.safetensors", b"", "is not a whole safetensors file"),
    "a config that is no JSON": ("config.json", "{", "config.json is not valid JSON"),
    "another model": ("config.json", '{"model_type": "llama"}', "model_type 'llama' is not implemented"),
    "a bad generation config": ("generation_config.json", '{"do_sample": true, "top_k": "many"}', "'top_k'"),
    "a list for a generation config": ("generation_config.json", "[]", "must hold one JSON object"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints(run: Run, folder: Path, tmp_path: Path, damage: str) -> None:
    """Each file that is missing or broken is one line that names it."""
    name, content, part = DAMAGES[damage]
    if name == "config.json":
        assert_refused(run("info", "--model", replaced(folder, tmp_path, name, content)), part)
        assert_refused(run("generate", "--tokens", "1", "--model", tmp_path))
    else:
        assert_refused(run("generate", PROMPT, "--model", replaced(folder, tmp_path, name, content)), part)


def test_truncated_weights(run: Run, bare: Path, tmp_path: Path) -> None:
    """A download that broke off is found before anything is computed."""
    whole = (bare / "model.safetensors").read_bytes()
    short = replaced(bare, tmp_path, "model.safetensors", whole[: len(whole) // 2])
    assert_refused(run("generate", "--tokens", "1,2", "--model", short), "model.safetensors is not a whole")


def test_a_prompt_that_is_too_long(folder: Path) -> None:
    """In a process of its own: one line, without the tokenizer library's warning, nor a traceback."""
    result = spawn("generate", "the cat sat " * 500, "--model", folder)
    assert_refused(result, "1024 positions")


# --- how a run can end early


@pytest.mark.parametrize(
    "arguments", [("generate", "--tokens", "1,2"), ("generate", "--tokens", "1", "--json"), ("info",)]
)
def test_a_closed_pipe(bare: Path, arguments: tuple[str, ...]) -> None:
    """A reader that has enough, such as `head -c 1`, leaves no traceback and no error status."""
    command = [sys.executable, "-m", "jaxfuse.cli", *arguments, "--model", str(bare)]
    env = {**os.environ, "JAXFUSE_CACHE": "0"}
    env.pop("PYTHONUNBUFFERED", None)  # with it nothing is left to write at exit, where it is too late to answer
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=env, timeout=120, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the third chunk is made."""
    whole = jaxfuse.stream

    def stream(*args: Any, **options: Any) -> Iterator[Any]:
        for index, chunk in enumerate(whole(*args, **options)):
            if index == 2:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(cli, "stream", stream)


@pytest.mark.usefixtures("interrupted")
def test_interrupted(run: Run, folder: Path, model: Qwen3, plain: tokenizers.Tokenizer) -> None:
    """Ctrl-C ends with status 130; what was written until then is kept, in text and in JSON."""
    common = ("generate", "--tokens", "3,4,5", "--model", folder, "--max-new-tokens", "30")
    tokens = written(model, [3, 4, 5], 9, FROM_FILE)
    assert run(*common) == Result(130, plain.decode(tokens) + "\n", "")
    result = run(*common, "--json")
    assert result.status == 130
    assert set(result.json) == KEYS
    assert (result.json["tokens"], result.json["finish_reason"]) == ([tokens], ["cancelled"])


def test_interrupted_while_loading(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before there is an answer: status 130 and no traceback."""

    def load(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "load", load)
    assert run("generate", PROMPT, "--model", folder) == Result(130, "", "")


# --- text as it comes


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    """The checkpoint's tokenizer as the command uses it."""
    return Tokenizer(folder)


def streamed(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds, and what is left at the end."""
    stream = tokenizer.streamer()
    return [*(stream.push([token]) for token in tokens), stream.flush()]


@pytest.mark.parametrize(
    "text", ["日本語のテキスト", "naïve – “quoted” 😀👩‍🚀!", "  two  spaces", "\n\tline\r\n ", "the cat"]
)
def test_characters_are_never_broken(tokenizer: Tokenizer, plain: tokenizers.Tokenizer, text: str) -> None:
    """A character of several tokens comes whole with its last one; leading spaces stay."""
    tokens = plain.encode(text).ids
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_end(tokenizer: Tokenizer, plain: tokenizers.Tokenizer) -> None:
    """A character that never became whole is shown at the end, as the tokenizer shows it; nothing comes twice."""
    tokens = plain.encode("the 語").ids[:-1]
    pieces = streamed(tokenizer, tokens)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == plain.decode(tokens) == "the \ufffd"
    assert streamed(tokenizer, []) == [""]


@given(st.lists(st.lists(st.integers(0, SMALL["vocab_size"] - 1), max_size=12), max_size=8))
def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer, chunks: list[list[int]]) -> None:
    """Any tokens, special and unknown ones and broken UTF-8 too, in any chunks, add up to their decoded text."""
    stream = tokenizer.streamer()
    text = "".join([*(stream.push(chunk) for chunk in chunks), stream.flush()])
    assert text == tokenizer.decode([token for chunk in chunks for token in chunk])


def test_decoding_is_that_of_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    """Special tokens are left out; spaces before punctuation stay."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = theirs("the cat <|im_end|> , sat . on", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True) == "the cat  , sat . on"


def test_a_terminal_without_the_character(folder: Path) -> None:
    """A standard output that cannot hold a character gets a question mark instead of a traceback."""
    result = spawn("generate", PROMPT, "--model", folder, "--max-new-tokens", "30", PYTHONIOENCODING="ascii")
    assert (result.status, result.err) == (0, "")
    assert "?" in result.out


def test_progress_on_a_terminal(bare: Path) -> None:
    """A bar while loading and a note while compiling, on a standard error that is a terminal."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "jaxfuse.cli", "generate", "--tokens", "5,6", "--max-new-tokens", "3"]
    env = {**os.environ, "JAXFUSE_CACHE": "0", "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        [*command, "--model", str(bare)], stdout=subprocess.PIPE, stderr=terminal, env=env, timeout=120, check=False
    )
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 65536):
            shown += piece
    except OSError:  # how Linux ends a terminal without users
        pass
    finally:
        os.close(controller)
    assert done.returncode == 0
    assert done.stdout.count(b",") == 2
    assert b"loading" in shown
    assert b"jaxfuse: compiling the model" in shown


# --- the compilation cache


def contents(folder: Path) -> dict[str, int]:
    """The files of a folder, and when each was written."""
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


def test_the_cache_serves_the_second_start(bare: Path, tmp_path: Path) -> None:
    """JAXFUSE_CACHE names the folder, made with mode 0700; a second start finds all there and writes nothing."""
    cache = tmp_path / "deep" / "cache"
    arguments = ("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "3", "--json")
    first = spawn(*arguments, cache=cache)
    assert (first.status, first.err) == (0, "")
    assert cache.stat().st_mode & 0o777 == 0o700
    before = contents(cache)
    assert any("decode" in name for name in before)
    assert any("prefill" in name for name in before)
    second = spawn(*arguments, cache=cache)
    assert (second.status, second.err) == (0, "")
    assert contents(cache) == before
    assert second.json["tokens"] == first.json["tokens"]
    assert second.json["timings"]["compile_s"] < first.json["timings"]["compile_s"]


@pytest.fixture
def jax_cache() -> Iterator[Callable[[], Any]]:
    """The folder that JAX's configuration names; it is set back after the test."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda: jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)


def test_cache_folders(jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JAXFUSE_CACHE wins over XDG_CACHE_HOME, which wins over ~/.cache; each is made with mode 0700."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for chosen, folder in [("~/mine", "home/mine"), (None, "xdg/jaxfuse"), (None, "home/.cache/jaxfuse")]:
        if chosen is not None:
            monkeypatch.setenv("JAXFUSE_CACHE", chosen)
        else:
            monkeypatch.delenv("JAXFUSE_CACHE", raising=False)
        assert compile_cache.enable() is None
        assert jax_cache() == str(tmp_path / folder)
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700
        if chosen is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_the_cache_can_be_off(jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """JAXFUSE_CACHE=0 keeps nothing, and says nothing."""
    monkeypatch.setenv("JAXFUSE_CACHE", "0")
    assert compile_cache.enable() is None
    assert jax_cache() is None


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_cache_that_others_can_write_to(
    jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    """Who can write to the cache can run code as its user: such a folder is not used, and the note says why."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    monkeypatch.setenv("JAXFUSE_CACHE", str(tmp_path / "shared"))
    message = compile_cache.enable()
    assert message is not None
    assert "others can write to" in message
    assert "chmod 700" in message
    assert jax_cache() is None


def test_a_cache_of_another_user(jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that belongs to someone else is not used either."""
    monkeypatch.setenv("JAXFUSE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert "no compilation cache" in str(compile_cache.enable())
    assert jax_cache() is None


@pytest.mark.parametrize("place", ["file/cache", "~nobody-of-this-name/cache"])
def test_a_cache_that_cannot_be_made(
    run: Run, bare: Path, jax_cache: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """The command runs without a cache, after a note that says how to have one."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("JAXFUSE_CACHE", place if place.startswith("~") else str(tmp_path / place))
    result = run("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "3")
    assert result.status == 0
    assert result.out.count(",") == 2
    assert result.err.startswith("jaxfuse: no compilation cache (")
    assert result.err.endswith("set JAXFUSE_CACHE to a folder of yours, or to 0\n")
    assert result.err.count("\n") == 1
    assert jax_cache() is None


def test_an_import_turns_no_cache_on(tmp_path: Path) -> None:
    """Only the command keeps programs on the disk: a library that did would surprise its user."""
    code = (
        "import jaxfuse, jaxfuse.cli, jaxfuse.kernels, jax; from jaxfuse import compile_cache;"
        "print(jax.config.jax_compilation_cache_dir)"
    )
    env = {**os.environ, "JAXFUSE_CACHE": str(tmp_path / "cache")}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # a user's own
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=True
    )
    assert done.stdout == "None\n"
    assert list(tmp_path.iterdir()) == []


# --- info, and what the machine has


def test_info(run: Run, folder: Path, tmp_path: Path) -> None:
    """The number of parameters is torch's own, a tied head counted once; the weights are not read."""
    result = run("info", "--model", folder)
    assert (result.status, result.err) == (0, "")
    rows = dict(line.split("  ", 1) for line in result.out.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    theirs = tiny.torch_model("untied", **SMALL)
    assert rows["parameters"] == f"{theirs.num_parameters():,}"
    assert rows["layers"] == "2"
    assert rows["heads"] == "4 query, 2 key-value, of 16"
    assert rows["vocabulary"] == "320"
    assert rows["dtype"] == "float32"
    assert rows["device"] == devices.describe()
    assert jaxfuse.__version__ in rows["versions"]
    tied = tiny.torch_model("attention_bias", **SMALL)
    tiny.save(tied, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    out = run("info", "--model", tmp_path).out
    assert f"  {tied.num_parameters():,}\n" in out
    assert "320, tied" in out


def test_only_generate_fetches_the_weights(run: Run, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository's name goes to the hub; to be described, a model need not be downloaded."""
    asked: list[tuple[str, bool]] = []

    def download(repo_id: str, patterns: tuple[str, ...]) -> Path:
        asked.append((repo_id, "*.safetensors" in patterns))
        return bare

    monkeypatch.setattr(hub, "_download", download)
    assert run("info", "--model", "owner/name").status == 0
    assert set(asked) == {("owner/name", False)}
    asked.clear()
    assert run("generate", "--tokens", "5", "--model", "owner/name", "--max-new-tokens", "2").status == 0
    assert ("owner/name", True) in asked


def test_version(run: Run) -> None:
    """The version is the package's."""
    assert run("--version") == Result(0, f"jaxfuse {jaxfuse.__version__}\n", "")


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a shell script in the place of nvidia-smi, on a machine on which JAX runs on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("580.65.06", "cuda13"),
        ("595.10", "cuda13"),
        ("1000.1", "cuda13"),
        ("575.57.08", "cuda12"),
        ("525.60", "cuda12"),
    ],
)
def test_an_idle_gpu(nvidia_smi: Callable[[str], None], driver: str, extra: str) -> None:
    """The note names the GPU and the extra that its driver can run: CUDA 13 from driver 580 on."""
    nvidia_smi(f"echo 'NVIDIA H200, {driver}'; echo 'NVIDIA T4, 1.0'")
    message = devices.unused_gpu()
    assert message is not None
    assert "NVIDIA H200" in message
    assert f"[{extra}]" in message


@pytest.mark.parametrize("script", ["exit 9", "echo; exit 9", "echo 'No devices were found'", "true", "kill $$"])
def test_no_working_gpu(nvidia_smi: Callable[[str], None], script: str) -> None:
    """A driver that does not answer is no GPU, and no reason to stop."""
    nvidia_smi(script)
    assert devices.unused_gpu() is None


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is said on a machine without nvidia-smi, nor where JAX has its GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.unused_gpu() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06'\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert devices.unused_gpu() is None


def test_notes_go_to_standard_error(run: Run, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note leaves the answer as it is, in both commands."""
    arguments = ("generate", "--tokens", "5,6", "--model", bare, "--max-new-tokens", "3", "--json")
    expected = run(*arguments).json["tokens"]
    monkeypatch.setattr(devices, "unused_gpu", lambda: "a GPU is idle")
    result = run(*arguments)
    assert (result.status, result.err) == (0, "jaxfuse: a GPU is idle\n")
    assert result.json["tokens"] == expected
    result = run("info", "--model", bare)
    assert (result.status, result.err) == (0, "jaxfuse: a GPU is idle\n")


def test_the_help_names_every_flag(run: Run) -> None:
    """--help prints to standard output and ends well."""
    result = run("generate", "--help")
    assert (result.status, result.err) == (0, "")
    flags = ("model", "tokens", "max-new-tokens", "temperature", "top-k", "top-p", "min-p", "seed", "raw", "dtype")
    for flag in (*flags, "rounding", "implementation", "json"):
        assert f"--{flag}" in result.out


def test_numpy_numbers_never_reach_the_json(run: Run, folder: Path) -> None:
    """Tokens are plain integers, whichever way they came."""
    data = run("generate", PROMPT, "--model", folder, "--max-new-tokens", "4", "--json").json
    assert all(type(token) is int for row in data["prompt_tokens"] + data["tokens"] for token in row)
    assert np.shape(data["tokens"]) == (1, 4)
