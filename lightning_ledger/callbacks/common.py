"""What the callbacks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ledger.strategies import PredictedGradients

C = TypeVar("C", bound=pl.Callback)


def callback_of(trainer: pl.Trainer, kind: type[C]) -> C | None:
    """The Trainer's first callback of this class, if it has one."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def predicting_strategy(trainer: pl.Trainer, callback: pl.Callback) -> PredictedGradients:
    """The Trainer's strategy, if it predicts gradients.

    Raises:
        MisconfigurationException: if it does not.
    """
    strategy = trainer.strategy
    if isinstance(strategy, PredictedGradients):
        return strategy
    raise MisconfigurationException(
        f"{type(callback).__name__} needs a strategy that predicts gradients, but the Trainer runs "
        f"{type(strategy).__name__}, which would train on exact gradients as if the callback were not there. Pass "
        f"Trainer(strategy={_counterpart(strategy)}()), or in YAML `strategy: {{class_path: "
        f"lightning_ledger.strategies.{_counterpart(strategy)}}}`. Only ComputeLedger works under any strategy."
    )


def _counterpart(strategy: Strategy) -> str:
    """Ours that does what this one does, as nearly as there is one: DeepSpeed, for one, hides ``.grad`` from all."""
    if isinstance(strategy, (ModelParallelStrategy, FSDPStrategy)):
        return "PredictedGradientFSDPStrategy"
    return "PredictedGradientDDPStrategy" if isinstance(strategy, ParallelStrategy) else "PredictedGradientStrategy"


def log_values(module: pl.LightningModule, values: Mapping[str, float]) -> None:
    """Log through the module, so that the values join the user's own row; in double precision."""
    exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    module.log_dict(exact, on_step=True, on_epoch=False, batch_size=1)


def checked_state(state: Mapping[str, Any], kind: str, schema: int) -> Mapping[str, Any]:
    """A callback's checkpoint state, refused by name if it is another's or another version's."""
    found = (state.get("kind"), state.get("schema"))
    if found != (kind, schema):
        raise ValueError(
            f"The checkpoint holds a state of kind {found[0]!r}, schema {found[1]!r}; this version reads {kind!r}, "
            f"schema {schema}. Resume with the version of lightning-ledger that wrote it."
        )
    return state


def wandb_runs(trainer: pl.Trainer) -> list[Any]:
    """The W&B runs among the loggers, on the process that writes them."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def update_wandb_config(trainer: pl.Trainer, values: Mapping[str, Any]) -> None:
    """Add values to the config of every W&B run."""
    for run in wandb_runs(trainer):
        run.config.update(dict(values), allow_val_change=True)
