"""Measure the plug-in's own overhead, print it beside what was aimed at, and keep it as JSON."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table

from benchmarks.arms import MICROBATCHES, SAMPLES, Bench, timed_predictions
from benchmarks.race import race

FORMATS = ("fp32", "int8", "int4")
WARMUP = 3  # an arm's first laps hold its set-up, its checks and its counting


@dataclass(frozen=True)
class Row:
    """One measured share, of each round; medians and quartiles are over rounds.

    Attributes:
        what: was measured.
        aim: the share should stay below it; None where it is for information.
        shares: one per round.
        milliseconds: median of a step.
    """

    what: str
    aim: float | None
    shares: Sequence[float]
    milliseconds: float

    @property
    def median(self) -> float:
        return statistics.median(self.shares)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.shares, n=4)
        return low, high

    @property
    def error(self) -> float:
        """Standard error of the median, from the quartiles: 1.25 sigma / sqrt(rounds), sigma = IQR / 1.35."""
        low, high = self.quartiles
        return 1.25 * (high - low) / 1.35 / math.sqrt(len(self.shares))

    @property
    def met(self) -> str:
        """Whether the aim was met, as far as the noise lets one tell."""
        if self.aim is None:
            return ""
        if abs(self.median - self.aim) < 2 * self.error:
            return "cannot tell"
        return "yes" if self.median < self.aim else "no"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "median": self.median, "quartiles": self.quartiles, "met": self.met}


def measure(rounds: int, seconds: float) -> list[Row]:
    """Race the arms.

    Args:
        rounds: at most, of each race.
        seconds: at most, of each race, about.
    """
    with tempfile.TemporaryDirectory() as folder, timed_predictions():
        bench = Bench(Path(folder))
        arms = {"stock": bench.stock(), "ledger": bench.ledger(), "by hand": bench.by_hand, "exact": bench.exact()}
        whole = race(arms, rounds, WARMUP, seconds)
        predicted = race({name: bench.predicted(name) for name in FORMATS}, rounds, WARMUP, seconds)
    rows = [
        _overhead("ComputeLedger alone, over a stock Trainer", 0.01, whole["ledger"], whole["stock"]),
        _overhead(f"all {MICROBATCHES} exact, over a plain loop", 0.03, whole["exact"], whole["by hand"]),
        _overhead(f"all {MICROBATCHES} exact, over a stock Trainer", None, whole["exact"], whole["stock"]),
    ]
    for name, times in predicted.items():
        inside = bench.inside[name][WARMUP:]
        shares = [1 - spent / total for spent, total in zip(inside, times, strict=False)]
        rows.append(Row(f"outside predictions and exact passes, {name}", 0.05, shares, 1000 * statistics.median(times)))
    return rows


def _overhead(what: str, aim: float | None, times: Sequence[float], reference: Sequence[float]) -> Row:
    shares = [a / b - 1 for a, b in zip(times, reference, strict=True)]
    return Row(what, aim, shares, 1000 * statistics.median(times))


def machine() -> dict[str, Any]:
    """Where this was measured."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def table(rows: Sequence[Row], facts: dict[str, Any]) -> Table:
    """The rows as a table; all but the time of a step are shares."""
    shown = Table(
        title=f"A step of the demo's GPT, {MICROBATCHES} micro-batches of {SAMPLES} x 128 bytes",
        caption="{cpu}, {cores} cores, {threads} threads, torch {torch}, load before {load}".format(**facts),
    )
    shown.add_column("time spent")
    for heading in ("aim", "median", "quartiles", "aim met", "step, ms", "rounds"):
        shown.add_column(heading, justify="right")
    for row in rows:
        aim = "" if row.aim is None else f"< {row.aim:.0%}"
        low, high = row.quartiles
        spread = f"{low:+.1%} .. {high:+.1%}"
        cells = (row.what, aim, f"{row.median:+.2%}", spread, row.met, f"{row.milliseconds:.0f}", str(len(row.shares)))
        shown.add_row(*cells)
    return shown


def main() -> None:
    """Measure, print, write."""
    parser = ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="of each race, at most")
    parser.add_argument("--seconds", type=float, default=45.0, help="for each of the two races, about")
    parser.add_argument("--json", type=str, default="runs/bench.json", help="where the numbers go")
    chosen = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    facts = machine()
    rows = measure(chosen.rounds, chosen.seconds)
    Console().print(table(rows, facts))
    path = Path(chosen.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": facts, "rows": [row.to_dict() for row in rows]}, indent=2) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
