"""How much to spend on exact gradients, given how good and how cheap predictions are."""

from __future__ import annotations

import math


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
