"""How much to spend on exact gradients, given how good and how cheap predictions are."""

from __future__ import annotations

import math
from typing import Literal

Draw = Literal["uniform", "bernoulli", "systematic"]


def relative_cost(delta: float, w: float) -> float:
    """R: variance times cost at the best exact share, relative to plain exact training; below 1 it pays.

        R = (sqrt(delta) + sqrt((1 - delta) w))^2

    Args:
        delta: D / V, between 0 (perfect predictor) and 1 (worthless).
        w: cost of one prediction over cost of one exact gradient, c p / F.

    Returns:
        R. It measures variance alone: above the critical batch size variance reduction buys nothing.

    Example:
        >>> [round(relative_cost(d, 0.05), 2) for d in (0.002, 0.1, 0.5)]
        [0.07, 0.28, 0.75]
    """
    delta = min(max(delta, 0.0), 1.0)
    return (math.sqrt(delta) + math.sqrt((1 - delta) * w)) ** 2


def best_share(delta: float, w: float) -> float:
    """The exact share k/n with the least variance times cost: ``sqrt(delta w / (1 - delta))``, at most 1.

    Args:
        delta: D / V.
        w: cost of one prediction over cost of one exact gradient.

    Returns:
        The share, between 0 and 1.

    Example:
        >>> round(best_share(0.1, 0.05), 3)
        0.075
    """
    delta = min(max(delta, 0.0), 1.0)
    return 1.0 if delta == 1 else min(1.0, math.sqrt(delta * w / (1 - delta)))


def break_even(delta: float) -> float:
    """The cost ratio w at which R = 1: the root below one of ``1 - delta = 4 w / (1 + w)^2``.

        w = (1 - sqrt(delta)) / (1 + sqrt(delta))

    Args:
        delta: D / V.

    Returns:
        w*; as a fleet price it is ``p* = w* F / c``.

    Example:
        >>> w = break_even(0.1)
        >>> round(w, 3), round(relative_cost(0.1, w), 6)
        (0.519, 1.0)
    """
    root = math.sqrt(min(max(delta, 0.0), 1.0))
    return (1 - root) / (1 + root)


def relative_cost_interval(low: float, high: float, w: float) -> tuple[float, float]:
    """The least and the greatest R over an interval of delta, with the exact share at most 1.

    R grows with delta up to ``1 + w`` at ``delta = 1 / (1 + w)``, where the best share reaches 1: beyond, every
    micro-batch is exact and its prediction is paid for nothing.

    Args:
        low: lower end of the interval of delta.
        high: upper end.
        w: cost of one prediction over cost of one exact gradient.

    Returns:
        Both ends of R.

    Example:
        >>> low, high = relative_cost_interval(0.05, 0.2, w=0.05)
        >>> round(low, 3), round(high, 3)
        (0.195, 0.419)
        >>> relative_cost_interval(0.5, 1.0, w=0.05)[1]
        1.05
    """
    least, greatest = (1 + w if delta >= 1 / (1 + w) else relative_cost(delta, w) for delta in (low, high))
    return least, greatest


def effective_batch(delta: float, n: int, share: float) -> float:
    """How many exact micro-batches have a mean gradient of the estimate's variance: ``V / Var(estimate)``.

        n / (1 + delta (n/k - 1))

    Args:
        delta: D / V.
        n: micro-batches in the batch.
        share: k/n, the exact ones' share.

    Returns:
        Micro-batches: n for a perfect predictor, k for a worthless one.

    Example:
        >>> effective_batch(0.0, 8, 1 / 8), effective_batch(1.0, 8, 1 / 8), round(effective_batch(0.1, 8, 1 / 8), 2)
        (8.0, 1.0, 4.71)
    """
    return n / (1 + min(max(delta, 0.0), 1.0) * (1 / share - 1))


def estimate_variance(v: float, d: float, n: int, share: float, draw: Draw = "uniform", missed: float = 0.0) -> float:
    """Variance of the estimate, over batches and over the draw of C, with K micro-batches in C.

        V/n + D (1/q - 1)/n + missed Var(K) / (q n)^2

        uniform      k = q n of n      Var(K) = 0                        no mean residual is paid for
        bernoulli    each with q       Var(K) = n q (1 - q)
        systematic   every 1/q-th      Var(K) = f (1 - f), f the fractional part of n q

    It holds for micro-batches that are independent of one another, in any order. Own derivation.

    Args:
        v: V, trace of the covariance of the exact gradients.
        d: D, that of the residuals g - lam h.
        n: micro-batches in the batch.
        share: q, the probability of each to be exact, above 0 and at most 1.
        draw: how C is drawn.
        missed: ``||mean(g - lam h) - b||^2``, what the centre b leaves of the mean residual.

    Returns:
        The variance, a sum over coordinates.

    Example:
        >>> [round(estimate_variance(1.0, 0.1, 8, 1 / 16, draw, 0.2), 4) for draw in ("bernoulli", "systematic")]
        [0.6875, 0.5125]
    """
    fraction = share * n % 1.0
    number = {"uniform": 0.0, "bernoulli": n * share * (1 - share), "systematic": fraction * (1 - fraction)}[draw]
    return v / n + d * (1 / share - 1) / n + missed * number / (share * n) ** 2


def predictions_only_error(h: float, bias_square: float, n: int) -> float:
    """Mean square error of predictions alone: ``H/n + ||mean(g - h)||^2``; more micro-batches leave the bias.

    Args:
        h: H, trace of the covariance of the predictions.
        bias_square: squared norm of their mean error.
        n: micro-batches in the batch.

    Returns:
        The error, a sum over coordinates; to be compared with :func:`estimate_variance`.

    Example:
        >>> predictions_only_error(1.0, 0.2, 10), predictions_only_error(1.0, 0.2, 1000)
        (0.30000000000000004, 0.201)
    """
    return h / n + bias_square


def step_cost(n: int, share: float, prediction: float, exact: float) -> float:
    """Expected cost of one batch: ``n (c p + q F)``.

    Args:
        n: micro-batches in the batch, all of them predicted.
        share: q, the share with an exact gradient.
        prediction: c p, cost of one prediction.
        exact: F, cost of one exact gradient.

    Returns:
        The cost, in the unit of the two prices.

    Example:
        >>> step_cost(8, 1 / 8, prediction=0.15, exact=3.0)
        4.2
    """
    return n * (prediction + share * exact)
