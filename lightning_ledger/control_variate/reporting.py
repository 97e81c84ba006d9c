"""The statistics as values to log."""

from __future__ import annotations

import math

from torch import Tensor

from lightning_ledger.control_variate.allocation import best_share, break_even, effective_batch, relative_cost
from lightning_ledger.control_variate.estimates import (
    bias_z,
    delta_interval,
    noise_scale,
    optimal_coefficient,
    relative_bias,
    variances,
)
from lightning_ledger.control_variate.statistics import Statistics


def report(
    statistics: Statistics,
    coefficient: Tensor,
    n: int,
    k: int,
    cost_ratio: float,
    unit_cost_ratio: float,
    adam: Statistics | None = None,
    samples: float | None = None,
) -> dict[str, float]:
    """The statistics as logged values.

    ==========================  =====================================================================================
    ``gpcv/coefficient``        lam this step, averaged over layers by their share of H
    ``gpcv/cosine``             between the exact and the predicted mean gradient on C
    ``gpcv/rho2``               1 - delta at lam* per layer
    ``gpcv/delta``              D / V at this step's lam, sums over layers
    ``gpcv/relative_cost``      R at the current prices and the best exact share
    ``gpcv/optimal_share``      that share, k/n
    ``gpcv/break_even_price``   fleet price at which R = 1
    ``gpcv/break_even_low``     lower end of its 95% interval, see :func:`delta_interval`
    ``gpcv/break_even_high``    upper end
    ``gpcv/effective_batch``    exact micro-batches whose mean gradient has the estimate's variance
    ``gpcv/noise_scale``        V / ||mean gradient||^2, in micro-batches (McCandlish et al., arXiv 1812.06162)
    ``gpcv/bias``               ||mean(g - h)|| / ||mean g||, free of sampling error, see :func:`relative_bias`
    ``gpcv/bias_z``             see :func:`bias_z`
    ==========================  =====================================================================================

    Args:
        statistics: the running averages, with at least two steps.
        coefficient: [L] this step's lam.
        n: micro-batches in the batch.
        k: exact ones among them.
        cost_ratio: w, cost of one prediction over cost of one exact gradient, at the current prices.
        unit_cost_ratio: the same at a fleet price of 1.
        adam: running averages in the optimizer's metric (:func:`adam_metric`): all but the coefficient, the cosine and
            the z-value a second time, under ``gpcv/adam/``.
        samples: in one micro-batch: the noise scale a second time, in samples, as ``noise_scale_samples``.

    Returns:
        The keys above; a value that is not defined yet is left out.
    """
    values = {"gpcv/bias_z": bias_z(statistics)}
    h = variances(statistics).h.clamp(min=0)
    values["gpcv/coefficient"] = float((coefficient * h).sum() / h.sum()) if h.sum() > 0 else float(coefficient.mean())
    gg, gh, hh = (float(statistics.mean(name).sum()) for name in ("gg", "gh", "hh"))
    if gg > 0 and hh > 0:
        values["gpcv/cosine"] = gh / math.sqrt(gg * hh)
    metrics = {"gpcv/": statistics} if adam is None or not adam.ready else {"gpcv/": statistics, "gpcv/adam/": adam}
    for prefix, state in metrics.items():
        found = _in_one_metric(state, coefficient, n, k, cost_ratio, unit_cost_ratio, samples)
        values.update({prefix + name: value for name, value in found.items() if value is not None})
    return values


def _in_one_metric(
    statistics: Statistics,
    coefficient: Tensor,
    n: int,
    k: int,
    cost_ratio: float,
    unit_cost_ratio: float,
    samples: float | None,
) -> dict[str, float | None]:
    """What has a meaning in any metric; None where it is not defined yet."""
    seen = variances(statistics)
    exact = float(seen.of_exact().sum())
    if exact <= 0:
        return {}
    delta = float(seen.of_residual(coefficient).sum()) / exact
    low, high = delta_interval(statistics, coefficient)
    scale = noise_scale(statistics, coefficient, n, k)
    values: dict[str, float | None] = {
        "delta": delta,
        "rho2": 1 - float(seen.of_residual(optimal_coefficient(statistics)).sum()) / exact,
        "relative_cost": relative_cost(delta, cost_ratio),
        "optimal_share": best_share(delta, cost_ratio),
        "effective_batch": effective_batch(delta, n, k / n),
        "noise_scale": scale,
        "bias": relative_bias(statistics, coefficient, n, k),
    }
    if unit_cost_ratio > 0:
        prices = {"price": delta, "low": high, "high": low}  # the larger delta, the lower the price that pays
        values |= {f"break_even_{name}": break_even(value) / unit_cost_ratio for name, value in prices.items()}
    if samples is not None and scale is not None:
        values["noise_scale_samples"] = samples * scale
    return values
