"""Intervals from leaving out one batch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning_ledger.reports.intervals import student_quantile

T = TypeVar("T")


def jackknife(batches: Sequence[T], estimate: Callable[[Sequence[T]], float]) -> float | None:
    """Half the width of the 95% interval of an estimate from batches.

        t_{.975, B-1} sqrt( (B - 1)/B sum_b (theta_b - mean theta)^2 ),   theta_b the estimate without batch b

    It takes batches as independent (Efron and Stein, The Jackknife Estimate of Variance, 1981).

    Args:
        batches: what each of B batches showed.
        estimate: of some of them.

    Returns:
        The half width, or None for fewer than two batches.

    Example:
        >>> round(jackknife([1.0, 2.0, 3.0], lambda x: sum(x) / len(x)), 3)  # that of a mean: 4.303 / sqrt(3)
        2.484
    """
    count = len(batches)
    if count < 2:
        return None
    without = [estimate([*batches[:b], *batches[b + 1 :]]) for b in range(count)]
    centre = sum(without) / count
    spread = sum((x - centre) ** 2 for x in without) * (count - 1) / count
    return student_quantile(count - 1) * math.sqrt(spread)
