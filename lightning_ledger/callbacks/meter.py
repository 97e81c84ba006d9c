"""Meter a training step that someone else runs, from Lightning's hooks alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.ledger import Ledger
from lightning_ledger.microbatches import Splitter, TokenWeights, shape_key
from lightning_ledger.program import count_in_shadow, is_compiled, trainable


class StepMeter:
    """Charges a ledger for training and validation batches, counting each new shape once while it runs.

        on_train_batch_start    new shape: start counting, forward
        on_before_backward      go on, backward
        on_after_backward       stop
        on_train_batch_end      charge scarce/forward and scarce/backward

    Under manual optimization the passes of a batch follow no rule, so every batch is counted.

    Args:
        ledger: to charge.
        warn: called with the names of heavy operations without a FLOP formula.
        tokens: counts valid targets, if given.
    """

    def __init__(self, ledger: Ledger, warn: Callable[[set[str]], None], tokens: TokenWeights | None = None) -> None:
        self._ledger = ledger
        self._warn = warn
        self._tokens = tokens
        self._splitter = Splitter()
        self._counted: dict[Hashable, StepFlops] = {}
        self._counter: FlopCounter | None = None
        self._running = contextlib.ExitStack()
        self._backward = False
        self._started: Hashable = None

    def start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """A training batch begins."""
        self.stop()
        self._counter, self._backward = None, False
        key = self._started = self._key(module, batch)
        if key in self._counted and module.automatic_optimization:
            return
        if is_compiled(module):
            counter = count_in_shadow(module, (batch, batch_idx), trainer.strategy.precision_plugin.train_step_context)
            self._keep(key, counter)
            self._ledger.charge("setup/checks", counter.counts().work())
            return
        self._enter()

    def before_backward(self) -> None:
        """The loss is there."""
        self._backward = True
        if self._counter is not None:
            self._counter.phase = "backward"

    def after_backward(self, module: pl.LightningModule) -> None:
        """The gradients are there; what an optimizer multiplies is not the step's."""
        if self._counter is not None:
            self._counter.phase = "forward"
        if module.automatic_optimization:
            self.stop()

    def end(self, module: pl.LightningModule, batch: Any) -> StepFlops:
        """The batch is done: charge it.

        Args:
            module: the user's module.
            batch: the batch.

        Returns:
            What the batch took.
        """
        self.stop()
        if self._counter is not None:
            flops = self._counter.counts()
            self._warn(self._counter.uncounted)
            # A step that changed its own trainable set is another one next time.
            same = isinstance(self._started, tuple) and self._started[1] == tuple(trainable(module))
            if self._backward and module.automatic_optimization and same:
                self._counted[self._started] = flops
        else:
            flops = self._counted[self._started]
        samples, tokens = self.samples(batch), self._tokens.count(batch) if self._tokens else 0
        forward = flops.work("forward", passes=1, samples=samples, tokens=tokens)
        if module.automatic_optimization and not self._backward:  # training_step returned None
            self._ledger.charge("waste/skipped_step", forward)
            return flops
        self._ledger.charge("scarce/forward", forward)
        self._ledger.charge("scarce/backward", flops.work("backward"))
        self._ledger.charge_exact_equivalent(flops.work(passes=1, samples=samples, tokens=tokens))
        return flops

    def start_validation(self, module: pl.LightningModule, batch: Any) -> None:
        """A validation batch begins. A compiled module runs the first of each shape eagerly, to be seen."""
        self.stop()
        self._counter = None
        if ("validation", shape_key(batch)) not in self._counted:
            if is_compiled(module):
                self._running.enter_context(torch.compiler.set_stance("force_eager"))
            self._enter()

    def end_validation(self, batch: Any) -> None:
        """A validation batch is done: charge it."""
        self.stop()
        key = ("validation", shape_key(batch))
        if self._counter is not None:
            self._keep(key, self._counter)
        flops = self._counted[key].work("forward", passes=1, samples=self.samples(batch))
        self._ledger.charge("scarce/validation", flops)

    def stop(self) -> None:
        """Stop counting, wherever the step was left."""
        self._running.close()

    def samples(self, batch: Any) -> int:
        """Samples in the batch, 0 where its structure does not tell."""
        try:
            return self._splitter.batch_size(batch)
        except (TypeError, ValueError):
            return 0

    def _enter(self) -> None:
        self._counter = self._running.enter_context(FlopCounter())

    def _keep(self, key: Hashable, counter: FlopCounter) -> None:
        self._counted[key] = counter.counts()
        self._warn(counter.uncounted)

    @staticmethod
    def _key(module: pl.LightningModule, batch: Any) -> Hashable:
        # Freezing a part shortens the backward pass without changing any shape.
        return shape_key(batch), tuple(trainable(module))
