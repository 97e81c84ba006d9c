"""Which format, how many micro-batches, and how many of them exact: the plan of least variance times cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_ledger.control_variate.allocation import Draw, best_share, estimate_variance, step_cost


@dataclass(frozen=True)
class Candidate:
    """A way to predict, and what is known of it.

    Attributes:
        name: of the format, say.
        residual: D, trace of the covariance of g - lam h.
        cost: c p, the price of one prediction, in the unit of an exact gradient's.
        missed: ``||mean(g - lam h) - b||^2``, what the centre b leaves of the mean residual (b = 0: all of it).
    """

    name: str
    residual: float
    cost: float
    missed: float = 0.0


class Plan(NamedTuple):
    """What to spend on one batch, and what comes of it.

    Attributes:
        relative_cost: R, variance times cost relative to plain exact training.
        name: the candidate's, or "exact".
        n: micro-batches.
        share: k/n, or q where fewer than one in n are exact.
        draw: how the exact ones are drawn.
        variance: of the estimate.
        cost: expected, of one batch.
    """

    relative_cost: float
    name: str
    n: int
    share: float
    draw: Draw
    variance: float
    cost: float


def plans(
    exact_variance: float,
    exact_cost: float,
    candidates: Sequence[Candidate],
    microbatches: Iterable[int],
    floor: float = 1e-3,
    ceiling: float = 1.0,
    draws: Sequence[Draw] = ("uniform", "systematic", "bernoulli"),
) -> list[Plan]:
    """Every candidate at its best share, for every number of micro-batches and every draw, and plain exact training.

        R = Var(estimate) cost / (V F)

    R does not fall with n but for the grid that n puts shares on: whether a batch that large is of use is a question
    for the noise scale. Predictions alone are no candidate: their error is a bias (:func:`predictions_only_error`).

    Args:
        exact_variance: V, trace of the covariance of the exact gradients.
        exact_cost: F, cost of one exact gradient.
        candidates: what can predict.
        microbatches: the numbers n to choose from.
        floor: least exact share, above 0: statistics and a certificate of unbiasedness need exact gradients.
        ceiling: greatest exact share.
        draws: allowed ways to draw the exact micro-batches. Uniform draws have one or more of them a batch, systematic
            ones here fewer than one.

    Returns:
        The plans, cheapest first; plans as cheap as one another in the order of fewest micro-batches, then candidates
        and draws as passed. A draw that no share within the limits allows is left out.

    Raises:
        ValueError: if variance, cost or limits are out of range.

    Example:
        >>> int8, int4 = Candidate("int8", residual=0.002, cost=0.15), Candidate("int4", residual=0.1, cost=0.075)
        >>> for plan in plans(1.0, 3.0, [int8, int4], [8, 64])[:2]:
        ...     print(plan.name, plan.n, plan.draw, round(plan.share, 3), round(plan.relative_cost, 3))
        int8 8 systematic 0.01 0.072
        int8 8 bernoulli 0.01 0.072
    """
    if exact_variance <= 0 or exact_cost <= 0:
        raise ValueError(f"exact_variance={exact_variance}, exact_cost={exact_cost}: both must be positive.")
    if not 0 < floor <= ceiling <= 1:
        raise ValueError(f"floor={floor}, ceiling={ceiling}: pass 0 < floor <= ceiling <= 1.")
    numbers = sorted(set(microbatches))
    if not numbers or numbers[0] < 1:
        raise ValueError(f"microbatches={numbers}: pass at least one number, each 1 or more.")

    def plan(name: str, n: int, share: float, draw: Draw, variance: float, cost: float) -> Plan:
        return Plan(variance * cost / (exact_variance * exact_cost), name, n, share, draw, variance, cost)

    found = [plan("exact", numbers[0], 1.0, "uniform", exact_variance / numbers[0], numbers[0] * exact_cost)]
    for n in numbers:
        for candidate in candidates:
            for draw in draws:
                of_draw = []
                for share in _shares(exact_variance, exact_cost, candidate, n, draw, floor, ceiling):
                    variance = estimate_variance(exact_variance, candidate.residual, n, share, draw, candidate.missed)
                    cost = step_cost(n, share, candidate.cost, exact_cost)
                    of_draw.append(plan(candidate.name, n, share, draw, variance, cost))
                if of_draw:
                    found.append(min(of_draw, key=lambda x: x.relative_cost))
    return sorted(found, key=lambda x: x.relative_cost)  # stable: ties stay in the order they were found in


def best_plan(
    exact_variance: float,
    exact_cost: float,
    candidates: Sequence[Candidate],
    microbatches: Iterable[int],
    floor: float = 1e-3,
    ceiling: float = 1.0,
    draws: Sequence[Draw] = ("uniform", "systematic", "bernoulli"),
) -> Plan:
    """The first of :func:`plans`, with the same arguments.

    Example:
        >>> best_plan(1.0, 3.0, [Candidate("noise", residual=1.0, cost=0.15)], [8]).name
        'exact'
    """
    return plans(exact_variance, exact_cost, candidates, microbatches, floor, ceiling, draws)[0]


def _shares(
    v: float, exact_cost: float, candidate: Candidate, n: int, draw: Draw, floor: float, ceiling: float
) -> Iterator[float]:
    """The shares among which the best one is: R falls and then rises with the share."""
    w = candidate.cost / exact_cost
    if draw == "uniform":
        best = best_share(candidate.residual / v, w) * n
        low, high = max(1, math.ceil(floor * n - 1e-9)), min(n, math.floor(ceiling * n + 1e-9))
        if low <= high:
            yield from sorted({min(max(k, low), high) / n for k in (math.floor(best), math.ceil(best))})
    elif draw == "bernoulli":
        yield min(max(best_share((candidate.residual + candidate.missed) / v, w), floor), ceiling)
    elif floor * n < 1:  # systematic: (1 - delta - beta n + (delta + beta) / q) (w + q), for n q < 1
        rising = v - candidate.residual - candidate.missed * n
        each = candidate.residual + candidate.missed
        best = math.sqrt(each * w / rising) if rising > 0 else math.inf
        if best * n < 1:
            yield min(max(best, floor), ceiling)
        elif ceiling * n < 1:
            yield ceiling
