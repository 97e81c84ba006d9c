"""What the callbacks ask of the estimator, and what it carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout, Scope, Statistics, optimal_coefficient
from lightning_ledger.microbatches import WeightSpec


@dataclass(frozen=True)
class PredictionSettings:
    """What to predict, and how; the arguments of ``GradientPrediction``, documented there."""

    format: str = "int8"
    rounding: str = "nearest"
    microbatches: int = 8
    exact: int = 1
    refresh_every: int = 1
    seed: int = 0
    weights: WeightSpec = "samples"
    split_fn: Callable[[Any, int], Sequence[Any]] | None = None
    check_separable: bool = True
    allow_batchnorm: bool = False


@dataclass
class PredictionState:
    """What predictions carry from step to step, and into checkpoints.

    Attributes:
        generator: draws C and the seeds; private.
        steps: optimizer steps taken.
        checked: whether the loss was found separable; a resumed run need not pay for that again.
        weights: what predictions are made at, where that is refreshed less often than every step.
    """

    generator: torch.Generator
    steps: int = 0
    checked: bool = False
    weights: dict[str, Tensor] | None = None


@dataclass
class Correction:
    """How to correct predictions, and the statistics that choose the coefficient.

    Attributes:
        coefficient: lam, or None for the optimal one.
        scope: one lam per layer, or one for all.
        decay: of the running averages.
        statistics: carried from step to step, and into checkpoints.
        names: of the parameters that they are about; None if a checkpoint brought them.
    """

    coefficient: float | None = None
    scope: Scope = "layer"
    decay: float = 0.95
    statistics: Statistics | None = None
    names: tuple[str, ...] | None = None

    def now(self, layout: Layout) -> Tensor:
        """[L] lam for this step, from the steps before it; statistics of other parameters are forgotten."""
        layers = layout.layers
        same = self.names in (None, layout.names) and self.statistics is not None and self.statistics.layers == layers
        self.names = layout.names
        if self.statistics is None or not same:
            self.statistics = Statistics.start(layers, self.decay)
        if self.coefficient is not None:
            return torch.full((len(layers),), float(self.coefficient), dtype=torch.float64)
        return optimal_coefficient(self.statistics, self.scope)
