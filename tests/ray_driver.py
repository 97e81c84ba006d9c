"""A training process with its own Ray cluster, for tests that kill one or the other: ``python ray_driver.py MODE``.

It prints the processes that belong to it once it trains, and at the end the exact share of every step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning_runs import Regression, Samples, trainer
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.fleet import RaySettings

SECONDS = 120


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below one."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        below = {int(row[0]): row[2] for row in rows if int(row[1]) in parents and int(row[0]) not in found}
        found |= below
        parents = set(below)
    return {child: command for child, command in found.items() if not command.startswith("ps -eo")}


class Watch(L.Callback):
    """Reports, and in mode "lose" kills the whole cluster in the middle of training and waits for its return."""

    def __init__(self, mode: str) -> None:
        self.mode, self.shares, self.end = mode, [], time.monotonic() + SECONDS

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.shares.append(trainer.strategy.loss_values["gpcv/exact_share"])
        if trainer.global_step == 2:
            print(json.dumps(descendants(os.getpid())), flush=True)
        if self.mode == "finish":
            trainer.should_stop = trainer.global_step == 3
            return
        if trainer.global_step == 3 and self.mode == "lose":
            for pid, command in descendants(os.getpid()).items():
                if "gcs_server" in command or "raylet/raylet" in command:
                    os.kill(pid, signal.SIGKILL)
        came_back = 1.0 in self.shares and self.shares[-1] == 0.25
        trainer.should_stop = came_back or time.monotonic() > self.end
        time.sleep(0.2)


if __name__ == "__main__":
    watch = Watch(sys.argv[1])
    fleet = RaySettings(workers=1, retry_every=1.0)
    with tempfile.TemporaryDirectory() as directory:
        runner = trainer(
            Path(directory),
            GradientPrediction(microbatches=4, fleet=fleet),
            ControlVariate(),
            watch,
            strategy="predicted_gradients",
            max_epochs=10_000,
        )
        runner.fit(Regression(), DataLoader(Samples(32), batch_size=8))
    print(json.dumps(watch.shares), flush=True)
    print(json.dumps(descendants(os.getpid())), flush=True)
