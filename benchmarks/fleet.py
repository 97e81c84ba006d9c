"""Whether predictions on a Ray fleet run while the exact passes do: ``python -m benchmarks.fleet``.

The training step of a small module sleeps for declared times, one in the training process and another on workers, so
that two cores suffice to time a fleet. A step whose passes overlap takes the longer of the two; otherwise their sum.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.fleet import RaySettings


class Sleeper(pl.LightningModule):
    """Sleeps in each training step.

    Args:
        exact: seconds, in the training process.
        predicted: seconds, on a worker.
    """

    def __init__(self, exact: float, predicted: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.exact, self.predicted = exact, predicted

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.exact if isinstance(self._trainer, pl.Trainer) else self.predicted)
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Stopwatch(pl.Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def measure(workers: int, exact: float, predicted: float, steps: int) -> dict[str, float]:
    """Seconds of a step: the median, the first aside, which waits for the workers to start.

    Args:
        workers: of the fleet; the batch has two micro-batches for each.
        exact: seconds of an exact pass; there is one.
        predicted: seconds of a prediction.
        steps: to time.
    """
    watch, n = Stopwatch(), 2 * workers
    prediction = GradientPrediction(
        microbatches=n, engine="eager", fleet=RaySettings(workers=workers), check_separable=False
    )
    trainer = pl.Trainer(
        strategy="predicted_gradients",
        accelerator="cpu",
        callbacks=[prediction, ControlVariate(), watch],
        max_steps=steps + 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    data = TensorDataset(torch.randn(n * (steps + 1), 8))
    trainer.fit(Sleeper(exact, predicted), DataLoader(data, batch_size=n))
    step, fleet = statistics.median(watch.seconds[1:]), 2 * predicted
    return {
        "workers": workers,
        "exact": exact,
        "fleet": fleet,
        "step": step,
        "of longer": step / max(exact, fleet),
        "of sum": step / (exact + fleet),
        "workers busy": fleet / step,
    }


def main() -> None:
    """Measure, print, write."""
    parser = ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=str, default="runs/fleet.json", help="where the numbers go")
    chosen = parser.parse_args()
    found = [measure(chosen.workers, exact, predicted, chosen.steps) for exact, predicted in ((0.4, 0.2), (0.2, 0.4))]
    for row in found:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    path = Path(chosen.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
