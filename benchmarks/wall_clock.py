"""Seconds, not ledger: the demo's model trained to one validation loss, exactly and from predictions, side by side.

`python -m benchmarks.wall_clock` takes turns between the arms step by step, so that what disturbs one disturbs all, and
counts for each arm the seconds of its training steps: validation, set-up and compilation are shown apart.
"""

from __future__ import annotations

import functools
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.race import Arm, Lap, race
from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.strategies import PredictedGradientStrategy

ENDLESS = 100_000
FASTEST = "int8:attention=bf16"


@dataclass(frozen=True)
class Way:
    """One way to train the demo's model.

    Args:
        batch: windows of 128 bytes in a step.
        learning_rate: the demo's tuned one for this batch and kind.
        precision: the Trainer's, for exact passes.
        prediction: settings of ``GradientPrediction``; None for plain Lightning.
        corrected: with ``ControlVariate``.
    """

    batch: int = 32
    learning_rate: float = 1e-3
    precision: Any = "32-true"
    prediction: Mapping[str, Any] | None = None
    corrected: bool = False


def _compiled(format: str, **settings: Any) -> Mapping[str, Any]:
    return {"format": format, "engine": "compiled", "microbatches": 8, **settings}


WAYS = {
    "exact, fp32": Way(),
    "exact, bf16-mixed": Way(precision="bf16-mixed"),
    "exact, fp32, batch of 8": Way(batch=8, learning_rate=5e-4),
    "exact, bf16-mixed, batch of 8": Way(batch=8, learning_rate=5e-4, precision="bf16-mixed"),
    f"GPCV, {FASTEST}": Way(prediction=_compiled(FASTEST, exact=1), corrected=True),
    "GPCV, bf16": Way(prediction=_compiled("bf16", exact=1), corrected=True),
    f"predictions only, {FASTEST}": Way(prediction=_compiled(FASTEST, exact=0)),
}


@dataclass
class Clock(pl.Callback):
    """Counts the seconds of training steps, and remembers what each validation reached.

    Attributes:
        seconds: of the steps after the first.
        first_step: seconds of the first step, which captures and compiles.
        reached: (steps, seconds, validation loss) at each validation.
    """

    lap: Lap
    seconds: float = 0.0
    first_step: float = 0.0
    reached: list[tuple[int, float, float]] = field(default_factory=list)
    _start: float = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        spent = time.perf_counter() - self._start
        if trainer.global_step > 1:
            self.seconds += spent
        else:
            self.first_step = spent
        trainer.should_stop = not self.lap()

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.reached.append((trainer.global_step, self.seconds, float(trainer.callback_metrics["val_loss"])))


def train(way: Way, clocks: dict[str, Clock], name: str, folder: Path, every: int, lap: Lap) -> None:
    """Train until the race is over."""
    torch.manual_seed(0)
    model = GPT(learning_rate=way.learning_rate, warmup_steps=10)
    data = TextDataModule(batch_size=way.batch, val_windows=64)
    callbacks: list[pl.Callback] = []
    if way.prediction is not None:
        callbacks.append(GradientPrediction(**way.prediction))
    if way.corrected:
        callbacks.append(ControlVariate())
    clocks[name] = Clock(lap)
    trainer = pl.Trainer(
        strategy=PredictedGradientStrategy() if way.prediction is not None else "auto",
        callbacks=[*callbacks, clocks[name]],
        accelerator="cpu",
        precision=way.precision,
        max_steps=ENDLESS,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / name,
    )
    trainer.fit(model, data)


def to_target(reached: Sequence[tuple[int, float, float]], target: float) -> tuple[int, float] | None:
    """Steps and seconds at the first validation at or below the target; None if there is none."""
    return next(((steps, seconds) for steps, seconds, loss in reached if loss <= target), None)


def table(clocks: Mapping[str, Clock], target: float, facts: Mapping[str, Any]) -> Table:
    """Seconds to the target, by arm."""
    shown = Table(
        title=f"Seconds of training steps until val_loss {target:.3f}: a GPT of 2.5M parameters, 32 x 128 bytes a step",
        caption="{cpu}, {cores} cores, torch {torch} on {threads} thread(s)".format(**facts)
        + "; steps of all arms in turn; set-up (the first step, with capture and compilation) apart",
        box=SIMPLE_HEAD,
    )
    shown.add_column("arm", no_wrap=True)
    for heading in ("best val_loss", "steps", "seconds", "against exact fp32", "ms a step", "set-up s"):
        shown.add_column(heading, justify="right")
    base = to_target(clocks["exact, fp32"].reached, target)
    for name, clock in clocks.items():
        found = to_target(clock.reached, target)
        steps, seconds = (str(found[0]), f"{found[1]:.1f}") if found else ("-", "never")
        ratio = f"{base[1] / found[1]:.2f}x" if found and base else "-"
        best = min((loss for *_, loss in clock.reached), default=float("nan"))
        total = max((s for s, *_ in clock.reached), default=0)
        each = 1000 * clock.reached[-1][1] / max(1, total - 1) if clock.reached else float("nan")
        shown.add_row(name, f"{best:.3f}", steps, seconds, ratio, f"{each:.0f}", f"{clock.first_step:.0f}")
    return shown


def main() -> None:
    """Race the arms, print the table, write the curves."""
    parser = ArgumentParser(prog="python -m benchmarks.wall_clock", description=__doc__)
    parser.add_argument("--steps", type=int, default=160, help="of every arm")
    parser.add_argument("--every", type=int, default=8, help="steps between validations")
    parser.add_argument("--target", type=float, default=2.338, help="validation loss to reach: the demo's")
    parser.add_argument("--threads", type=int, default=2, help="that torch computes with")
    parser.add_argument("--json", type=str, default="runs/wall_clock.json", help="where the curves go")
    chosen = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(chosen.threads)
    clocks: dict[str, Clock] = {}
    with tempfile.TemporaryDirectory() as folder:
        arms: dict[str, Arm] = {
            name: functools.partial(train, way, clocks, name, Path(folder), chosen.every) for name, way in WAYS.items()
        }
        race(arms, chosen.steps, 0, float("inf"))
    facts = machine()
    Console().print(table(clocks, chosen.target, facts))
    curves = {name: {"setup": clock.first_step, "reached": clock.reached} for name, clock in clocks.items()}
    path = Path(chosen.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": facts, "target": chosen.target, "arms": curves}, indent=2) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
