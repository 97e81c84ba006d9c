"""What ``GradientPrediction`` asks of the estimator, and what that carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_ledger.control_variate import Statistics
from lightning_ledger.fleet import FleetSettings, InProcessSettings
from lightning_ledger.microbatches import WeightSpec
from lightning_ledger.predictors import Engine


@dataclass(frozen=True)
class PredictionSettings:
    """What to predict, and how; the arguments of ``GradientPrediction``, documented there.

    Attributes:
        others: number formats to choose from besides ``format``.
    """

    format: str = "int8"
    rounding: str = "nearest"
    rotation: bool = False
    keep: Sequence[str] = ()
    engine: Engine = "captured"
    microbatches: int = 8
    exact: int = 1
    refresh_every: int = 1
    seed: int = 0
    weights: WeightSpec = "samples"
    split_fn: Callable[[Any, int], Sequence[Any]] | None = None
    check_separable: bool = True
    allow_batchnorm: bool = False
    others: Sequence[str] = ()
    fleet: FleetSettings = field(default_factory=InProcessSettings)

    @property
    def formats(self) -> tuple[str, ...]:
        """The format to begin with, and the others."""
        return (self.format, *self.others)


@dataclass
class PredictionState:
    """What predictions carry from step to step, and into checkpoints.

    Attributes:
        generator: draws C and the seeds; private.
        steps: optimizer steps taken.
        checked: whether the loss was found separable; a resumed run need not pay for that again.
        weights: what predictions are made at, where that is refreshed less often than every step.
        weights_at: the step they date from.
        uses: by format, how often each input shape was predicted by a program; decides when programs are compared.
        phase: where the count of systematic draws stands; None to draw it anew.
        mixed: how far uncorrected estimates drift from the exact gradients.
    """

    generator: torch.Generator
    steps: int = 0
    checked: bool = False
    weights: dict[str, Tensor] | None = None
    weights_at: int = 0
    uses: dict[str, dict[int, int]] = field(default_factory=dict)
    phase: float | None = None
    mixed: Statistics | None = None
