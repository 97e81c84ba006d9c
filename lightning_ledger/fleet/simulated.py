"""Predictions made here, on a virtual clock: what a run would have taken on machines that are only declared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet.base import Fleet, Job, Predictions
from lightning_ledger.fleet.chunks import chunks, merge, tensor_bytes
from lightning_ledger.fleet.in_process import InProcessFleet, predict_jobs
from lightning_ledger.fleet.latency import Machines
from lightning_ledger.fleet.recipe import PredictorRecipe
from lightning_ledger.fleet.settings import FleetBackend, FleetSettings, Observers, make_predictor
from lightning_ledger.predictors import GradientPredictor
from lightning_ledger.work import Work, add_to


class SimulatedSettings(FleetSettings):
    """Predictions are made in process, chunk by chunk as so many workers would, and timed on a virtual clock.

    The numbers are bit for bit those of a Ray fleet of as many workers and threads. It logs, beside the rest:

    ========================  =========================================================
    ``fleet/virtual_seconds``  of all steps so far, on the declared machines
    ``fleet/gpu_idle``         part of it in which the training GPU waited
    ``fleet/busy``             part of it in which the workers computed, on average
    ``fleet/price``            of the declared machines' hours
    ========================  =========================================================

    Args:
        seed: of stragglers and preemptions, which are drawn for each worker and step.
        **machines: as of :class:`lightning_ledger.fleet.latency.Machines`.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> SimulatedSettings(workers=8, bandwidth=1e9).machines.workers
        8
    """

    def __init__(
        self,
        workers: int = 100,
        worker_flops: float = 5e12,
        gpu_flops: float = 4e14,
        bandwidth: float = 1.25e8,
        trainer_bandwidth: float = 3e9,
        latency: float = 0.02,
        straggling: float = 0.2,
        preemptions: float = 0.0,
        tree: bool = False,
        worker_price: float = 0.05,
        gpu_price: float = 3.0,
        seed: int = 0,
    ) -> None:
        given = locals()
        self.machines = Machines(**{f.name: given[f.name] for f in fields(Machines)})
        self.seed = seed

    def open(self, module: pl.LightningModule) -> SimulatedBackend:
        return SimulatedBackend(self.machines, module, self.seed)


@dataclass
class _Clock:
    """Virtual seconds so far: of steps, of the GPU's exact passes, and of workers computing, all of them together."""

    seconds: float = 0.0
    exact: float = 0.0
    computing: float = 0.0


class SimulatedBackend(FleetBackend):
    """The declared machines of one run.

    Args:
        machines: declared.
        module: that is trained.
        seed: of stragglers and preemptions.
    """

    def __init__(self, machines: Machines, module: pl.LightningModule, seed: int = 0) -> None:
        self.machines = machines
        self._module = module
        self._generator = torch.Generator().manual_seed(seed)
        self._clock = _Clock()
        self._sent = self._fleet = 0.0

    def fleet(self, recipe: PredictorRecipe, layout: Layout, observers: Observers) -> Fleet:
        return SimulatedFleet(self, make_predictor(self._module, recipe, observers), layout)

    def sent(self, size: int) -> None:
        """Weights of so many bytes went to every worker."""
        self._sent += self.machines.spread(size)

    def predicted(self, flops: Sequence[float], batches: Sequence[int], returned: int) -> list[bool]:
        """A batch was predicted.

        Args:
            flops: of each chunk.
            batches: bytes of each chunk's micro-batches.
            returned: bytes of the sums of one worker.

        Returns:
            Of each chunk, whether its worker was preempted, so that it was computed twice.
        """
        m, draws = self.machines, self._generator
        slow = torch.exp(m.straggling * torch.randn(len(flops), generator=draws, dtype=torch.float64)).tolist()
        chance = torch.rand(len(flops), generator=draws, dtype=torch.float64).tolist()
        ends, lost = [], []
        for work, size, factor, u in zip(flops, batches, slow, chance, strict=True):
            computing = factor * work / m.worker_flops
            lost.append(u < -math.expm1(-m.preemptions * computing / 3600))
            took = computing * (2 if lost[-1] else 1)
            self._clock.computing += took
            ends.append(size / m.bandwidth + took)
        used = replace(m, workers=max(1, len(flops)))
        # A second fleet (another format) uses the same workers, after the first.
        self._fleet += max(ends, default=0.0) + used.spread(returned, m.tree)
        return lost

    def end_step(self, exact_flops: int) -> dict[str, float]:
        exact = exact_flops / self.machines.gpu_flops
        step = max(exact, self._sent + self._fleet)
        self._sent = self._fleet = 0.0
        clock, m = self._clock, self.machines
        clock.seconds += step
        clock.exact += exact
        whole = max(clock.seconds, 1e-300)
        return {
            "fleet/virtual_seconds": clock.seconds,
            "fleet/gpu_idle": 1 - clock.exact / whole,
            "fleet/busy": clock.computing / (whole * m.workers),
            "fleet/price": clock.seconds / 3600 * (m.gpu_price + m.workers * m.worker_price),
        }


class SimulatedFleet(InProcessFleet):
    """Predicts in process what the declared workers would, in their chunks, and bills their transfers.

    Args:
        backend: keeps the clock.
        predictor: makes the predictions.
        layout: names the layers and the sampled coordinates.
    """

    def __init__(self, backend: SimulatedBackend, predictor: GradientPredictor, layout: Layout) -> None:
        super().__init__(predictor, layout)
        self._backend = backend

    def refresh(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Work]:
        super().refresh(weights, seed)
        size = sum(w.nbytes for w in weights.values())
        self._backend.sent(size)
        return {"transfer/weights": Work(bytes=size * self._backend.machines.workers)}

    def submit(self, jobs: Sequence[Job], arguments: Sequence[Any], observe: bool) -> None:
        cut = chunks(jobs, self._backend.machines.workers)
        parts = [predict_jobs(self._predictor, self._layout, c, arguments, observe, len(jobs)) for c in cut]
        returned = [_returned(part) for part in parts]
        batches = [sum(tensor_bytes(job.microbatch.data) for job in chunk) for chunk in cut]
        flops = [sum(work.flops for work in part.work.values()) for part in parts]
        lost = self._backend.predicted(flops, batches, max(returned, default=0))
        wasted = [work for part, again in zip(parts, lost, strict=True) if again for work in part.work.values()]
        self._done = merge(parts)
        add_to(self._done.work, [("waste/lost_prediction", replace(work, seconds=0.0)) for work in wasted])
        moved = {"transfer/weights": Work(bytes=sum(batches)), "transfer/gradients": Work(bytes=sum(returned))}
        add_to(self._done.work, moved.items())


def _returned(part: Predictions) -> int:
    """Bytes of the tensors that a worker would answer with."""
    sums = [g for total in (part.control, part.rest) for g in total.values() if g is not None]
    norms = [] if part.squared_norms is None else [part.squared_norms]
    return sum(tensor.nbytes for tensor in [*sums, *part.samples.values(), *norms])
