"""How many micro-batches get an exact gradient, decided by what predictions have been worth so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_ledger.control_variate import (
    Candidate,
    Draw,
    Plan,
    level_costs,
    multilevel_relative_cost,
    multilevel_shares,
    plans,
    relative_cost_interval,
)
from lightning_ledger.precision import parse_formats
from lightning_ledger.prices import PriceBook
from lightning_ledger.work import Work


@dataclass(frozen=True)
class Allocation:
    """What every batch spends on exact gradients until the next decision.

    Attributes:
        format: of the predictions.
        share: k/n where C is drawn uniformly, else q, the probability of each micro-batch to be exact.
        draw: how C is drawn.
        predicting: whether there are predictions at all; if not, the estimate is the mean over C.
        probe_every: optimizer steps between two probes of predictions that are not in use; 0 for no probes.
        below: a coarser format that predicts every micro-batch, for ``format`` to correct; empty without.
        between: m/n then, the share that ``format`` predicts besides C.
    """

    format: str
    share: float
    draw: Draw = "uniform"
    predicting: bool = True
    probe_every: int = 20
    below: str = ""
    between: float = 0.0

    def count(self, n: int) -> int:
        """k for a batch of n micro-batches drawn uniformly: at least 1, and with predictions at most n - 1.

        Example:
            >>> shares = Allocation("int8", 1 / 8), Allocation("int8", 1.0), Allocation("int8", 1.0, predicting=False)
            >>> [allocation.count(16) for allocation in shares]
            [2, 15, 16]
        """
        most = n - 1 if self.predicting and n > 1 else n
        return min(max(1, round(self.share * n)), most)

    def members(self, n: int, k: int) -> int:
        """m for a batch of n micro-batches, k of them exact; 0 where there is one level, or no room for two.

        Example:
            >>> Allocation("int8", 1 / 8, below="int4", between=0.5).members(8, k=1)
            4
        """
        return min(max(1, round(self.between * n)), n - k) if self.below else 0


@dataclass(frozen=True)
class Evidence:
    """What is known of the predictions, in the optimizer's metric where it has one.

    Attributes:
        variance: V, trace of the covariance of the exact gradients.
        residual: D, that of g - lam h.
        low: lower end of the 95% interval of delta = D / V.
        high: upper end.
        cost: w, cost of one prediction over cost of one exact gradient.
        missed: ``||mean(g - lam h) - b||^2``; None where no centre b is kept, or too little was seen of it.
    """

    variance: float
    residual: float
    low: float
    high: float
    cost: float
    missed: float | None = None

    @property
    def relative_cost(self) -> tuple[float, float]:
        """Both ends of R."""
        return relative_cost_interval(self.low, self.high, self.cost)

    def values(self) -> dict[str, float]:
        """The numbers behind a decision, as logged with it."""
        cheapest, dearest = self.relative_cost
        values = {
            "delta": self.residual / self.variance,
            "delta_low": self.low,
            "delta_high": self.high,
            "cost_ratio": self.cost,
            "relative_cost_low": cheapest,
            "relative_cost_high": dearest,
        }
        return values if self.missed is None else {**values, "missed": self.missed / self.variance}


def allocate(
    evidence: Mapping[str, Evidence],
    active: str,
    n: int,
    floor: float,
    ceiling: float,
    fractional: Draw | None = None,
    margin: float = 0.1,
) -> dict[str, Plan]:
    """The exact share with the least variance times cost for every format, predictions being on.

    Args:
        evidence: of earlier steps, by format.
        active: the format in use.
        n: micro-batches in a batch.
        floor: least share.
        ceiling: greatest share; where C is drawn uniformly, one micro-batch at least is left to predictions.
        fractional: how to draw C with fewer than one exact micro-batch a batch; None for whole numbers only.
        margin: another format must promise an R lower by this part to be chosen.

    Returns:
        By format, the best of :func:`lightning_ledger.control_variate.plans`, plain exact training aside; the chosen
        one first.

    Example:
        >>> int8 = Evidence(variance=1.0, residual=0.002, low=0.001, high=0.004, cost=0.1)
        >>> int4 = Evidence(variance=1.0, residual=0.1, low=0.05, high=0.2, cost=0.05)
        >>> for name, plan in allocate({"int4": int4, "int8": int8}, "int4", 64, 0.01, 1.0).items():
        ...     print(name, round(plan.share * 64), round(plan.relative_cost, 3))
        int8 1 0.13
        int4 5 0.279
    """
    ceiling = max(floor, min(ceiling, max(1, n - 1) / n))
    found = {}
    for name, seen in evidence.items():
        draws: tuple[Draw, ...] = ("uniform",)
        if fractional is not None and seen.missed is not None:
            draws = ("uniform", fractional)
        candidate = Candidate(name, seen.residual, seen.cost, seen.missed or 0.0)
        of_format = plans(seen.variance, 1.0, [candidate], [n], floor, ceiling, draws)
        found[name] = next(plan for plan in of_format if plan.name == name)

    def rank(name: str) -> float:
        return found[name].relative_cost * (1 - margin if name == active else 1)

    return {name: found[name] for name in sorted(found, key=rank)}


class Levels(NamedTuple):
    """How to spend a batch on three levels, and what comes of it.

    Attributes:
        relative_cost: R.
        between: m/n, the share of micro-batches on which the finer predictions correct the coarser ones.
        share: k/n.
    """

    relative_cost: float
    between: float
    share: float


def allocate_levels(
    between: float, residual: float, costs: tuple[float, float], n: int, floor: float, ceiling: float
) -> Levels | None:
    """The numbers of finer predictions and of exact gradients with the least variance times cost.

    Args:
        between: ``tr Cov(h - h') / V`` of finer against coarser predictions.
        residual: ``tr Cov(g - lam h) / V`` of exact gradients against finer predictions.
        costs: of a coarser and of a finer prediction, over that of an exact gradient.
        n: micro-batches in a batch.
        floor: least share of exact ones.
        ceiling: greatest share of exact ones.

    Returns:
        The best, with an exact share next to that of :func:`lightning_ledger.control_variate.multilevel_shares`; None
        if n is too small for three levels.

    Example:
        >>> levels = allocate_levels(0.1, 0.002, (0.01, 0.05), 64, 0.01, 1.0)
        >>> round(levels.between * 64), round(levels.share * 64), round(levels.relative_cost, 3)
        (15, 1, 0.055)
    """
    if n < 3:
        return None
    ratios = level_costs([*costs, 1.0])
    best = multilevel_shares([between, residual], ratios)[1] * n
    low = max(1, math.ceil(floor * n - 1e-9))
    high = max(low, min(math.floor(ceiling * n + 1e-9), n - 1))
    exact = {min(max(k, low), high) for k in (math.floor(best), math.ceil(best))}

    def levels(m: int, k: int) -> Levels:
        shares = m / n, k / n
        return Levels(multilevel_relative_cost([between, residual], ratios, shares), *shares)

    return min(levels(m, k) for k in sorted(exact) for m in range(1, n - k + 1))


def least_cost(prices: PriceBook, format: str) -> float:
    """The price of a prediction in the cheapest of its formats, over that of an exact gradient of as many FLOPs.

    Args:
        prices: the price book.
        format: of the prediction.

    Returns:
        w, as far as it is known before either was run: with three forward-equivalents in a gradient.

    Example:
        >>> round(least_cost(PriceBook(fleet_forward=0.3), "int8"), 6)
        0.3
        >>> round(least_cost(PriceBook(fleet_forward=0.3, fleet_billing="per_gradient"), "int8"), 6)
        0.1
    """
    prices = replace(prices, forward_flops=None)
    names = [fmt.name for fmt in parse_formats(format).distinct]
    works = [Work(flops=3, flops_by_format={name: 3}, passes=1) for name in names]
    scarce = prices.cost("scarce/forward", Work(flops=3), 1)
    least = min(prices.cost("fleet/prediction", work, 1) for work in works)
    return least / scarce if scarce else math.inf
