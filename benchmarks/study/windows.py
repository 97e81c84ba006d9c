"""Part 2: training windows. Every arm's learning rate is tuned on one seed; the best one is run on the others."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.study.records import facts, write_csv, write_json
from lightning_ledger import reports
from lightning_ledger.ledger import read_ledger
from lightning_ledger.reports.runs import best_of
from lightning_ledger.sweeps import Outcome, Run, Sweep, run_all

ARM, RATE, SEED, METRIC = "config", "model.init_args.learning_rate", "seed_everything", "val_loss"
PRICES = (0.01, 0.03, 0.1, 0.3, 1.0)
OBSERVED = ("gpcv/relative_cost", "gpcv/delta", "gpcv/noise_scale")


def run(file: Path, folder: Path, results: Path, command: str, jobs: int) -> int:
    """Train what is not trained yet, then compare; a killed study goes on where it stood.

    Args:
        file: the sweep over arms, learning rates and seeds.
        folder: for the runs.
        results: where ``windows.csv``, ``windows_prices.csv``, ``windows.json`` and ``windows.png`` go.
        command: that makes them again.
        jobs: runs at a time.

    Returns:
        0 if every run succeeded, else 1.
    """
    runs = Sweep.read(file).runs()
    first = runs[0].parameters[SEED]
    tuning = [run for run in runs if run.parameters[SEED] == first]
    outcomes = run_all(tuning, folder, jobs)
    rates = best_rates(tuning, outcomes, folder)
    chosen = [run for run in runs if rates.get(run.parameters[ARM]) == run.parameters[RATE]]
    outcomes |= run_all(chosen, folder, jobs)
    kept = [run for run in chosen if outcomes[run.name].status == "finished"]
    failed = [name for name, outcome in outcomes.items() if outcome.status == "failed"]
    made = {**facts(command), "runs": len(kept), "tuned": len(tuning), "failed": failed}
    report(kept, tuning, rates, folder, results, made)
    return 1 if failed else 0


def best_rates(runs: Sequence[Run], outcomes: Mapping[str, Outcome], folder: Path) -> dict[str, float]:
    """The learning rate of each arm's best validation loss; a run that failed or diverged is the worst."""
    best: dict[str, tuple[float, float]] = {}
    for run in runs:
        if outcomes[run.name].status == "finished":
            loss = _loss(folder / run.name)
            arm, rate = run.parameters[ARM], run.parameters[RATE]
            best[arm] = min(best.get(arm, (math.inf, rate)), (loss, rate))
    return {arm: rate for arm, (_, rate) in best.items()}


def report(
    kept: Sequence[Run],
    tuning: Sequence[Run],
    rates: Mapping[str, float],
    folder: Path,
    results: Path,
    made: Mapping[str, Any],
) -> None:
    """Compare the runs at their best rates, at 0.05 and over fleet prices; write the numbers and the picture."""
    paths: dict[str, list[Path]] = {}
    for run in kept:
        paths.setdefault(run.parameters[ARM], []).append(folder / run.name)
    every = [path for group in paths.values() for path in group]
    groups = [f"{Path(arm).stem}={_seeds_of(group[0])}" for arm, group in paths.items()]
    comparison = reports.compare(every, METRIC, groups=groups)
    arms = {arm.label: arm for arm in comparison.arms}
    rows = []
    for name, group in paths.items():
        arm = arms[Path(name).stem]
        tried = [run.parameters[RATE] for run in tuning if run.parameters[ARM] == name]
        cost = arm.cost_to_target
        rows.append(
            {
                "arm": arm.label,
                "kind": arm.kind,
                "batch": arm.settings.batch,
                "learning_rate": rates[name],
                "at_edge": rates[name] in (min(tried), max(tried)),
                "seeds": len(group),
                "best": arm.best,
                "reached": arm.reached,
                "cost_to_target": None if cost is None else cost.mean,
                "half_width": None if cost is None else cost.half_width,
                "saving": arm.saving,
                **{key.partition("/")[2]: observed(group, key) for key in OBSERVED},
            }
        )
    write_csv(results / "windows.csv", rows)
    repricing = reports.reprice(every, PRICES, METRIC, groups=groups)
    costs = [
        {
            "arm": arm.label,
            "censored": arm.censored,
            "verdict": arm.verdict,
            "break_even": arm.break_even,
            **{f"cost at {price:g}": arm.cost(price).mean for price in PRICES},
            **{f"half width at {price:g}": arm.cost(price).half_width for price in PRICES},
        }
        for arm in repricing.arms
    ]
    write_csv(results / "windows_prices.csv", costs)
    rule = {"target": comparison.target, "target_rule": comparison.target_rule, "metric": METRIC}
    priced = {"unit_flops": comparison.unit_flops, "fleet_price": comparison.prices.fleet_forward}
    write_json(results / "windows.json", {**made, **rule, **priced})
    # All arms in one picture would be illegible: the cheapest of each way to spend.
    rivals = [way.arm.label for way in comparison.ways if way.arm is not None]
    shown = [arm for arm in repricing.arms if arm.label in rivals]
    reports.plot_repricing(replace(repricing, arms=shown), results / "windows.png")


def _seeds_of(run: Path) -> str:
    """A pattern of the paths that differ from a run's in the seed alone."""
    return re.sub(r"-seed-[^-/]*$", "-seed-*", run.as_posix())


def observed(folders: Iterable[Path], key: str) -> float | None:
    """The median of what the runs logged under a key; None where they logged nothing."""
    values: list[float] = []
    for folder in folders:
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as lines:
            found = [float(row[key]) for row in csv.DictReader(lines) if row.get(key)]
        values += [value for value in found if math.isfinite(value)]
    return statistics.median(values) if values else None


def _loss(folder: Path) -> float:
    losses = [mark.metrics[METRIC] for mark in read_ledger(folder).marks if METRIC in mark.metrics]
    best = best_of(losses, "min") if losses else math.nan
    # A run that ended in NaN is no run to train by, however low it was before.
    return best if losses and math.isfinite(losses[-1]) else math.inf
