"""Predictions made one after another in the training process: fleet work, done here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout, WeightedSum
from lightning_ledger.fleet.base import Fleet, Job, Predictions
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
        control, rest = WeightedSum(), WeightedSum()
        done = Predictions(control=control.total, rest=rest.total)
        norms, losses = [], {}
        for job in jobs:
            part, start = job.microbatch, time.perf_counter()
            prediction = self._predictor.predict(part.data, job.seed, *arguments)
            if prediction is None:
                done.skipped.append(part.index)
                account = "waste/lost_prediction"
            else:
                account = "fleet/control" if job.control else "fleet/prediction"
                losses[part.index], gradients = prediction
                (control if job.control else rest).add(gradients, part.weight)
                if observe:
                    scale = len(jobs) * part.weight
                    norms.append(scale**2 * self._layout.per_layer(self._layout.squared_norms(gradients)))
                    if job.control:
                        done.samples[part.index] = scale * self._layout.sample(gradients)
            counted = self._predictor.work(shape_key(part.data), skipped=prediction is None)
            assert counted is not None, "a prediction was made, so its shape was counted"
            work = counted.work(passes=1, samples=part.samples, tokens=part.tokens, seconds=time.perf_counter() - start)
            done.work[account] = done.work.get(account, Work()) + work
        if losses:  # one wait for the device, not one for each
            done.losses = dict(zip(losses, torch.stack([x.reshape(()) for x in losses.values()]).tolist(), strict=True))
        if norms and not done.skipped:
            done.squared_norms = torch.stack(norms)
        self._done = done

    def gather(self) -> Predictions:
        assert self._done is not None, "gather() follows submit()"
        done, self._done = self._done, None
        return done
