"""What a running training shows of its gradients: running averages over steps, from which ``estimates.py`` reads.

:func:`observe` takes a state and returns a new one; nothing is hidden. The symbols are those of the package's
docstring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ledger.control_variate.gradients import Gradients
from lightning_ledger.control_variate.layout import PROJECTIONS, Layout


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
        squared_norms: [n, L] squared norm of each n w_i h_i; [n, 0] if they are not known.
        residuals: [k, m] n w_i (g_i - h_i) on the sampled coordinates, for each i in C.
        loss_scale: what the loss was multiplied by before its backward pass (AMP, accumulation).
    """

    exact: Gradients
    control: Gradients
    rest: Gradients
    squared_norms: Tensor
    residuals: Tensor
    loss_scale: float = 1.0


def _with_products(size: int) -> tuple[Average, Average]:
    """Averages of [size] values and of their [size, size] products."""
    return Average.zeros(size), Average.zeros(size, size)


_LAYER_AVERAGES = (
    "h_variance",
    "eh_covariance",
    "h_spread",
    "within",
    "residual",
    "lagged",
    "mean_residual",
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
        ratio: averages of [D_t, V_t], one step's own estimates of D and V, and of their [2, 2] products.
    """

    layers: tuple[str, ...]
    decay: float = 0.95
    steps: int = 0
    averages: Mapping[str, Average] = field(default_factory=dict)
    previous: Tensor | None = None
    drift: tuple[Average, Average] = field(default_factory=lambda: _with_products(PROJECTIONS))
    ratio: tuple[Average, Average] = field(default_factory=lambda: _with_products(2))

    @classmethod
    def start(cls, layers: Sequence[str], decay: float = 0.95) -> Statistics:
        """No observations yet."""
        return cls(tuple(layers), decay, averages={name: Average.zeros(len(layers)) for name in _LAYER_AVERAGES})

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
            "drift": [list(a) for a in self.drift],
            "ratio": [list(a) for a in self.ratio],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Statistics:
        """The inverse of :meth:`state_dict`; averages that an older state lacks start anew."""
        start = cls.start(state["layers"], state["decay"])

        def pair(name: str) -> tuple[Average, Average]:
            mean, products = (Average(*a) for a in state[name])
            return mean, products

        return replace(
            start,
            steps=state["steps"],
            averages={**start.averages, **{name: Average(*a) for name, a in state["averages"].items()}},
            previous=state["previous"],
            drift=pair("drift"),
            ratio=pair("ratio") if "ratio" in state else start.ratio,
        )


def observe(
    statistics: Statistics,
    layout: Layout,
    seen: Observation,
    coefficient: Tensor,
    metric: Tensor | None = None,
) -> Statistics:
    """Fold one step's gradients into the running averages.

        H            sum_i ||h_i - mean h||^2 / (n - 1); in a metric, or without norms, k (n-k)/n ||control - rest||^2
        tr Cov(e,h)  k <exact - control, control - rest>     (same expectation as with exact alone, far less noise)
        tr Cov(e)    k = 1: ||e_t||^2 - <e_t, e_{t-1}> over successive steps; k > 1: within the step
        ||mean e||^2 k = 1: <e_t, e_{t-1}>; k > 1: mean of <e_i, e_j> over pairs i != j of the step

    With a metric d every coordinate is divided by it, so that a second state holds the same statistics as the
    optimizer sees them (:func:`adam_metric`), from the sampled coordinates alone: a few thousand products a layer
    instead of one more pass over every gradient. That sample is fixed, so its error stays: for a parameter of N
    coordinates, s of them sampled, a sum has the relative standard error ``cv sqrt(1/s - 1/N)``, with cv the standard
    deviation of the coordinates' contributions over their mean. d must not depend on this step's gradients.

    Args:
        statistics: the state before this step; it alone may decide this step's coefficient.
        layout: names, layers and sampled coordinates.
        seen: this step's gradients, with 0 < k < n.
        coefficient: [L] the lam this step was estimated with.
        metric: [m] d on the sampled coordinates; a coordinate whose d is 0 counts nothing.

    Returns:
        The state after this step; unchanged if a gradient was not finite.
    """
    return fold(statistics, *measure(statistics, layout, seen, coefficient, metric), coefficient)


def measured_sizes(layers: int) -> dict[str, int]:
    """The lengths of all that :func:`measure` can measure, by name, for L layers."""
    return {**dict.fromkeys(_LAYER_AVERAGES, layers), "drift": PROJECTIONS}


def measure(
    statistics: Statistics,
    layout: Layout,
    seen: Observation,
    coefficient: Tensor,
    metric: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The first half of :func:`observe`: what one step alone says of every average.

    Args:
        statistics: the state before this step.
        layout: names, layers and sampled coordinates.
        seen: this step's gradients.
        coefficient: [L] the lam this step was estimated with.
        metric: [m] d on the sampled coordinates.

    Returns:
        The values by name, and [m] the mean residual on the sampled coordinates; ``({}, None)`` if a gradient was not
        finite. Each value has the same expectation whoever measures it, so that processes may average theirs.
    """
    n, k = len(seen.squared_norms), len(seen.residuals)
    sums = (seen.exact, seen.control, seen.rest)
    # From here on: g, a, b are the means of the exact gradients over C, the predictions over C and those outside it.
    scales = torch.tensor([1 / seen.loss_scale, n / k, n / (n - k)], dtype=torch.float64)
    if metric is None:
        inverse = torch.ones_like(layout.inflation)
        products = layout.inner_products(*sums)
    else:
        inverse = torch.where(metric > 0, 1 / metric, 0.0).to(layout.inflation)
        products = layout.sampled_products([layout.sample(x) * inverse for x in sums])
    (gg, ga, gb), (_, aa, ab), (_, _, bb) = products * torch.outer(scales, scales)[..., None]
    values = {"gg": gg, "gh": ga, "hh": aa}

    spread = aa - 2 * ab + bb
    values["h_spread"] = k * (n - k) / n * spread
    if metric is None and seen.squared_norms.shape[1]:
        mean_square = (k * k * aa + 2 * k * (n - k) * ab + (n - k) ** 2 * bb) / n**2
        values["h_variance"] = (seen.squared_norms.double().sum(0) - n * mean_square) / (n - 1)
    else:
        values["h_variance"] = values["h_spread"]
    values["eh_covariance"] = k * (ga - gb - aa + ab)
    step = coefficient * (n - k) / n  # estimate = exact + lam (n-k)/n (rest - control)
    values["est"] = gg + 2 * step * (gb - ga) + step**2 * spread

    mean_residual = seen.residuals.mean(0)
    residual = mean_residual * inverse
    squared = layout.inner(residual, residual)
    values["residual"] = k * squared
    if k > 1:
        centred = seen.residuals * inverse - residual
        values["within"] = torch.stack([layout.inner(r, r) for r in centred]).sum(0) / (k - 1)
        values["mean_residual"] = squared - values["within"] / k
    if statistics.previous is not None and statistics.previous.shape == residual.shape:
        values["lagged"] = k * layout.inner(residual, statistics.previous.to(residual) * inverse)
        values.setdefault("mean_residual", values["lagged"])
    if not all(v.isfinite().all() for v in values.values()):
        return {}, None

    on_sample = n / (n - k) * layout.sample(seen.rest) - n / k * layout.sample(seen.control)
    values["drift"] = layout.signs @ (step.to(on_sample)[layout.coordinate_layer] * inverse * on_sample)
    return values, mean_residual.detach().clone()


def fold(
    statistics: Statistics, values: Mapping[str, Tensor], residual: Tensor | None, coefficient: Tensor
) -> Statistics:
    """The second half of :func:`observe`: the state after these values.

    Args:
        statistics: the state before this step.
        values: by name, from :func:`measure`, or their means over processes that each measured their own.
        residual: [m] of this process; None if it measured nothing.
        coefficient: [L] the lam of this step.

    Returns:
        The state after this step; without values it only forgets the last residual.
    """
    if not values:
        return replace(statistics, previous=residual)
    drift = values["drift"].cpu().double()
    slow = 1 - (1 - statistics.decay) / 5  # a small bias shows only over many steps
    return replace(
        statistics,
        steps=statistics.steps + 1,
        averages={
            name: average.add(values[name], statistics.decay) if name in values else average
            for name, average in statistics.averages.items()
        },
        previous=residual,
        drift=_add_with_products(statistics.drift, drift, slow),
        ratio=_observe_ratio(statistics, values, coefficient),
    )


def _add_with_products(pair: tuple[Average, Average], value: Tensor, decay: float) -> tuple[Average, Average]:
    return pair[0].add(value, decay), pair[1].add(torch.outer(value, value), decay)


def _observe_ratio(
    statistics: Statistics, values: Mapping[str, Tensor], coefficient: Tensor
) -> tuple[Average, Average]:
    """This step's own [D_t, V_t], where it has both."""
    if "mean_residual" not in values:
        return statistics.ratio
    e = values["within"] if "within" in values else values["residual"] - values["lagged"]
    h, eh, rest = values["h_variance"], values["eh_covariance"], 1 - coefficient
    d, v = e + 2 * rest * eh + rest**2 * h, e + 2 * eh + h
    return _add_with_products(statistics.ratio, torch.stack([d.sum(), v.sum()]), statistics.decay)
