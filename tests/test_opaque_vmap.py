"""Batches pass through a kernel: under vmap they are more rows for it, and it still runs once."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxfuse.kernels import opaque
from op_inputs import OPS
from opaque_ops import (
    CALLS,
    KERNEL,
    POSITIONS,
    SHARED,
    WIDTH,
    Function,
    arguments,
    assert_equal,
    both,
    curved,
    draw,
    each_op,
    equations,
    floats,
    interpreted,
    kernels,
    loss,
    lowered,
    mosaic,
    places,
    primitives,
)


def operands(function: Function, *values: Any) -> list[tuple[int, ...]]:
    """The shapes that go into the function's kernels."""
    found = [equation for equation in equations(jax.make_jaxpr(function)(*values)) if equation.primitive.name == KERNEL]
    return [operand.aval.shape for equation in found for operand in equation.invars]


def batches(op: str, *sizes: int, shared: bool = False, weight_sizes: tuple[int, ...] = ()) -> tuple[jax.Array, ...]:
    """Arguments of [*sizes, 2] rows; with `shared` the weight or table has leading axes `weight_sizes` too."""
    values = list(arguments((*sizes, 2))[op])
    if shared:
        place = SHARED[op]
        assert place is not None
        values[place] = draw(7, *weight_sizes, *values[place].shape)
    return tuple(values)


def axes(op: str, rows: int | None, shared: int | None) -> tuple[int | None, ...]:
    """in_axes that give every argument of rows one axis, and the shared one another."""
    return tuple(shared if place == SHARED[op] else rows for place in range(len(arguments(())[op])))


@each_op
def test_vmap_over_rows(op: str) -> None:
    """With the weight shared vmap is more rows for one kernel, and a row has the bits that it has without vmap."""
    values = batches(op, 3)
    mapped = both(op, lambda run: jax.vmap(run, axes(op, 0, None)), *values)
    with interpreted():
        assert_equal(mapped, mosaic(op)(*values))
        alone = mosaic(op)(*(value if i == SHARED[op] else value[1] for i, value in enumerate(values)))
    assert_equal(jax.tree.map(lambda part: part[1], mapped), alone)
    batched = jax.vmap(mosaic(op), axes(op, 0, None))
    found = primitives(batched, *values)
    assert found[KERNEL] == 1
    assert set(found) <= {*CALLS, KERNEL, "reshape"}
    assert operands(batched, *values) == operands(mosaic(op), *values)


WITH_SHARED = [op for op in OPS if SHARED[op] is not None]


@pytest.mark.parametrize("op", WITH_SHARED)
@pytest.mark.parametrize("rows", [0, None], ids=["with_rows", "alone"])
def test_vmap_over_the_weight(op: str, rows: int | None) -> None:
    """A weight or table of its own for each row of the batch, and many for the same rows: still one kernel."""
    values = batches(op, *([3] if rows == 0 else []), shared=True, weight_sizes=(3,))
    both(op, lambda run: jax.vmap(run, axes(op, rows, 0)), *values)
    assert len(kernels(lowered(jax.vmap(mosaic(op), axes(op, rows, 0)), *values))) == 1


@pytest.mark.parametrize(
    ("outer", "inner"),
    [((0, None), (0, None)), ((None, 0), (0, None)), ((0, None), (None, 0)), ((None, 0), (None, 0)), ((0, 0), (0, 0))],
    ids=["rows_rows", "weight_rows", "rows_weight", "weight_weight", "both_both"],
)
def test_nested_vmap(outer: tuple[int | None, int | None], inner: tuple[int | None, int | None]) -> None:
    """Two axes, of the rows, of the weight or of both, each in turn."""
    x_sizes = [size for size, pair in ((3, outer), (2, inner)) if pair[0] == 0]
    weight_sizes = [size for size, pair in ((3, outer), (2, inner)) if pair[1] == 0]
    values = draw(1, *x_sizes, 2, WIDTH), draw(2, *weight_sizes, WIDTH)
    both("rms_norm", lambda run: jax.vmap(jax.vmap(run, inner), outer), *values)
    assert len(kernels(lowered(jax.vmap(jax.vmap(mosaic("rms_norm"), inner), outer), *values))) == 1


def test_vmap_over_other_axes() -> None:
    """in_axes and out_axes anywhere, the axis of the width behind them."""
    x, weight = draw(1, 3, WIDTH, 4), draw(2, WIDTH)
    both("rms_norm", lambda run: jax.vmap(run, (-1, None), -1), x, weight)
    both("rms_norm", lambda run: jax.vmap(run, (2, 1), 1), x, draw(2, WIDTH, 4))
    both("silu_and_mul", lambda run: jax.vmap(run, 1, 1), draw(1, 3, 4, 2 * WIDTH))
    q, k, table = draw(1, 3, 2, 4, WIDTH), draw(2, 3, 2, 1, WIDTH), draw(3, POSITIONS, WIDTH)
    both("rotary_embedding", lambda run: jax.vmap(run, (1, 1, None, None), 1), q, k, places(3), table)


def test_vmap_over_some_arguments() -> None:
    """What is not mapped is repeated: a residual, one token's keys, its position."""
    x, weight = draw(1, 3, 2, WIDTH), draw(2, WIDTH)
    both("fused_add_rms_norm", lambda run: jax.vmap(run, (0, None, None)), x, x[1], weight)
    both("fused_add_rms_norm", lambda run: jax.vmap(run, (None, 1, 0)), x[1], x.swapaxes(0, 1), draw(4, 3, WIDTH))
    q, k, table = draw(1, 3, 2, WIDTH), draw(2, 1, WIDTH), draw(3, POSITIONS, WIDTH)
    both("rotary_embedding", lambda run: jax.vmap(run, (0, None, None, None)), q, k, jnp.int32(3), table)
    both("rotary_embedding", lambda run: jax.vmap(run, (None, None, 0, None)), q[0], k, places(3), table)


@each_op
def test_vmap_of_none_and_one(op: str) -> None:
    """An axis of size 1, and of size 0, which runs no kernel; zero rows for several weights."""
    both(op, lambda run: jax.vmap(run, axes(op, 0, None)), *batches(op, 1))
    none = batches(op, 0)
    both(op, lambda run: jax.vmap(run, axes(op, 0, None)), *none)
    assert primitives(jax.vmap(mosaic(op), axes(op, 0, None)), *none)[KERNEL] == 0
    place = SHARED[op]
    if place is not None:
        both(op, lambda run: jax.vmap(run, axes(op, 0, 0)), *batches(op, 1, shared=True, weight_sizes=(1,)))
        values = list(arguments((0,))[op])
        values[place] = draw(7, 3, *values[place].shape)
        both(op, lambda run: jax.vmap(run, axes(op, None, 0)), *values)


@pytest.mark.parametrize("op", WITH_SHARED)
@pytest.mark.parametrize("rows", [0, None], ids=["with_rows", "alone"])
def test_vmap_over_no_weights(op: str, rows: int | None) -> None:
    """An axis of size 0 that the weight has, too."""
    values = batches(op, *([0] if rows == 0 else []), shared=True, weight_sizes=(0,))
    both(op, lambda run: jax.vmap(run, axes(op, rows, 0)), *values)


@pytest.mark.parametrize("outer", [(0, 0), (0, None), (None, 0)], ids=["both", "rows", "weight"])
def test_nested_vmap_over_none(outer: tuple[int | None, int | None]) -> None:
    """An outer axis of size 0 around weights of their own: no kernel runs on a grid of none."""
    sizes = [[0] if axis == 0 else [] for axis in outer]
    x, weight = draw(1, *sizes[0], 3, 2, WIDTH), draw(2, *sizes[1], 3, WIDTH)
    both("rms_norm", lambda run: jax.vmap(jax.vmap(run), outer), x, weight)


def grids(function: Function, *values: Any) -> list[tuple[int, ...]]:
    """The grids of the function's kernels, slowest axis first."""
    found = [equation for equation in equations(jax.make_jaxpr(function)(*values)) if equation.primitive.name == KERNEL]
    return [tuple(mesh.grid) for equation in found for mesh in equation.params["meshes"]]


@pytest.mark.parametrize("sizes", [(65_535,), (65_536,), (300, 300), (70_000, 2), (50, 50, 50)])
def test_more_weights_than_a_grid_has_programs(sizes: tuple[int, ...]) -> None:
    """An axis of a CUDA grid but the first holds 65,535 programs; Pallas multiplies the outermost of more than three.

    So many weights are taken in turns.
    """
    values = [jax.ShapeDtypeStruct((*sizes, *shape), jnp.float32) for shape in ((2, WIDTH), (WIDTH,))]
    run = mosaic("rms_norm")
    for _ in sizes:
        run = jax.vmap(run)
    found = grids(run, *values)
    assert found
    assert all(math.prod(grid[:-1]) <= 65_535 for grid in found)


def test_weights_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken in turns is what is taken at once, and some are left over."""
    monkeypatch.setattr(opaque, "MOST_PROGRAMS", 4)
    values = batches("rms_norm", 3, 3, shared=True, weight_sizes=(3, 3))
    both("rms_norm", lambda run: jax.vmap(jax.vmap(run)), *values)
    assert grids(jax.vmap(jax.vmap(mosaic("rms_norm"))), *values)
    values = batches("rotary_embedding", 7, shared=True, weight_sizes=(7,))
    both("rotary_embedding", lambda run: jax.vmap(run), *values)
    many = grids(jax.vmap(mosaic("rotary_embedding")), *values)
    assert [grid[0] for grid in many] == [4, 3]


def test_outputs_share_the_batch_axis() -> None:
    """An output that does not depend on the batched argument is repeated, and cannot be taken without the axis."""
    x, weights = draw(1, 2, WIDTH), draw(2, 3, WIDTH)

    def add(run: Any) -> Any:
        return lambda weight: run(x, x, weight)

    normed, total = both("fused_add_rms_norm", lambda run: jax.vmap(add(run)), weights)
    assert normed.shape == total.shape == (3, 2, WIDTH)
    with pytest.raises(ValueError, match="out_axes"):
        jax.eval_shape(jax.vmap(add(mosaic("fused_add_rms_norm")), out_axes=(0, None)), weights)


# Derivatives.


@each_op
def test_vmap_of_grad(op: str) -> None:
    """Gradients for each row of the batch."""
    values = batches(op, 3)
    both(op, lambda run: jax.vmap(jax.value_and_grad(loss(run), floats(values)), axes(op, 0, None)), *values)


@pytest.mark.parametrize("op", WITH_SHARED)
def test_grad_of_vmap(op: str) -> None:
    """The gradient by a shared weight is summed over the batch; by weights of their own, it is not."""
    values = batches(op, 3)
    both(op, lambda run: jax.value_and_grad(loss(jax.vmap(run, axes(op, 0, None))), floats(values)), *values)
    values = batches(op, 3, shared=True, weight_sizes=(3,))
    both(op, lambda run: jax.value_and_grad(loss(jax.vmap(run)), floats(values)), *values)


def test_vmap_of_second_derivatives() -> None:
    """vmap of reverse over reverse, the weights batched too, and the other way round."""
    values = batches("rms_norm", 2, shared=True, weight_sizes=(2,))
    both("rms_norm", lambda run: jax.vmap(curved(run, (0, 1))), *values)
    both("rms_norm", lambda run: curved(jax.vmap(run), (0, 1)), *values)
