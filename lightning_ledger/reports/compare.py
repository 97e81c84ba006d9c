"""Compares runs by what they cost: per tier, in total, and up to a target."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning_ledger.history import LedgerHistory, read_ledger
from lightning_ledger.ledger_file import plain
from lightning_ledger.prices import FORWARD_EQUIVALENTS, PriceBook
from lightning_ledger.work import TIERS, Work, account_of, by_tier

__all__ = ["TRAINING_TIERS", "Comparison", "Point", "Row", "compare"]

TRAINING_TIERS = tuple(tier for tier in TIERS if tier != "validation")
"""The tiers that make up a run's total. Validation measures the experiment; it is shown apart."""


Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Point:
    """The metric at a mark, and the training cost up to there."""

    step: int
    cost: float
    value: float


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        label: The run's label, or its directory's name.
        path: Where its ledger was read.
        exact: Whether the fleet did no work at all.
        steps: Optimizer steps.
        samples: Training samples: those of exact passes, and those predicted only.
        first: The metric at the first mark, and so on: ``best``, ``final``.
        tiers: Training cost by tier.
        total: Training cost: the sum of ``tiers``.
        validation: What validation cost. Not in ``total``.
        cost_to_target: Training cost at the first mark at or beyond the target; None if never reached.
        saving: ``1 - cost_to_target / (that of the cheapest exact run that reached the target)``.
        curve: The metric against training cost, mark by mark.
    """

    label: str
    path: str
    exact: bool
    steps: int
    samples: int
    first: float
    best: float
    final: float
    tiers: Mapping[str, float]
    total: float
    validation: float
    cost_to_target: float | None
    saving: float | None
    curve: Sequence[Point]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, all in one unit and at one price book.

    Args:
        metric: The metric compared.
        mode: Whether lower (``min``) or higher (``max``) is better.
        target: The value whose cost is compared.
        target_rule: Where the target comes from, in words.
        unit_flops: FLOPs of one forward-equivalent: the smallest among the runs.
        prices: The price book.
        rows: The runs, in the order given.
    """

    metric: str
    mode: Mode
    target: float
    target_rule: str
    unit_flops: int
    prices: PriceBook
    rows: Sequence[Row]

    @property
    def cheapest_exact(self) -> Row | None:
        """The exact run that reached the target at the lowest cost: what savings are measured against."""
        return min(
            (row for row in self.rows if row.exact and row.cost_to_target is not None),
            key=_to_target,
            default=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: plain containers, non-finite numbers as strings."""
        cheapest = self.cheapest_exact
        data: dict[str, Any] = plain(asdict(self))
        return {**data, "cheapest_exact": cheapest.label if cheapest else None}


def compare(
    runs: Sequence[str | os.PathLike[str]],
    metric: str = "val_loss",
    mode: Mode = "min",
    target: float | None = None,
    prices: PriceBook | None = None,
) -> Comparison:
    """Reads the runs' ledgers and prices them, in one common unit.

    Without a ``target``, it is the value that every exact run reached, so that all of them are rivals: the best
    of the one that got least far. Pass a stricter one to compare only those that got further. Without an exact
    run, all runs take their place. The cost to reach the target is that of the
    first *measured* value at or beyond it: nothing is interpolated, so it is known to within one validation
    interval.

    Args:
        runs: Run directories, each holding a ``ledger.jsonl``, or such files.
        metric: A metric that the runs marked.
        mode: ``min`` if lower is better, else ``max``.
        target: The value to reach.
        prices: The price book; by default ``PriceBook(fleet_forward=0.05)``.

    Raises:
        FileNotFoundError: A run has no ledger.
        ValueError: No runs, a damaged ledger, no marks with the metric, or FLOPs that were never counted.
    """
    if not runs:
        raise ValueError("runs is empty: pass at least one run directory.")
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r} is unknown: 'min' if a lower {metric} is better, else 'max'.")
    prices = prices or PriceBook(fleet_forward=0.05)
    prices.warn_if_stale()
    histories = [read_ledger(run) for run in runs]
    unit = _common_unit(histories, prices)
    curves = [_curve(run, h, metric, prices, unit) for run, h in zip(runs, histories, strict=True)]
    rows = [
        _row(label, run, history, curve, prices, unit, mode)
        for label, run, history, curve in zip(_labels(runs, histories), runs, histories, curves, strict=True)
    ]
    rule = "as asked"
    if target is None:
        target, rule = _default_target(rows, mode)
    rows = [replace(row, cost_to_target=_reached(row.curve, target, mode)) for row in rows]
    result = Comparison(metric, mode, float(target), rule, unit, prices, rows)
    if cheapest := result.cheapest_exact:
        result = replace(result, rows=[_with_saving(row, cheapest) for row in rows])
    return result


def _row(
    label: str,
    run: str | os.PathLike[str],
    history: LedgerHistory,
    curve: Sequence[Point],
    prices: PriceBook,
    unit: int,
    mode: Mode,
) -> Row:
    costs = _costs(history.totals, history, prices, unit)
    tiers = by_tier(costs)
    validation = tiers.pop("validation")
    trained = (history.totals.get(account, Work()) for account in ("scarce/forward", "fleet/prediction"))
    values = [point.value for point in curve]
    return Row(
        label=label,
        path=str(run),
        exact=all(account_of(account).hardware == "scarce" for account in history.totals),
        steps=history.steps,
        samples=sum(work.samples for work in trained),
        first=values[0],
        best=_best(values, mode),
        final=values[-1],
        tiers=tiers,
        total=math.fsum(tiers.values()),
        validation=validation,
        cost_to_target=None,
        saving=None,
        curve=curve,
    )


def _curve(
    run: str | os.PathLike[str], history: LedgerHistory, metric: str, prices: PriceBook, unit: int
) -> list[Point]:
    marks = [mark for mark in history.marks if metric in mark.metrics]
    if not marks:
        found = sorted({name for mark in history.marks for name in mark.metrics})
        known = f"Its marks hold: {', '.join(found)}." if found else "It has no marks: nothing was validated."
        raise ValueError(f"{run} has no mark with metric={metric!r}. {known}")
    costs = (_training(_costs(mark.totals, history, prices, unit)) for mark in marks)
    return [Point(mark.step, cost, mark.metrics[metric]) for mark, cost in zip(marks, costs, strict=True)]


def _costs(totals: Mapping[str, Work], history: LedgerHistory, prices: PriceBook, unit: int) -> dict[str, float]:
    """Costs by account in the common unit: a forward here is ``own / unit`` of it, a byte is a byte."""
    if prices.forward_flops:
        return prices.costs(totals, prices.forward_flops)
    own = history.forward_flops or unit
    return {
        account: own / unit * prices.cost(account, replace(work, bytes=0), own)
        + prices.cost(account, Work(bytes=work.bytes), own)
        for account, work in totals.items()
    }


def _training(costs: Mapping[str, float]) -> float:
    tiers = by_tier(costs)
    return math.fsum(tiers[tier] for tier in TRAINING_TIERS)


def _common_unit(histories: Sequence[LedgerHistory], prices: PriceBook) -> int:
    units = [history.forward_flops for history in histories if history.forward_flops]
    if not units:
        raise ValueError(
            "No run knows forward_flops, the FLOPs of one forward pass: no work was counted. Train at least one step."
        )
    if prices.currency != FORWARD_EQUIVALENTS and prices.forward_flops is None and len(set(units)) > 1:
        raise ValueError(
            f"The runs count in forward-equivalents of {', '.join(f'{unit:,}' for unit in sorted(set(units)))} FLOPs, "
            f"and a price in {prices.currency} is for one of them only. Say which: forward_flops in the price book."
        )
    return min(units)


def _labels(runs: Sequence[str | os.PathLike[str]], histories: Sequence[LedgerHistory]) -> list[str]:
    """The runs' labels; equal ones are told apart by their paths."""
    labels = [history.label for history in histories]
    return [
        f"{label} ({Path(run).as_posix()})" if labels.count(label) > 1 else label
        for run, label in zip(runs, labels, strict=True)
    ]


def _best(values: Sequence[float], mode: Mode) -> float:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return values[0]
    return min(finite) if mode == "min" else max(finite)


def _default_target(rows: Sequence[Row], mode: Mode) -> tuple[float, str]:
    exact = [row for row in rows if row.exact and math.isfinite(row.best)]
    candidates = exact or [row for row in rows if math.isfinite(row.best)]
    if not candidates:
        raise ValueError("No run has a finite value of the metric, so there is no target: pass target=...")
    loosest = (max if mode == "min" else min)(candidates, key=lambda row: row.best)
    kind = "exact run" if exact else "run (none is exact)"
    return loosest.best, f"which every {kind} reached: the best of {loosest.label!r}, that got least far"


def _reached(curve: Sequence[Point], target: float, mode: Mode) -> float | None:
    for point in curve:  # NaN compares false: it reaches nothing
        if point.value <= target if mode == "min" else point.value >= target:
            return point.cost
    return None


def _with_saving(row: Row, cheapest: Row) -> Row:
    if row.cost_to_target is None or not cheapest.cost_to_target:
        return row
    return replace(row, saving=1 - row.cost_to_target / cheapest.cost_to_target)


def _to_target(row: Row) -> float:
    return math.inf if row.cost_to_target is None else row.cost_to_target
