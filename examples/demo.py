"""The demo: the same small GPT trained seven ways, and what each way cost.

`python examples/demo.py run` trains every arm at its tuned learning rate and compares their ledgers.
`python examples/demo.py tune` makes the table of learning rates that `run` reads.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_ledger.cli import main as ledger_command
from lightning_ledger.cli import train

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = Path("configs/demo")
RATES = CONFIGS / "learning_rates.yaml"
ARMS = ("exact-1", "exact-4", "exact-16", "predicted-int4", "mixed-int4", "gpcv-int8", "gpcv-int4")
SWEEP = (1e-3, 2e-3, 4e-3)
WIDEN = 2  # how many more rates to try, one by one, where the best one is at the edge of the sweep


@dataclass(frozen=True)
class Arm:
    """One way to train: its own configuration file on top of the shared one.

    Args:
        name: of the file in configs/demo.
        steps: optimizer steps.
        validate_every: steps between two validations.
        seconds_per_step: a guess, up to a common factor, that only the time left depends on.
    """

    name: str
    steps: int
    validate_every: int
    seconds_per_step: float

    @classmethod
    def read(cls, name: str, scale: float = 1.0) -> Arm:
        """Read an arm's length from its files; `scale` shortens it and keeps the number of validations."""
        base, own = (yaml.safe_load((CONFIGS / f"{file}.yaml").read_text()) for file in ("base", name))
        trainer: dict[str, Any] = {**base["trainer"], **own["trainer"]}
        every = max(1, round(trainer["val_check_interval"] * scale))
        validations = trainer["max_steps"] // trainer["val_check_interval"]
        batch = own.get("data", base["data"])["init_args"]["batch_size"]
        exact, predicted = batch / 2, 0.0
        for callback in trainer.get("callbacks+", []):
            if "microbatches" in (given := callback.get("init_args", {})):
                exact, predicted = float(given["exact"]), float(given["microbatches"])
        # Emulated low precision takes about twice as long as what it imitates.
        return cls(name, every * validations, every, exact + 2.0 * predicted)

    @property
    def effort(self) -> float:
        return self.steps * self.seconds_per_step

    def fit(self, folder: Path, learning_rate: float, callback: Callback) -> float:
        """Train this arm through the public command; return the last validation loss."""
        shutil.rmtree(folder, ignore_errors=True)
        options = {
            "trainer.max_steps": self.steps,
            "trainer.val_check_interval": self.validate_every,
            "trainer.default_root_dir": folder,
            "trainer.logger.init_args.save_dir": folder,
            "model.init_args.learning_rate": learning_rate,
        }
        configs = [f"--config={CONFIGS / name}.yaml" for name in ("base", self.name)]
        cli = train(["fit", *configs, *(f"--{key}={value}" for key, value in options.items())], [callback])
        return float(cli.trainer.callback_metrics["val_loss"])


class Bar(Callback):
    """Advances one task of a progress display by an arm's effort, step by step."""

    def __init__(self, progress: Progress, task: TaskID, arm: Arm) -> None:
        self.progress = progress
        self.task = task
        self.arm = arm

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = trainer.callback_metrics.get("val_loss")
        shown = "" if loss is None else f", val_loss {loss:.3f}"
        text = f"{self.arm.name}: step {trainer.global_step}/{self.arm.steps}{shown}"
        self.progress.update(self.task, advance=self.arm.seconds_per_step, description=text)


def run(names: Sequence[str], fleet_price: float, folder: Path, scale: float) -> int:
    """Train the arms one after another, then compare them."""
    arms = [Arm.read(name, scale) for name in names]
    table = read_table()
    if missing := [name for name in names if name not in table]:
        print(
            f"{RATES} has no learning rate for {', '.join(missing)}: run `make tune` first.", file=sys.stderr
        )
        return 2
    started = time.monotonic()
    with _progress() as progress:
        task = progress.add_task("", total=sum(arm.effort for arm in arms))
        for arm in arms:
            rate = table[arm.name]["learning_rate"]
            before = time.monotonic()
            loss = arm.fit(folder / arm.name, rate, Bar(progress, task, arm))
            seconds = time.monotonic() - before
            progress.print(
                f"{arm.name:15} learning rate {rate:<6g} {arm.steps:4} steps, "
                f"val_loss {loss:.3f}, {seconds:.0f} s"
            )
    print(f"\n{len(arms)} runs in {time.monotonic() - started:.0f} s; their ledgers are in {folder}/.")
    if edge := [name for name in names if table[name]["at_edge"]]:
        print(f"The best learning rate was the largest or smallest one tried for: {', '.join(edge)}.")
    outputs = [f"--json={folder / 'compare.json'}", f"--png={folder / 'compare.png'}"]
    return ledger_command(
        ["compare", *(str(folder / name) for name in names), f"--fleet-price={fleet_price}", *outputs]
    )


def tune(names: Sequence[str], rates: Sequence[float], folder: Path, scale: float) -> int:
    """Train each arm at several learning rates; write the losses and the best rate after each arm."""
    arms = [Arm.read(name, scale) for name in names]
    table = read_table()
    total = len(rates) * sum(arm.effort for arm in arms)
    with _progress() as progress:
        task = progress.add_task("", total=total)
        for arm in arms:
            losses: dict[float, float] = {}
            waiting = list(rates)
            while waiting:
                rate = waiting.pop(0)
                run_folder = folder / f"{arm.name}-{rate:g}"
                losses[rate] = round(arm.fit(run_folder, rate, Bar(progress, task, arm)), 4)
                progress.print(f"{arm.name:15}  learning rate {rate:<7g}  val_loss {losses[rate]:6.3f}")
                if not waiting and len(losses) < len(rates) + WIDEN:
                    waiting = next_rates(losses)
                    total += len(waiting) * arm.effort
                    progress.update(task, total=total)
            table[arm.name] = summary(losses, arm.steps)
            write_table(table)
    print(f"wrote {RATES}")
    return 0


def next_rates(losses: Mapping[float, float]) -> list[float]:
    """Return the rate to try next: one beyond the edge that the best one is at, or none.

    Example:
        >>> next_rates({1e-3: 2.5, 2e-3: 2.4, 4e-3: 2.3}), next_rates({1e-3: 2.5, 2e-3: 2.4, 4e-3: 2.6})
        ([0.008], [])
    """
    best = best_rate(losses)
    if best == max(losses):
        return [2.0 * best]
    return [best / 2.0] if best == min(losses) else []


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the rate of the lowest loss; a diverged run, of loss NaN, is the worst."""
    return min(losses, key=lambda rate: (losses[rate] != losses[rate], losses[rate]))


def summary(losses: Mapping[float, float], steps: int) -> dict[str, Any]:
    """Return an arm's row of the table."""
    best = best_rate(losses)
    return {
        "learning_rate": best,
        "at_edge": best in (min(losses), max(losses)),
        "steps": steps,
        "losses": dict(sorted(losses.items())),
    }


def read_table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(RATES.read_text()) if RATES.exists() else {}
    return table


def write_table(table: Mapping[str, Any]) -> None:
    header = "# Written by `make tune`: each arm's last validation loss by learning rate, one seed each.\n"
    rows = {name: table[name] for name in ARMS if name in table}
    RATES.write_text(header + yaml.safe_dump(rows, sort_keys=False))


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="demo.py", description="Train a small GPT seven ways and compare the costs.")
    commands = parser.add_subcommands()
    for name, text in (("run", "train every arm, then compare"), ("tune", "sweep each arm's learning rate")):
        command = ArgumentParser(description=text)
        command.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which to train")
        command.add_argument("--folder", type=str, default=f"runs/{'demo' if name == 'run' else 'tune'}")
        command.add_argument("--scale", type=float, default=1.0, help="shorten all runs by this factor")
        if name == "run":
            command.add_argument("--fleet-price", type=float, default=0.05, help="per forward-equivalent")
        else:
            command.add_argument("--rates", nargs="+", type=float, default=list(SWEEP), help="to begin with")
        commands.add_subcommand(name, command, help=text)
    return parser


def main() -> int:
    chosen = _parser().parse_args()
    os.chdir(ROOT)  # the configurations' paths are relative to it
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)  # advice on workers, not needed here
    if chosen.subcommand == "tune":
        given = chosen.tune
        return tune(given.arms, given.rates, Path(given.folder), given.scale)
    given = chosen.run
    return run(given.arms, given.fleet_price, Path(given.folder), given.scale)


if __name__ == "__main__":
    sys.exit(main())
