"""The interface between a strategy and the machines that predict gradients for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_ledger.control_variate import Gradients
from lightning_ledger.flops import StepFlops
from lightning_ledger.ledger import Work
from lightning_ledger.microbatches import MicroBatch


@dataclass(frozen=True)
class Job:
    """One prediction to make.

    Attributes:
        microbatch: the samples and their weight w_i.
        seed: seeds dropout and stochastic rounding; the exact pass on the same micro-batch has the same one.
        control: whether the micro-batch is in C. It decides which sum the prediction joins, never its value.
        loss_scale: see :meth:`lightning_ledger.predictors.GradientPredictor.predict`; one for all jobs of a batch.
        sample: whether its sampled coordinates are wanted for the statistics, as those of C are.
    """

    microbatch: MicroBatch
    seed: int
    control: bool
    loss_scale: float = 1.0
    sample: bool = False


@dataclass
class Predictions:
    """What a fleet returns for one batch: sums, never n gradient sets.

    Attributes:
        control: sum over C of w_i h_i, by parameter name.
        rest: sum over the other jobs of w_i h_i.
        losses: predicted loss by micro-batch index.
        squared_norms: [jobs, L] squared norm of n w_i h_i, by layer, in the order of the jobs.
        samples: for each micro-batch of C, by index, [m] the sampled coordinates of n w_i h_i (n: of the jobs).
        work: what was done, by ledger account.
        skipped: indices of the micro-batches whose training step returned None.
    """

    control: Gradients = field(default_factory=dict)
    rest: Gradients = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    squared_norms: Tensor | None = None
    samples: dict[int, Tensor] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)


class FleetLost(RuntimeError):
    """No worker is left to predict this batch. Its micro-batches can all be exact, and others may come back.

    Attributes:
        work: what was done for it, by ledger account.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.work: dict[str, Work] = {}


class Fleet(ABC):
    """Runs predictions somewhere. ``submit`` may return before they are done; ``gather`` waits for them.

    Every job of a batch is predicted with the same version of the weights. Any of the methods raises ``FleetLost``
    where the machines are gone.
    """

    @abstractmethod
    def refresh(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Work]:
        """Send weights; the work that took, by account."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job], arguments: Sequence[Any], observe: bool) -> None:
        """Start predicting.

        Args:
            jobs: the micro-batches to predict.
            arguments: the rest of what ``training_step`` takes.
            observe: whether norms and samples are wanted for the statistics.
        """

    def run_eagerly(self, reason: str) -> bool:
        """Give up captured programs, because ``reason``; whether there were any."""
        return False

    @abstractmethod
    def gather(self) -> Predictions:
        """Wait for the predictions of the submitted batch."""

    def close(self) -> None:  # noqa: B027  in process there is nothing to do
        """Forget the predictor; the machines stay."""

    @abstractmethod
    def work(self, shape: Hashable) -> StepFlops | None:
        """FLOPs of one prediction on micro-batches of this shape; None before the first such prediction."""
