"""The steps of jaxfuse's own model: recorded where its modules meet, while the model's own code runs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxfuse.cache import KVCache
from jaxfuse.errors import InputError
from jaxfuse.model import Qwen3

Arrays = dict[str, jax.Array]


class _Tap:
    """In the place of a module: `around` gets the module and the arguments of a call."""

    def __init__(self, module: Any, around: Callable[..., Any]):
        self._module, self._around = module, around

    def __call__(self, *arguments: Any) -> Any:
        return self._around(self._module, *arguments)


class _Taps:
    """Taps on all modules of a model; with `theirs`, each step is given transformers' output of those before it."""

    def __init__(self, theirs: Arrays | None):
        self.steps: Arrays = {}
        self._theirs = theirs
        self._turns = 0

    def put(self, model: Qwen3) -> None:
        model.embed_tokens = self._on(model.embed_tokens, "embed_tokens")
        rotary: Any = _Tap(model.rotary_emb, self._rope)
        model.rotary_emb = rotary
        before = "embed_tokens"
        for i, layer in enumerate(model.layers):
            at = f"layers.{i}."
            attention, mlp = layer.self_attn, layer.mlp
            layer.input_layernorm = self._on_norm(layer.input_layernorm, f"{at}input_layernorm", before)
            attention.qkv_proj = self._on(attention.qkv_proj, f"{at}qkv_proj")
            attention.o_proj = self._on(attention.o_proj, f"{at}o_proj", reads=f"{at}attention")
            layer.post_attention_layernorm = self._on_norm(
                layer.post_attention_layernorm, f"{at}post_attention_layernorm", f"{at}attention_residual"
            )
            mlp.gate_up_proj = self._on(mlp.gate_up_proj, f"{at}gate_up_proj")
            mlp.down_proj = self._on(mlp.down_proj, f"{at}down_proj", reads=f"{at}silu_and_mul")
            before = f"{at}block"
        model.norm = self._on_norm(model.norm, "norm", before)

    def note(self, name: str, value: jax.Array) -> jax.Array:
        """Records what a step gave, and returns what the next ones are to be given."""
        self.steps[name] = value
        return value if self._theirs is None else self._theirs[name].astype(value.dtype).reshape(value.shape)

    def _on(self, module: Any, name: str, *, reads: str | None = None) -> Any:
        def around(module: Any, x: jax.Array) -> jax.Array:
            if reads is not None:
                x = self.note(reads, x)
            return self.note(name, module(x))

        return _Tap(module, around)

    def _on_norm(self, module: Any, name: str, sum_name: str) -> Any:
        def around(module: Any, x: jax.Array, residual: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
            normed, total = module(x, residual)
            return self.note(name, normed), total if residual is None else self.note(sum_name, total)

        return _Tap(module, around)

    def _rope(self, module: Any, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = f"layers.{self._turns}."
        self._turns += 1
        q, k = module(q, k, positions)
        return self.note(f"{at}q_rope", q), self.note(f"{at}k_rope", k)


class JaxSide:
    """A jaxfuse model, and its steps by the names of `steps.names`.

    Its weights are flattened once; a traced copy of it gets the taps, the model itself stays as it is.
    """

    def __init__(self, model: Qwen3):
        self.model = model
        self._leaves: list[jax.Array]
        self._tree: Any
        self._leaves, self._tree = jax.tree.flatten(model)
        self._logits = jax.jit(lambda leaves, tokens: self._model(leaves)(tokens))
        self._with_cache = jax.jit(
            lambda leaves, tokens, cache: self._model(leaves)(tokens, cache=cache), donate_argnames="cache"
        )
        self._tapped = jax.jit(self._run, static_argnames="keep")

    def logits(self, tokens: np.ndarray) -> jax.Array:
        """`[B, T]` -> `[B, T, vocab]` float32, from the plain forward pass."""
        return self._logits(self._leaves, tokens)

    def logits_with_cache(self, tokens: np.ndarray, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """The same, of tokens that follow those in a cache; the cache is donated."""
        return self._with_cache(self._leaves, tokens, cache)

    def steps(self, tokens: np.ndarray, keep: tuple[str, ...]) -> Arrays:
        """What the steps named gave, one after the other, `[B, T, ...]` in the model's dtype; logits float32."""
        return self._tapped(self._leaves, tokens, None, keep=keep)

    def local_steps(self, tokens: np.ndarray, theirs: Mapping[str, torch.Tensor], keep: tuple[str, ...]) -> Arrays:
        """The same, but each step is given transformers' outputs of the steps before it."""
        return self._tapped(self._leaves, tokens, {name: to_jax(x) for name, x in theirs.items()}, keep=keep)

    def _model(self, leaves: list[jax.Array]) -> Qwen3:
        return self._tree.unflatten(leaves)

    def _run(
        self, leaves: list[jax.Array], tokens: jax.Array, theirs: Arrays | None, *, keep: tuple[str, ...]
    ) -> Arrays:
        model = self._model(leaves)
        taps = _Taps(theirs)
        taps.put(model)
        # A tied head is the embedding, which has a tap now.
        taps.note("lm_head", self._model(leaves).logits(model.hidden(tokens)))
        missing = [name for name in keep if name not in taps.steps]
        if missing:
            raise InputError(
                f"the model must call the modules of jaxfuse.Qwen3, each once, got none of {missing[0]!r}; keep its "
                "module, or compare what replaces it with check_op"
            )
        return {name: taps.steps[name] for name in keep}


def to_torch(x: jax.Array | np.ndarray, device: str = "cpu") -> torch.Tensor:
    """The same values as a tensor; bfloat16 by its bits."""
    array = np.array(x)
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def to_jax(x: torch.Tensor) -> jax.Array:
    """The same values as an array on JAX's default device; bfloat16 by its bits."""
    x = x.cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.view(torch.int16).numpy().view(jnp.bfloat16))
    return jnp.asarray(x.numpy())
