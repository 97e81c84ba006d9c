"""The exact side of a step: the user's own training step, and its backward pass, on the micro-batches of C."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ledger.estimation.merged_logs import merged_logs
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.flops import FlopCounter
from lightning_ledger.microbatches import MicroBatch, private_copy
from lightning_ledger.program import Context, refuse_detached, seeded, training_loss


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
        with merged_logs(self._module, len(parts)) as logs:
            for part, seed in zip(parts, seeds, strict=True):
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
        self, scales: Sequence[float], capture: Mapping[str, Tensor], among: Collection[int] | None = None
    ) -> list[dict[str, Tensor]]:
        """Backward through every pass, adding ``scale * gradient`` to each ``.grad``; graphs are freed on the way.

        Args:
            scales: by micro-batch index of the whole batch.
            capture: parameters whose added gradients are wanted.
            among: micro-batches whose gradients are wanted; by default of all.

        Returns:
            Pass by pass, the captured gradients, scaled.
        """
        captured = []
        while self._graphs:
            part, loss, counter = self._graphs.pop(0)
            start = time.perf_counter()
            if counter:
                counter.phase = "backward"
            last = not self._graphs
            wanted = among is None or part.index in among
            with _capturing(capture if wanted else {}, copy=not last) as gradients, counter or contextlib.nullcontext():
                torch.autograd.backward(loss, torch.full_like(loss, scales[part.index]))
            if wanted:
                captured.append(gradients)
            if counter:
                self._metering.keep(part, counter)
            seconds = time.perf_counter() - start
            self._metering.charge_exact("scarce/backward", "backward", part, counter, seconds)
        return captured


@contextlib.contextmanager
def _capturing(parameters: Mapping[str, Tensor], copy: bool) -> Iterator[dict[str, Tensor]]:
    """Collect the gradients that a backward pass adds to these leaves, whatever ``.grad`` held before.

    A leaf's hook sees the sum over its uses, once a backward; under reentrant checkpointing, once a part of it. What
    it sees may become the leaf's ``.grad``, to which the next pass adds in place: ``copy`` where a pass follows.
    """
    captured: dict[str, Tensor] = {}

    def keep(name: str, gradient: Tensor) -> None:
        if name in captured:
            captured[name] = captured[name] + gradient
        else:
            captured[name] = gradient.clone() if copy else gradient.detach()

    handles = [parameter.register_hook(functools.partial(keep, name)) for name, parameter in parameters.items()]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
