"""jaxfuse generate: what it prints and where, and what its flags do."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from command import (
    CHAT,
    FILE_SAMPLING,
    FROM_FILE,
    KEYS,
    PROMPT,
    Result,
    Run,
    assert_refused,
    part_of,
    replaced,
    written,
)
from jaxfuse import Qwen3, Sampling, cli, devices, terminal

TIMINGS = {"load_s", "compile_s", "prefill_s", "decode_s", "decode_tokens_per_s"}


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


def test_numpy_numbers_never_reach_the_json(run: Run, folder: Path) -> None:
    """Tokens are plain integers, whichever way they came."""
    data = run("generate", PROMPT, "--model", folder, "--max-new-tokens", "4", "--json").json
    assert all(type(token) is int for row in data["prompt_tokens"] + data["tokens"] for token in row)
    assert np.shape(data["tokens"]) == (1, 4)
