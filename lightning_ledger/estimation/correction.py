"""How predictions are corrected, and what has been seen of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_ledger.control_variate import (
    Average,
    Layout,
    Observation,
    Scope,
    Statistics,
    adam_metric,
    delta_interval,
    effective_batch,
    observe,
    optimal_coefficient,
    report,
    variances,
)
from lightning_ledger.control_variate.estimates import WARMUP
from lightning_ledger.estimation.allocation import Allocation, Evidence
from lightning_ledger.estimation.centre import Centre

# The root of a second moment of t gradients is near zero on some coordinates by chance while t is small, and a single
# quotient by it would rule the averages for hundreds of steps: the metric is used after so many observations.
METRIC_WARMUP = 20
# What a probe of two micro-batches tells nothing of: values that depend on n and k.
_OF_BATCHES = ("noise_scale", "noise_scale_samples", "bias", "effective_batch")


@dataclass
class Correction:
    """How to correct predictions, and the statistics that choose the coefficient and the exact share.

    Attributes:
        coefficient: lam, or None for the optimal one.
        scope: one lam per layer, or one for all.
        decay: of the running averages.
        observe_every: optimizer steps between two observations.
        optimizer: whose metric a second set of statistics is kept in, if it has one.
        allocation: the exact share of the next batches; None for a fixed number.
        statistics: carried from step to step, and into checkpoints, as are the next four.
        adam: the same in the optimizer's metric.
        centre: of fractional draws; None if none is kept.
        cost_ratios: w at the present prices, and at a fleet price of 1, of the last batch that had them.
        names: of the parameters that they are about; None if a checkpoint brought them.
    """

    coefficient: float | None = None
    scope: Scope = "layer"
    decay: float = 0.95
    observe_every: int = 1
    optimizer: torch.optim.Optimizer | None = None
    allocation: Allocation | None = None
    statistics: Statistics | None = None
    adam: Statistics | None = None
    centre: Centre | None = None
    cost_ratios: tuple[float, float] = (0.0, 0.0)
    names: tuple[str, ...] | None = None

    def now(self, layout: Layout) -> Tensor:
        """[L] lam for this step, from the steps before it; statistics of other parameters are forgotten."""
        layers = layout.layers
        same = self.names in (None, layout.names) and self.statistics is not None and self.statistics.layers == layers
        self.names = layout.names
        if self.statistics is None or not same:
            self.statistics = Statistics.start(layers, self.decay)
            self.adam = None
        if self.centre is not None and not self.centre.mean.keys() <= set(layout.names):
            self.centre = Centre(decay=self.decay)
        return self._lam(self.statistics)

    def _lam(self, statistics: Statistics) -> Tensor:
        if self.coefficient is not None:
            return torch.full((len(statistics.layers),), float(self.coefficient), dtype=torch.float64)
        return optimal_coefficient(statistics, self.scope)

    def observe(
        self, layout: Layout, seen: Observation, lam: Tensor, parameters: Mapping[str, Tensor], probe: bool = False
    ) -> None:
        """Fold one step in, before the optimizer steps; it decides later steps' coefficients, not this one's.

        Args:
            layout: names, layers and sampled coordinates.
            seen: the step's gradients.
            lam: [L] its coefficients.
            parameters: name to the very tensors that the optimizer steps.
            probe: the step shows two micro-batches apart from the batch.
        """
        assert self.statistics is not None
        before = self.statistics
        metric = None
        if self.optimizer is not None and before.steps >= METRIC_WARMUP:
            metric = adam_metric(self.optimizer, parameters, layout)
        self.statistics = self._fold(before, layout, seen, lam, None, probe)
        if self.statistics.steps == before.steps:  # a gradient was not finite
            return
        if metric is not None:
            adam = self.adam or Statistics.start(layout.layers, self.decay)
            self.adam = self._fold(adam, layout, seen, lam, metric, probe)
        if self.centre is not None:
            self.centre = self.centre.after(layout, seen, lam, metric)

    def _fold(
        self, before: Statistics, layout: Layout, seen: Observation, lam: Tensor, metric: Tensor | None, probe: bool
    ) -> Statistics:
        after = observe(before, layout, seen, lam, metric)
        if self.allocation is None:
            return after
        # k changes, and with it which estimate of tr Cov(e) there is: keep to the one that every k has.
        kept = {"within": Average.zeros(len(before.layers))}
        if probe:
            return replace(
                after, averages={**after.averages, **kept, "est": before.averages["est"]}, drift=before.drift
            )
        return replace(after, averages={**after.averages, **kept})

    def evidence(self) -> Evidence | None:
        """What earlier steps say of the predictions; None while that is too little.

        Until the optimizer's metric is in use the plain statistics speak, and the centre does not.
        """
        in_metric = self.adam is not None and self.adam.steps >= WARMUP
        state = self.adam if in_metric else self.statistics
        if self.statistics is None or state is None or state.steps < WARMUP or not state.ready:
            return None
        lam, seen = self._lam(self.statistics), variances(state)
        exact = float(seen.of_exact().sum())
        if exact <= 0 or self.cost_ratios[1] <= 0:
            return None
        missed = None
        settled = in_metric or (self.adam is None and self.statistics.steps > METRIC_WARMUP)
        if self.centre is not None and self.centre.steps >= WARMUP and settled:
            missed = max(0.0, float(self.centre.missed[in_metric].mean))
        residual = float(seen.of_residual(lam).sum())
        return Evidence(exact, residual, *delta_interval(state, lam), self.cost_ratios[0], missed)

    def report(self, lam: Tensor, n: int, k: int, share: float | None, samples: float | None) -> dict[str, float]:
        """The statistics as logged values; without predictions (k = 0 and no share) what probes tell.

        Args:
            lam: [L] the step's coefficients.
            n: micro-batches in the batch.
            k: exact ones among them.
            share: q, if C was drawn with one.
            samples: in one micro-batch, if they can be counted.
        """
        if self.statistics is None or not self.statistics.ready:
            return {}
        values = report(self.statistics, lam, n, max(k, 1), *self.cost_ratios, self.adam, samples)
        for prefix in ("gpcv/", "gpcv/adam/"):
            if share is not None and prefix + "delta" in values:
                values[prefix + "effective_batch"] = effective_batch(values[prefix + "delta"], n, share)
            elif k == 0:
                for name in _OF_BATCHES:
                    values.pop(prefix + name, None)
        return values
