"""Measure the plug-in's own overhead beside what was aimed at.

Rows, each a share of time, step by step:

- ledger alone: a stock Trainer with ComputeLedger over one without; and, far less noisy, the time in its hooks.
- all exact: the strategy with every micro-batch exact, over the same micro-batches accumulated in a plain loop
  without Lightning, and over a stock Trainer on whole batches.
- outside passes: what a step under the whole method spends neither in predictions, whose gradients are summed as they
  come, nor in exact forward and backward passes: statistics, logging, the optimizer. It grows with parameters, passes
  with samples, hence the last row.
"""

from __future__ import annotations

import math
import operator
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.arms import HOOKS, MICROBATCHES, SAMPLES, Bench, watched
from benchmarks.race import Seconds, race
from lightning_ledger.callbacks import ComputeLedger
from lightning_ledger.predictors import ProgramPredictor

GPT_10M = {"layers": 6, "heads": 6, "width": 384}
PREDICTED: dict[str, dict[str, Any]] = {
    "fp32": {"format": "fp32"},
    "int8": {"format": "int8"},
    "int4": {"format": "int4"},
    "int8, 4 x 8": {"format": "int8", "microbatches": MICROBATCHES // 4},
    "int8, 4 x 8, 10M": {"format": "int8", "microbatches": MICROBATCHES // 4, **GPT_10M},
}
WARMUP = 2  # an arm's first laps hold its set-up, its checks and its counting


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
            return "unclear"
        return "yes" if self.median < self.aim else "no"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "median": self.median, "quartiles": self.quartiles, "met": self.met}


def measure(rounds: int, seconds: float) -> list[Row]:
    """Race the arms.

    Args:
        rounds: at most, of each race.
        seconds: at most, of each race, about.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        watched(ProgramPredictor, "predict_into"),
        watched(ComputeLedger, *HOOKS),
    ):
        bench = Bench(Path(folder))
        arms = {"stock": bench.stock(), "ledger": bench.ledger(), "by hand": bench.by_hand, "exact": bench.exact()}
        whole = race(arms, rounds, WARMUP, seconds)
        predicted = race({n: bench.predicted(n, **how) for n, how in PREDICTED.items()}, rounds, WARMUP, seconds)

    def inside(name: str, laps: Sequence[Seconds]) -> list[float]:
        return [spent / lap.wall for spent, lap in zip(bench.inside[name][WARMUP:], laps, strict=False)]

    rows = [
        _overhead("ledger alone, over stock", 0.01, whole["ledger"], whole["stock"]),
        Row("ledger alone, its hooks", 0.01, inside("ledger", whole["ledger"]), _median_ms(whole["ledger"])),
        _overhead("all exact, over a plain loop", 0.03, whole["exact"], whole["by hand"]),
        _overhead("all exact, over stock", None, whole["exact"], whole["stock"]),
    ]
    for name, laps in predicted.items():
        outside = [1 - share for share in inside(name, laps)]
        rows.append(Row(f"outside passes, {name}", 0.05, outside, _median_ms(laps)))
    return rows


def _overhead(what: str, aim: float | None, laps: Sequence[Seconds], reference: Sequence[Seconds]) -> Row:
    # With one thread its CPU time is all there is to measure, and other programs do not disturb it.
    clock = operator.attrgetter("cpu" if torch.get_num_threads() == 1 else "wall")
    shares = [clock(a) / clock(b) - 1 for a, b in zip(laps, reference, strict=True)]
    return Row(what, aim, shares, _median_ms(laps))


def _median_ms(laps: Sequence[Seconds]) -> float:
    return 1000 * statistics.median(lap.wall for lap in laps)


def table(rows: Sequence[Row], facts: dict[str, Any]) -> Table:
    """The rows as a table; all but the time of a step are shares."""
    rounds = ", ".join(str(n) for n in sorted({len(row.shares) for row in rows}))
    shown = Table(
        title=f"A step of the demo's GPT, {MICROBATCHES} micro-batches of {SAMPLES} x 128 bytes",
        caption="{cpu}, {cores} cores, torch {torch} on {threads} thread(s), load {load}\n".format(**facts)
        + f"medians and quartiles of {rounds} rounds",
        box=SIMPLE_HEAD,
    )
    shown.add_column("share of time", no_wrap=True)
    for heading in ("aim", "median", "quartiles", "met", "ms"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        aim = "" if row.aim is None else f"< {row.aim:.0%}"
        low, high = row.quartiles
        cells = (aim, f"{row.median:.2%}", f"{low:.1%} {high:.1%}", row.met, f"{row.milliseconds:.0f}")
        shown.add_row(row.what, *cells)
    return shown
