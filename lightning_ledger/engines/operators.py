"""An ONNX graph in the making, and the one table from core ATen operations to ONNX's.

torch's own exporter re-traces a graph three times and then rewrites it: 24 to 50 seconds for 1400 operations where this
table takes half of one, and that exporter knows neither int8 products nor bit casts.

Narrow floats (bfloat16, float16) are held in fp32 and every result is rounded to them, which is what torch's kernels on
CPUs do: engines on CPUs seldom compute in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx

aten = torch.ops.aten

NARROW = (torch.bfloat16, torch.float16)
BITCAST_OPSET = 26

_TYPES = {
    torch.bool: TensorProto.BOOL,
    torch.uint8: TensorProto.UINT8,
    torch.int8: TensorProto.INT8,
    torch.int16: TensorProto.INT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.bfloat16: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT,
}
_ROUNDED = {torch.bfloat16: TensorProto.BFLOAT16, torch.float16: TensorProto.FLOAT16}


def held_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype that stands for another in a model.

    Example:
        >>> held_as(torch.bfloat16), held_as(torch.int8)
        (torch.float32, torch.int8)
    """
    return torch.float32 if dtype in NARROW else dtype


class Builder:
    """An ONNX graph in the making.

    Attributes:
        nodes: its operations, in order.
        constants: its constants.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._known: dict[Any, str] = {}
        self._names: dict[fx.Node, Any] = {}

    def name(self, node: fx.Node, name: Any) -> None:
        """Say which value, or tuple of values, a node of the captured graph has become."""
        self._names[node] = name

    def __getitem__(self, node: fx.Node) -> str:
        name: str = self._names[node]
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operation; returns the name of its result."""
        return self.ops(1, kind, *inputs, **attributes)[0]

    def ops(self, count: int, kind: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        """Add an operation with several results; returns their names."""
        names = tuple(f"v{len(self.nodes)}_{number}" for number in range(count))
        self.nodes.append(helper.make_node(kind, list(inputs), list(names), **attributes))
        return names

    def part(self, node: fx.Node, index: int) -> str:
        """One of the results that a node has become."""
        name: str = self._names[node][index]
        return name

    def constant(self, value: Any, dtype: torch.dtype = torch.int64) -> str:
        """A constant: a number, a list of integers or a tensor."""
        array = torch.as_tensor(value).to(held_as(dtype)).contiguous().numpy()
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = f"c{len(self._known)}"
            self.constants.append(numpy_helper.from_array(array, self._known[key]))
        return self._known[key]

    def tensor(self, x: Any, dtype: torch.dtype) -> str:
        """A node's value, or a number, in a dtype."""
        if not isinstance(x, fx.Node):
            return self.constant(x, dtype)
        return self.cast(self[x], dtype_of(x), dtype)

    def cast(self, value: str, source: torch.dtype, dtype: torch.dtype) -> str:
        """A value of one dtype in another."""
        if dtype in _ROUNDED:
            return value if source == dtype else self.rounded(self.cast(value, source, torch.float32), dtype)
        same = held_as(source) == dtype
        return value if same else self.op("Cast", value, to=_TYPES[dtype])

    def rounded(self, value: str, dtype: torch.dtype) -> str:
        """An fp32 value rounded to what a narrow dtype can hold."""
        if dtype not in _ROUNDED:
            return value
        return self.op("Cast", self.op("Cast", value, to=_ROUNDED[dtype]), to=TensorProto.FLOAT)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Of a node's value."""
    return node.meta["val"].dtype  # type: ignore[no-any-return]


def shape_of(node: fx.Node) -> list[int]:
    """Of a node's value."""
    return [int(size) for size in node.meta["val"].shape]


def type_of(dtype: torch.dtype) -> int:
    """ONNX's number for what a dtype is held as."""
    return _TYPES[dtype]


Translation = Callable[..., Any]
"""``(builder, node, *args, **kwargs)`` of an aten operation -> the name of its value, or a tuple of names."""

OPERATORS: dict[Any, Translation] = {}
"""Every operation that ONNX has a form of. Adding one is adding one entry."""

MOVES: set[Any] = set()
"""Those that compute nothing: what they move needs no rounding again."""


def register(*targets: Any, moves: bool = False) -> Callable[[Translation], Translation]:
    def entered(function: Translation) -> Translation:
        OPERATORS.update(dict.fromkeys(targets, function))
        if moves:
            MOVES.update(targets)
        return function

    return entered
