"""Intervals from leaving out one batch, or one micro-batch, at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_ledger.planning.moments import BatchMoments
from lightning_ledger.reports.intervals import student_quantile

# Fewer batches than this say little of how they differ, and their micro-batches say more.
FEW = 5


def jackknife(estimates: Sequence[float]) -> float | None:
    """Half the width of the 95% interval of an estimate from N independent observations.

        t_{.975, N-1} sqrt( (N - 1)/N sum_i (theta_i - mean theta)^2 ),   theta_i the estimate without observation i

    It is due to Quenouille and Tukey (Efron and Stein, The Jackknife Estimate of Variance, 1981).

    Args:
        estimates: theta_i.

    Returns:
        The half width, or None for fewer than two.

    Example:
        >>> round(jackknife([2.5, 2.0, 1.5]), 3)  # the mean of 1, 2 and 3: 4.303 / sqrt(3)
        2.484
    """
    count = len(estimates)
    if count < 2:
        return None
    centre = sum(estimates) / count
    spread = sum((x - centre) ** 2 for x in estimates) * (count - 1) / count
    return student_quantile(count - 1) * math.sqrt(spread)


def left_out(batches: Sequence[BatchMoments]) -> list[list[BatchMoments]]:
    """All but one batch, each in turn; of fewer than ``FEW`` batches, all but one micro-batch.

    Args:
        batches: what each showed.

    Returns:
        One list for each observation; none where too few are left for a covariance.
    """
    if len(batches) >= FEW:
        return [[*batches[:b], *batches[b + 1 :]] for b in range(len(batches))]
    found = []
    for b, batch in enumerate(batches):
        for i in range(batch.n if batch.n > 2 else 1):  # one of two leaves no covariance: both go at once
            rest = [batch.without(i)] if batch.n > 2 else []
            if others := [*batches[:b], *rest, *batches[b + 1 :]]:
                found.append(others)
    return found
