"""Operations that move numbers or make constants, in ONNX; shapes are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ledger.engines.operators import Builder, dtype_of, held_as, register, shape_of

aten = torch.ops.aten
END = 2**63 - 1


@register(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    moves=True,
)
def _reshape(b: Builder, node: fx.Node, x: fx.Node, *how: Any) -> str:
    return b[x] if shape_of(node) == shape_of(x) else b.op("Reshape", b[x], b.constant(shape_of(node)))


@register(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, moves=True)
def _same(b: Builder, node: fx.Node, x: fx.Node, **options: Any) -> str:
    return b[x]


@register(aten.copy.default, moves=True)
def _copy(b: Builder, node: fx.Node, x: fx.Node, source: fx.Node, *options: Any) -> str:
    value = b.tensor(source, dtype_of(node))
    return value if shape_of(node) == shape_of(source) else b.op("Expand", value, b.constant(shape_of(node)))


@register(aten.expand.default, moves=True)
def _expand(b: Builder, node: fx.Node, x: fx.Node, sizes: Any) -> str:
    return b[x] if shape_of(node) == shape_of(x) else b.op("Expand", b[x], b.constant(shape_of(node)))


@register(aten.permute.default, moves=True)
def _permute(b: Builder, node: fx.Node, x: fx.Node, order: Sequence[int]) -> str:
    return b.op("Transpose", b[x], perm=[axis % len(order) for axis in order])


@register(aten.transpose.int, moves=True)
def _transpose(b: Builder, node: fx.Node, x: fx.Node, first: int, second: int) -> str:
    order = list(range(len(shape_of(x))))
    order[first], order[second] = order[second], order[first]
    return b.op("Transpose", b[x], perm=order)


def _part(b: Builder, value: str, dim: int, start: int, end: int, step: int = 1) -> str:
    return b.op("Slice", value, *(b.constant([x]) for x in (start, end, dim, step)))


@register(aten.slice.Tensor, moves=True)
def _slice(
    b: Builder, node: fx.Node, x: fx.Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> str:
    if shape_of(node) == shape_of(x):
        return b[x]
    return _part(b, b[x], dim, start or 0, END if end is None else end, step)


@register(aten.select.int, moves=True)
def _select(b: Builder, node: fx.Node, x: fx.Node, dim: int, index: int) -> str:
    return b.op("Gather", b[x], b.constant(index), axis=dim)


@register(aten.slice_scatter.default, moves=True)
def _slice_scatter(
    b: Builder,
    node: fx.Node,
    x: fx.Node,
    source: fx.Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> str:
    size = shape_of(x)[dim]
    places = torch.arange(size)[slice(start, end, step)]
    others = [1] * len(shape_of(x))
    others[dim] = len(places)
    where = b.op("Expand", b.constant(places.view(others)), b.constant(shape_of(source)))
    return b.op("ScatterElements", b[x], where, b.tensor(source, dtype_of(node)), axis=dim)


@register(aten.select_scatter.default, moves=True)
def _select_scatter(b: Builder, node: fx.Node, x: fx.Node, source: fx.Node, dim: int, index: int) -> str:
    shape = shape_of(x)
    shape[dim] = 1
    where = b.op("Expand", b.constant([index % shape_of(x)[dim]]), b.constant(shape))
    return b.op("ScatterElements", b[x], where, b.op("Reshape", b[source], b.constant(shape)), axis=dim)


@register(aten.flip.default, moves=True)
def _flip(b: Builder, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> str:
    last, first = ([value] * len(dims) for value in (-1, -END))
    return b.op("Slice", b[x], *(b.constant(list(part)) for part in (last, first, dims, last)))


@register(aten.cat.default, moves=True)
def _cat(b: Builder, node: fx.Node, parts: Sequence[fx.Node], dim: int = 0) -> str:
    # torch lets an empty vector join anything.
    full = [part for part in parts if shape_of(part) != [0]]
    return b.op("Concat", *(b.tensor(part, dtype_of(node)) for part in full), axis=dim)


@register(aten.split_with_sizes.default, moves=True)
def _split(b: Builder, node: fx.Node, x: fx.Node, sizes: Sequence[int], dim: int = 0) -> tuple[str, ...]:
    return b.ops(len(sizes), "Split", b[x], b.constant(list(sizes)), axis=dim)


@register(aten.constant_pad_nd.default, moves=True)
def _pad(b: Builder, node: fx.Node, x: fx.Node, pad: Sequence[int], value: float = 0) -> str:
    # torch counts from the last axis, and each axis's two ends together.
    missing = [0] * (len(shape_of(x)) - len(pad) // 2)
    before, after = ([*missing, *reversed(pad[side::2])] for side in (0, 1))
    return b.op("Pad", b[x], b.constant([*before, *after]), b.constant(value, dtype_of(node)))


@register(aten.embedding.default, moves=True)
def _embedding(b: Builder, node: fx.Node, weight: fx.Node, index: fx.Node, *options: Any) -> str:
    return b.op("Gather", b[weight], b[index], axis=0)


@register(aten.index_select.default, moves=True)
def _index_select(b: Builder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> str:
    return b.op("Gather", b[x], b[index], axis=dim)


@register(aten.gather.default, moves=True)
def _gather(b: Builder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, **options: Any) -> str:
    return b.op("GatherElements", b[x], b[index], axis=dim)


@register(aten.scatter.value, aten.scatter.src, moves=True)
def _scatter(b: Builder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, source: Any) -> str:
    values = b.tensor(source, dtype_of(node))
    if not isinstance(source, fx.Node):
        values = b.op("Expand", values, b.constant(shape_of(index)))
    return b.op("ScatterElements", b[x], b[index], values, axis=dim)


def _places(b: Builder, indices: Sequence[fx.Node | None]) -> str | None:
    """[*shared shape, number of indices]: index tensors for the first axes, side by side; None for other ways."""
    known = [i for i in indices if i is not None and dtype_of(i) in (torch.int32, torch.int64)]
    if len(known) != len(indices):
        return None
    shape = [*torch.broadcast_shapes(*(tuple(shape_of(i)) for i in known)), 1]
    columns = []
    for index in known:
        column = b.op("Reshape", b.tensor(index, torch.int64), b.constant([*shape_of(index), 1]))
        columns.append(b.op("Expand", column, b.constant(shape)))
    return columns[0] if len(columns) == 1 else b.op("Concat", *columns, axis=-1)


@register(aten.index.Tensor, moves=True)
def _index(b: Builder, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> Any:
    places = _places(b, indices)
    return NotImplemented if places is None else b.op("GatherND", b[x], places)


@register(aten.index_put.default, moves=True)
def _index_put(
    b: Builder, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> Any:
    places = None if accumulate else _places(b, indices)
    if places is None:
        return NotImplemented
    shared = torch.broadcast_shapes(*(tuple(shape_of(i)) for i in indices if i is not None))
    shape = [*shared, *shape_of(x)[len(indices) :]]
    updates = b.op("Expand", b.tensor(values, dtype_of(node)), b.constant(shape))
    return b.op("ScatterND", b[x], places, updates)


@register(
    aten.full.default,
    aten.full_like.default,
    aten.zeros.default,
    aten.zeros_like.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.scalar_tensor.default,
    moves=True,
)
def _filled(b: Builder, node: fx.Node, *how: Any, **options: Any) -> Any:
    name = str(node.target)  # aten.zeros_like.default
    value = 0 if "zeros" in name else 1 if "ones" in name else how[0 if "scalar" in name else 1]
    if isinstance(value, fx.Node):
        return NotImplemented
    single, shape = b.constant(value, dtype_of(node)), shape_of(node)
    return b.op("Expand", single, b.constant(shape)) if shape else single


@register(aten.empty.memory_format, aten.empty_like.default, moves=True)
def _empty(b: Builder, node: fx.Node, *how: Any, **options: Any) -> str:
    return b.op("Expand", b.constant(0, held_as(dtype_of(node))), b.constant(shape_of(node)))


@register(aten.arange.start_step, moves=True)
def _arange(b: Builder, node: fx.Node, start: float, end: float, step: float = 1, **options: Any) -> str:
    return b.constant(torch.arange(start, end, step, dtype=dtype_of(node)), dtype_of(node))
