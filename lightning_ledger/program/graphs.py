"""Surgery on captured graphs: constants become inputs, random numbers come from outside, gradients leave early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from lightning_ledger.precision import Tape, WeightUse


def lift(graph: fx.GraphModule, tape: Tape) -> tuple[list[tuple[WeightUse, bool]], list[torch.Size]]:
    """Turn the constants that a tape knows into inputs, after those that are there; the rest stay constants.

    Args:
        graph: as traced; changed in place.
        tape: of the trace.

    Returns:
        For each rounded weight that the graph uses, how it is made and whether the input is its scale; and the shape of
        each draw of noise, in order, the unused ones included: the stream of noise goes on behind them.
    """
    weights = [
        (part, (use, scaled)) for use, o in tape.weights for part, scaled in ((o.values, False), (o.scale, True))
    ]
    constants = {id(getattr(graph, str(node.target))): node for node in graph.graph.nodes if node.op == "get_attr"}
    used = [(part, how) for part, how in weights if part is not None and id(part) in constants]
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for number, part in enumerate([*(part for part, _ in used), *tape.noise]):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"lifted_{number}")
        last.meta["shape"] = tuple(part.shape)
        constant = constants.get(id(part))
        if constant is not None:
            last.meta.update(constant.meta)
            for node in [n for n in graph.graph.nodes if n.op == "get_attr" and n.target == constant.target]:
                node.replace_all_uses_with(last)
                graph.graph.erase_node(node)
            delattr(graph, str(constant.target))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return [how for _, how in used], [drawn.shape for drawn in tape.noise]


@dataclass
class Stream:
    """What a streamed graph calls while it runs.

    Attributes:
        draw: gives noise of a shape.
        deliver: takes a gradient by name.
    """

    draw: Callable[[Any], Any] = lambda shape: None
    deliver: Callable[[str, Tensor], object] = lambda name, gradient: None

    def reset(self) -> None:
        """Let go of what a run was given."""
        self.draw, self.deliver = (lambda shape: None), (lambda name, gradient: None)


def streamed(graph: fx.GraphModule, noises: int, names: Sequence[str], stream: Stream) -> fx.GraphModule:
    """A copy of a graph that draws noise where it is used and delivers gradients where they are made: least memory.

    Args:
        graph: whose last ``noises`` inputs are noise, and whose outputs are the loss and the gradients.
        noises: how many.
        names: of the gradients.
        stream: called by the copy.

    Returns:
        The copy: it takes the other inputs and returns the loss.
    """
    copy, nodes = duplicate(graph)
    placeholders = [node for node in copy.nodes if node.op == "placeholder"]

    def draw(shape: Sequence[int]) -> Any:
        return stream.draw(shape)

    def deliver(name: str, gradient: Tensor) -> None:
        stream.deliver(name, gradient)

    loss, *gradients = (nodes[node] for node in outputs(graph))
    at = copy.output(loss)
    position = {node: number for number, node in enumerate(copy.nodes)}
    for placeholder in reversed(placeholders[len(placeholders) - noises :] if noises else []):
        users = [*placeholder.users, at]
        at = min(users, key=position.__getitem__)
        with copy.inserting_before(at):
            drawn = copy.call_function(draw, (placeholder.meta["shape"],))
        position[drawn] = position[at]
        placeholder.replace_all_uses_with(drawn)
        copy.erase_node(placeholder)
        at = drawn  # an unused draw comes before the next one
    written = last_writes(copy)
    for name, gradient in zip(names, gradients, strict=True):
        done = written.get(storage_of(gradient), gradient)
        with copy.inserting_after(done if done.op != "placeholder" else placeholders[-1]):
            copy.call_function(deliver, (name, gradient))
    return fx.GraphModule(graph, copy)


def last_writes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The last node that touches each storage that is written to, by the node that made it.

    A gradient can be filled in after it is named: through a view, or in place. The last node that uses it or a view of
    it stands for its last write, which is never too early.
    """
    written: set[fx.Node] = set()
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        owners = {storage_of(argument) for argument in node.all_input_nodes}
        last.update(dict.fromkeys(owners, node))
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written |= owners
    return {owner: node if node.op != "output" else node.prev for owner, node in last.items() if owner in written}


def storage_of(node: fx.Node) -> fx.Node:
    """The node that made the memory of this one: what it is a view of, or was written into."""
    while node.all_input_nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            returns = node.target._schema.returns
            if not returns or (returns[0].alias_info is None and "Tensor(" not in str(returns[0].type)):
                break
        elif node.target is not getitem:
            break
        node = node.all_input_nodes[0]
    return node


def duplicate(graph: fx.GraphModule) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph without its output, and where each node went."""
    copy, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.graph_copy(graph.graph, nodes)
    return copy, nodes


def outputs(graph: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a graph returns."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return list(output.args[0])


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers; a fused attention without dropout only could."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    places = [place for place, a in enumerate(node.target._schema.arguments) if a.name == "dropout_p"]
    return not places or "dropout_p" in node.kwargs or any(bool(p) for p in node.args[places[0] : places[0] + 1])
