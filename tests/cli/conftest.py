"""The command, and a checkpoint for it to load."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import tiny
from command import FILE_SAMPLING, SMALL, TEMPLATE, Result, Run, part_of
from jaxfuse import Qwen3, cli, devices

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


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


@pytest.fixture(scope="session")
def plain() -> tokenizers.Tokenizer:
    """The tokenizer of the checkpoint, without transformers."""
    return small_tokenizer()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, plain: tokenizers.Tokenizer) -> Path:
    """A whole checkpoint; its generation_config.json samples."""
    path = tiny.save(tiny.torch_model("untied", **SMALL), tmp_path_factory.mktemp("model"))
    plain.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "model_max_length": 40}
    (path / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps(FILE_SAMPLING), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The same checkpoint without tokenizer and generation_config.json."""
    return part_of(folder, tmp_path_factory.mktemp("bare"), "config.json", "model.safetensors")


@pytest.fixture(scope="session")
def model(folder: Path) -> Qwen3:
    """The checkpoint's model."""
    return Qwen3.from_pretrained(folder)
