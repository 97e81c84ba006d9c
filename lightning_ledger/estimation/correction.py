"""How predictions are corrected, and what has been seen of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    fold,
    measure,
    measured_sizes,
    optimal_coefficient,
    report,
    variances,
)
from lightning_ledger.control_variate.estimates import WARMUP
from lightning_ledger.estimation.allocation import Allocation, Evidence
from lightning_ledger.estimation.centre import MISSED, Centre
from lightning_ledger.estimation.ranks import Ranks

# The root of a second moment of t gradients is near zero on some coordinates by chance while t is small, and a single
# quotient by it would rule the averages for hundreds of steps: the metric is used after so many observations.
METRIC_WARMUP = 20
# What a probe of two micro-batches tells nothing of, and what does not know of a third level: they depend on n and k.
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
        format: that they are about.
        others: what is known of predictions in formats that are not in use.
        between: what is known of coarser predictions against those in use, while there are both.
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
    format: str = ""
    others: dict[str, Correction] = field(default_factory=dict)
    between: Correction | None = None

    def of(self, format: str) -> Correction:
        """The one that holds the statistics of this format: itself for the one in use."""
        own = self._own_format
        if not own or format == own:
            return self
        if format not in self.others:
            self.others[format] = Correction(self.coefficient, self.scope, self.decay, self.observe_every)
        other = self.others[format]
        other.allocation, other.optimizer = self.allocation, self.optimizer
        return other

    def allocate(self, allocation: Allocation) -> None:
        """Spend so from the next batch on; another format brings its own statistics, and no centre yet."""
        before = self.allocation
        if not allocation.below or (before is not None and before.format != allocation.format):
            self.between = None
        if allocation.below:
            self.between = self.between or Correction(1.0, self.scope, self.decay)
            self.between.allocation = allocation
        self.use(allocation.format)
        self.allocation = allocation

    def use(self, format: str) -> None:
        """Predict in this format from now on, with what is known of it."""
        own, self.format = self._own_format, format
        if not own or own == format:
            return
        other = self.others.pop(format, None) or Correction(self.coefficient, self.scope, self.decay)
        for name in ("statistics", "adam", "cost_ratios", "names"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, its)
            setattr(other, name, mine)
        self.others[own] = other
        if self.centre is not None:
            self.centre = Centre(decay=self.decay)

    @property
    def _own_format(self) -> str:
        return self.format or (self.allocation.format if self.allocation is not None else "")

    def probed(self, formats: Sequence[str], step: int) -> str | None:
        """The format to try besides what this step predicts; None in most steps.

        Formats that are not in use take turns. One that too little is known of to be chosen has its turn at once, if
        there are predictions at all.
        """
        allocation = self.allocation
        if allocation is None:
            return None
        idle = [f for f in formats if f != allocation.format or not allocation.predicting]
        unknown = [f for f in idle if allocation.predicting and not self.of(f).settled]
        if unknown:
            return unknown[step % len(unknown)]
        if not idle or not allocation.probe_every or step % allocation.probe_every:
            return None
        return idle[step // allocation.probe_every % len(idle)]

    @property
    def settled(self) -> bool:
        """Whether it is known what metric the optimizer has, and what is known is in that metric."""
        if self.statistics is None:
            return False
        return self.in_metric or (self.adam is None and self.statistics.steps > METRIC_WARMUP)

    @property
    def in_metric(self) -> bool:
        """Whether the optimizer's metric has the say."""
        return self.adam is not None and self.adam.steps >= WARMUP

    def now(self, layout: Layout) -> Tensor:
        """[L] lam for this step, from the steps before it; statistics of other parameters are forgotten."""
        layers = layout.layers
        same = self.names in (None, layout.names) and self.statistics is not None and self.statistics.layers == layers
        self.names = layout.names
        if self.statistics is None or not same:
            if self.statistics is not None:
                self.adam = self.between = None
                self.others.clear()
            self.statistics = Statistics.start(layers, self.decay)
        if self.centre is not None and not self.centre.mean.keys() <= set(layout.names):
            self.centre = Centre(decay=self.decay)
        return self._lam(self.statistics)

    def _lam(self, statistics: Statistics) -> Tensor:
        if self.coefficient is not None:
            return torch.full((len(statistics.layers),), float(self.coefficient), dtype=torch.float64)
        return optimal_coefficient(statistics, self.scope)

    def observe(
        self,
        layout: Layout,
        seen: Observation | None,
        lam: Tensor,
        parameters: Mapping[str, Tensor],
        probe: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Fold one step in, before the optimizer steps; it decides later steps' coefficients, not this one's.

        Several processes fold in the mean of what each measured, so that all decide alike; residuals and b, whole
        vectors that only a process's own draws need, stay with the process.

        Args:
            layout: names, layers and sampled coordinates.
            seen: the step's gradients; None if this process's draw shows none.
            lam: [L] its coefficients.
            parameters: name to the very tensors that the optimizer steps.
            probe: the step shows two micro-batches apart from the batch.
            ranks: the processes; all of them observe.
        """
        assert self.statistics is not None
        before, layers = self.statistics, len(layout.layers)
        adam, metric = self.adam or Statistics.start(layout.layers, self.decay), None
        if self.optimizer is not None and before.steps >= METRIC_WARMUP:
            metric = adam_metric(self.optimizer, parameters, layout)
        # Of a process without observation the last residual stays; of one that was not finite it does not.
        values, residual = ({}, before.previous) if seen is None else measure(before, layout, seen, lam)
        in_metric: dict[str, Tensor] = {}
        adam_residual = adam.previous
        if metric is not None and seen is not None and values:
            in_metric, adam_residual = measure(adam, layout, seen, lam, metric)
        missed: dict[str, Tensor] = {}
        centre = self.centre
        if centre is not None and seen is not None and values:
            centre, missed = centre.after(layout, seen, lam, metric)
        sizes = measured_sizes(layers)
        means = (ranks or Ranks()).mean(
            {**values, **{"adam/" + name: value for name, value in in_metric.items()}, **missed},
            {**sizes, **{"adam/" + name: size for name, size in sizes.items()}, **dict.fromkeys(MISSED, 1)},
        )
        self.statistics = self._fold(before, {n: v for n, v in means.items() if n in sizes}, residual, lam, probe)
        if self.statistics.steps == before.steps:  # a gradient was not finite
            return
        if metric is not None:
            found = {name: means["adam/" + name] for name in sizes if "adam/" + name in means}
            self.adam = self._fold(adam, found, adam_residual, lam, probe)
        if centre is not None:
            self.centre = centre.counted(means)

    def _fold(
        self, before: Statistics, values: Mapping[str, Tensor], residual: Tensor | None, lam: Tensor, probe: bool
    ) -> Statistics:
        after = fold(before, values, residual, lam)
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
        state = self.adam if self.in_metric else self.statistics
        if self.statistics is None or state is None or state.steps < WARMUP or not state.ready:
            return None
        state = self._with_known_variance(state)
        lam, seen = self._lam(self.statistics), variances(state)
        exact = float(seen.of_exact().sum())
        if exact <= 0 or self.cost_ratios[1] <= 0:
            return None
        missed = None
        if self.centre is not None and self.centre.steps >= WARMUP and self.settled:
            missed = max(0.0, float(self.centre.missed[self.in_metric].mean))
        residual = float(seen.of_residual(lam).sum())
        return Evidence(exact, residual, *delta_interval(state, lam), self.cost_ratios[0], missed)

    def _with_known_variance(self, state: Statistics) -> Statistics:
        """With H of predictions that are made on some micro-batches only: what is seen of their sum is an estimate.

        Its noise would count as H. The comparison with coarser predictions knows H as the variance of its finer ones.
        """
        if self.between is None or not (self.allocation and self.allocation.below):
            return state
        known = self.between.statistics if state is self.statistics else self.between.adam
        if known is None or known.steps < WARMUP or not known.ready:
            return state
        held = state.averages["h_variance"]
        own = Average(variances(known).of_exact() * held.weight, held.weight, held.weight_squared)
        return replace(state, averages={**state.averages, "h_variance": own})

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
        plain, adam = (None if x is None else self._with_known_variance(x) for x in (self.statistics, self.adam))
        assert plain is not None
        values = report(plain, lam, n, max(k, 1), *self.cost_ratios, adam, samples)
        for prefix in ("gpcv/", "gpcv/adam/"):
            if share is not None and prefix + "delta" in values:
                values[prefix + "effective_batch"] = effective_batch(values[prefix + "delta"], n, share)
            elif k == 0 or (self.allocation is not None and self.allocation.below):
                for name in _OF_BATCHES:
                    values.pop(prefix + name, None)
        return values
