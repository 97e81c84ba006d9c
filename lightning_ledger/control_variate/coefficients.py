"""The estimator: one coefficient per (micro-batch, pass)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Coefficients(NamedTuple):
    """One coefficient per (micro-batch, pass): ``estimate = sum_i exact_i g_i + sum_i predicted_i h_i``."""

    exact: tuple[float, ...]
    predicted: tuple[float, ...]


def coefficients(
    weights: Sequence[float],
    control: Sequence[int],
    corrected: bool = True,
    coefficient: float = 1.0,
    share: float | None = None,
) -> Coefficients:
    """Coefficients of every pass; the variants of the method differ in nothing else.

    With ``share`` C has no fixed size: each micro-batch is in it with probability q, and so is exact fewer than once a
    batch if need be. A centre b of earlier residuals then joins the estimate, with :func:`centre_coefficient`:

        estimate = sum_i w_i (lam h_i + b)  +  (1/q) sum_{i in C} w_i (g_i - lam h_i - b)

    Args:
        weights: w_i, each micro-batch's share of what the loss averages over, length n.
        control: C, the micro-batches that get an exact gradient, length k from 0 to n.
        corrected: True for the control variate; False for the biased mix of exact gradients on C and predictions
            elsewhere. With k = 0 both are predictions only, with k = n both are the exact gradient.
        coefficient: lam, chosen from earlier steps only.
        share: q, if C was drawn so that each micro-batch is in it with this probability; C may be empty.

    Returns:
        The two coefficient vectors, each of length n. A pass of coefficient zero need not run.

    Raises:
        ValueError: if ``control`` names a micro-batch twice or one that does not exist, or if ``share`` is out of range
            or given without the correction.

    Example:
        >>> coefficients([0.5, 0.5], control=[1])
        Coefficients(exact=(0.0, 1.0), predicted=(0.5, -0.5))
        >>> coefficients([0.5, 0.5], control=[1], corrected=False)
        Coefficients(exact=(0.0, 0.5), predicted=(0.5, 0.0))
        >>> coefficients([0.5, 0.5], control=[1], share=0.25)
        Coefficients(exact=(0.0, 2.0), predicted=(0.5, -1.5))
    """
    n, k, chosen = len(weights), len(control), set(control)
    check_control(control, n)
    on_control, elsewhere = sum_factors(n, k, corrected, share)
    if share is None:
        scale = n / k if corrected and k else 1.0
        lam = coefficient if corrected and 0 < k < n else 1.0
    else:
        scale, lam = 1 / share, coefficient
    return Coefficients(
        tuple(scale * w if i in chosen else 0.0 for i, w in enumerate(weights)),
        tuple(lam * w * (on_control if i in chosen else elsewhere) for i, w in enumerate(weights)),
    )


def check_control(control: Sequence[int], n: int) -> None:
    """Refuse a draw that names a micro-batch twice or one that does not exist."""
    if len(set(control)) != len(control) or not set(control) <= set(range(n)):
        raise ValueError(f"control={list(control)} must name distinct micro-batches of 0..{n - 1}.")


def centre_coefficient(weights: Sequence[float], control: Sequence[int], share: float) -> float:
    """What the centre b is multiplied by: ``sum_i w_i - (1/q) sum_{i in C} w_i``, of mean zero over the draw of C.

    Args:
        weights: w_i, length n.
        control: C, each micro-batch in it with probability ``share``.
        share: q.

    Returns:
        The coefficient.

    Raises:
        ValueError: as :func:`coefficients`.

    Example:
        >>> centre_coefficient([0.5, 0.5], [], 0.25), centre_coefficient([0.5, 0.5], [1], 0.25)
        (1.0, -1.0)
    """
    check_control(control, len(weights))
    _check_share(share)
    return sum(weights) - sum(weights[i] for i in control) / share


def sum_factors(n: int, k: int, corrected: bool = True, share: float | None = None) -> tuple[float, float]:
    """What the weighted sums of predictions, over C and over the rest, are multiplied by, besides lam.

    Args:
        n: micro-batches.
        k: how many of them are in C.
        corrected: as in :func:`coefficients`.
        share: as in :func:`coefficients`.

    Returns:
        ``(1 - n/k, 1)`` for the control variate, ``(1 - 1/q, 1)`` with a share q, ``(0, 1)`` without correction, where
        C needs no prediction.

    Raises:
        ValueError: as :func:`coefficients`.

    Example:
        >>> sum_factors(4, 1), sum_factors(4, 1, corrected=False), sum_factors(4, 4), sum_factors(4, 0, share=0.1)
        ((-3.0, 1.0), (0.0, 1.0), (0.0, 1.0), (-9.0, 1.0))
    """
    if share is None:
        return (1 - n / k if corrected and k else 0.0), 1.0
    _check_share(share)
    if not corrected:
        raise ValueError(f"share={share} with corrected=False: only the correction has exact shares below one a batch.")
    return 1 - 1 / share, 1.0


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share={share} must be a probability above 0: no micro-batch would ever be exact.")


def estimate_loss(
    weights: Sequence[float],
    control: Sequence[int],
    exact: Mapping[int, float],
    predicted: Mapping[int, float],
    corrected: bool = True,
    share: float | None = None,
) -> float:
    """The same estimate for the loss: ``sum_i exact_i l_i + sum_i predicted_i l^_i``, with lam = 1.

    Args:
        weights: w_i, length n.
        control: C.
        exact: exact losses of the micro-batches of C.
        predicted: predicted losses of every micro-batch whose coefficient is not zero.
        corrected: as in :func:`coefficients`.
        share: as in :func:`coefficients`; here without a centre.

    Returns:
        An estimate of the full-batch loss, unbiased where ``corrected``.

    Example:
        >>> estimate_loss([0.5, 0.5], [1], exact={1: 3.0}, predicted={0: 2.0, 1: 2.8})
        2.6
    """
    c = coefficients(weights, control, corrected, share=share)
    return sum(a * exact[i] for i, a in enumerate(c.exact) if a) + sum(
        b * predicted[i] for i, b in enumerate(c.predicted) if b
    )
