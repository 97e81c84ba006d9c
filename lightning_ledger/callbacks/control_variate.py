"""Correct predicted gradients by a few exact ones."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import lightning.pytorch as pl

from lightning_ledger.callbacks.common import checked_state, log_values, predicting_strategy
from lightning_ledger.control_variate import Scope, Statistics
from lightning_ledger.estimation import Centre, Correction


class ControlVariate(pl.Callback):
    """Adds ``(n/k) sum_C w_i (g_i - lam h_i)`` to the sum of predictions: their error becomes variance, not bias.

    Needs ``GradientPrediction``. The estimate is in ``.grad`` when ``on_after_backward`` fires. It logs the keys of
    :func:`lightning_ledger.control_variate.report`, priced with the ``ComputeLedger``'s price book where there is one,
    and ``gpcv/noise_scale_samples``, the noise scale in samples, where samples can be counted. Under an optimizer with
    second moments (Adam, AdamW, RMSprop, Adagrad, ...) all of them but ``gpcv/coefficient``, ``gpcv/cosine`` and
    ``gpcv/bias_z`` are logged a second time, under ``gpcv/adam/``, for gradients divided by the root of that moment.

    Args:
        coefficient: lam: ``"optimal"`` for the running estimate of ``1 + cov(g - h, h) / var(h)``, or a number.
        scope: one optimal coefficient per ``"layer"``, or one for all (``"global"``).
        decay: of the running averages behind the statistics, per observation.
        observe_every: optimizer steps between two observations.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> ControlVariate(coefficient=0.8).correction.coefficient
        0.8
    """

    KIND, SCHEMA = "lightning_ledger.ControlVariate", 1

    def __init__(
        self,
        coefficient: Literal["optimal"] | float = "optimal",
        scope: Scope = "layer",
        decay: float = 0.95,
        observe_every: int = 1,
    ) -> None:
        if isinstance(coefficient, str) and coefficient != "optimal":
            raise ValueError(f"coefficient={coefficient!r} is unknown: pass 'optimal' or a number such as 1.0.")
        if scope not in ("layer", "global"):
            raise ValueError(f"scope={scope!r} is unknown: pass 'layer' or 'global'.")
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay!r} must be at least 0 and below 1; 0.95 remembers about 40 steps.")
        if isinstance(observe_every, bool) or not isinstance(observe_every, int) or observe_every < 1:
            raise ValueError(f"observe_every={observe_every!r} must be an integer of at least 1.")
        number = None if isinstance(coefficient, str) else float(coefficient)
        self.correction = Correction(number, scope, decay, observe_every)
        self._module: weakref.ref[pl.LightningModule] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: everything but the reference to the module."""
        return {**self.__dict__, "_module": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Configure the strategy."""
        if stage == "fit":
            if self._module is not None and self._module() is not pl_module:  # another module, another run
                c = self.correction
                self.correction = Correction(c.coefficient, c.scope, c.decay, c.observe_every)
            self.correction.allocation = self.correction.centre = None  # AdaptiveAllocation sets them later
            self._module = weakref.ref(pl_module)
            predicting_strategy(trainer, self).correct_with(self.correction)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Automatic optimization has one optimizer: its metric is what its updates are scaled by."""
        self.correction.optimizer = trainer.optimizers[0] if trainer.optimizers else None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let go of the optimizer."""
        self.correction.optimizer = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the statistics."""
        log_values(pl_module, predicting_strategy(trainer, self).statistics_values)

    def state_dict(self) -> dict[str, Any]:
        """The statistics, in both metrics, the centre of fractional draws, and the last cost ratios."""
        c = self.correction
        return {
            "kind": self.KIND,
            "schema": self.SCHEMA,
            "statistics": None if c.statistics is None else c.statistics.state_dict(),
            "adam": None if c.adam is None else c.adam.state_dict(),
            "centre": None if c.centre is None else c.centre.state_dict(),
            "cost_ratios": list(c.cost_ratios),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the statistics of the checkpoint; one of an earlier version has the first of them only."""
        state, c = checked_state(state_dict, self.KIND, self.SCHEMA), self.correction
        statistics, adam, centre = (state.get(name) for name in ("statistics", "adam", "centre"))
        c.statistics = None if statistics is None else Statistics.from_state_dict(statistics)
        c.adam = None if adam is None else Statistics.from_state_dict(adam)
        c.centre = None if centre is None else Centre.from_state_dict(centre)
        now, at_one = state.get("cost_ratios", (0.0, 0.0))
        c.cost_ratios = now, at_one
