"""What the two processes of the DDP tests run, and the single process they are compared with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import Work
from lightning_ledger.microbatches import TokenWeights
from lightning_ledger.strategies import PredictedGradientDDPStrategy, PredictedGradientStrategy
from tests.lightning_runs import TokenModel, trainer, weights

BATCH = dict[str, Tensor]


def rank() -> int:
    """Of this process; 0 where there is only one."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


class Model(TokenModel):
    """A :class:`TokenModel` with an optimizer.

    Args:
        optimizer: ``"sgd"`` or ``"adamw"``.
    """

    def __init__(self, optimizer: str = "sgd", **options: Any) -> None:
        super().__init__(**options)
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Watch(pl.Callback):
    """Gradients as ``on_after_backward`` sees them, window by window, and how many were None."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.missing: list[list[str]] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        named = dict(pl_module.named_parameters())
        self.missing.append([name for name, p in named.items() if p.grad is None])
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in named.values()]
        self.gradients.append(torch.cat([p.detach().double().flatten() for p in parts]))


class CountedReduction(pl.Callback):
    """Counts what DDP reduces, by its own communication hook."""

    def __init__(self) -> None:
        self.buckets: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants the very types, not their names
            self.buckets.append(bucket.buffer().numel())
            return allreduce_hook(None, bucket)

        trainer.strategy.model.register_comm_hook(None, hook)


@dataclass
class Seen:
    """What a run showed, in plain values: it travels between processes."""

    weights: Tensor
    gradients: list[Tensor]
    missing: list[list[str]]
    logged: dict[str, float]
    totals: dict[str, Work]
    exact_equivalent: Work


def fit(
    batches: Sequence[BATCH],
    prediction: dict[str, Any] | None,
    *more: pl.Callback,
    correction: bool = True,
    model: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    module: pl.LightningModule | None = None,
    directory: str | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Seen:
    """Train on these batches, one after another, with the strategy that fits the number of processes.

    Args:
        batches: of this process.
        prediction: arguments of ``GradientPrediction``; None for stock Lightning.
        *more: callbacks.
        correction: with ``ControlVariate``.
        model: arguments of :class:`Model`.
        strategy: arguments of the DDP strategy.
        module: to train instead of a new :class:`Model`.
        directory: of the run.
        ckpt_path: to continue from.
        **options: of the Trainer.
    """
    torch.manual_seed(0)
    module = module or Model(**(model or {}))
    callbacks: list[pl.Callback] = [ledger := ComputeLedger(), watch := Watch()]
    several, chosen = ranks() > 1, dict(strategy or {})
    used: Any
    if prediction is None:
        used = pl.strategies.DDPStrategy(**chosen) if several else "auto"
    else:
        settings = {"format": "fp32", "microbatches": 4, "weights": TokenWeights(), **prediction}
        callbacks.append(GradientPrediction(**settings))
        if correction:
            callbacks.append(ControlVariate())
        used = PredictedGradientDDPStrategy(**chosen) if several else PredictedGradientStrategy()
    with tempfile.TemporaryDirectory() as scratch:
        fitted = trainer(
            Path(directory or scratch),
            *callbacks,
            *more,
            strategy=used,
            devices=ranks(),
            use_distributed_sampler=False,
            **{"max_epochs": 1, **options},
        )
        fitted.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path, weights_only=False)
    logged = {name: float(value) for name, value in fitted.callback_metrics.items()}
    return Seen(
        weights(module), watch.gradients, watch.missing, logged, ledger.ledger.totals(), ledger.ledger.exact_equivalent
    )
