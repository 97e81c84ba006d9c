"""The exact side of a step: the user's own training step, and its backward pass, on the micro-batches of C."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ledger.estimation.accumulation import add
from lightning_ledger.estimation.merged_logs import merged_logs
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.flops import FlopCounter
from lightning_ledger.microbatches import MicroBatch, private_copy
from lightning_ledger.program import Context, refuse_detached, seeded, trainable, training_loss, without_power_iteration


class ExactPasses:
    """The exact passes of one batch: all forward, then all backward.

    Args:
        module: the user's module.
        metering: charged for each pass.
        context: the Trainer's precision context.

    Attributes:
        losses: by micro-batch index.
        skipped: indices whose training step returned None.
        output: what the last training step returned.
    """

    def __init__(self, module: pl.LightningModule, metering: StepMetering, context: Context) -> None:
        self._module = module
        self._metering = metering
        self._context = context
        self._graphs: list[tuple[MicroBatch, Tensor, FlopCounter | None]] = []
        self.losses: dict[int, float] = {}
        self.skipped: list[int] = []
        self.output: Any = None

    def forward(self, parts: Sequence[MicroBatch], seeds: Sequence[int], arguments: Sequence[Any]) -> None:
        """Run the training step on each micro-batch, under its seed; what they log is merged.

        Args:
            parts: the micro-batches of C.
            seeds: one for each.
            arguments: the rest of what ``training_step`` takes.
        """
        device = next(self._module.parameters()).device
        with merged_logs(self._module, len(parts)) as logs, contextlib.ExitStack() as after_first:
            for number, (part, seed) in enumerate(zip(parts, seeds, strict=True)):
                if number == 1:
                    after_first.enter_context(without_power_iteration(self._module))
                logs.weight = part.weight
                counter = self._metering.counter(part, arguments)
                start = time.perf_counter()
                with seeded(seed, device), self._context(), counter or contextlib.nullcontext():
                    self.output = self._module.training_step(private_copy(part.data), *arguments)
                loss = training_loss(self.output, self._module)
                seconds = time.perf_counter() - start
                if loss is None:
                    self.skipped.append(part.index)
                    self._metering.charge_exact("waste/skipped_step", "forward", part, counter, seconds)
                    continue
                refuse_detached(loss, self._module)
                self._graphs.append((part, loss, counter))
                self.losses[part.index] = float(loss.detach())
                self._metering.charge_exact("scarce/forward", "forward", part, counter, seconds)

    def backward(
        self,
        scales: Sequence[float],
        capture: Mapping[str, Tensor],
        among: Collection[int] | None = None,
        before_last: Callable[[Tensor], Tensor] | None = None,
        apart: bool = False,
    ) -> list[dict[str, Tensor]]:
        """Backward through every pass, adding ``scale * gradient`` to each ``.grad``; graphs are freed on the way.

        Args:
            scales: by micro-batch index of the whole batch.
            capture: parameters whose added gradients are wanted.
            among: micro-batches whose gradients are wanted; by default of all.
            before_last: called with the last loss, just before its backward pass, for the loss to use instead; with a
                zero if there is none. What then becomes of ``.grad`` does not show in the captured gradients.
            apart: run autograd's own accumulation into ``.grad`` for no loss but one that ``before_last`` replaced.

        Returns:
            Pass by pass, the captured gradients, scaled.
        """
        captured, reduced = [], False
        while self._graphs:
            part, loss, counter = self._graphs.pop(0)
            last = not self._graphs
            if last and before_last is not None:
                given, loss, before_last = loss, before_last(loss), None
                reduced = loss is not given
            start = time.perf_counter()
            if counter:
                counter.phase = "backward"
            wanted = capture if among is None or part.index in among else {}
            with _capturing(wanted, not last, reduced) as gradients, counter or contextlib.nullcontext():
                backward = self._backward_apart if apart and not reduced else torch.autograd.backward
                backward(loss, torch.full_like(loss, scales[part.index]))
            if wanted:
                captured.append(gradients)
            if counter:
                self._metering.keep(part, counter)
            seconds = time.perf_counter() - start
            self._metering.charge_exact("scarce/backward", "backward", part, counter, seconds)
        if before_last is not None:
            zero = torch.zeros((), device=next(self._module.parameters()).device, requires_grad=True)
            before_last(zero).backward()
        return captured

    def _backward_apart(self, loss: Tensor, scale: Tensor) -> None:
        parameters = trainable(self._module)
        gradients = torch.autograd.grad(loss, list(parameters.values()), scale, allow_unused=True)
        add({n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}, parameters)


@contextlib.contextmanager
def _capturing(parameters: Mapping[str, Tensor], copy: bool, reduced: bool) -> Iterator[dict[str, Tensor]]:
    """Collect the gradients that a backward pass adds to these leaves, whatever ``.grad`` held before.

    A leaf's hook sees the sum over its uses, once a backward; under reentrant checkpointing, once a part of it. What
    it sees may become the leaf's ``.grad``, to which the next pass adds in place, and which DDP averages in place:
    ``copy`` where a pass follows, and where gradients are ``reduced`` if there is no ``.grad`` yet.
    """
    captured: dict[str, Tensor] = {}

    def keep(name: str, gradient: Tensor | None) -> None:
        if gradient is None:  # reached without a gradient
            return
        if name in captured:
            captured[name] = captured[name] + gradient
        else:
            becomes_grad = copy or (reduced and parameters[name].grad is None)
            captured[name] = gradient.clone() if becomes_grad else gradient.detach()

    handles = [parameter.register_hook(functools.partial(keep, name)) for name, parameter in parameters.items()]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
