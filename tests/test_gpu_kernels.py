"""The Mosaic kernels on a GPU: against float64, at the published sizes and at the edges, and in JAX's transforms."""

import itertools
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gpu import needs_mosaic
from jaxfuse.kernels import fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
from op_inputs import make_cache
from truth import UNIT

pytestmark = [pytest.mark.gpu, needs_mosaic]

DTYPES = ["bfloat16", "float16", "float32"]
ROWS = [1, 3, 1000, 16384]
# Hidden sizes of 0.6B, 4B, 8B, 32B and the shipped checkpoint, their head size, and two between on one and two warps a
# row; the intermediate sizes; the heads.
WIDTHS = [1024, 2560, 4096, 5120, 256, 128, 384, 640]
INNER = [3072, 9728, 12288, 25600, 512]
HEADS = [(16, 8), (32, 8), (64, 8), (4, 2)]
EPS = 3e-5  # not the default, which a call that forgot its own would take
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
type Run = Callable[..., Any]
OPS: dict[str, Run] = {
    "rms_norm": partial(rms_norm, eps=EPS),
    "fused_add_rms_norm": partial(fused_add_rms_norm, eps=EPS),
    "silu_and_mul": silu_and_mul,
    "rotary_embedding": rotary_embedding,
}
mosaic: dict[str, Run] = {name: partial(run, implementation="mosaic") for name, run in OPS.items()}
xla: dict[str, Run] = {name: partial(run, implementation="xla") for name, run in OPS.items()}
counter = itertools.count()


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test draws the same, whichever tests run before it."""
    monkeypatch.setitem(globals(), "counter", itertools.count(zlib.crc32(request.node.name.encode())))


def heavy(*shape: int, dtype: str) -> jax.Array:
    """Fresh values over some four decades: a normal number times the exponential of another."""
    random = torch.Generator(DEVICE).manual_seed(next(counter))
    normal, scale = (torch.randn(shape, generator=random, device=DEVICE) for _ in range(2))
    values = (normal * torch.exp(scale)).to(getattr(torch, dtype))
    if DEVICE == "cpu":
        return jnp.asarray(np.asarray(values.float())).astype(dtype)
    torch.cuda.synchronize()
    return jnp.from_dlpack(values)


def make_table(length: int, width: int = 128) -> jax.Array:
    """A RoPE table, `[length, width]` float32."""
    return jnp.asarray(make_cache(length, width))


def wide(x: jax.Array) -> torch.Tensor:
    """The same values in float64, on the GPU where torch has it."""
    if DEVICE == "cpu":
        return torch.tensor(np.asarray(x, np.float64))
    return torch.from_dlpack(x.block_until_ready()).double()


def half_ulp(exact: torch.Tensor, dtype: Any) -> torch.Tensor:
    """What one correct rounding to `dtype` may add."""
    info = jnp.finfo(dtype)
    exponent = (torch.frexp(exact).exponent - 1).clamp(min=int(info.minexp))
    return torch.ldexp(torch.ones_like(exact), exponent - int(info.nmant) - 1)


def assert_close(ours: jax.Array, exact: torch.Tensor, slack: torch.Tensor) -> None:
    """Within one rounding to the dtype, and `slack` for float32's roundings before it; nothing is missing."""
    error = (wide(ours) - exact).abs()
    error = torch.where((exact.abs() > float(jnp.finfo(ours.dtype).max)) & wide(ours).isinf(), 0.0, error)
    allowed = half_ulp(exact, ours.dtype) + slack
    worst = torch.argmax(torch.nan_to_num(error / allowed, nan=torch.inf))
    assert bool((error <= allowed).all()), (
        f"worst at {worst}: {wide(ours).flatten()[worst]} for {exact.flatten()[worst]}"
    )


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm in float64."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def norm_slack(exact: torch.Tensor, width: int) -> torch.Tensor:
    """A thread adds width / 32 squares at most, five lanes' steps follow, and the root halves that error.

    Five more for the residual sum, the mean, rsqrt (two) and the two products.
    """
    return ((width / 32 + 5) / 2 + 6) * UNIT * exact.abs()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, dtype: str) -> None:
    """Both norms and the sum, rounded once."""
    for rows in ROWS:
        x, residual, weight = (
            heavy(rows, width, dtype=dtype),
            heavy(rows, width, dtype=dtype),
            heavy(width, dtype=dtype),
        )
        exact = norm64(wide(x), wide(weight))
        assert_close(mosaic["rms_norm"](x, weight), exact, norm_slack(exact, width))
        normed, total = mosaic["fused_add_rms_norm"](x, residual, weight)
        exact = wide(x) + wide(residual)
        assert_close(total, exact, UNIT * exact.abs())
        exact = norm64(exact, wide(weight))
        assert_close(normed, exact, norm_slack(exact, width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", INNER)
def test_silu_and_mul(width: int, dtype: str) -> None:
    """Within an exponential, a sum, a quotient and a product; below -88.7 float32's exponential is infinite."""
    for rows in ROWS:
        x = 4 * heavy(rows, 2 * width, dtype=dtype)
        result = mosaic["silu_and_mul"](x)
        for first in range(0, rows, 4096):  # float64 takes eight bytes
            gate, up = wide(x[first : first + 4096]).chunk(2, dim=-1)
            exact = gate * torch.sigmoid(gate) * up
            assert_close(result[first : first + 4096], exact, 8 * UNIT * exact.abs() + 2.0**-121 * up.abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_rotary_embedding(heads: tuple[int, int], dtype: str) -> None:
    """Two products and their sum, of every head, at positions in any order."""
    table = make_table(4096)
    for tokens in ROWS:
        q, k = (heavy(tokens, count, 128, dtype=dtype) for count in heads)
        positions = jax.random.randint(jax.random.key(next(counter)), (tokens,), 0, 4096)
        cos, sin = wide(table[positions])[:, None].chunk(2, dim=-1)
        for x, result in zip((q, k), mosaic["rotary_embedding"](q, k, positions, table), strict=True):
            first, second = wide(x).chunk(2, dim=-1)
            exact = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            terms = torch.cat([first.abs() * cos.abs() + second.abs() * sin.abs()] * 2, dim=-1)
            swapped = torch.cat([second.abs() * cos.abs() + first.abs() * sin.abs()] * 2, dim=-1)
            assert_close(result, exact, 2 * UNIT * torch.maximum(terms, swapped))


def arguments(rows: int, dtype: str) -> Iterator[tuple[str, tuple[jax.Array, ...]]]:
    """Each op with arguments for it, at small sizes."""
    for width in (128, 384, 640):
        yield "rms_norm", (heavy(rows, width, dtype=dtype), heavy(width, dtype=dtype))
    x, residual = heavy(rows, 1024, dtype=dtype), heavy(rows, 1024, dtype=dtype)
    yield "fused_add_rms_norm", (x, residual, heavy(1024, dtype=dtype))
    yield "silu_and_mul", (heavy(rows, 768, dtype=dtype),)
    positions = jax.random.randint(jax.random.key(next(counter)), (rows,), 0, 50)
    q, k = heavy(rows, 5, 128, dtype=dtype), heavy(rows, 3, 128, dtype=dtype)
    yield "rotary_embedding", (q, k, positions, make_table(50))


def bits(results: Any) -> list[bytes]:
    """The bytes of each array."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_sizes(dtype: str) -> None:
    """Rows left over from blocks, odd numbers of heads, three warps' worth of columns; and no rows at all."""
    for rows in (0, 1, 2, 5, 9, 31):
        for name, args in arguments(rows, dtype):
            ours, theirs = (jax.tree.leaves(run[name](*args)) for run in (mosaic, xla))
            for one, other in zip(ours, theirs, strict=True):
                ulps = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-18}[dtype]
                np.testing.assert_allclose(
                    np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=ulps, atol=1e-6
                )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_are_its_own(dtype: str) -> None:
    """A row alone, among others, under vmap and a second time: the same bits."""
    for name, args in arguments(1003, dtype):
        shared = {"rms_norm": 1, "fused_add_rms_norm": 2, "silu_and_mul": 1, "rotary_embedding": 3}[name]
        whole = mosaic[name](*args)
        assert bits(mosaic[name](*args)) == bits(whole)
        for first, count in ((0, 1), (1, 3), (500, 8), (3, 1000)):
            part = [array[first : first + count] if i < shared else array for i, array in enumerate(args)]
            expected = jax.tree.map(lambda leaf, a=first, n=count: leaf[a : a + n], whole)
            assert bits(mosaic[name](*part)) == bits(expected)
        axes = [0 if i < shared else None for i in range(len(args))]
        assert bits(jax.vmap(mosaic[name], axes)(*args)) == bits(whole)


def kind(x: jax.Array) -> np.ndarray:
    """0 finite, 1 and -1 infinite, 2 not a number."""
    values = np.asarray(x, np.float32)
    return np.where(np.isnan(values), 2, np.where(np.isinf(values), np.sign(values), 0))


def pair_size(x: jax.Array) -> np.ndarray:
    """For each element of heads `[..., D]`, its size and that of the one it is rotated with, added."""
    first, second = np.split(np.abs(np.asarray(x, np.float64)), 2, -1)
    return np.concatenate([first + second] * 2, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(dtype: str) -> None:
    """Largest finite, subnormal, NaN and infinite values pass through as in the reference; other rows are untouched."""
    info = jnp.finfo(dtype)
    extremes = [info.max, -info.max, info.tiny, info.smallest_subnormal, np.nan, np.inf, -np.inf, 0.0, -0.0]
    for name, args in arguments(2 * len(extremes), dtype):
        plain = mosaic[name](*args)
        for where in ((0,), (-1,), (slice(None),)):
            x = args[0]
            for row, value in enumerate(extremes):
                x = x.at[(2 * row, ..., *where)].set(jnp.asarray(value, dtype))
            ours, theirs = (jax.tree.leaves(run[name](x, *args[1:])) for run in (mosaic, xla))
            for i, (one, other, before) in enumerate(zip(ours, theirs, jax.tree.leaves(plain), strict=True)):
                np.testing.assert_array_equal(kind(one), kind(other))
                got, wanted = (np.where(kind(other) == 0, np.asarray(y, np.float64), 0) for y in (one, other))
                relative = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-18}[dtype]
                absolute = np.broadcast_to(float(info.smallest_subnormal) + 1e-6 * (dtype != "float32"), one.shape)
                if name == "rotary_embedding":  # its two products, each rounded, may cancel
                    absolute = absolute + 8 * UNIT * np.nan_to_num(pair_size((x, args[1])[i]), nan=0, posinf=0)
                over = np.abs(got - wanted) / (relative * np.abs(wanted) + absolute)
                worst = np.argmax(over)
                assert over.max() <= 1, f"{name}: {got.flat[worst]} for {wanted.flat[worst]}, at {worst}, {one.shape}"
                assert bits(one[1::2]) == bits(before[1::2])


def test_positions_outside_the_table() -> None:
    """They turn their token into NaN, in a program; the tokens beside it stay right."""
    table, positions = make_table(50), jnp.asarray([3, -1, 49, 50, 7, 2**31 - 1, -(2**31)])
    q, k = heavy(7, 4, 128, dtype="bfloat16"), heavy(7, 2, 128, dtype="bfloat16")
    ours, theirs = (jax.jit(run["rotary_embedding"])(q, k, positions, table) for run in (mosaic, xla))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.isnan(np.asarray(one, np.float32)).all((1, 2)), [0, 1, 0, 1, 0, 1, 1])
        np.testing.assert_array_equal(kind(one), kind(other))


def test_more_elements_than_an_int32_counts() -> None:
    """The last rows of an array of more than 2^31 elements are what they are alone."""
    rows = 2**31 // 4096 + 5
    x = jax.jit(lambda: jax.random.normal(jax.random.key(0), (rows, 4096), jnp.bfloat16))()
    weight, table = heavy(4096, dtype="bfloat16"), make_table(50)
    ends = [slice(0, 3), slice(rows - 9, rows)]

    def check(run: Run, *args: jax.Array) -> None:
        whole = run(*args)
        for end in ends:
            part = run(*(array[end] if len(array) == rows else array for array in args))
            assert bits(jax.tree.map(lambda leaf, end=end: leaf[end], whole)) == bits(part)

    check(mosaic["rms_norm"], x, weight)
    check(mosaic["silu_and_mul"], x)
    check(mosaic["fused_add_rms_norm"], x, x, weight)
    positions = jnp.arange(rows, dtype=jnp.int32) % 50
    check(mosaic["rotary_embedding"], x.reshape(rows, 32, 128), x[:, :1024].reshape(rows, 8, 128), positions, table)


def test_transforms() -> None:
    """First and second derivatives, vmap over a weight, scan, checkpoint and shard_map, as in the reference."""
    for name, args in arguments(6, "float32"):
        varied = [i for i, array in enumerate(args) if array.dtype == jnp.float32 and i < 3]

        def loss(run: Run, *args: jax.Array) -> jax.Array:
            return sum((jnp.sin(leaf).sum() for leaf in jax.tree.leaves(run(*args))), jnp.float32(0))

        def second(run: Run, *args: jax.Array, loss: Any = loss, varied: Any = varied) -> jax.Array:
            grads = jax.grad(partial(loss, run), varied)(*args)
            return sum((jnp.square(grad).sum() for grad in grads), jnp.float32(0))

        def checkpointed(run: Run, *args: jax.Array, loss: Any = loss, varied: Any = varied) -> Any:
            return jax.grad(jax.checkpoint(partial(loss, run)), varied)(*args)

        def scanned(run: Run, *args: jax.Array, name: str = name) -> Any:
            if name == "silu_and_mul":  # its result is not as wide as its argument
                return run(*args)
            return jax.lax.scan(lambda x, _: (jax.tree.leaves(run(x, *args[1:]))[0], None), args[0], length=3)[0]

        def over_a_mesh(run: Run, *args: jax.Array, varied: Any = varied) -> Any:
            rows = args[0].shape[0]
            specs = tuple(P("i") if array.shape[0] == rows else P() for array in args)
            mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices("gpu")[:1])
            return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("i"))(*args)

        for transformed in (
            lambda run, *a, loss=loss, varied=varied: jax.grad(partial(loss, run), varied)(*a),
            lambda run, *a, second=second, varied=varied: jax.grad(partial(second, run), varied)(*a),
            checkpointed,
            scanned,
            over_a_mesh,
            lambda run, *a: jax.vmap(run)(*(jnp.stack([array, array[::-1]]) for array in a)),
        ):
            ours, theirs = (jax.tree.leaves(jax.jit(partial(transformed, run[name]))(*args)) for run in (mosaic, xla))
            for one, other in zip(ours, theirs, strict=True):
                one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
                assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def test_committed_to_a_cpu_none_runs_there() -> None:
    """A program traced while the GPU is the default device, and compiled for arrays on the CPU, runs the reference."""
    cpu = jax.devices("cpu")[0]
    for name, args in arguments(3, "float32"):
        run = OPS[name]
        there = jax.device_put(args, cpu)
        traced, direct = jax.jit(run)(*there), run(*there)
        assert {leaf.device for leaf in jax.tree.leaves((traced, direct))} == {cpu}
        here = jax.jit(run)(*args)
        for one, other in zip(jax.tree.leaves(traced), jax.tree.leaves(here), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(OPS))
def test_none_runs_the_kernel(name: str) -> None:
    """On this GPU the default is the kernel for many rows; for those as narrow as a head it is XLA."""
    for op, args in arguments(100, "bfloat16"):
        if op != name:
            continue
        text = jax.jit(OPS[name]).lower(*args).compile().as_text()
        assert text is not None
        assert ("mosaic_gpu" in text) == (args[0].shape != (100, 128))
