"""Export: a captured program as an ONNX model, for engines that have no autograd and need none.

Everything that changes from step to step stays an input of the model: weights, rounded weights, the batch, rounding
noise, dropout masks. So a refresh of the weights needs no new export.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ledger.engines import arithmetic, movement  # noqa: F401  they fill the table
from lightning_ledger.engines.decompositions import decompositions
from lightning_ledger.engines.operators import (
    BITCAST_OPSET,
    MOVES,
    NARROW,
    OPERATORS,
    Builder,
    dtype_of,
    shape_of,
    type_of,
)
from lightning_ledger.program import GradientProgram
from lightning_ledger.program.compilation import NotCompilable, lift_random
from lightning_ledger.program.graphs import outputs

aten = torch.ops.aten

# The least versions that have what the table emits, bit casts apart.
OPSET, IR_VERSION = 20, 10


class NotExportable(NotCompilable):
    """A program that ONNX cannot express, or its engine cannot run; the message says all that is missing."""


@dataclass(frozen=True)
class ExportedProgram:
    """A captured program in ONNX.

    Attributes:
        model: the ONNX model.
        inputs: names of its inputs, in the order of the program's, and then ``random.0``, ``random.1``, ...
        outputs: names of its outputs: ``loss``, and ``<weight>.grad`` for each weight that the loss depends on.
        draws: for each random input, the function that draws it from torch's global generators.
    """

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    draws: tuple[Callable[[], Tensor], ...]

    def feed(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """The model's inputs as NumPy arrays by name, from the program's; random inputs are drawn now.

        Args:
            inputs: of the program, noise included.
        """
        given = [*inputs, *(draw() for draw in self.draws)]
        wide = [x.float() if x.dtype in NARROW else x for x in given]
        return {name: x.numpy() for name, x in zip(self.inputs, wide, strict=True)}

    def operations(self) -> dict[str, int]:
        """How often the model has each operation."""
        return dict(Counter(node.op_type for node in self.model.graph.node))


def export_program(program: GradientProgram, inputs: Sequence[Tensor], others: Sequence[str] = ()) -> ExportedProgram:
    """Export a captured program to ONNX.

    The graph is traced once more into core ATen without in-place operations, with attention, convolution gradients and
    sums over repeated indices written out (see ``decompositions.py``), and translated by the table in ``operators.py``.
    Int8 products become ``MatMulInteger``.

    Args:
        program: as captured.
        inputs: of the program, noise included: their shapes are the model's.
        others: names of frozen parameters and buffers, in order; they count as the batch's where left out.

    Returns:
        The model, with the names of its inputs and outputs.

    Raises:
        NotExportable: naming every operation that ONNX has no form of, and the layer that it belongs to.
    """
    if inputs[0].device.type != "cpu":
        raise NotExportable(f"its inputs are on {inputs[0].device}, and it is exported and run on the CPU alone")
    try:
        lifted, draws = lift_random(program.graph)
    except NotCompilable as error:
        raise NotExportable(str(error)) from error
    examples = [*(x.clone() for x in inputs), *(draw() for draw in draws)]
    with torch.no_grad():
        graph = make_fx(functionalize(lifted), decompositions())(*examples)
    names = [*_input_names(program, len(inputs), others), *(f"random.{number}" for number in range(len(draws)))]
    results = ["loss", *(f"{name}.grad" for name in program._used)]
    model = translate(graph, names, results, program.names)
    return ExportedProgram(model, tuple(names), tuple(results), tuple(draws))


def translate(
    graph: fx.GraphModule, inputs: Sequence[str], results: Sequence[str], weights: Sequence[str] = ()
) -> onnx.ModelProto:
    """Translate a functional graph of core ATen operations to ONNX.

    Args:
        graph: as ``make_fx`` leaves it, changed in place; its shapes are the model's.
        inputs: names for its inputs.
        results: names for its outputs.
        weights: names of the inputs that are weights, to tell layers by.

    Returns:
        The model. Inputs and outputs that are bfloat16 or float16 in the graph are fp32 in it.

    Raises:
        NotExportable: naming every operation that is not in the table.
    """
    _forget_writes(graph)
    builder = Builder()
    missing: dict[str, dict[str, None]] = {}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    owners = {node: name for node, name in zip(placeholders, inputs, strict=True) if name in weights}
    for node, name in zip(placeholders, inputs, strict=True):
        builder.name(node, name)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = getattr(graph, node.target)
            builder.name(node, builder.constant(value.detach(), value.dtype))
        elif node.op == "call_function":
            try:
                builder.name(node, _translated(builder, node))
            except _Missing:
                missing.setdefault(str(node.target), {})[nearest_layer(node, owners)] = None
                builder.name(node, _Unknown("unknown"))  # go on, to find what else is missing
    if missing:
        found = "; ".join(f"{target} (in {', '.join(where)})" for target, where in sorted(missing.items()))
        raise NotExportable(f"ONNX has no form of these operations: {found}")
    for node, name in zip(outputs(graph), results, strict=True):
        builder.nodes.append(helper.make_node("Identity", [builder[node]], [name]))
    body = helper.make_graph(
        builder.nodes,
        "gradient_program",
        [_described(node, name) for node, name in zip(placeholders, inputs, strict=True)],
        [_described(node, name) for node, name in zip(outputs(graph), results, strict=True)],
        builder.constants,
    )
    later = any(node.op_type == "BitCast" for node in builder.nodes)
    opset = helper.make_opsetid("", BITCAST_OPSET if later else OPSET)
    return helper.make_model(body, opset_imports=[opset], ir_version=IR_VERSION)


class _Missing(Exception):
    """An operation that is not in the table."""


class _Unknown(str):
    """The name of the value of a missing operation, or of each of its values."""

    def __getitem__(self, index: Any) -> _Unknown:
        return self


def _translated(builder: Builder, node: fx.Node) -> Any:
    if node.target is getitem:
        source, index = node.args
        return builder.part(source, index)  # type: ignore[arg-type]
    if node.target not in OPERATORS:
        raise _Missing
    value = OPERATORS[node.target](builder, node, *node.args, **node.kwargs)
    if value is NotImplemented:
        raise _Missing
    return value if isinstance(value, tuple) or node.target in MOVES else builder.rounded(value, dtype_of(node))


def nearest_layer(node: fx.Node, weights: dict[fx.Node, str]) -> str:
    """The layer that owns the nearest weight among the nodes that this one is computed from.

    Args:
        node: of a graph.
        weights: the graph's inputs that are weights, and their names.
    """
    queue, seen = deque([node]), {node}
    while queue:
        at = queue.popleft()
        if at in weights:
            return weights[at].rpartition(".")[0] or weights[at]
        queue.extend(source for source in at.all_input_nodes if source not in seen)
        seen.update(at.all_input_nodes)
    return "what comes before the first layer"


def _described(node: fx.Node, name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, type_of(dtype_of(node)), shape_of(node))


def _input_names(program: GradientProgram, count: int, others: Sequence[str]) -> list[str]:
    rounded = [f"rounded.{number}.{'scale' if scaled else 'values'}" for number, scaled in _numbered(program)]
    noise = [f"noise.{number}" for number in range(len(program._noise))]
    batch = count - len(program.names) - len(others) - 1 - len(rounded) - len(noise)
    leaves = [f"batch.{number}" for number in range(batch)]
    return [*program.names, *others, *leaves, "tangent", *rounded, *noise]


def _numbered(program: GradientProgram) -> Iterator[tuple[int, bool]]:
    """For each operand of a rounded weight, the number of that weight's use and whether it is the scale."""
    uses: list[Any] = []
    for use, scaled in program._operands:
        if use not in uses:
            uses.append(use)
        yield uses.index(use), scaled


def _forget_writes(graph: fx.GraphModule) -> None:
    """Drop writes to inputs, which are copies; a write to a new tensor is its value. Others stay, and are refused."""
    for node in reversed(graph.graph.nodes):
        if node.target is aten.copy_.default:
            written, source = node.args[:2]
            if written.op == "placeholder":
                node.replace_all_uses_with(source)
                graph.graph.erase_node(node)
            elif len(written.users) == 1:
                node.target = aten.copy.default
    graph.graph.eliminate_dead_code()
    graph.recompile()
