"""The estimator: one coefficient per (micro-batch, pass)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Coefficients(NamedTuple):
    """One coefficient per (micro-batch, pass): ``estimate = sum_i exact_i g_i + sum_i predicted_i h_i``."""

    exact: tuple[float, ...]
    predicted: tuple[float, ...]


def coefficients(
    weights: Sequence[float], control: Sequence[int], corrected: bool = True, coefficient: float = 1.0
) -> Coefficients:
    """Coefficients of every pass; the variants of the method differ in nothing else.

    Args:
        weights: w_i, each micro-batch's share of what the loss averages over, length n.
        control: C, the micro-batches that get an exact gradient, length k from 0 to n.
        corrected: True for the control variate; False for the biased mix of exact gradients on C and predictions
            elsewhere. With k = 0 both are predictions only, with k = n both are the exact gradient.
        coefficient: lam, chosen from earlier steps only.

    Returns:
        The two coefficient vectors, each of length n. A pass of coefficient zero need not run.

    Raises:
        ValueError: if ``control`` names a micro-batch twice or one that does not exist.

    Example:
        >>> coefficients([0.5, 0.5], control=[1])
        Coefficients(exact=(0.0, 1.0), predicted=(0.5, -0.5))
        >>> coefficients([0.5, 0.5], control=[1], corrected=False)
        Coefficients(exact=(0.0, 0.5), predicted=(0.5, 0.0))
    """
    n, k, chosen = len(weights), len(control), set(control)
    if len(chosen) != k or not chosen <= set(range(n)):
        raise ValueError(f"control={list(control)} must name distinct micro-batches of 0..{n - 1}.")
    on_control, elsewhere = sum_factors(n, k, corrected)
    scale = n / k if corrected and k else 1.0
    lam = coefficient if corrected and 0 < k < n else 1.0
    return Coefficients(
        tuple(scale * w if i in chosen else 0.0 for i, w in enumerate(weights)),
        tuple(lam * w * (on_control if i in chosen else elsewhere) for i, w in enumerate(weights)),
    )


def sum_factors(n: int, k: int, corrected: bool = True) -> tuple[float, float]:
    """What the weighted sums of predictions, over C and over the rest, are multiplied by, besides lam.

    Args:
        n: micro-batches.
        k: how many of them are in C.
        corrected: as in :func:`coefficients`.

    Returns:
        ``(1 - n/k, 1)`` for the control variate, ``(0, 1)`` without it, where C needs no prediction.

    Example:
        >>> sum_factors(4, 1), sum_factors(4, 1, corrected=False), sum_factors(4, 4)
        ((-3.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    """
    return (1 - n / k if corrected and k else 0.0), 1.0


def estimate_loss(
    weights: Sequence[float],
    control: Sequence[int],
    exact: Mapping[int, float],
    predicted: Mapping[int, float],
    corrected: bool = True,
) -> float:
    """The same estimate for the loss: ``sum_i exact_i l_i + sum_i predicted_i l^_i``, with lam = 1.

    Args:
        weights: w_i, length n.
        control: C.
        exact: exact losses of the micro-batches of C.
        predicted: predicted losses of every micro-batch whose coefficient is not zero.
        corrected: as in :func:`coefficients`.

    Returns:
        An estimate of the full-batch loss, unbiased where ``corrected``.

    Example:
        >>> estimate_loss([0.5, 0.5], [1], exact={1: 3.0}, predicted={0: 2.0, 1: 2.8})
        2.6
    """
    c = coefficients(weights, control, corrected)
    return sum(a * exact[i] for i, a in enumerate(c.exact) if a) + sum(
        b * predicted[i] for i, b in enumerate(c.predicted) if b
    )
