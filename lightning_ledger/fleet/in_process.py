"""Predictions made one after another in the training process: fleet work, done here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet.base import Fleet, Job, Predictions
from lightning_ledger.ledger import Work
from lightning_ledger.microbatches import shape_key
from lightning_ledger.predictors import GradientPredictor


class WeightedSum:
    """``sum_i w_i h_i`` over gradients that may miss some parameters, one gradient set in memory."""

    def __init__(self) -> None:
        self.total: dict[str, Tensor] = {}

    def add(self, gradients: Mapping[str, Tensor | None], weight: float) -> None:
        """Add one gradient set; its tensors may be reused as storage."""
        held, new = [], []
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if name in self.total:
                held.append(self.total[name])
                new.append(gradient)
            else:
                self.total[name] = gradient.mul(weight)
        if held:
            torch._foreach_add_(held, new, alpha=weight)


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
        control, rest = WeightedSum(), WeightedSum()
        done = Predictions(control=control.total, rest=rest.total)
        norms = []
        for job in jobs:
            start = time.perf_counter()
            prediction = self._predictor.predict(job.microbatch.data, job.seed, *arguments)
            if prediction is None:
                done.skipped.append(job.microbatch.index)
                continue
            loss, gradients = prediction
            weight = job.microbatch.weight
            (control if job.control else rest).add(gradients, weight)
            done.losses[job.microbatch.index] = float(loss)
            if observe:
                scale = len(jobs) * weight
                norms.append(scale**2 * self._layout.per_layer(self._layout.squared_norms(gradients)))
                if job.control:
                    done.samples[job.microbatch.index] = scale * self._layout.sample(gradients)
            account = "fleet/control" if job.control else "fleet/prediction"
            done.work[account] = done.work.get(account, Work()) + self._work(job, time.perf_counter() - start)
        if observe and not done.skipped:
            done.squared_norms = torch.stack(norms)
        self._done = done

    def _work(self, job: Job, seconds: float) -> Work:
        counted = self._predictor.work(shape_key(job.microbatch.data))
        assert counted is not None, "a prediction was made, so its shape was counted"
        samples, tokens = job.microbatch.samples, job.microbatch.tokens
        return counted.work(passes=1, samples=samples, tokens=tokens, seconds=seconds)

    def gather(self) -> Predictions:
        assert self._done is not None, "gather() follows submit()"
        done, self._done = self._done, None
        return done
