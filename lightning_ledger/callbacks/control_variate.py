"""Correct predicted gradients by a few exact ones."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities import move_data_to_device

from lightning_ledger.callbacks.common import callback_of, checked_state, log_values, predicting_strategy
from lightning_ledger.callbacks.gradient_prediction import GradientPrediction
from lightning_ledger.control_variate import Scope, Statistics
from lightning_ledger.estimation import Centre, Correction
from lightning_ledger.estimation.ranks import Ranks


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
        self._ranks = Ranks()
        self._format = ""

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: everything but the reference to the module."""
        return {**self.__dict__, "_module": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Configure the strategy."""
        if stage == "fit":
            c, other = self.correction, self._module is not None and self._module() is not pl_module
            # Another module is another run; and of several formats it is not known yet whose statistics are needed.
            if other or c.others or c.between:
                self.correction = Correction(c.coefficient, c.scope, c.decay, c.observe_every)
            self.correction.allocation = self.correction.centre = None  # AdaptiveAllocation sets them later
            predicts = callback_of(trainer, GradientPrediction)
            self._format = "" if predicts is None else predicts.prediction.format
            self.correction.format = self._format
            self._module = weakref.ref(pl_module)
            strategy = predicting_strategy(trainer, self)
            self._ranks = strategy.ranks
            strategy.correct_with(self.correction)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Automatic optimization has one optimizer: its metric is what its updates are scaled by."""
        self.correction.optimizer = trainer.optimizers[0] if trainer.optimizers else None
        if self.correction.allocation is None:  # a checkpoint may know another format's statistics
            self.correction.use(self._format)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let go of the optimizer."""
        self.correction.optimizer = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the statistics."""
        log_values(pl_module, predicting_strategy(trainer, self).statistics_values)

    def state_dict(self) -> dict[str, Any]:
        """The statistics of every format, in both metrics, the last cost ratios, and the centre of fractional draws.

        Every process has residuals and a centre of its own: they are gathered, as one of them writes the checkpoint.
        """
        c = self.correction
        own: dict[str, Any] = {
            "format": c.format,
            **_state_of(c),
            "centre": None if c.centre is None else c.centre.state_dict(),
            "others": {name: _state_of(other) for name, other in c.others.items()},
            "between": None if c.between is None else _state_of(c.between),
        }
        ranks = {"ranks": self._ranks.gather(move_data_to_device(own, "cpu"))} if self._ranks.together else {}
        return {"kind": self.KIND, "schema": self.SCHEMA, **own, **ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the statistics of the checkpoint; one of an earlier version has the first of them only."""
        state, c = checked_state(state_dict, self.KIND, self.SCHEMA), self.correction
        if saved := state.get("ranks"):  # of more processes, the new ones begin with the residuals of the first
            state = saved[self._ranks.rank if self._ranks.rank < len(saved) else 0]
        centre = state.get("centre")
        _restore(c, state)
        c.format = state.get("format") or c.format
        c.others.clear()
        c.between = None
        c.centre = None if centre is None else Centre.from_state_dict(centre)
        for name, of_format in state.get("others", {}).items():
            c.others[name] = Correction(c.coefficient, c.scope, c.decay, c.observe_every)
            _restore(c.others[name], of_format)
        if state.get("between") is not None:
            c.between = Correction(1.0, c.scope, c.decay)
            _restore(c.between, state["between"])


def _state_of(correction: Correction) -> dict[str, Any]:
    """What is known of one format."""
    statistics, adam = correction.statistics, correction.adam
    return {
        "statistics": None if statistics is None else statistics.state_dict(),
        "adam": None if adam is None else adam.state_dict(),
        "cost_ratios": list(correction.cost_ratios),
    }


def _restore(correction: Correction, state: Mapping[str, Any]) -> None:
    statistics, adam = state.get("statistics"), state.get("adam")
    correction.statistics = None if statistics is None else Statistics.from_state_dict(statistics)
    correction.adam = None if adam is None else Statistics.from_state_dict(adam)
    now, at_one = state.get("cost_ratios", (0.0, 0.0))
    correction.cost_ratios = now, at_one
