"""The demo: the same small GPT trained seven ways, and what each way cost.

`python examples/demo.py run` trains every arm at its tuned learning rate and compares their ledgers.
`python examples/demo.py tune` makes the table of learning rates that `run` reads.

Every run is a `lightning-ledger fit` process of its own; this script starts them, one per core with one thread
each, and watches the ledgers that they write.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_ledger.cli import main as ledger_command
from lightning_ledger.ledger import read_ledger

ROOT = Path(__file__).resolve().parent.parent
BASE = Path("configs/demo.yaml")
CONFIGS = Path("configs/demo")
RATES = CONFIGS / "learning_rates.yaml"
ARMS = ("exact-1", "exact-4", "exact-16", "predicted-int4", "mixed-int4", "gpcv-int8", "gpcv-int4")
SWEEP = (5e-4, 1e-3, 2e-3)
WIDEN = 2  # how many more rates to try, one by one, where the best one is at the edge of the sweep


@dataclass(frozen=True)
class Arm:
    """One way to train: its own configuration file on top of the shared one.

    Args:
        name: of the file in configs/demo.
        steps: optimizer steps.
        validate_every: steps between two validations.
        step_effort: about how long a step takes, in exact micro-batch passes; only the time left depends on it.
    """

    name: str
    steps: int
    validate_every: int
    step_effort: float

    @classmethod
    def read(cls, name: str, scale: float = 1.0) -> Arm:
        """Read an arm's length from its files; `scale` shortens it, and it ends with a validation all the same."""
        base, own = (yaml.safe_load(path.read_text()) for path in (BASE, CONFIGS / f"{name}.yaml"))
        trainer: dict[str, Any] = {**base["trainer"], **own["trainer"]}
        every = max(1, round(trainer["val_check_interval"] * scale))
        validations = max(1, round(trainer["max_steps"] * scale / every))
        exact, predicted = own.get("data", base["data"])["init_args"]["batch_size"] / 2, 0
        for callback in trainer.get("callbacks+", []):
            if "microbatches" in (given := callback.get("init_args", {})):
                exact, predicted = given["exact"], given["microbatches"]
        # Emulating four bits takes almost twice as long as computing in 32.
        return cls(name, every * validations, every, exact + 1.75 * predicted)


@dataclass(frozen=True)
class Job:
    """One run: an arm at a learning rate, in a folder."""

    arm: Arm
    learning_rate: float
    folder: Path

    @property
    def effort(self) -> float:
        return self.arm.steps * self.arm.step_effort

    def command(self) -> list[str]:
        """Return the command that trains it: what a user would type."""
        options: dict[str, list[Any]] = {
            "config": [BASE, CONFIGS / f"{self.arm.name}.yaml"],
            "trainer.max_steps": [self.arm.steps],
            "trainer.val_check_interval": [self.arm.validate_every],
            "trainer.enable_progress_bar": ["false"],
            "trainer.default_root_dir": [self.folder],
            "trainer.logger.init_args.save_dir": [self.folder],
            "model.init_args.learning_rate": [self.learning_rate],
        }
        flags = [f"--{name}={value}" for name, values in options.items() for value in values]
        return [sys.executable, "-m", "lightning_ledger.cli", "fit", *flags]

    def start(self, threads: int) -> subprocess.Popen[bytes]:
        """Start it in a process of its own, in a fresh folder; what it prints goes to log.txt there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with (self.folder / "log.txt").open("w") as log:
            log.write(shlex.join(self.command()) + "\n\n")
            log.flush()
            return subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT, env=environment)

    def finished(self) -> float | None:
        """Return the last validation loss, if this very command has run to its end in the folder before."""
        log = self.folder / "log.txt"
        if not log.exists() or log.read_text().partition("\n")[0] != shlex.join(self.command()):
            return None
        steps, loss = self.progress()
        return loss if steps == self.arm.steps else None

    def progress(self) -> tuple[int, float | None]:
        """Return the steps done and the last validation loss, as its ledger on disk has them."""
        if not (self.folder / "ledger.jsonl").exists():
            return 0, None
        history = read_ledger(self.folder)
        losses = [mark.metrics["val_loss"] for mark in history.marks if "val_loss" in mark.metrics]
        return history.steps, losses[-1] if losses else None


def train_all(jobs: Sequence[Job], workers: int, after: Callable[[Job, float], Sequence[Job]]) -> None:
    """Run all jobs, several at a time, with a progress display.

    Args:
        jobs: what to run, in this order.
        workers: how many at a time; the cores are shared out evenly.
        after: called with each finished job and its last validation loss; returns further jobs.

    Raises:
        RuntimeError: if a run fails; the others are ended.
    """
    threads = max(1, _cores() // workers)
    waiting = list(jobs)
    running: dict[Job, tuple[subprocess.Popen[bytes], TaskID, float]] = {}
    total = sum(job.effort for job in jobs)
    finished = 0.0
    columns = (TextColumn("{task.description:46}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            whole = bars.add_task("all runs, and the time left", total=total)
            while waiting or running:
                while waiting and len(running) < workers:
                    job = waiting.pop(0)
                    running[job] = job.start(threads), bars.add_task("", total=job.arm.steps), time.monotonic()
                time.sleep(0.5)
                done = finished
                for job, (process, task, started) in list(running.items()):
                    ended = process.poll() is not None  # before reading, so that nothing written is missed
                    steps, loss = job.progress()
                    done += steps * job.arm.step_effort
                    shown = "starting" if loss is None else f"val_loss {loss:.3f}"
                    bars.update(task, completed=steps, description=f"{job.arm.name} at {job.learning_rate:g}: {shown}")
                    if not ended:
                        continue
                    if process.returncode or loss is None:
                        log = (job.folder / "log.txt").read_text()
                        raise RuntimeError(f"{job.arm.name} failed; {job.folder}/log.txt ends:\n{log[-2000:]}")
                    del running[job]
                    bars.remove_task(task)
                    bars.print(
                        f"{job.arm.name:15} learning rate {job.learning_rate:<7g} {steps:5} steps, "
                        f"val_loss {loss:.3f}, {time.monotonic() - started:.0f} s"
                    )
                    finished += job.effort
                    more = after(job, loss)
                    waiting += more
                    total += sum(job.effort for job in more)
                bars.update(whole, completed=done, total=total)
    finally:
        for process, _, _ in running.values():
            process.kill()  # Lightning takes a mere SIGTERM as a wish


def run(names: Sequence[str], fleet_price: float, folder: Path, scale: float, workers: int) -> int:
    """Train each arm once, at its tuned learning rate, then compare them."""
    table = read_table()
    if missing := [name for name in names if name not in table]:
        print(f"{RATES} has no learning rate for {', '.join(missing)}: run `make tune` first.", file=sys.stderr)
        return 2
    arms = [Arm.read(name, scale) for name in names]
    jobs = [Job(arm, table[arm.name]["learning_rate"], folder / arm.name) for arm in arms]
    started = time.monotonic()
    # The longest first, so that no core is idle at the end.
    train_all(sorted(jobs, key=lambda job: -job.effort), workers, after=lambda job, loss: [])
    print(f"\n{len(jobs)} runs in {time.monotonic() - started:.0f} s; their ledgers are in {folder}/.")
    if edge := [name for name in names if table[name]["at_edge"]]:
        print(f"The best learning rate was the largest or smallest one tried for: {', '.join(edge)}.")
    outputs = [f"--json={folder / 'compare.json'}", f"--png={folder / 'compare.png'}"]
    return ledger_command(["compare", *(str(job.folder) for job in jobs), f"--fleet-price={fleet_price}", *outputs])


def tune(names: Sequence[str], rates: Sequence[float], folder: Path, scale: float, workers: int) -> int:
    """Train each arm at several learning rates; write the losses and the best rate of each.

    Runs that an earlier, interrupted sweep finished are taken as they are.
    """
    table = read_table()
    seen: dict[str, dict[float, float]] = {name: {} for name in names}

    def job(arm: Arm, rate: float) -> Job:
        return Job(arm, rate, folder / f"{arm.name}-{rate:g}")

    def after(done: Job, loss: float) -> list[Job]:
        losses = seen[done.arm.name]
        losses[done.learning_rate] = round(loss, 4)
        if len(losses) < len(rates):
            return []
        table[done.arm.name] = summary(losses, done.arm.steps)
        write_table(table)
        widened = next_rates(losses) if len(losses) < len(rates) + WIDEN else []
        return [job(done.arm, rate) for rate in widened]

    waiting = [job(Arm.read(name, scale), rate) for name in names for rate in rates]
    fresh: list[Job] = []
    while waiting:
        first = waiting.pop(0)
        loss = first.finished()
        if loss is None:
            fresh.append(first)
        else:
            waiting += after(first, loss)
    train_all(fresh, workers, after)
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


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="demo.py", description="Train a small GPT seven ways and compare the costs.")
    commands = parser.add_subcommands()
    for name, text in (("run", "train every arm, then compare"), ("tune", "sweep each arm's learning rate")):
        command = ArgumentParser(description=text)
        command.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which to train")
        command.add_argument("--folder", type=str, default=f"runs/{'demo' if name == 'run' else 'tune'}")
        command.add_argument("--scale", type=float, default=1.0, help="shorten all runs by this factor")
        command.add_argument("--workers", type=int, default=_cores(), help="runs at a time")
        if name == "run":
            command.add_argument("--fleet-price", type=float, default=0.05, help="per forward-equivalent")
        else:
            command.add_argument("--rates", nargs="+", type=float, default=list(SWEEP), help="to begin with")
        commands.add_subcommand(name, command, help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    given = chosen[chosen.subcommand]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too
    os.chdir(ROOT)  # the configurations' paths are relative to it
    shared = Path(given.folder), given.scale, given.workers
    try:
        if chosen.subcommand == "tune":
            return tune(given.arms, given.rates, *shared)
        return run(given.arms, given.fleet_price, *shared)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
