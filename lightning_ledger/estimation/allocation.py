"""How many micro-batches get an exact gradient, decided by what predictions have been worth so far."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ledger.control_variate import Candidate, Draw, Plan, plans, relative_cost_interval


@dataclass(frozen=True)
class Allocation:
    """What every batch spends on exact gradients until the next decision.

    Attributes:
        share: k/n where C is drawn uniformly, else q, the probability of each micro-batch to be exact.
        draw: how C is drawn.
        predicting: whether there are predictions at all; if not, the estimate is the mean over C.
        probe_every: without predictions, optimizer steps between two probes of them.
    """

    share: float
    draw: Draw = "uniform"
    predicting: bool = True
    probe_every: int = 20

    def count(self, n: int) -> int:
        """k for a batch of n micro-batches drawn uniformly: at least 1, and with predictions at most n - 1.

        Example:
            >>> Allocation(1 / 8).count(16), Allocation(1.0).count(16), Allocation(1.0, predicting=False).count(16)
            (2, 15, 16)
        """
        most = n - 1 if self.predicting and n > 1 else n
        return min(max(1, round(self.share * n)), most)


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


def allocate(evidence: Evidence, n: int, floor: float, ceiling: float, fractional: Draw | None = None) -> Plan:
    """The exact share with the least variance times cost, predictions being on.

    Args:
        evidence: of earlier steps.
        n: micro-batches in a batch.
        floor: least share.
        ceiling: greatest share; where C is drawn uniformly, one micro-batch at least is left to predictions.
        fractional: how to draw C with fewer than one exact micro-batch a batch; None for whole numbers only.

    Returns:
        The best of :func:`lightning_ledger.control_variate.plans`, plain exact training aside.

    Example:
        >>> found = Evidence(variance=1.0, residual=0.1, low=0.05, high=0.2, cost=0.05)
        >>> round(allocate(found, 64, 0.01, 1.0).share * 64)
        5
    """
    draws: tuple[Draw, ...] = ("uniform",)
    if fractional is not None and evidence.missed is not None:
        draws = ("uniform", fractional)
    candidate = Candidate("predictions", evidence.residual, evidence.cost, evidence.missed or 0.0)
    ceiling = max(floor, min(ceiling, max(1, n - 1) / n))
    found = plans(evidence.variance, 1.0, [candidate], [n], floor, ceiling, draws)
    return next(plan for plan in found if plan.name == candidate.name)
