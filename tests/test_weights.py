"""Safetensors to and from the module: every tensor used once or named in an error, and back bit for bit."""

import contextlib
import dataclasses
import io
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import Qwen3ForCausalLM

import tiny
from jaxfuse import CheckpointError, JaxfuseError, Qwen3, Qwen3Config, weights
from jaxfuse.checkpoint_files import CheckpointFiles

Tensors = dict[str, np.ndarray]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder saved by transformers for a variant, single or sharded; made once for each."""
    made: dict[str, Path] = {}

    def folder(variant: str, **options: Any) -> Path:
        key = repr((variant, options))
        if key not in made:
            model = tiny.torch_model(variant, num_hidden_layers=2)
            made[key] = tiny.save(model, tmp_path_factory.mktemp("checkpoint"), **options)
        return made[key]

    return folder


@pytest.fixture
def files(checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Path, dict[str, Any], Tensors]:
    """A folder to spoil, with its config.json and its tensors, not yet written."""
    source = checkpoint("tied")
    return tmp_path, json.loads((source / "config.json").read_text("utf-8")), load_file(source / "model.safetensors")


def write(folder: Path, config: dict[str, Any], *shards: Tensors, name: str = "model.safetensors") -> Path:
    """Writes a checkpoint: one file, or shards with their index."""
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if len(shards) == 1:
        save_file(shards[0], folder / name)
        return folder
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"part{number}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return folder


def refused(folder: str | Path) -> str:
    """The one line with which loading fails."""
    with pytest.raises(JaxfuseError) as error:
        Qwen3.from_pretrained(folder)
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


def assert_same_weights(ours: Tensors, theirs: Qwen3ForCausalLM) -> None:
    """Every tensor of a transformers model, bit for bit, and no other."""
    expected = theirs.state_dict()
    if theirs.config.tie_word_embeddings:
        expected.pop(HEAD)
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        bits = value.view(np.int16 if value.itemsize == 2 else np.int32)
        their_bits = expected[name].view(torch.int16 if value.itemsize == 2 else torch.int32).numpy()
        np.testing.assert_array_equal(bits, their_bits, err_msg=name)


def from_transformers(folder: Path) -> Qwen3ForCausalLM:
    """A checkpoint as transformers loads it, in the dtype of the files."""
    with contextlib.redirect_stderr(io.StringIO()):
        model, report = Qwen3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "200KB"}], ids=["single", "sharded"])
@pytest.mark.parametrize("variant", ["tied", "untied", "attention_bias"])
def test_rows_are_where_they_should_be(checkpoint: Callable[..., Path], variant: str, options: dict[str, Any]) -> None:
    """q, k and v, and gate and up, are joined in this order; each tensor of transformers' files is there."""
    folder = checkpoint(variant, **options)
    assert (folder / "model.safetensors").exists() == (not options)
    model = Qwen3.from_pretrained(folder)
    assert_same_weights(tiny.unmerged(model), tiny.torch_model(variant, num_hidden_layers=2))
    assert hasattr(model, "lm_head") == (variant == "untied")


def test_dtype(files: tuple[Path, dict[str, Any], Tensors]) -> None:
    """dtype=None keeps the checkpoint's, another converts; without one in config.json the file's counts."""
    folder, config, tensors = files
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    config.pop("torch_dtype", None)
    write(folder, config | {"dtype": "bfloat16"}, narrow)
    kept = Qwen3.from_pretrained(folder)
    assert all(value.dtype == jnp.bfloat16 for value in tiny.unmerged(kept).values())
    assert kept.numerics.dtype == jnp.bfloat16
    assert kept.rotary_emb.cos_sin_cache.dtype == jnp.float32
    assert_same_weights(tiny.unmerged(kept), from_transformers(folder))

    wide = Qwen3.from_pretrained(folder, dtype=jnp.float32)
    assert wide.numerics.dtype == jnp.float32
    for name, value in tiny.unmerged(wide).items():
        np.testing.assert_array_equal(value, narrow[name].astype(np.float32))
    half = tiny.unmerged(Qwen3.from_pretrained(folder, dtype="float16"))
    np.testing.assert_array_equal(half[EMBEDDING], narrow[EMBEDDING].astype(np.float16))

    config.pop("dtype", None)
    unnamed = Qwen3.from_pretrained(write(folder, config, narrow))
    assert unnamed.config.dtype == "bfloat16"
    assert unnamed.numerics.dtype == jnp.bfloat16
    # config.json's word counts, whatever the file holds.
    named = Qwen3.from_pretrained(write(folder, config | {"torch_dtype": "float32"}, narrow))
    assert tiny.unmerged(named)[EMBEDDING].dtype == np.float32
    for dtype in ("float64", "int8"):
        with pytest.raises(TypeError, match=dtype):
            Qwen3.from_pretrained(folder, dtype=dtype)


def test_options_reach_the_model(checkpoint: Callable[..., Path]) -> None:
    """Rounding and implementation are those asked for, and an unknown one is refused."""
    model = Qwen3.from_pretrained(checkpoint("tied"), rounding="hf", implementation="xla")
    assert (model.numerics.rounding, model.numerics.implementation) == ("hf", "xla")
    assert (model.layer(1).mlp.numerics, model.rotary_emb.numerics) == (model.numerics, model.numerics)
    with pytest.raises(ValueError, match="rounding"):
        Qwen3.from_pretrained(checkpoint("tied"), rounding="nearest")  # type: ignore[arg-type]


def test_progress(checkpoint: Callable[..., Path]) -> None:
    """Progress counts every parameter once, to the last."""
    seen: list[tuple[int, int]] = []
    model = weights.load(checkpoint("untied"), progress=lambda done, total: seen.append((done, total)))
    total = len(weights.table(model.config))
    assert seen == [(done + 1, total) for done in range(total)]


def test_tied_models_own_head(files: tuple[Path, dict[str, Any], Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied model may ship lm_head.weight, in any dtype and read in pieces, if it equals the embedding."""
    folder, config, tensors = files
    config["dtype"] = "bfloat16"
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    monkeypatch.setattr(weights, "_PIECE_BYTES", 7 * 4 * config["hidden_size"])
    for head in (tensors[EMBEDDING], tensors[EMBEDDING].astype(np.float32)):
        model = Qwen3.from_pretrained(write(folder, config, tensors | {HEAD: head}))
        assert not hasattr(model, "lm_head")
        assert tiny.unmerged(model).keys() == tensors.keys()

    differing = tensors[EMBEDDING].copy()
    differing[-1, -1] *= 2
    message = refused(write(folder, config, tensors | {HEAD: differing}))
    assert HEAD in message
    assert "tie_word_embeddings" in message
    message = refused(write(folder, config, tensors | {HEAD: tensors[EMBEDDING][:-1]}))
    assert HEAD in message


@pytest.mark.parametrize("rows", [3, 64])
def test_memory_is_bounded(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Tensors are read in pieces of a bounded size, one on the host at a time, to the same weights."""
    piece_bytes = rows * 4 * 128
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    read = CheckpointFiles.rows
    sizes: list[int] = []
    alive: list[weakref.ref[np.ndarray]] = []
    most_alive = 0

    def watched(self: CheckpointFiles, name: str, start: int, stop: int) -> np.ndarray:
        nonlocal most_alive
        most_alive = max(most_alive, sum(piece() is not None for piece in alive))
        piece = read(self, name, start, stop)
        alive[:] = [weakref.ref(piece), *(other for other in alive if other() is not None)]
        sizes.append(piece.nbytes)
        if piece.shape[0] > 1:
            assert piece.nbytes <= piece_bytes
        return piece

    monkeypatch.setattr(CheckpointFiles, "rows", watched)
    # Converting makes copies: on a CPU, JAX would otherwise hold the very pieces.
    model = Qwen3.from_pretrained(checkpoint("untied"), dtype=jnp.bfloat16)
    ours, expected = tiny.unmerged(model), tiny.torch_model("untied", num_hidden_layers=2).bfloat16()
    assert_same_weights(ours, expected)
    assert sum(sizes) == 2 * sum(value.nbytes for value in ours.values())
    assert most_alive <= 2  # the generator still holds the one before


def test_missing_shard(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A shard that the index names and the folder lacks is named."""
    for file in checkpoint("untied", max_shard_size="200KB").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refused(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, "header", "data", "last"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_truncated_file(files: tuple[Path, dict[str, Any], Tensors], cut: int | str, sharded: bool) -> None:
    """A file cut short anywhere, as by a broken download, is named before anything is read."""
    folder, config, tensors = files
    names = sorted(tensors)
    shards = [{n: tensors[n] for n in names[:9]}, {n: tensors[n] for n in names[9:]}] if sharded else [tensors]
    write(folder, config, *shards)
    file = folder / ("part1.safetensors" if sharded else "model.safetensors")
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    place = {"header": header, "data": (header + len(content)) // 2, "last": len(content) - 1}
    file.write_bytes(content[: place[cut] if isinstance(cut, str) else cut])
    assert str(file) in refused(folder)


@pytest.mark.parametrize("content", [b"\xff" * 64, b"<html>not found</html>" * 9, b"\x02" + bytes(7) + b"[]"])
def test_no_safetensors_inside(files: tuple[Path, dict[str, Any], Tensors], content: bytes) -> None:
    """A file that is something else, as a server's error page, is named."""
    folder, config, tensors = files
    write(folder, config, tensors)
    (folder / "model.safetensors").write_bytes(content)
    assert str(folder / "model.safetensors") in refused(folder)


NORM = "model.layers.1.self_attn.q_norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(NORM), [NORM]),
        (lambda t: [t.pop(name) for name in list(t)], ["and 21 more"]),
        (lambda t: t.update(extra=t[NORM]), ["extra"]),
        (lambda t: t.update({"model.layers.2.self_attn.q_norm.weight": t[NORM]}), ["model.layers.2"]),
        (lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": np.ones(256, np.float32)}), ["q_proj.bias"]),
        (lambda t: t.update({GATE: np.ascontiguousarray(t[GATE].T)}), [GATE, "(256, 128)", "(128, 256)"]),
        (lambda t: t.update({GATE: t[GATE][:-1]}), [GATE, "(255, 128)"]),
        (lambda t: t.update({NORM: t[NORM][None]}), [NORM, "(1, 64)"]),
        (lambda t: t.update({NORM: np.array(1, np.float32)}), [NORM, "()"]),
        (lambda t: t.update({GATE: t[GATE].astype(np.int8)}), [GATE, "I8"]),
        (lambda t: t.update({GATE: t[GATE].astype(np.float64)}), [GATE, "F64"]),
        (lambda t: t.update({n: v.astype(np.int8) for n, v in t.items()}), ["I8"]),
    ],
    ids=[
        "missing",
        "empty",
        "unknown",
        "layer_too_many",
        "bias_too_many",
        "transposed",
        "row_too_few",
        "rank",
        "scalar",
        "int8",
        "float64",
        "all_int8",
    ],
)
def test_strict_both_ways(
    files: tuple[Path, dict[str, Any], Tensors], change: Callable[[Tensors], object], named: list[str]
) -> None:
    """A tensor that is missing, unknown, misshapen or of another dtype is named, with what was expected."""
    folder, config, tensors = files
    change(tensors)
    for name in ("dtype", "torch_dtype"):  # so that the file's dtype is looked at too
        config.pop(name, None)
    message = refused(write(folder, config, tensors))
    assert all(part in message for part in named), message


def test_config_of_another_model(files: tuple[Path, dict[str, Any], Tensors]) -> None:
    """Weights that do not belong to their config.json are refused by what differs."""
    folder, config, tensors = files
    assert "model.layers.2" in refused(write(folder, config | {"num_hidden_layers": 3}, tensors))
    assert "model.layers.1" in refused(write(folder, config | {"num_hidden_layers": 1}, tensors))
    assert HEAD in refused(write(folder, config | {"tie_word_embeddings": False}, tensors))
    assert EMBEDDING in refused(write(folder, config | {"vocab_size": 321}, tensors))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"weight_map": {', "JSON"),
        (b"[]", "object"),
        (b"{}", "weight_map"),
        (b'{"weight_map": []}', "weight_map"),
        (b'{"weight_map": {}}', "weight_map"),
        (b'{"weight_map": {"model.norm.weight": 1}}', "model.norm.weight"),
        (b'{"weight_map": {"model.norm.weight": "../x"}}', "../x"),
        (b'{"weight_map": {"model.norm.weight": ".."}}', ".."),
        (b'{"weight_map": {"model.norm.weight": "/etc/passwd"}}', "/etc/passwd"),
        (b'{"weight_map": {"model.norm.weight": "sub/part0.safetensors"}}', "sub/part0"),
        (b'{"weight_map": {"model.norm.weight": "nowhere.safetensors"}}', "nowhere.safetensors"),
        (b'{"weight_map": {"absent": "part0.safetensors"}}', "absent"),
    ],
)
def test_bad_index(files: tuple[Path, dict[str, Any], Tensors], content: bytes, named: str) -> None:
    """An index that is damaged, or points outside its folder, is refused by what is wrong with it."""
    folder, config, tensors = files
    folder = folder / "model"
    folder.mkdir()
    names = sorted(tensors)
    write(folder, config, {n: tensors[n] for n in names[:9]}, {n: tensors[n] for n in names[9:]})
    Qwen3.from_pretrained(folder)
    (folder / "sub").mkdir()
    for outside in (folder.parent / "x", folder / "sub" / "part0.safetensors"):
        save_file(tensors, outside)
    (folder / "model.safetensors.index.json").write_bytes(content)
    assert named in refused(folder)


def test_tensor_in_two_shards(files: tuple[Path, dict[str, Any], Tensors]) -> None:
    """Which of two would count is no question that a loader answers."""
    folder, config, tensors = files
    write(folder, config, tensors, {NORM: tensors[NORM]})
    message = refused(folder)
    assert NORM in message
    assert "two files" in message


def test_no_checkpoint(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A folder without weights, a file, a path to nothing, and a repository that is not at hand."""
    source = checkpoint("tied")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert "model.safetensors" in refused(tmp_path)
    assert "is a file" in refused(source / "model.safetensors")
    assert "nowhere" in refused(tmp_path / "nowhere")
    for name in ("nowhere", "a/b/c", "owner/../name", "https://x/y"):
        assert repr(name) in refused(name)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, in its own layout; conftest.py keeps the hub offline."""
    assert huggingface_hub.constants.is_offline_mode()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_repository_offline(hub_cache: Path) -> None:
    """A repository that is not in the cache is one line that says so, and what to do without a network."""
    message = refused("some-owner/Some-Model.1")
    assert "some-owner/Some-Model.1" in message
    assert "network" in message


def test_repository_in_the_cache(checkpoint: Callable[..., Path], hub_cache: Path) -> None:
    """A repository id loads the snapshot that the hub's own cache holds under `main`."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = hub_cache / "models--some-owner--Some-Model.1"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    (repository / "blobs").mkdir()
    for number, file in enumerate(checkpoint("untied", max_shard_size="200KB").iterdir()):
        (repository / "blobs" / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    model = Qwen3.from_pretrained("some-owner/Some-Model.1")
    assert_same_weights(tiny.unmerged(model), tiny.torch_model("untied", num_hidden_layers=2))
    assert Qwen3Config.from_pretrained("some-owner/Some-Model.1") == model.config


def test_an_existing_folder_wins(
    checkpoint: Callable[..., Path], hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`owner/name` is a folder where there is one of that name."""
    source = checkpoint("tied")
    monkeypatch.chdir(source.parent.parent)
    assert Qwen3.from_pretrained(f"{source.parent.name}/{source.name}").config.num_hidden_layers == 2


def test_errors_of_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hub's client raises, a broken connection included, is one line with its reason."""

    class ReadError(Exception):
        pass

    def broken(*args: object, **options: object) -> str:
        raise ReadError("connection reset\nby peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    message = refused("some-owner/some-model")
    assert "connection reset" in message


@pytest.mark.parametrize("variant", ["tied", "untied", "attention_bias", "yarn_attention_factor"])
def test_save(checkpoint: Callable[..., Path], tmp_path: Path, variant: str) -> None:
    """transformers loads what was saved to the same bits and logits, and jaxfuse to the same configuration."""
    model = Qwen3.from_pretrained(checkpoint(variant))
    model.save_pretrained(tmp_path / "deep" / "folder")
    saved = tmp_path / "deep" / "folder"
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "model.safetensors"]
    theirs = from_transformers(saved)
    assert_same_weights(tiny.unmerged(model), theirs)
    tokens = np.random.default_rng(0).integers(0, 320, (2, 40))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    ours = np.asarray(jax.jit(model)(tokens))
    assert np.abs(ours - expected).max() <= 2e-5 * np.abs(expected).max()
    assert Qwen3Config.from_pretrained(saved) == model.config
    # Over the file that is open for reading, and again.
    again = Qwen3.from_pretrained(saved)
    again.save_pretrained(saved)
    assert_same_weights(tiny.unmerged(again), theirs)
    assert_same_weights(tiny.unmerged(Qwen3.from_pretrained(saved)), theirs)


def test_save_dtype(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """dtype= converts what is written, and config.json says so; the model keeps its own."""
    model = Qwen3.from_pretrained(checkpoint("tied"))
    model.save_pretrained(tmp_path, dtype=jnp.bfloat16)
    assert model.embed_tokens.weight.dtype == jnp.float32
    theirs = from_transformers(tmp_path)
    assert theirs.dtype == torch.bfloat16
    expected = tiny.torch_model("tied", num_hidden_layers=2).bfloat16()
    again = Qwen3.from_pretrained(tmp_path)
    assert_same_weights(tiny.unmerged(again), expected)
    assert_same_weights(tiny.unmerged(again), theirs)
    assert again.config.dtype == "bfloat16"
    with pytest.raises(TypeError, match="int8"):
        model.save_pretrained(tmp_path, dtype=jnp.int8)
    assert_same_weights(tiny.unmerged(Qwen3.from_pretrained(tmp_path)), expected)


def test_save_in_shards(checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights go to shards with an index that transformers reads; a save removes what an older one left."""
    model = Qwen3.from_pretrained(checkpoint("untied"))
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "generation_config.json", "model.onnx", "notes.safetensors"):
        (tmp_path / name).write_text("{}")
    others = {"config.json", "tokenizer.json", "generation_config.json", "model.onnx", "notes.safetensors"}

    monkeypatch.setattr(weights, "_SHARD_BYTES", 300_000)
    model.save_pretrained(tmp_path)
    names = {file.name for file in tmp_path.iterdir()} - others
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    count = len(shards)
    assert count > 2
    assert shards == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert names == {*shards, "model.safetensors.index.json"}
    for name in shards:
        size = sum(value.nbytes for value in load_file(tmp_path / name).values())
        assert size <= 300_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tiny.unmerged(model).values())
    (tmp_path / "notes.safetensors").unlink()  # transformers loads every safetensors file that it is pointed to
    expected = tiny.torch_model("untied", num_hidden_layers=2)
    assert_same_weights(tiny.unmerged(Qwen3.from_pretrained(tmp_path)), expected)
    assert_same_weights(tiny.unmerged(model), from_transformers(tmp_path))

    monkeypatch.setattr(weights, "_SHARD_BYTES", 600_000)
    model.save_pretrained(tmp_path)
    fewer = {file.name for file in tmp_path.glob("model-*.safetensors")}
    assert 1 < len(fewer) < count
    assert not fewer & set(shards)
    assert_same_weights(tiny.unmerged(Qwen3.from_pretrained(tmp_path)), expected)

    monkeypatch.undo()
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.glob("model*")} == {"model.safetensors", "model.onnx"}
    assert_same_weights(tiny.unmerged(Qwen3.from_pretrained(tmp_path)), expected)


@pytest.mark.parametrize("write", ["save_file", "_write_json"])
def test_interrupted_save(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """A save cut short leaves no half file, and what was there before still loads."""
    model = Qwen3.from_pretrained(checkpoint("tied"))

    def interrupted(*args: Any, **options: Any) -> None:
        path = next(argument for argument in args if isinstance(argument, Path))
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, write, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == (set() if write == "save_file" else {"model.safetensors"})

    model.save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(weights, write, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert_same_weights(tiny.unmerged(Qwen3.from_pretrained(tmp_path)), tiny.torch_model("tied", num_hidden_layers=2))


def test_saving_a_fresh_model(tmp_path: Path) -> None:
    """A model that was never loaded saves and loads too: the table names every parameter of the module."""
    data = tiny.torch_model("attention_bias", num_hidden_layers=1, tie_word_embeddings=False).config.to_dict()
    config = Qwen3Config.from_dict(data)
    model = Qwen3(config, rngs=nnx.Rngs(3), dtype=jnp.float16)
    model.save_pretrained(tmp_path)
    again = Qwen3.from_pretrained(tmp_path)
    ours, expected = (jax.tree.leaves_with_path(nnx.state(each)) for each in (again, model))
    for (path, leaf), (name, wanted) in zip(ours, expected, strict=True):
        assert path == name
        np.testing.assert_array_equal(leaf, wanted)
    assert again.config == dataclasses.replace(config, dtype="float16")


def test_saved_files_have_the_users_mode(tmp_path: Path) -> None:
    """Others may read what a person saves as far as the umask says, the weights as well as config.json."""
    model = Qwen3(Qwen3Config.from_dict(tiny.torch_model(num_hidden_layers=1).config.to_dict()), rngs=nnx.Rngs(0))
    before = os.umask(0o022)
    try:
        model.save_pretrained(tmp_path)
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "config.json": 0o644,
        "model.safetensors": 0o644,
    }


def test_float16_that_overflows(files: tuple[Path, dict[str, Any], Tensors]) -> None:
    """A weight that float16 cannot hold is named, not turned into infinity."""
    folder, config, tensors = files
    tensors[EMBEDDING][3, 5] = 1e6
    write(folder, config, tensors)
    with pytest.raises(CheckpointError, match=rf"{EMBEDDING} holds values beyond float16"):
        Qwen3.from_pretrained(folder, dtype="float16")
    Qwen3.from_pretrained(folder, dtype="bfloat16")
