"""Hugging Face safetensors to and from the module: one table of names, strict both ways."""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxfuse.checkpoint_files import CheckpointFiles
from jaxfuse.config import Qwen3Config
from jaxfuse.errors import CheckpointError
from jaxfuse.hub import resolve
from jaxfuse.kernels import Implementation, Rounding
from jaxfuse.layers import RotaryEmbedding
from jaxfuse.model import Qwen3, model_dtype

# Rows are moved in pieces of this size, so that host memory beyond the mapped files stays far below 2 GiB.
_PIECE_BYTES = 2**28
_SHARD_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter of the module, and the tensors of the checkpoint whose rows it joins, in this order."""

    parameter: tuple[str | int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


def table(config: Qwen3Config) -> list[Entry]:
    """Every parameter of the model, with the names and shapes of its tensors in a checkpoint."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

    def one(parameter: tuple[str | int, ...], name: str, shape: tuple[int, ...]) -> Entry:
        return Entry(parameter, ((name, shape),))

    entries = [one(("embed_tokens", "weight"), "model.embed_tokens.weight", (config.vocab_size, hidden))]
    for i in range(config.num_hidden_layers):
        at, name = ("layers", i), f"model.layers.{i}"
        attention, mlp = (*at, "self_attn"), (*at, "mlp")
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        entries += [
            one((*at, "input_layernorm", "weight"), f"{name}.input_layernorm.weight", (hidden,)),
            Entry(
                (*attention, "qkv_proj", "weight"),
                tuple((f"{name}.self_attn.{part}.weight", (n, hidden)) for part, n in rows.items()),
            ),
            one((*attention, "q_norm", "weight"), f"{name}.self_attn.q_norm.weight", (head_dim,)),
            one((*attention, "k_norm", "weight"), f"{name}.self_attn.k_norm.weight", (head_dim,)),
            one((*attention, "o_proj", "weight"), f"{name}.self_attn.o_proj.weight", (hidden, q)),
            one(
                (*at, "post_attention_layernorm", "weight"),
                f"{name}.post_attention_layernorm.weight",
                (hidden,),
            ),
            Entry(
                (*mlp, "gate_up_proj", "weight"),
                tuple((f"{name}.mlp.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")),
            ),
            one((*mlp, "down_proj", "weight"), f"{name}.mlp.down_proj.weight", (hidden, inner)),
        ]
        if config.attention_bias:
            entries += [
                Entry(
                    (*attention, "qkv_proj", "bias"),
                    tuple((f"{name}.self_attn.{part}.bias", (n,)) for part, n in rows.items()),
                ),
                one((*attention, "o_proj", "bias"), f"{name}.self_attn.o_proj.bias", (hidden,)),
            ]
    entries.append(one(("norm", "weight"), "model.norm.weight", (hidden,)))
    if not config.tie_word_embeddings:
        entries.append(one(("lm_head", "weight"), "lm_head.weight", (config.vocab_size, hidden)))
    return entries


def load(
    path_or_repo_id: str | os.PathLike[str],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    rounding: Rounding = "fused",
    implementation: Implementation | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Qwen3:
    """A model with the weights of a checkpoint; `Qwen3.from_pretrained` is its front door.

    Args:
        progress: called with the parameters filled so far and their number.
        path_or_repo_id, dtype, rounding, implementation: as there.

    Raises:
        ConfigError, CheckpointError: as there.
    """
    folder = resolve(path_or_repo_id)
    config = Qwen3Config.from_pretrained(folder)
    entries = table(config)
    with CheckpointFiles(folder) as files:
        if config.dtype is None:
            config = dataclasses.replace(config, dtype=files.first_dtype())
        files.check({name: shape for entry in entries for name, shape in entry.tensors}, _optional(config))
        _check_tied(files, config)
        model = nnx.eval_shape(
            lambda: Qwen3(config, rngs=nnx.Rngs(0), dtype=dtype, rounding=rounding, implementation=implementation)
        )
        numerics = model.numerics
        model.rotary_emb = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, numerics=numerics
        )
        for done, entry in enumerate(entries):
            arrays = [
                _on_device(name, piece, numerics.dtype)
                for name, shape in entry.tensors
                for piece in _pieces(files, name, shape)
            ]
            _parameter(model, entry.parameter).set_value(arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays))
            if progress is not None:
                progress(done + 1, len(entries))
    return model


def _optional(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Tensors that a checkpoint may have although no parameter takes them: a tied model's own head."""
    return {"lm_head.weight": (config.vocab_size, config.hidden_size)} if config.tie_word_embeddings else {}


def _check_tied(files: CheckpointFiles, config: Qwen3Config) -> None:
    if not config.tie_word_embeddings or "lm_head.weight" not in files:
        return
    shape = (config.vocab_size, config.hidden_size)
    ours, shipped = (_pieces(files, name, shape) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, shipped, strict=True)):
        raise CheckpointError(
            "config.json ties lm_head to the embedding (tie_word_embeddings), but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false if the model has its own head"
        )


def _pieces(files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """A tensor in runs of whole rows, each at most `_PIECE_BYTES` in float32, or one row."""
    rows = max(1, _PIECE_BYTES // (4 * math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield files.rows(name, start, min(start + rows, shape[0]))


def _on_device(name: str, piece: np.ndarray, dtype: jnp.dtype) -> jax.Array:
    """Rows of a tensor in the model's dtype; waited for, since transfers in flight would pile up host buffers."""
    array = jax.device_put(piece).astype(dtype).block_until_ready()
    if dtype == jnp.float16 and piece.dtype != np.float16 and bool(jnp.isinf(array).any()) and np.isfinite(piece).all():
        raise CheckpointError(f"{name} holds values beyond float16's 65504; load the model in bfloat16 or float32")
    return array


def _parameter(model: Qwen3, path: tuple[str | int, ...]) -> nnx.Param[jax.Array]:
    node: Any = model
    for key in path:
        node = node[key] if isinstance(key, int) else getattr(node, key)
    parameter: nnx.Param[jax.Array] = node
    return parameter


def save(model: Qwen3, path: str | os.PathLike[str], *, dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes config.json and unmerged weights; `Qwen3.save_pretrained` is its front door.

    Up to 1 GiB goes to model.safetensors, more to shards with an index. Weight files that an earlier save left
    in the folder are removed.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    saved = np.dtype(model.numerics.dtype if dtype is None else model_dtype(model.config, dtype))
    shards = _shards(table(model.config), saved.itemsize)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    weight_map: dict[str, str] = {}
    total = 0
    for file_name, shard in zip(names, shards, strict=True):
        tensors: dict[str, np.ndarray] = {}
        for entry in shard:
            tensors |= _unmerged(model, entry, saved)
        weight_map |= dict.fromkeys(tensors, file_name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        _replace(folder / file_name, functools.partial(save_file, tensors, metadata={"format": "pt"}))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    config = dataclasses.replace(model.config, dtype=saved.name).to_dict()
    kept = set(names)
    if len(shards) > 1:
        kept.add("model.safetensors.index.json")
        _replace(folder / "model.safetensors.index.json", lambda p: _write_json(p, index))
    _replace(folder / "config.json", lambda p: _write_json(p, config))
    stale = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
    for file in folder.iterdir():
        if stale.fullmatch(file.name) and file.name not in kept:
            file.unlink()


def _shards(entries: list[Entry], itemsize: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        nbytes = itemsize * sum(math.prod(shape) for _, shape in entry.tensors)
        if shards[-1] and size + nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += nbytes
    return shards


def _unmerged(model: Qwen3, entry: Entry, dtype: np.dtype) -> dict[str, np.ndarray]:
    merged = np.asarray(_parameter(model, entry.parameter)[...].astype(dtype))
    ends = np.cumsum([shape[0] for _, shape in entry.tensors])
    parts = np.split(merged, ends[:-1])
    return {name: np.ascontiguousarray(part) for (name, _), part in zip(entry.tensors, parts, strict=True)}


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Writes beside the target and renames, so that an interrupted save leaves no half file under its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it, which safetensors narrows to 0600
        write(temporary)
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
