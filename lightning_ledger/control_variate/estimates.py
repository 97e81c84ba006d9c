"""What the running averages say: variances, the best coefficient, bias, and how sure all that is.

Pure functions of :class:`Statistics`. In a metric (:func:`observe`) they hold for gradients divided by it.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_ledger.control_variate.statistics import Statistics

Scope = Literal["layer", "global"]

# Before so many observations the running averages are noise: the coefficient stays at 1, where any is unbiased.
WARMUP = 10
# A coefficient outside this range can only be sampling error: lam* = cov(g, h) / var(h) is near 1 for any predictor
# worth its price, and at 0 for a worthless one.
COEFFICIENT_RANGE = (0.0, 2.0)


class Variances(NamedTuple):
    """Traces of covariances across micro-batches, one entry per layer."""

    h: Tensor
    eh: Tensor
    e: Tensor

    def of_exact(self) -> Tensor:
        """V = H + 2 tr Cov(e, h) + tr Cov(e)."""
        return (self.h + 2 * self.eh + self.e).clamp(min=0)

    def of_residual(self, coefficient: Tensor) -> Tensor:
        """D = tr Cov(g - lam h) = tr Cov(e) + 2 (1 - lam) tr Cov(e, h) + (1 - lam)^2 H."""
        rest = 1 - coefficient
        return (self.e + 2 * rest * self.eh + rest**2 * self.h).clamp(min=0)


def variances(statistics: Statistics) -> Variances:
    """The current estimates of H, tr Cov(e, h) and tr Cov(e), per layer.

    Args:
        statistics: the running averages.

    Returns:
        Three [L] tensors.
    """
    if statistics.averages["within"].weight:
        e = statistics.mean("within")
    else:
        e = statistics.mean("residual") - statistics.mean("lagged").clamp(min=0)
    return Variances(statistics.mean("h_variance"), statistics.mean("eh_covariance"), e.clamp(min=0))


def optimal_coefficient(statistics: Statistics, scope: Scope = "layer") -> Tensor:
    """lam* = 1 + tr Cov(e, h) / tr Cov(h): the coefficient of least variance, from the steps seen so far.

    Args:
        statistics: the running averages, of earlier steps only.
        scope: one coefficient per layer, or the same for all.

    Returns:
        [L] coefficients; ones until enough steps were seen.
    """
    ones = torch.ones(len(statistics.layers), dtype=torch.float64)
    if statistics.steps < WARMUP:
        return ones
    covariance, spread = statistics.mean("eh_covariance"), statistics.mean("h_spread")
    if scope == "global":
        covariance, spread = covariance.sum().expand_as(ones), spread.sum().expand_as(ones)
    lam = torch.where(spread > 0, 1 + covariance / spread.clamp(min=1e-300), ones)
    return lam.clamp(*COEFFICIENT_RANGE)


def delta_by_layer(statistics: Statistics, coefficient: Tensor) -> dict[str, float]:
    """``D / V`` of each layer.

    Args:
        statistics: the running averages.
        coefficient: [L] lam.

    Returns:
        By layer name; layers without gradient variance are left out.
    """
    seen = variances(statistics)
    rows = zip(statistics.layers, seen.of_residual(coefficient).tolist(), seen.of_exact().tolist(), strict=True)
    return {layer: residual / exact for layer, residual, exact in rows if exact > 0}


def mean_gradient_square(statistics: Statistics, coefficient: Tensor, n: int, k: int) -> float:
    """``||mean gradient||^2``, without the sampling error that any one estimate of it carries.

        ||estimate||^2 averaged over steps  -  V/n  -  D (1/k - 1/n)

    Args:
        statistics: the running averages.
        coefficient: [L] lam.
        n: micro-batches in the batch.
        k: exact ones among them.

    Returns:
        The difference, summed over layers: its expectation is right, so it can come out negative where noise rules.
    """
    seen = variances(statistics)
    exact, residual = float(seen.of_exact().sum()), float(seen.of_residual(coefficient).sum())
    return float(statistics.mean("est").sum()) - exact / n - residual * (1 / k - 1 / n)


def noise_scale(statistics: Statistics, coefficient: Tensor, n: int, k: int, samples: float = 1.0) -> float | None:
    """The gradient noise scale ``B = V / ||mean gradient||^2``: batches much larger than this gain little.

    A micro-batch of b samples has ``V = tr Sigma / b`` with Sigma the covariance of one sample's gradient, so the same
    ratio times b is ``B_simple = tr Sigma / ||mean gradient||^2`` in samples (McCandlish et al., arXiv 1812.06162).

    Args:
        statistics: the running averages.
        coefficient: [L] lam.
        n: micro-batches in the batch.
        k: exact ones among them.
        samples: in one micro-batch, for the scale in samples; 1 for the scale in micro-batches.

    Returns:
        B, or None while no mean gradient can be told from the noise.
    """
    signal = mean_gradient_square(statistics, coefficient, n, k)
    exact = float(variances(statistics).of_exact().sum())
    return samples * exact / signal if signal > 0 and exact > 0 else None


def relative_bias(statistics: Statistics, coefficient: Tensor, n: int, k: int) -> float | None:
    """``||mean(g - h)|| / ||mean g||``: how far training on predictions alone would be misled.

    Both squared norms are free of their own sampling error: the first is a mean of products of independent residuals,
    of pairs within the step for k > 1 and of successive steps for k = 1, and 0 where it comes out negative. With S the
    covariance of one residual, each such product deviates by about ``sqrt(2 tr S^2 / (k (k-1)) + 4 m' S m / k)`` from
    the square of the mean m (k = 1: ``sqrt(tr S^2 + 2 m' S m)``). Own derivation.

    Args:
        statistics: the running averages.
        coefficient: [L] lam.
        n: micro-batches in the batch.
        k: exact ones among them.

    Returns:
        The ratio, or None while no mean gradient can be told from the noise.
    """
    signal = mean_gradient_square(statistics, coefficient, n, k)
    residual = max(0.0, float(statistics.mean("mean_residual").sum()))
    return math.sqrt(residual / signal) if signal > 0 else None


def delta_interval(statistics: Statistics, coefficient: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    """An interval for ``delta = D / V``, by the delta method for a ratio of means.

    Step t has its own unbiased estimates D_t and V_t. With N the effective number of steps in the averages,

        half width = t_{N-1} sqrt( Var(D_t - delta V_t) / N ) / V

    It assumes that D_t - delta V_t is uncorrelated from step to step and that delta stays as it is over the steps
    remembered. For k = 1 successive steps share a residual: their correlation is negative, and the interval somewhat
    too wide; a delta that drifts widens it too. What the fixed sample of coordinates leaves out is not in it. Student's
    quantile is the expansion 26.7.5 of Abramowitz and Stegun; the rest is own derivation.

    Args:
        statistics: the running averages.
        coefficient: [L] lam.
        confidence: how often the interval should hold the truth.

    Returns:
        Its two ends, within 0 and 1; both of these while too few steps were seen.

    Example:
        >>> delta_interval(Statistics.start(["layer"]), torch.ones(1))
        (0.0, 1.0)
    """
    average, products = statistics.ratio
    share, seen = average.inverse_samples, variances(statistics)
    exact = float(seen.of_exact().sum())
    if statistics.steps < WARMUP or share >= 1 or exact <= 0:
        return 0.0, 1.0
    delta = float(seen.of_residual(coefficient).sum()) / exact
    covariance = (products.mean - torch.outer(average.mean, average.mean)) / (1 - share)
    difference = torch.tensor([1.0, -delta], dtype=covariance.dtype)
    variance = max(0.0, float(difference @ covariance @ difference))
    half = student_quantile(confidence, 1 / share - 1) * math.sqrt(variance * share) / exact
    return min(max(delta - half, 0.0), 1.0), min(max(delta + half, 0.0), 1.0)


def student_quantile(confidence: float, degrees: float) -> float:
    """Two-sided quantile of Student's t; 0.2% off at 8 degrees of freedom, less beyond."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def bias_z(statistics: Statistics) -> float:
    """Does the estimate drift away from the exact gradients? Near 0 if unbiased, far above 3 if not.

    Fixed random projections of (estimate - mean of the exact gradients) have mean zero under the method's own claim.
    Each of the J running means, over its standard error, is a t-value with nu degrees of freedom, turned into a
    standard normal z_j (Wallace's approximation: ``z^2 = ((8 nu + 1) / (8 nu + 3))^2 nu log(1 + t^2 / nu)``), so that
    few steps raise no alarm. With r the projections' correlations, the result is
    ``(sum_j z_j^2 - J) / sqrt(2 sum_ij r_ij^2)``: mean 0 and deviation 1 if unbiased.

    Args:
        statistics: the running averages.

    Returns:
        The standardised sum; 0 before the second step.
    """
    mean, share = statistics.drift[0].mean, statistics.drift[0].inverse_samples
    covariance = (statistics.drift[1].mean - torch.outer(mean, mean)) / max(1 - share, 1e-12)
    variance = covariance.diag()
    if share >= 1 or not bool((variance > 0).all()):
        return 0.0
    degrees = 1 / share - 1
    t_squared = mean**2 / (variance * share)
    z_squared = ((8 * degrees + 1) / (8 * degrees + 3)) ** 2 * degrees * torch.log1p(t_squared / degrees)
    correlation_squared = covariance**2 / torch.outer(variance, variance)
    return float((z_squared.sum() - len(mean)) / (2 * correlation_squared.sum()).sqrt())
