"""The steps of Lightning's learning-rate and batch-size finders, which train nothing."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_ledger.callbacks.meter import StepMeter
from lightning_ledger.ledger import Ledger
from lightning_ledger.work import TUNING


class Tuning:
    """Accounts for a finder's steps: it takes all callbacks away, runs, and puts them back.

        trainer.save_checkpoint    ComputeLedger.state_dict, before training: a finder may begin
        the finder's steps         charged by the strategy, or metered from its methods
        checkpoint restored        ComputeLedger.load_state_dict: what was charged since is tuning

    Args:
        trainer: about to fit.
        ledger: charged for the steps; nothing is open in it.
        meter: of the steps, if the strategy does not charge them itself.
    """

    def __init__(self, trainer: pl.Trainer, ledger: Ledger, meter: StepMeter | None) -> None:
        self._trainer = trainer
        self._ledger = ledger
        self._meter = meter
        self._has_unit = ledger.forward_flops is not None
        self._batch: tuple[Any] | None = None
        if meter is not None:
            # In the instance's dict, where they shadow the strategy's own methods; no hook sees a finder's steps.
            trainer.strategy.__dict__.update(training_step=self._training_step, backward=self._backward)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._meter is not None
        self._charge()
        batch, batch_idx, *_ = (*args, *kwargs.values(), 0)
        self._meter.start(self._trainer, self._trainer.lightning_module, batch, batch_idx)
        self._batch = (batch,)
        try:
            return type(self._trainer.strategy).training_step(self._trainer.strategy, *args, **kwargs)
        except BaseException:
            self._drop()
            raise

    def _backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self._meter is not None
        self._meter.before_backward()
        try:
            return type(self._trainer.strategy).backward(self._trainer.strategy, closure_loss, *args, **kwargs)
        except BaseException:
            self._drop()
            raise
        finally:
            self._meter.after_backward(self._trainer.lightning_module)

    def _charge(self) -> None:
        if self._meter is not None and self._batch is not None:
            (batch,), self._batch = self._batch, None
            self._meter.end(self._trainer.lightning_module, batch)

    def _drop(self) -> None:
        """A batch that was too large for the memory, for one."""
        assert self._meter is not None
        self._meter.stop()
        self._batch = None

    def end(self) -> None:
        """The finder is done, if there was one: move what it charged to accounts of its own."""
        self._charge()
        if self._meter is not None:
            for name in ("training_step", "backward"):
                self._trainer.strategy.__dict__.pop(name, None)
        self._ledger.rebook(TUNING)
        if not self._has_unit:
            self._ledger.forget_unit()  # a finder's batches have sizes of their own
