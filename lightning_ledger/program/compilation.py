"""Compilation: a captured program through TorchInductor, with its random numbers as inputs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from torch import Tensor, fx

from lightning_ledger.program.capture import GradientProgram
from lightning_ledger.program.graphs import duplicate, is_random, outputs

# Random operations whose result depends on the shapes of their arguments alone.
_LIFTABLE = {
    "bernoulli_",
    "exponential_",
    "normal_",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random_",
    "uniform_",
}


class NotCompilable(Exception):
    """A program that stays as it was captured; the message says why."""


def compile_program(program: GradientProgram, inputs: Sequence[Tensor]) -> None:
    """Compile a program for the shapes of these inputs; TorchInductor keeps what it compiled on disk.

    Random numbers are drawn before, in the order and under the seed of the captured program, and given to the compiled
    one: a compiler would draw others.

    Args:
        program: will run in its compiled form from now on.
        inputs: of the program.

    Raises:
        NotCompilable: with the reason; the program is then as it was.
    """
    graph, draws = lift_random(program.graph)
    start = time.perf_counter()
    masks = [draw() for draw in draws]
    try:
        with _progress("compiling the captured program (minutes the first time, then seconds)"), torch.no_grad():
            compiled = torch._inductor.compile(graph, [*inputs, *masks])
            compiled(*inputs, *masks)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise NotCompilable(f"TorchInductor failed with {type(error).__name__}: {lines[0]}") from error
    rank_zero_info(f"Compiled the captured program in {time.perf_counter() - start:.1f} s.")

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = compiled(*inputs, *[draw() for draw in draws])
        return outputs

    program.replace(run)


def lift_random(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Callable[[], Tensor]]]:
    """A copy of a graph that takes its random numbers as further inputs, and the functions that draw them, in order.

    Raises:
        NotCompilable: if a random operation depends on the values of its arguments.
    """
    copy, nodes = duplicate(graph)
    copy.output([nodes[node] for node in outputs(graph)])
    last = [node for node in copy.nodes if node.op == "placeholder"][-1]
    draws: list[Callable[[], Tensor]] = []
    for node in [node for node in copy.nodes if is_random(node)]:
        if node.target._overloadpacket.__name__ not in _LIFTABLE:
            raise NotCompilable(f"its random operation {node.target} depends on the values of its arguments")
        draws.append(_drawing(node))
        with copy.inserting_after(last):
            last = copy.placeholder(f"random_{len(draws)}")
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
        copy.erase_node(node)
    copy.eliminate_dead_code()
    return fx.GraphModule(graph, copy), draws


def _drawing(node: fx.Node) -> Callable[[], Tensor]:
    """What draws a node's random numbers from the shapes of its arguments."""

    def stand_in(argument: fx.Node) -> Callable[[], Tensor]:
        value = argument.meta["val"]
        shape, stride, dtype, device = tuple(value.shape), value.stride(), value.dtype, value.device
        return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)

    arguments = [stand_in(a) if isinstance(a, fx.Node) else (lambda a=a: a) for a in node.args]
    kwargs, target = dict(node.kwargs), node.target
    assert callable(target)
    return lambda: target(*[make() for make in arguments], **kwargs)


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """A line that shows that something long is under way, where somebody watches."""
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield
