"""What a run is set to, as the ledger's header records it for reports."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import lightning.pytorch as pl

from lightning_ledger.callbacks.control_variate import ControlVariate
from lightning_ledger.callbacks.gradient_prediction import GradientPrediction


def run_settings(trainer: pl.Trainer) -> dict[str, Any]:
    """The settings that tell arms apart: predictions, correction, optimizers, accumulation. Call it set up.

    Args:
        trainer: of the run.

    Returns:
        ``prediction``, ``correction`` and ``allocation`` (None without), ``optimizers`` (class, and the learning rate
        of each group before any schedule), ``accumulate_grad_batches``, ``precision``.
    """
    from lightning_ledger.callbacks.adaptive_allocation import AdaptiveAllocation  # which itself needs the ledger

    prediction: dict[str, Any] | None = None
    correction: dict[str, Any] | None = None
    allocation: dict[str, Any] | None = None
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientPrediction):
            p = callback.prediction
            prediction = {f.name: getattr(p, f.name) for f in fields(p) if f.name != "split_fn"}
        elif isinstance(callback, ControlVariate):
            c = callback.correction
            coefficient = "optimal" if c.coefficient is None else c.coefficient
            correction = {"coefficient": coefficient, "scope": c.scope, "decay": c.decay}
        elif isinstance(callback, AdaptiveAllocation):
            allocation = callback.settings
    optimizers = [
        {
            "class": type(optimizer).__qualname__,
            "learning_rates": [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups],
        }
        for optimizer in trainer.optimizers
    ]
    return {
        "prediction": prediction,
        "correction": correction,
        "allocation": allocation,
        "optimizers": optimizers,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "precision": str(trainer.precision),
    }
