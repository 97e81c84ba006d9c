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
    n, chosen = len(weights), set(control)
    if len(chosen) != len(control) or not chosen <= set(range(n)):
        raise ValueError(f"control={list(control)} must name distinct micro-batches of 0..{n - 1}.")
    k = len(control)
    if k == n:
        return Coefficients(tuple(weights), (0.0,) * n)
    if k == 0 or not corrected:
        return Coefficients(
            tuple(w if i in chosen else 0.0 for i, w in enumerate(weights)),
            tuple(0.0 if i in chosen else w for i, w in enumerate(weights)),
        )
    scale = n / k
    return Coefficients(
        tuple(scale * w if i in chosen else 0.0 for i, w in enumerate(weights)),
        tuple(coefficient * w * (1 - scale if i in chosen else 1) for i, w in enumerate(weights)),
    )


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
