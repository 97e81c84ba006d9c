"""Predictions made one after another in the training process: fleet work, done here."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout, WeightedSum
from lightning_ledger.fleet.base import Fleet, Job, Predictions
from lightning_ledger.flops import StepFlops
from lightning_ledger.ledger import Work
from lightning_ledger.microbatches import shape_key
from lightning_ledger.predictors import GradientPredictor


class InProcessFleet(Fleet):
    """The predictor runs in this process, when it is asked.

    Args:
        predictor: makes the predictions.
        layout: names the layers and the sampled coordinates.
    """

    def __init__(self, predictor: GradientPredictor, layout: Layout) -> None:
        self._predictor = predictor
        self._layout = layout
        self._done: Predictions | None = None

    def refresh(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Work]:
        self._predictor.refresh(weights, seed)
        return {}  # the same memory: nothing is transferred

    def submit(self, jobs: Sequence[Job], arguments: Sequence[Any], observe: bool) -> None:
        self._done = predict_jobs(self._predictor, self._layout, jobs, arguments, observe, len(jobs))

    def run_eagerly(self, reason: str) -> bool:
        return self._predictor.run_eagerly(reason)

    def gather(self) -> Predictions:
        assert self._done is not None, "gather() follows submit()"
        done, self._done = self._done, None
        return done

    def work(self, shape: Hashable) -> StepFlops | None:
        return self._predictor.work(shape)


def predict_jobs(
    predictor: GradientPredictor,
    layout: Layout,
    jobs: Sequence[Job],
    arguments: Sequence[Any],
    observe: bool,
    total: int,
) -> Predictions:
    """Predict one job after another, and sum.

    Args:
        predictor: makes the predictions.
        layout: names the layers and the sampled coordinates.
        jobs: the micro-batches to predict.
        arguments: the rest of what ``training_step`` takes.
        observe: whether norms and samples are wanted for the statistics.
        total: n of norms and samples: the jobs of the whole batch, of which these may be a part.

    Returns:
        Their sums, in the order of the jobs.
    """
    control, rest = WeightedSum(), WeightedSum()
    done = Predictions(control=control.total, rest=rest.total)
    norms, losses = [], {}
    for job in jobs:
        part, start = job.microbatch, time.perf_counter()
        into = _Delivery(control if job.control else rest, part.weight, layout, observe, job.control or job.sample)
        loss = predictor.predict_into(into, part.data, job.seed, *arguments, loss_scale=job.loss_scale)
        if loss is None:
            done.skipped.append(part.index)
            account = "waste/lost_prediction"
        else:
            account = "fleet/control" if job.control else "fleet/prediction"
            losses[part.index] = loss
            if observe:
                scale = total * part.weight
                norms.append(scale**2 * layout.per_layer(into.squared_norms()))
                if job.control or job.sample:
                    done.samples[part.index] = scale * into.sample()
        counted = predictor.work(shape_key(part.data), skipped=loss is None)
        assert counted is not None, "a prediction was made, so its shape was counted"
        work = counted.work(passes=1, samples=part.samples, tokens=part.tokens, seconds=time.perf_counter() - start)
        done.work[account] = done.work.get(account, Work()) + work
    if losses:  # one wait for the device, not one for each
        done.losses = dict(zip(losses, torch.stack([x.reshape(()) for x in losses.values()]).tolist(), strict=True))
    if norms and not done.skipped:
        done.squared_norms = torch.stack(norms)
    return done


class _Delivery:
    """Adds gradients to a weighted sum as they come; of each it keeps its norm and its sampled coordinates.

    Args:
        into: the sum.
        weight: of the micro-batch.
        layout: names the layers and the sampled coordinates.
        observe: whether norms are wanted.
        sample: whether sampled coordinates are wanted too.
    """

    def __init__(self, into: WeightedSum, weight: float, layout: Layout, observe: bool, sample: bool) -> None:
        self._into = into
        self._weight = weight
        self._layout = layout
        self._observe = observe
        self._sample = sample
        self._norms: dict[str, Tensor] = {}
        self._samples: dict[str, Tensor] = {}

    def __call__(self, name: str, gradient: Tensor) -> None:
        self._into.add({name: gradient}, self._weight)
        if self._observe:
            self._norms[name] = torch.linalg.vector_norm(gradient.float())
            if self._sample:
                self._samples[name] = gradient.reshape(-1)[self._layout.coordinates_of(name)]

    def squared_norms(self) -> Tensor:
        """[P] squared norm of each parameter's gradient; a missing gradient is zero."""
        squares = torch.zeros(len(self._layout.names), dtype=torch.float64)
        if self._norms:
            places = [self._layout.place(name) for name in self._norms]
            squares[places] = torch.stack([*self._norms.values()]).cpu().double().square()
        return squares

    def sample(self) -> Tensor:
        """[m] the sampled coordinates; a missing gradient is zero."""
        return self._layout.assemble(self._samples)
