"""Compares runs by what they cost: per tier, in total, and up to a target."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_ledger.history import LedgerHistory
from lightning_ledger.ledger_file import plain
from lightning_ledger.prices import PriceBook
from lightning_ledger.reports.intervals import Estimate
from lightning_ledger.reports.pricing import common_unit, costs_in, training_cost
from lightning_ledger.reports.runs import (
    Kind,
    Mode,
    Settings,
    arms_of,
    best_of,
    default_target,
    kind_of,
    labels_of,
    marks_of,
    reaches,
    read_runs,
)
from lightning_ledger.reports.ways import Arm, Way, with_rivals
from lightning_ledger.work import Work, by_tier

__all__ = ["Comparison", "Point", "Row", "compare"]


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
        kind: What it did: see :func:`~lightning_ledger.reports.runs.kind_of`.
        exact: Whether the fleet did no work at all.
        settings: What it was set to, as far as its ledger tells.
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
    kind: Kind
    exact: bool
    settings: Settings
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
        arms: The same runs, seeds of one arm together.
        ways: The rival ways to spend, each by its cheapest arm; those that nobody ran are there too, without one.
    """

    metric: str
    mode: Mode
    target: float
    target_rule: str
    unit_flops: int
    prices: PriceBook
    rows: Sequence[Row]
    arms: Sequence[Arm]
    ways: Sequence[Way]

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
    groups: Sequence[str] = (),
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
        groups: Which runs are seeds of one arm, where names do not tell: see
            :func:`~lightning_ledger.reports.runs.arms_of`.

    Raises:
        FileNotFoundError: A run has no ledger.
        ValueError: No runs, a damaged ledger, no marks with the metric, FLOPs that were never counted, or a group
            that is none.
    """
    prices = prices or PriceBook(fleet_forward=0.05)
    prices.warn_if_stale()
    histories = read_runs(runs, metric, mode)
    unit = common_unit(histories, prices)
    marks = [marks_of(run, history, metric) for run, history in zip(runs, histories, strict=True)]
    curves = [
        [Point(m.step, training_cost(unit, m.totals, history, prices), m.metrics[metric]) for m in found]
        for history, found in zip(histories, marks, strict=True)
    ]
    rows = [
        _row(label, run, history, curve, prices, unit, mode)
        for label, run, history, curve in zip(labels_of(runs, histories), runs, histories, curves, strict=True)
    ]
    rule = "as asked"
    if target is None:
        target, rule = default_target([(row.label, row.exact, row.best) for row in rows], mode)
    rows = [
        replace(row, cost_to_target=next((p.cost for p in row.curve if reaches(p.value, target, mode)), None))
        for row in rows
    ]
    arms = [
        _arm(label, [rows[index] for index in members]) for label, members in arms_of(runs, histories, groups).items()
    ]
    result = Comparison(metric, mode, float(target), rule, unit, prices, rows, *with_rivals(arms, mode))
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
    tiers = by_tier(costs_in(unit, history.totals, history, prices))
    validation = tiers.pop("validation")
    trained = (history.totals.get(account, Work()) for account in ("scarce/forward", "fleet/prediction"))
    kind, values = kind_of(history.totals), [point.value for point in curve]
    return Row(
        label=label,
        path=str(run),
        kind=kind,
        exact=kind == "exact",
        settings=Settings.of(history),
        steps=history.steps,
        samples=sum(work.samples for work in trained),
        first=values[0],
        best=best_of(values, mode),
        final=values[-1],
        tiers=tiers,
        total=math.fsum(tiers.values()),
        validation=validation,
        cost_to_target=None,
        saving=None,
        curve=curve,
    )


def _arm(label: str, rows: Sequence[Row]) -> Arm:
    reached = [row.cost_to_target for row in rows if row.cost_to_target is not None]
    return Arm(
        label=label,
        kind=rows[0].kind,
        settings=Settings.common([row.settings for row in rows]),
        runs=[row.label for row in rows],
        best=math.fsum(row.best for row in rows) / len(rows),
        reached=len(reached),
        cost_to_target=Estimate.of(reached) if len(reached) == len(rows) else None,
        saving=None,
    )


def _with_saving(row: Row, cheapest: Row) -> Row:
    if row.cost_to_target is None or not cheapest.cost_to_target:
        return row
    return replace(row, saving=1 - row.cost_to_target / cheapest.cost_to_target)


def _to_target(row: Row) -> float:
    return math.inf if row.cost_to_target is None else row.cost_to_target
