"""Several predictors of rising fidelity: each corrects the one below it, on micro-batches of its own.

With h_1 the cheapest predictor, h_L = g the exact gradient, lam_L = 1, and C_2, ..., C_L independent uniform draws of
k_l out of n micro-batches:

    estimate = sum_i w_i lam_1 h_1i  +  sum_{l=2}^L (n/k_l) sum_{i in C_l} w_i (lam_l h_li - lam_{l-1} h_{l-1,i})

The sum telescopes: averaged over the draws it is sum_i w_i g_i, whatever the predictors. Given independent
micro-batches its variance is ``V/n + sum_l D_l (1/k_l - 1/n)``, with ``D_l = tr Cov(lam_l h_l - lam_{l-1} h_{l-1})``.
This is multilevel Monte Carlo (Giles, Operations Research 56(3), 2008) over fidelities, here with a first level on
every micro-batch; the allocation for a least product of variance and cost is own derivation.

Training (``fleet/two_level.py``) draws C_2 outside C_3 instead of independently of it: as unbiased, with
``-(2/n) Cov(h_2 - h_1, g - h_2)`` more variance. :func:`multilevel_coefficients` is the estimator written out, for any
draws, which tests hold it to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_ledger.control_variate.coefficients import check_control


def multilevel_coefficients(
    weights: Sequence[float], controls: Sequence[Sequence[int]], coefficients: Sequence[float] | None = None
) -> tuple[tuple[float, ...], ...]:
    """One coefficient per (level, micro-batch): ``estimate = sum_l sum_i c_li h_li``.

    Args:
        weights: w_i, length n.
        controls: C_2, ..., C_L, the draws of levels 2 to L, none of them empty.
        coefficients: lam_1, ..., lam_{L-1}, chosen from earlier steps only; ones by default.

    Returns:
        L rows of length n, the cheapest predictor's first and the exact gradient's last. A pass of coefficient zero
        need not run.

    Raises:
        ValueError: if a draw is empty, or names a micro-batch twice or one that does not exist, or if the numbers of
            draws and coefficients differ.

    Example:
        >>> multilevel_coefficients([0.5, 0.5], controls=[[0], [1]])
        ((-0.5, 0.5), (1.0, -1.0), (0.0, 1.0))
    """
    lams = [1.0] * len(controls) if coefficients is None else list(coefficients)
    if len(lams) != len(controls):
        raise ValueError(f"{len(lams)} coefficients for {len(controls)} draws: pass one for each level but the exact.")
    n = len(weights)
    rows = [[lams[0] * w if controls else w for w in weights], *([0.0] * n for _ in controls)]
    for level, (control, below, above) in enumerate(zip(controls, lams, [*lams, 1.0][1:], strict=True), start=1):
        check_control(control, n)
        if not control:
            raise ValueError(f"controls[{level - 1}] is empty: nothing would correct level {level}. Draw at least one.")
        for i in control:
            scaled = n / len(control) * weights[i]
            rows[level][i] += scaled * above
            rows[level - 1][i] -= scaled * below
    return tuple(tuple(row) for row in rows)


def level_costs(costs: Sequence[float]) -> tuple[float, ...]:
    """What each micro-batch of a level costs, given the price of one pass of each fidelity.

    The first level runs on all micro-batches, so that the second pays for its own passes alone; any higher one pays for
    both fidelities that it compares.

    Args:
        costs: of one pass of each predictor, cheapest first, the exact gradient last; length L.

    Returns:
        L costs: of each micro-batch, then of each member of C_2, ..., C_L.

    Example:
        >>> level_costs([0.1, 0.25, 3.0])
        (0.1, 0.25, 3.25)
    """
    return tuple(cost + (costs[level - 1] if level > 1 else 0.0) for level, cost in enumerate(costs))


def multilevel_variance(v: float, residuals: Sequence[float], n: int, shares: Sequence[float]) -> float:
    """``V/n + sum_l D_l (1/q_l - 1)/n``.

    Args:
        v: V, trace of the covariance of the exact gradients.
        residuals: D_2, ..., D_L.
        n: micro-batches in the batch.
        shares: q_l = k_l / n of each of these levels; anything where D_l is 0, or by sampling error below.

    Returns:
        The variance, a sum over coordinates.

    Example:
        >>> round(multilevel_variance(1.0, [0.1, 0.002], 8, [0.5, 0.125]), 5)
        0.13925
    """
    return (v + sum(d * (1 / q - 1) for d, q in zip(residuals, shares, strict=True) if d > 0)) / n


def multilevel_shares(deltas: Sequence[float], ratios: Sequence[float]) -> tuple[float, ...]:
    """The shares k_l / n of least variance times cost: ``k_l`` proportional to ``sqrt(D_l / cost_l)``, at most n.

        q_l = sqrt( delta_l w_1 / (w_l (1 - sum_m delta_m)) )

    A level whose share would exceed 1 runs on every micro-batch: its variance is gone and its cost is fixed, and the
    others share anew. With two levels this is :func:`best_share`.

    Args:
        deltas: D_l / V of levels 2 to L.
        ratios: cost of one micro-batch of levels 1 to L (:func:`level_costs`), over that of one exact gradient.

    Returns:
        L - 1 shares.

    Raises:
        ValueError: if the lengths do not fit, or a cost is not positive.

    Example:
        >>> [round(q, 3) for q in multilevel_shares([0.1, 0.002], level_costs([0.01, 0.05, 1.0]))]
        [0.149, 0.005]
    """
    if len(ratios) != len(deltas) + 1 or min(ratios) <= 0:
        raise ValueError(f"ratios={list(ratios)}: pass {len(deltas) + 1} positive costs, level 1 to the exact one.")
    free, fixed, variance = set(range(len(deltas))), ratios[0], 1 - sum(deltas)
    shares = [1.0] * len(deltas)
    while free:
        for level in free:
            left = ratios[level + 1] * variance
            shares[level] = math.sqrt(max(deltas[level], 0.0) * fixed / left) if left > 0 else math.inf
        widest = max(free, key=lambda level: deltas[level] / ratios[level + 1])
        if shares[widest] <= 1:
            break
        shares[widest] = 1.0
        free.remove(widest)
        variance, fixed = variance + deltas[widest], fixed + ratios[widest + 1]
    return tuple(shares)


def multilevel_relative_cost(deltas: Sequence[float], ratios: Sequence[float], shares: Sequence[float]) -> float:
    """Variance times cost at these shares, relative to plain exact training.

        (1 + sum_l delta_l (1/q_l - 1)) (w_1 + sum_l q_l w_l)

    At the best shares, none of them at 1, it is ``(sqrt((1 - sum_l delta_l) w_1) + sum_l sqrt(delta_l w_l))^2``.

    Args:
        deltas: D_l / V of levels 2 to L.
        ratios: as in :func:`multilevel_shares`.
        shares: q_l of levels 2 to L.

    Returns:
        R.

    Example:
        >>> deltas, ratios = [0.1, 0.002], level_costs([0.01, 0.05, 1.0])
        >>> round(multilevel_relative_cost(deltas, ratios, multilevel_shares(deltas, ratios)), 4)
        0.0446
    """
    cost = ratios[0] + sum(q * w for q, w in zip(shares, ratios[1:], strict=True))
    return multilevel_variance(1.0, deltas, 1, shares) * cost
