"""Prices finished runs again: what they would have cost to the target at other fleet prices, without a rerun."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lightning_ledger.history import Mark
from lightning_ledger.ledger_file import plain
from lightning_ledger.prices import PriceBook
from lightning_ledger.reports.intervals import Estimate
from lightning_ledger.reports.pricing import common_unit, training_line
from lightning_ledger.reports.runs import (
    Kind,
    Mode,
    arms_of,
    best_of,
    default_target,
    kind_of,
    labels_of,
    marks_of,
    reaches,
    read_runs,
)

__all__ = ["FLEET_PRICES", "CostLine", "RepricedArm", "Repricing", "break_even", "reprice"]

FLEET_PRICES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""The fleet prices shown by default: from nearly free to that of the training GPU."""

Verdict = Literal["yardstick", "below", "always", "never", "censored", "no exact run"]


@dataclass(frozen=True)
class CostLine:
    r"""One run's training cost to the target, a line over the fleet price: :math:`a + b\,p`.

    Args:
        label: The run's label.
        path: Where its ledger was read.
        reached: Whether it reached the target. If not, the line is what it spent in all: a lower bound.
        best: The best value it reached.
        fixed: :math:`a`: its cost with a free fleet.
        fleet: :math:`b`: its work on the fleet, in what one unit of the fleet price buys.
    """

    label: str
    path: str
    reached: bool
    best: float
    fixed: float
    fleet: float

    def at(self, price: float) -> float:
        """The cost at a fleet price."""
        return self.fixed + self.fleet * price


@dataclass(frozen=True)
class RepricedArm:
    """Runs that differ in their seed alone, over fleet prices.

    Args:
        label: The arm's name.
        kind: What its runs did.
        runs: Their costs to the target.
        verdict: Against the cheapest exact arm: ``below`` if this one is cheaper at fleet prices below
            ``break_even``; ``always`` or ``never`` at any price; ``yardstick`` if it is that arm; ``censored`` if not
            all its runs reached the target, ``no exact run`` if no exact arm did.
        break_even: The fleet price at which both cost the same; None unless ``verdict`` is ``below``.
    """

    label: str
    kind: Kind
    runs: Sequence[CostLine]
    verdict: Verdict = "no exact run"
    break_even: float | None = None

    @property
    def censored(self) -> bool:
        """Whether some run never reached the target, so that costs are lower bounds."""
        return not all(run.reached for run in self.runs)

    def cost(self, price: float) -> Estimate:
        """Mean cost to the target at a fleet price, with its 95% interval; a lower bound if :attr:`censored`."""
        estimate = Estimate.of([run.at(price) for run in self.runs])
        return replace(estimate, half_width=None) if self.censored else estimate


@dataclass(frozen=True)
class Repricing:
    """Runs over fleet prices, all in one unit.

    Args:
        metric: The metric whose target counts.
        mode: Whether lower (``min``) or higher (``max``) is better.
        target: The value to reach.
        target_rule: Where the target comes from, in words.
        unit_flops: FLOPs of one forward-equivalent: the smallest among the runs.
        prices: The price book, whose fleet prices are replaced one after the other.
        fleet_prices: By these.
        arms: The runs, seeds of one arm together.
    """

    metric: str
    mode: Mode
    target: float
    target_rule: str
    unit_flops: int
    prices: PriceBook
    fleet_prices: Sequence[float]
    arms: Sequence[RepricedArm]

    @property
    def cheapest_exact(self) -> RepricedArm | None:
        """The exact arm that reached the target at the lowest mean cost. No fleet price changes it."""
        return _cheapest_exact(self.arms)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: plain containers, non-finite numbers as strings; each arm with its costs."""
        data: dict[str, Any] = plain(asdict(self))
        for entry, arm in zip(data["arms"], self.arms, strict=True):
            entry["censored"] = arm.censored
            entry["costs"] = [{"fleet_price": p, **asdict(arm.cost(p))} for p in self.fleet_prices]
        cheapest = self.cheapest_exact
        return {**data, "cheapest_exact": cheapest.label if cheapest else None}


def reprice(
    runs: Sequence[str | os.PathLike[str]],
    fleet_prices: Sequence[float] = FLEET_PRICES,
    metric: str = "val_loss",
    mode: Mode = "min",
    target: float | None = None,
    prices: PriceBook | None = None,
    groups: Sequence[str] = (),
) -> Repricing:
    r"""Cost to the target over fleet prices, from the ledgers of finished runs.

    A ledger holds work, so its cost to the first mark at or beyond the target is a line over the fleet price,
    :math:`a + b\,p`; and an exact run costs :math:`E` at any. The break-even price is :math:`(E - a)/b`. Own
    derivation. What a price cannot change is how the run trained: another allocation may suit another price better.

    Args:
        runs: Run directories, each holding a ``ledger.jsonl``, or such files.
        fleet_prices: Prices of one forward-equivalent on the fleet, or of one prediction: as the book bills.
        metric: A metric that the runs marked.
        mode: ``min`` if lower is better, else ``max``.
        target: The value to reach; by default as in :func:`~lightning_ledger.reports.compare`.
        prices: The price book for everything else. Its own fleet prices, by format too, are replaced.
        groups: Which runs are seeds of one arm, where names do not tell: see
            :func:`~lightning_ledger.reports.runs.arms_of`.

    Raises:
        FileNotFoundError: A run has no ledger.
        ValueError: No runs or no prices, a price that is none, a damaged ledger, no marks with the metric, FLOPs that
            were never counted, or a group that is none.
    """
    if not fleet_prices:
        raise ValueError("fleet_prices is empty: pass at least one, such as 0.05.")
    prices = prices or PriceBook()
    for price in fleet_prices:
        prices.with_fleet_price(price)  # refuses what is no price
    prices.warn_if_stale()
    histories = read_runs(runs, metric, mode)
    unit = common_unit(histories, prices)
    marks = [marks_of(run, history, metric) for run, history in zip(runs, histories, strict=True)]
    labels = labels_of(runs, histories)
    kinds = [kind_of(history.totals) for history in histories]
    bests = [best_of([mark.metrics[metric] for mark in found], mode) for found in marks]
    rule = "as asked"
    if target is None:
        exact = [kind == "exact" for kind in kinds]
        target, rule = default_target(list(zip(labels, exact, bests, strict=True)), mode)

    def line(index: int) -> CostLine:
        history = histories[index]
        there = _first(marks[index], metric, target, mode)
        fixed, fleet = training_line(unit, (there or history).totals, history, prices)
        return CostLine(labels[index], str(runs[index]), there is not None, bests[index], fixed, fleet)

    arms = [
        RepricedArm(name, kinds[members[0]], [line(index) for index in members])
        for name, members in arms_of(runs, histories, groups).items()
    ]
    yardstick = _cheapest_exact(arms)
    judged = [_judged(arm, yardstick) for arm in arms]
    return Repricing(metric, mode, float(target), rule, unit, prices, sorted(set(fleet_prices)), judged)


def break_even(fixed: float, fleet: float, exact: float) -> tuple[Verdict, float | None]:
    """Below which fleet price ``fixed + fleet * price`` is less than ``exact``.

    Example:
        >>> break_even(3.0, 12.0, exact=9.0), break_even(3.0, 0.0, exact=9.0), break_even(9.0, 12.0, exact=9.0)
        (('below', 0.5), ('always', None), ('never', None))
    """
    if fixed >= exact:
        return "never", None
    return ("below", (exact - fixed) / fleet) if fleet else ("always", None)


def _judged(arm: RepricedArm, yardstick: RepricedArm | None) -> RepricedArm:
    if arm.censored:
        return replace(arm, verdict="censored")
    if yardstick is None:
        return arm
    if arm is yardstick:
        return replace(arm, verdict="yardstick")
    fleet = math.fsum(run.fleet for run in arm.runs) / len(arm.runs)
    verdict, price = break_even(arm.cost(0.0).mean, fleet, yardstick.cost(0.0).mean)
    return replace(arm, verdict=verdict, break_even=price)


def _cheapest_exact(arms: Sequence[RepricedArm]) -> RepricedArm | None:
    reached = (arm for arm in arms if arm.kind == "exact" and not arm.censored)
    return min(reached, key=lambda arm: arm.cost(0.0).mean, default=None)


def _first(marks: Sequence[Mark], metric: str, target: float, mode: Mode) -> Mark | None:
    return next((mark for mark in marks if reaches(mark.metrics[metric], target, mode)), None)
