"""Correct predicted gradients by a few exact ones."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import lightning.pytorch as pl

from lightning_ledger.callbacks.common import checked_state, log_values, predicting_strategy
from lightning_ledger.control_variate import Scope, Statistics
from lightning_ledger.estimation import Correction


class ControlVariate(pl.Callback):
    """Adds ``(n/k) sum_C w_i (g_i - lam h_i)`` to the sum of predictions: their error becomes variance, not bias.

    Needs ``GradientPrediction``. The estimate is in ``.grad`` when ``on_after_backward`` fires. It logs the keys of
    :func:`lightning_ledger.control_variate.report`, priced with the ``ComputeLedger``'s price book where there is one.

    Args:
        coefficient: lam: ``"optimal"`` for the running estimate of ``1 + cov(g - h, h) / var(h)``, or a number.
        scope: one optimal coefficient per ``"layer"``, or one for all (``"global"``).
        decay: of the running averages behind the statistics, per step.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> ControlVariate(coefficient=0.8).correction.coefficient
        0.8
    """

    KIND, SCHEMA = "lightning_ledger.ControlVariate", 1

    def __init__(
        self, coefficient: Literal["optimal"] | float = "optimal", scope: Scope = "layer", decay: float = 0.95
    ) -> None:
        if isinstance(coefficient, str) and coefficient != "optimal":
            raise ValueError(f"coefficient={coefficient!r} is unknown: pass 'optimal' or a number such as 1.0.")
        if scope not in ("layer", "global"):
            raise ValueError(f"scope={scope!r} is unknown: pass 'layer' or 'global'.")
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay!r} must be at least 0 and below 1; 0.95 remembers about 40 steps.")
        number = None if isinstance(coefficient, str) else float(coefficient)
        self.correction = Correction(number, scope, decay)
        self._module: weakref.ref[pl.LightningModule] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: everything but the reference to the module."""
        return {**self.__dict__, "_module": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Configure the strategy."""
        if stage == "fit":
            if self._module is not None and self._module() is not pl_module:  # another module, another run
                self.correction.statistics = None
            self._module = weakref.ref(pl_module)
            predicting_strategy(trainer, self).correct_with(self.correction)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the statistics."""
        log_values(pl_module, predicting_strategy(trainer, self).statistics_values)

    def state_dict(self) -> dict[str, Any]:
        """The statistics."""
        statistics = self.correction.statistics
        return {
            "kind": self.KIND,
            "schema": self.SCHEMA,
            "statistics": None if statistics is None else statistics.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the statistics of the checkpoint."""
        statistics = checked_state(state_dict, self.KIND, self.SCHEMA)["statistics"]
        self.correction.statistics = None if statistics is None else Statistics.from_state_dict(statistics)
