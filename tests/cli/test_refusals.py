"""What the command refuses: bad flags and folders, damaged checkpoints, a machine that cannot."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import PROMPT, Run, assert_refused, part_of, replaced, spawn
from jaxfuse import weights

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
