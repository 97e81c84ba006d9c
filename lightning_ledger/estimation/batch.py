"""A batch between its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_ledger.control_variate import Coefficients
from lightning_ledger.estimation.centre import Centre
from lightning_ledger.estimation.drawing import Drawn
from lightning_ledger.estimation.exact import ExactPasses
from lightning_ledger.fleet import Fleet, Predictions
from lightning_ledger.microbatches import MicroBatch


@dataclass
class Batch:
    """A batch between its forward and its backward pass.

    Attributes:
        draw: who gets which passes.
        corrected: whether predictions on C are made and subtracted.
        observing: whether the statistics learn from it.
        coefficients: of every pass, lam aside.
        lam: [L] this step's.
        centre: b, of fractional draws.
        loss_leaf: a zero whose gradient will tell by how much the caller scaled the loss.
        fleet: that predicts it.
        asked: indices of the micro-batches that some pass runs on.
        due: whether the statistics of all processes learn from it, whatever this one's draw shows.
        factor: what the gradient of this process's batch is multiplied by, for the mean over processes.
        arguments: the rest of what ``training_step`` takes.
        lost: whether the fleet was lost that had the predictions.
    """

    microbatches: tuple[MicroBatch, ...]
    draw: Drawn
    corrected: bool
    observing: bool
    coefficients: Coefficients
    lam: Tensor
    centre: Centre | None
    loss_leaf: Tensor
    exact: ExactPasses
    asked: set[int]
    due: bool = False
    factor: float = 1.0
    arguments: Sequence[Any] = ()
    lost: bool = False
    fleet: Fleet | None = None
    predictions: Predictions | None = None
    probed: Predictions | None = None

    @property
    def n(self) -> int:
        return len(self.microbatches)

    @property
    def k(self) -> int:
        return len(self.draw.control)

    @property
    def control(self) -> tuple[int, ...]:
        return self.draw.control

    @property
    def share(self) -> float | None:
        return self.draw.share

    @property
    def weights(self) -> list[float]:
        return [m.weight for m in self.microbatches]

    @property
    def predicts(self) -> bool:
        return any(self.coefficients.predicted)

    @property
    def gain(self) -> float:
        """What n w_i g_i is multiplied by in the estimate: 1/k for uniform draws, 1/(qn) for others."""
        return 1 / self.k if self.share is None else 1 / (self.share * self.n)
