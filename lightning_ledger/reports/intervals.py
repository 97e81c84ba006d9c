"""Means over seeds, with Student's 95% interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Estimate", "student_quantile"]


@dataclass(frozen=True)
class Estimate:
    r"""A mean over runs that differ in their seed alone, with its 95% interval.

    .. math:: \bar x \pm t_{.975,\,n-1}\, s / \sqrt n

    It takes the runs as independent and roughly normal; with two or three of them it is wide, as it should be.

    Args:
        mean: Of the runs.
        half_width: Half the interval's width; None for a single run.
        count: How many runs.

    Example:
        >>> Estimate.of([1.0, 2.0, 3.0])  # s = 1, t = 4.303
        Estimate(mean=2.0, half_width=2.484..., count=3)
    """

    mean: float
    half_width: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The mean of ``values``, at least one, and its interval."""
        count = len(values)
        mean = math.fsum(values) / count
        if count == 1:
            return cls(mean, None, 1)
        return cls(mean, student_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def student_quantile(freedom: int, confidence: float = 0.95) -> float:
    """The ``t`` that a Student variable stays within, on both sides, with probability ``confidence``.

    Args:
        freedom: Degrees of freedom, at least 1.
        confidence: Strictly between 0 and 1.

    Example:
        >>> round(student_quantile(1), 3), round(student_quantile(10), 3)
        (12.706, 2.228)
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(\\|T\\| < t) in closed form: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for index in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * index / (index + 1)
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series
