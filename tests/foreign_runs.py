"""Runs of modules from other packages, as those packages have them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import trainer

STEPS, BATCH, N = 50, 16, 4


class Losses(pl.Callback):
    """``gpcv/loss``, batch by batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["gpcv/loss"]))


def predicted(**settings: Any) -> list[pl.Callback]:
    """The whole method: int8 predictions of four micro-batches, one of them exact."""
    return [ComputeLedger(), GradientPrediction(**{"microbatches": N, **settings}), ControlVariate()]


def train(
    directory: Path, module: pl.LightningModule, data: DataLoader[Any], settings: dict[str, Any], **options: Any
) -> pl.Trainer:
    """Train for 50 steps with predictions and the correction; the loss falls, and most of the work is the fleet's.

    Args:
        directory: for the run's files.
        module: as its package has it.
        data: training batches.
        settings: of ``GradientPrediction``.
        options: of the Trainer; ``validation`` is a loader.
    """
    losses, stack, validation = Losses(), predicted(**settings), options.pop("validation", None)
    callbacks = [*options.pop("callbacks", []), *stack, losses]
    run = trainer(directory, *callbacks, strategy=PredictedGradientStrategy(), max_steps=STEPS, **options)
    run.fit(module, data, validation)
    assert run.global_step == len(losses.seen) == STEPS
    first, last = sum(losses.seen[:10]), sum(losses.seen[-10:])
    assert last < 0.9 * first, losses.seen
    totals = stack[0].ledger.totals()  # type: ignore[attr-defined]
    assert totals["fleet/prediction"].samples == (N - 1) * totals["scarce/forward"].samples > 0
    return run


def windows(length: int, count: int = STEPS * BATCH) -> Tensor:
    """Windows of the source of Python's ``argparse``, byte by byte, in a random order.

    Args:
        length: bytes of one.
        count: how many.
    """
    source = torch.tensor(list(inspect.getsource(argparse).encode()))
    starts = torch.randint(len(source) - length, (count, 1), generator=torch.Generator().manual_seed(0))
    return source[starts + torch.arange(length)]


def loader(samples: Sequence[Any]) -> DataLoader[Any]:
    """Batches of these samples, in order."""
    return DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type]
