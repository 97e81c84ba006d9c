"""Workers that die, hang, run out of memory or send NaN: the numbers are those of healthy ones."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_runs import Regression, Samples, trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.fleet import FleetSettings, SimulatedSettings
from lightning_ledger.ledger import Work

SAID = {
    "kill": "died",
    "hang": "did not answer within",
    "memory": "ran out of memory",
    "nan": "sent numbers that are not finite",
}


class Faulty(Regression):
    """Its training step fails on whichever worker first finds a file that says how.

    Args:
        directory: of the files.
        faults: by optimizer step.
    """

    def __init__(self, directory: Path, faults: dict[int, str]) -> None:
        super().__init__(dropout=0.1, optimizer="adamw")
        self.directory, self.faults = directory, faults

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if fault := self.faults.get(self.global_step):
            (self.directory / f"{self.global_step}.{fault}").touch()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss if isinstance(self._trainer, L.Trainer) else self.fail(loss)

    def fail(self, loss: Tensor) -> Tensor:
        for found in self.directory.glob("*.*"):
            try:
                found.unlink()
            except FileNotFoundError:
                continue  # another worker was faster
            if found.suffix == ".kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if found.suffix == ".hang":
                time.sleep(10_000)
            if found.suffix == ".memory":
                raise torch.OutOfMemoryError("no memory is left on this worker")
            if found.suffix == ".nan":
                return loss * float("nan")
        return loss


def fit(
    fleet: FleetSettings, directory: Path, faults: dict[int, str], steps: int, module: L.LightningModule | None = None
) -> tuple[Tensor, dict[str, Work]]:
    L.seed_everything(0, verbose=False)
    module = module or Faulty(directory, faults)
    ledger = ComputeLedger()
    prediction = GradientPrediction(microbatches=4, fleet=fleet, engine="eager")
    callbacks = [prediction, ControlVariate(), ledger]
    trainer(directory / "run", *callbacks, strategy="predicted_gradients", max_steps=steps, max_epochs=steps).fit(
        module, DataLoader(Samples(32), batch_size=8)
    )
    assert not list(directory.glob("*.*"))  # every fault was met
    return weights(module), ledger.ledger.totals()


def check(fleet: FleetSettings, faults: dict[int, str], steps: int, directory: Path) -> None:
    healthy, healthy_work = fit(SimulatedSettings(workers=2), directory, {}, steps)
    with pytest.warns(UserWarning, match="A worker of the fleet") as said:
        found, work = fit(fleet, directory, faults, steps)
    assert torch.equal(found, healthy)
    messages = [str(warning.message) for warning in said]
    for fault in faults.values():
        assert sum(SAID[fault] in message for message in messages) == list(faults.values()).count(fault), messages
    # Each fault costs a chunk, half of the four micro-batches; and another where that waited for the same worker.
    lost = work["waste/lost_prediction"].passes // 2
    assert len(faults) <= lost <= 2 * len(faults)
    for account in ("fleet/prediction", "fleet/control", "scarce/forward", "scarce/backward"):
        assert work[account] == healthy_work[account]
    # Weights are sent to replacements too, and micro-batches again.
    assert work["transfer/weights"].bytes > healthy_work["transfer/weights"].bytes


def test_lost_work_is_done_again_with_the_same_numbers(ray_fleet: Any, tmp_path: Path) -> None:
    ray_fleet.deadline = 4.0
    check(ray_fleet, {1: "kill", 2: "nan", 3: "hang"}, 5, tmp_path)


@pytest.mark.slow
def test_two_hundred_steps_with_a_death_every_twenty_and_one_worker_that_hangs(ray_fleet: Any, tmp_path: Path) -> None:
    ray_fleet.deadline = 20.0
    faults = dict.fromkeys(range(10, 200, 20), "kill") | {15: "memory", 105: "hang"}
    check(ray_fleet, faults, 200, tmp_path)


def test_training_that_diverges_is_no_fault_of_a_worker(ray_fleet: Any, tmp_path: Path) -> None:
    class Diverging(Regression):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return super().loss(batch) * (float("inf") if self.global_step else 1.0)

    before = list(ray_fleet.cluster.workers)
    found, work = fit(ray_fleet, tmp_path, {}, 3, Diverging())
    assert not torch.isfinite(found).all()
    assert ray_fleet.cluster.workers == before  # nobody was replaced
    assert work["waste/lost_prediction"].passes == 2 * 4  # every chunk of the last two steps was asked for twice
