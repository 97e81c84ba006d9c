"""What a running training shows of its gradients' variances, bias and best coefficient.

Every function here takes a state and returns a new one; nothing is hidden. The symbols are those of the package's
docstring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_ledger.control_variate.allocation import break_even, relative_cost
from lightning_ledger.control_variate.gradients import Gradients
from lightning_ledger.control_variate.layout import PROJECTIONS, Layout

Scope = Literal["layer", "global"]

# Before so many observations the running averages are noise: the coefficient stays at 1, where any is unbiased.
WARMUP = 10
# A coefficient outside this range can only be sampling error: lam* = cov(g, h) / var(h) is near 1 for any predictor
# worth its price, and at 0 for a worthless one.
COEFFICIENT_RANGE = (0.0, 2.0)


class Average(NamedTuple):
    """An exponential average that carries its own weight, so that its mean has no start-up bias."""

    total: Tensor
    weight: float = 0.0
    weight_squared: float = 0.0

    @classmethod
    def zeros(cls, *shape: int) -> Average:
        """An average of nothing yet, over tensors of this shape."""
        return cls(torch.zeros(*shape, dtype=torch.float64))

    def add(self, value: Tensor, decay: float) -> Average:
        """The average after one more value."""
        return Average(
            decay * self.total + (1 - decay) * value.to(self.total),
            decay * self.weight + (1 - decay),
            decay**2 * self.weight_squared + (1 - decay) ** 2,
        )

    @property
    def mean(self) -> Tensor:
        """Bias-corrected mean; zeros where nothing was seen."""
        return self.total / self.weight if self.weight else self.total

    @property
    def inverse_samples(self) -> float:
        """1 / effective number of independent values in the mean."""
        return self.weight_squared / self.weight**2 if self.weight else 1.0


@dataclass(frozen=True)
class Observation:
    """What one step shows of the gradients, as the sums that the step holds anyway.

    Attributes:
        exact: (n/k) sum over C of w_i g_i, times ``loss_scale``.
        control: sum over C of w_i h_i.
        rest: sum outside C of w_i h_i.
        squared_norms: [n, L] squared norm of each n w_i h_i.
        residuals: [k, m] n w_i (g_i - h_i) on the sampled coordinates, for each i in C.
        loss_scale: what the loss was multiplied by before its backward pass (AMP, accumulation).
    """

    exact: Gradients
    control: Gradients
    rest: Gradients
    squared_norms: Tensor
    residuals: Tensor
    loss_scale: float = 1.0


_LAYER_AVERAGES = (
    "h_variance",
    "eh_covariance",
    "h_spread",
    "within",
    "residual",
    "lagged",
    "gg",
    "gh",
    "hh",
    "est",
)


@dataclass(frozen=True)
class Statistics:
    """Running averages over steps, one entry per layer; :func:`observe` returns the next one.

    Attributes:
        layers: layer names, L of them.
        decay: of the exponential averages.
        steps: observations made.
        averages: name to :class:`Average`, of [L] tensors.
        previous: [m] last step's mean residual on the sampled coordinates.
        drift: averages of [J] projections of estimate - exact mean, and of their [J, J] products.
    """

    layers: tuple[str, ...]
    decay: float = 0.95
    steps: int = 0
    averages: Mapping[str, Average] = field(default_factory=dict)
    previous: Tensor | None = None
    drift: tuple[Average, Average] | None = None

    @classmethod
    def start(cls, layers: Sequence[str], decay: float = 0.95) -> Statistics:
        """No observations yet."""
        return cls(
            tuple(layers),
            decay,
            averages={name: Average.zeros(len(layers)) for name in _LAYER_AVERAGES},
            drift=(Average.zeros(PROJECTIONS), Average.zeros(PROJECTIONS, PROJECTIONS)),
        )

    def mean(self, name: str) -> Tensor:
        """[L] bias-corrected running mean of one statistic."""
        return self.averages[name].mean

    @property
    def ready(self) -> bool:
        """Whether every variance has an estimate: residuals need two successive steps."""
        return self.averages["within"].weight > 0 or self.averages["lagged"].weight > 0

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        return {
            "layers": list(self.layers),
            "decay": self.decay,
            "steps": self.steps,
            "averages": {name: list(a) for name, a in self.averages.items()},
            "previous": self.previous,
            "drift": [list(a) for a in self.drift] if self.drift else None,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Statistics:
        """The inverse of :meth:`state_dict`."""
        drift = [Average(*a) for a in state["drift"]]
        return cls(
            layers=tuple(state["layers"]),
            decay=state["decay"],
            steps=state["steps"],
            averages={name: Average(*a) for name, a in state["averages"].items()},
            previous=state["previous"],
            drift=(drift[0], drift[1]),
        )


def observe(statistics: Statistics, layout: Layout, seen: Observation, coefficient: Tensor) -> Statistics:
    """Fold one step's gradients into the running averages.

        H            sum_i ||h_i - mean h||^2 / (n - 1)
        tr Cov(e,h)  k <exact - control, control - rest>     (same expectation as with exact alone, far less noise)
        tr Cov(e)    k = 1: ||e_t||^2 - <e_t, e_{t-1}> over successive steps; k > 1: within the step

    Args:
        statistics: the state before this step; it alone may decide this step's coefficient.
        layout: names, layers and sampled coordinates.
        seen: this step's gradients, with 0 < k < n.
        coefficient: [L] the lam this step was estimated with.

    Returns:
        The state after this step; unchanged if a gradient was not finite.
    """
    n, k = len(seen.squared_norms), len(seen.residuals)
    # From here on: g, a, b are the means of the exact gradients over C, the predictions over C and those outside it.
    scales = torch.tensor([1 / seen.loss_scale, n / k, n / (n - k)], dtype=torch.float64)
    products = layout.inner_products(seen.exact, seen.control, seen.rest)
    (gg, ga, gb), (_, aa, ab), (_, _, bb) = products * torch.outer(scales, scales)[..., None]
    residual = seen.residuals.mean(0)
    values = {"gg": gg, "gh": ga, "hh": aa}

    mean_square = (k * k * aa + 2 * k * (n - k) * ab + (n - k) ** 2 * bb) / n**2
    values["h_variance"] = (seen.squared_norms.double().sum(0) - n * mean_square) / (n - 1)
    spread = aa - 2 * ab + bb
    values["h_spread"] = k * (n - k) / n * spread
    values["eh_covariance"] = k * (ga - gb - aa + ab)
    step = coefficient * (n - k) / n  # estimate = exact + lam (n-k)/n (rest - control)
    values["est"] = gg + 2 * step * (gb - ga) + step**2 * spread

    if k > 1:
        centred = seen.residuals - residual
        values["within"] = torch.stack([layout.inner(r, r) for r in centred]).sum(0) / (k - 1)
    values["residual"] = k * layout.inner(residual, residual)
    if statistics.previous is not None and statistics.previous.shape == residual.shape:
        values["lagged"] = k * layout.inner(residual, statistics.previous.to(residual))
    if not all(v.isfinite().all() for v in values.values()):
        return replace(statistics, previous=None)

    assert statistics.drift is not None
    on_sample = n / (n - k) * layout.sample(seen.rest) - n / k * layout.sample(seen.control)
    drift = (layout.signs @ (step.to(on_sample)[layout.coordinate_layer] * on_sample)).cpu().double()
    slow = 1 - (1 - statistics.decay) / 5  # a small bias shows only over many steps
    return replace(
        statistics,
        steps=statistics.steps + 1,
        averages={
            name: average.add(values[name], statistics.decay) if name in values else average
            for name, average in statistics.averages.items()
        },
        previous=residual.detach().clone(),
        drift=(statistics.drift[0].add(drift, slow), statistics.drift[1].add(torch.outer(drift, drift), slow)),
    )


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
    assert statistics.drift is not None
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


def report(
    statistics: Statistics, coefficient: Tensor, n: int, k: int, cost_ratio: float, unit_cost_ratio: float
) -> dict[str, float]:
    """The statistics as logged values.

    ==========================  =====================================================================================
    ``gpcv/coefficient``        lam this step, averaged over layers by their share of H
    ``gpcv/cosine``             between the exact and the predicted mean gradient on C
    ``gpcv/rho2``               1 - delta at lam* per layer
    ``gpcv/delta``              D / V at this step's lam, sums over layers
    ``gpcv/relative_cost``      R at the current prices and the best exact share
    ``gpcv/break_even_price``   fleet price at which R = 1
    ``gpcv/noise_scale``        V / ||mean gradient||^2, in micro-batches (McCandlish et al., arXiv 1812.06162)
    ``gpcv/bias_z``             see :func:`bias_z`
    ==========================  =====================================================================================

    Args:
        statistics: the running averages, with at least two steps.
        coefficient: [L] this step's lam.
        n: micro-batches in the batch.
        k: exact ones among them.
        cost_ratio: w, cost of one prediction over cost of one exact gradient, at the current prices.
        unit_cost_ratio: the same at a fleet price of 1.

    Returns:
        The keys above; a value that is not defined yet is left out.
    """
    seen = variances(statistics)
    exact = float(seen.of_exact().sum())
    values = {"gpcv/bias_z": bias_z(statistics)}
    h = seen.h.clamp(min=0)
    values["gpcv/coefficient"] = float((coefficient * h).sum() / h.sum()) if h.sum() > 0 else float(coefficient.mean())
    gg, gh, hh = (float(statistics.mean(name).sum()) for name in ("gg", "gh", "hh"))
    if gg > 0 and hh > 0:
        values["gpcv/cosine"] = gh / math.sqrt(gg * hh)
    if exact > 0:
        residual = float(seen.of_residual(coefficient).sum())
        delta = residual / exact
        values["gpcv/delta"] = delta
        values["gpcv/rho2"] = 1 - float(seen.of_residual(optimal_coefficient(statistics)).sum()) / exact
        values["gpcv/relative_cost"] = relative_cost(delta, cost_ratio)
        if unit_cost_ratio > 0:
            values["gpcv/break_even_price"] = break_even(delta) / unit_cost_ratio
        # ||estimate||^2 is ||mean gradient||^2 plus the estimate's own variance
        signal = float(statistics.mean("est").sum()) - exact / n - residual * (1 / k - 1 / n)
        if signal > 0:
            values["gpcv/noise_scale"] = exact / signal
    return values
