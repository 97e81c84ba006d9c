"""The centre of a fractional draw: a running mean of earlier residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_ledger.control_variate import Average, Layout, Observation

MISSED = ("missed", "missed_in_metric")


@dataclass(frozen=True)
class Centre:
    """b, the running mean of ``n w_i (g_i - lam h_i)`` over the exact micro-batches of earlier steps.

    Attributes:
        mean: b, by parameter name.
        steps: steps that were observed, by whichever process.
        own: observations in this process's b.
        decay: of the running mean once it has seen 1 / (1 - decay) of them; before, all count alike.
        previous: [m] the last residual on the sampled coordinates.
        missed: averages of ``||mean residual - b||^2``: as it is, and in the optimizer's metric.
    """

    mean: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    own: int = 0
    decay: float = 0.95
    previous: Tensor | None = None
    missed: tuple[Average, Average] = field(default_factory=lambda: (Average.zeros(1), Average.zeros(1)))

    def after(
        self, layout: Layout, seen: Observation, lam: Tensor, metric: Tensor | None
    ) -> tuple[Centre, dict[str, Tensor]]:
        """The centre after one more observation, still to be :meth:`counted`, and what b missed by.

        b itself is a new set of tensors, so that this step can go on with the old.

        With r the residual of this step, r' that of the observed step before and b that of before,
        ``<r, r'> - 2 <r, b> + ||b||^2`` has the mean ``||mean residual - b||^2``: r is independent of r' and b.

        Args:
            layout: names, layers and sampled coordinates.
            seen: this step's gradients.
            lam: [L] this step's coefficients.
            metric: [m] of the optimizer, if it has one.
        """
        n, k = len(seen.squared_norms), len(seen.residuals)
        by_name = by_parameter(layout, lam)
        rate = max(1 / (self.own + 1), 1 - self.decay)
        mean = {}
        for name, exact in seen.exact.items():
            control, held = seen.control.get(name), self.mean.get(name)
            if exact is None:
                continue
            step = exact.detach() * (rate / seen.loss_scale)
            if control is not None:
                step.sub_(control, alpha=rate * by_name[name] * n / k)
            mean[name] = step if held is None else step.add_(held, alpha=1 - rate)
        for name in self.mean.keys() - mean.keys():
            mean[name] = self.mean[name] * (1 - rate)
        rest = (1 - lam).to(layout.inflation)[layout.coordinate_layer]
        residual = seen.residuals.mean(0) + rest * (n / k) * layout.sample(seen.control)
        missed = {}
        if self.previous is not None and self.previous.shape == residual.shape:
            missed = self._missed(layout, residual, self.previous.to(residual), metric)
        after = replace(self, mean=mean, own=self.own + 1, previous=residual.detach().clone())
        return after, missed

    def counted(self, missed: Mapping[str, Tensor]) -> Centre:
        """The centre after a step, with what b missed by: of this process, or the mean over several."""
        averages = (
            average.add(missed[name], self.decay) if name in missed else average
            for name, average in zip(MISSED, self.missed, strict=True)
        )
        plain, measured = averages
        return replace(self, steps=self.steps + 1, missed=(plain, measured))

    def _missed(self, layout: Layout, residual: Tensor, previous: Tensor, metric: Tensor | None) -> dict[str, Tensor]:
        centre = layout.sample(self.mean)

        def product(inverse: Tensor | float) -> Tensor:
            r, p, b = (x * inverse for x in (residual, previous, centre))
            return (layout.inner(r, p) - 2 * layout.inner(r, b) + layout.inner(b, b)).sum().reshape(1)

        inverses: list[Tensor | float] = (
            [1.0] if metric is None else [1.0, torch.where(metric > 0, 1 / metric, 0.0).to(residual)]
        )
        return {name: product(inverse) for name, inverse in zip(MISSED, inverses, strict=False)}

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        return {
            "mean": dict(self.mean),
            "steps": self.steps,
            "own": self.own,
            "decay": self.decay,
            "previous": self.previous,
            "missed": [list(average) for average in self.missed],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Centre:
        """The inverse of :meth:`state_dict`."""
        plain, measured = (Average(*average) for average in state["missed"])
        own = state.get("own", state["steps"])
        return cls(state["mean"], state["steps"], own, state["decay"], state["previous"], (plain, measured))


def by_parameter(layout: Layout, lam: Tensor) -> dict[str, float]:
    """lam of each parameter, by name."""
    return dict(zip(layout.names, lam[layout.layer_of].tolist(), strict=True))
