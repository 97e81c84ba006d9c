"""Capture: a training step and its backward pass as one graph of inference operations, without autograd."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.overrides import TorchFunctionMode

from lightning_ledger.microbatches import tensors_apart
from lightning_ledger.precision import Lowering, Tape
from lightning_ledger.program.graphs import Stream, is_random, lift, streamed
from lightning_ledger.program.isolation import ShadowBuffers, seeded, without_metrics
from lightning_ledger.program.step import Context, differentiate

Deliver = Callable[[str, Tensor], object]
"""Takes a gradient, by the name of its weight, as soon as it is known."""

_OURS = tuple(
    f"{folder}{os.sep}"
    for folder in (*(Path(str(m.__file__)).parent for m in (torch, lightning, torchmetrics)), Path(__file__).parents[1])
)


class NotCapturable(Exception):
    """A training step that no graph can stand for; the message says why and where."""


class GradientProgram:
    """A captured training step: (weights, micro-batch, seed) -> (loss, gradients).

    Parameters, buffers, the batch's tensors, the loss's tangent, rounded weights and noise are inputs of its graph;
    what Python decided while it was captured (branches, counters, attributes) is baked in.

    Attributes:
        graph: inputs in the order weights, frozen parameters, buffers, batch, tangent, rounded weights, noise;
            outputs the loss and the gradients of those weights that it depends on.
        names: of the weights, in that order.
        draws: whether the graph draws from the global generators, under the micro-batch's seed.
    """

    def __init__(
        self, graph: fx.GraphModule, names: Sequence[str], used: Sequence[bool], lowering: Lowering, tape: Tape
    ) -> None:
        self.graph = graph
        self.names = tuple(names)
        self.draws = any(is_random(node) for node in graph.graph.nodes)
        # oneDNN's LSTM keeps what its backward pass needs only where gradients are enabled; no input requires one.
        self._grad = any(node.target is torch.ops.aten.mkldnn_rnn_layer.default for node in graph.graph.nodes)
        self._lowering = lowering
        self._operands, self._noise = lift(graph, tape)
        self._used = [name for name, is_used in zip(names, used, strict=True) if is_used]
        self._stream = Stream()
        self._streamed = streamed(graph, len(self._noise), self._used, self._stream)
        self._compiled: Callable[..., Sequence[Tensor]] | None = None

    def __call__(
        self, weights: Mapping[str, Tensor], others: Sequence[Tensor], batch: Any, seed: int, loss_scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Loss and gradients at these weights.

        Args:
            weights: trainable parameters by name.
            others: frozen parameters, then buffers, which the step may write to.
            batch: of the shapes it was captured with; it is not changed.
            seed: of the dropout masks and of the rounding noise.
            loss_scale: multiplies the loss before its backward pass, and is divided out of the gradients.

        Returns:
            The loss and a gradient per weight, None where the loss does not depend on it.
        """
        gradients: dict[str, Tensor | None] = dict.fromkeys(self.names)
        loss = self.run(weights, others, batch, seed, gradients.__setitem__, loss_scale)
        return loss, gradients

    def run(
        self,
        weights: Mapping[str, Tensor],
        others: Sequence[Tensor],
        batch: Any,
        seed: int,
        deliver: Deliver,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """The same, with each gradient delivered when it is known and kept no longer; returns the loss."""
        apart = tensors_apart(batch)
        assert apart is not None, "a batch that was captured can be taken apart"
        inputs = self.inputs(weights, others, apart[0], tangent=loss_scale)
        device = inputs[0].device
        draw = self._lowering.pass_noise(device, seed)
        self._stream.draw = lambda shape: draw(torch.empty(shape, device=device)) if draw else None
        if loss_scale == 1:
            unscale = deliver
        else:

            def unscale(name: str, gradient: Tensor) -> object:
                return deliver(name, gradient / loss_scale)

        self._stream.deliver = unscale
        try:
            with torch.set_grad_enabled(self._grad), seeded(seed, device) if self.draws else contextlib.nullcontext():
                if self._compiled is None:
                    loss: Tensor = self._streamed(*inputs)
                    return loss
                loss, *gradients = self._compiled(*inputs, *map(self._stream.draw, self._noise))
        finally:
            self._stream.reset()
        for name, gradient in zip(self._used, gradients, strict=True):
            unscale(name, gradient)
        return loss

    def inputs(
        self, weights: Mapping[str, Tensor], others: Sequence[Tensor], leaves: Sequence[Tensor], tangent: float = 1.0
    ) -> list[Tensor]:
        """The inputs of the graph, in order, up to the noise; the batch's tensors are copied."""
        own = [weights[name].detach() for name in self.names]
        operands = []
        for use, scaled in self._operands:
            operand = self._lowering.rounded(use)
            part = operand.scale if scaled else operand.values
            assert part is not None
            operands.append(part)
        return [
            *own,
            *(x.detach() for x in others),
            *(x.detach().clone() for x in leaves),
            torch.tensor(tangent, device=own[0].device),
            *operands,
        ]

    def noise(self, seed: int, device: torch.device) -> list[Tensor]:
        """The rest of the inputs: the rounding noise of a pass."""
        draw = self._lowering.pass_noise(device, seed)
        return [draw(torch.empty(shape, device=device)) for shape in self._noise] if draw else []

    def replace(self, compiled: Callable[..., Sequence[Tensor]]) -> None:
        """Run another form of the same graph."""
        self._compiled = compiled


def capture(
    module: pl.LightningModule,
    weights: Mapping[str, Tensor],
    buffers: ShadowBuffers,
    arguments: Sequence[Any],
    seed: int,
    lowering: Lowering,
    context: Context = contextlib.nullcontext,
) -> GradientProgram:
    """Trace the training step and its backward pass inside the lowering mode.

    Args:
        module: the user's module.
        weights: trainable parameters by name.
        buffers: the module's shadow buffers.
        arguments: what ``training_step`` takes: a micro-batch, whose shapes are captured, and the rest, which is
            baked in.
        seed: of the pass that is traced.
        lowering: the number formats.
        context: the Trainer's precision context.

    Raises:
        NotCapturable: with the reason and the user's source line.
    """
    batch, *rest = arguments
    apart = tensors_apart(batch)
    if apart is None:
        raise NotCapturable(f"the batch, a {type(batch).__name__}, holds arrays or objects that hide their tensors")
    leaves, put, _ = apart
    frozen = {name: p for name, p in module.named_parameters() if name not in weights}
    fresh = buffers.fresh()
    counts = [len(weights), len(frozen), len(fresh), len(leaves)]
    tape = Tape()
    used: list[bool] = []

    def traced(*flat: Tensor) -> list[Tensor]:
        groups, at = [], 0
        for count in counts:
            groups.append(flat[at : at + count])
            at += count
        own = [w.detach().requires_grad_() for w in groups[0]]
        replaced = dict(zip([*weights, *frozen, *fresh], [*own, *groups[1], *groups[2]], strict=True))
        with lowering.mode(seed, tape), _NoReading():
            result = differentiate(module, own, replaced, (put(groups[3]), *rest), seed, context, tangent=flat[at])
        if result is None:
            raise NotCapturable("training_step returned None")
        loss, gradients = result
        used[:] = [g is not None for g in gradients]
        return [loss, *(g for g in gradients if g is not None)]

    # Tensors of their own, each apart from the others: two that are one object would be traced as one input.
    flat = [
        *(x.detach() for x in weights.values()),
        *(x.detach() for x in frozen.values()),
        *fresh.values(),
        *(x.clone() for x in leaves),
        torch.ones((), device=next(iter(weights.values())).device),
    ]
    try:
        # Anomaly detection looks at values, too.
        with without_metrics(module), torch.autograd.set_detect_anomaly(False), _said_to_compile():
            graph = make_fx(traced)(*flat)
    except NotCapturable:
        raise
    except Exception as error:
        raise NotCapturable(_because(error)) from error
    return GradientProgram(graph, list(weights), used, lowering, tape)


@contextlib.contextmanager
def _said_to_compile() -> Iterator[None]:
    """Answer yes to ``torch.compiler.is_compiling()``: libraries that ask do not then look at values of tensors."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _Reading(Exception):
    """A Python value was taken out of a traced tensor."""


class _NoReading(TorchFunctionMode):
    """Refuses ways of taking Python values out of a traced tensor that a trace lets pass: they would be baked in."""

    _READING = (Tensor.tolist, Tensor.numpy, Tensor.__array__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READING and _is_of_inputs(args[0]):
            raise _Reading
        return func(*args, **(kwargs or {}))


def _is_of_inputs(tensor: Tensor) -> bool:
    """Whether a traced tensor depends on what is given to the graph, so that its values may be others next time."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    waiting = [] if slot is None else [slot.proxy.node]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            return True
        waiting += [before for before in node.all_input_nodes if before not in seen]
        seen.update(waiting)
    return False


def _because(error: Exception) -> str:
    """The first line of an error, and the innermost line of the user's source that led to it."""
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, _Reading) or "get value out of a tracing tensor" in reason:
        reason = "it takes a Python value out of a tensor, as data-dependent control flow does"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_OURS, "<")) and "contextlib" not in frame.filename:
            return f"{reason} (at {frame.filename}:{frame.lineno}: `{(frame.line or '').strip()}`)"
    return reason
