"""How long a step takes on declared machines: a fleet's seconds, from counted bytes and FLOPs.

While the training GPU runs its exact passes, W workers each take the weights, predict their chunk of the batch and
return two sums of gradients. Nothing starts the next step before both are done:

    step = max(exact, spread + straggler * chunk / speed + preempted + collected)

These are estimates of a declared model, not measurements; the formulas are our own derivation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist


@dataclass(frozen=True)
class Machines:
    """Declared machines.

    Args:
        workers: in the fleet.
        worker_flops: a second, sustained, of one worker.
        gpu_flops: a second, sustained, of the training GPU.
        bandwidth: bytes a second of one worker's link, each way.
        trainer_bandwidth: bytes a second of the training machine's link, each way.
        latency: seconds from machine to machine.
        straggling: standard deviation of the logarithm of a worker's slowness.
        preemptions: of one worker in an hour; what it was doing is done again.
        tree: whether workers also add one another's sums up on the way back. This package's do not; weights go from
            worker to worker in any case, as Ray's object store sends them.
        worker_price: of one worker's hour.
        gpu_price: of the GPU's hour.

    Raises:
        ValueError: if one of them is out of range.
    """

    workers: int = 100
    worker_flops: float = 5e12
    gpu_flops: float = 4e14
    bandwidth: float = 1.25e8
    trainer_bandwidth: float = 3e9
    latency: float = 0.02
    straggling: float = 0.2
    preemptions: float = 0.0
    tree: bool = False
    worker_price: float = 0.05
    gpu_price: float = 3.0

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise ValueError(f"workers={self.workers!r} must be an integer of at least 1.")
        for name in ("worker_flops", "gpu_flops", "bandwidth", "trainer_bandwidth"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive and finite: it is a speed.")
        for name in ("latency", "straggling", "preemptions", "worker_price", "gpu_price"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be finite and not negative.")

    def spread(self, size: float, tree: bool = True) -> float:
        """Seconds until every worker has ``size`` bytes, or, the other way, until the sum of theirs has come back.

        From the training machine to each, or down a binary tree, whichever is faster:

            latency + max(size / bandwidth, W size / trainer_bandwidth)
            latency ceil(log2(W + 1)) + 2 size / bandwidth

        Example:
            >>> machines = Machines(workers=1000, bandwidth=1e8, trainer_bandwidth=1e9, latency=0.01)
            >>> machines.spread(1e8, tree=False), round(machines.spread(1e8), 6)
            (100.01, 2.1)
        """
        star = self.latency + max(size / self.bandwidth, self.workers * size / self.trainer_bandwidth)
        if not tree:
            return star
        return min(star, self.latency * math.ceil(math.log2(self.workers + 1)) + 2 * size / self.bandwidth)

    @property
    def slowest(self) -> float:
        """How much slower than usual the slowest of the workers is: the W/(W+1) quantile."""
        return math.exp(self.straggling * NormalDist().inv_cdf(self.workers / (self.workers + 1)))


@dataclass(frozen=True)
class StepLoad:
    """What one step asks of the machines.

    Args:
        microbatches: n.
        exact: k.
        flops: of one exact gradient, and of one prediction.
        weights: bytes of the weights, as sent.
        gradients: bytes of one sum of gradients; a worker returns two.
        batch: bytes of one micro-batch.
    """

    microbatches: int
    exact: int
    flops: float
    weights: float
    gradients: float
    batch: float = 0.0

    @classmethod
    def of_language_model(
        cls, parameters: float, microbatches: int, exact: int, tokens: int, weight_bytes: float = 4.0
    ) -> StepLoad:
        """A transformer's, whose forward pass takes 2 FLOPs a parameter and token, and whose backward pass 4.

        Args:
            parameters: P.
            microbatches: n.
            exact: k.
            tokens: in one micro-batch.
            weight_bytes: of one weight, as sent; gradients are sent in four.
        """
        return cls(microbatches, exact, 6 * parameters * tokens, weight_bytes * parameters, 4 * parameters, 8 * tokens)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        exact: the GPU's passes.
        fleet: until the predictions have come back.
        computing: of that, a usual worker's predictions.
    """

    exact: float
    fleet: float
    computing: float

    @property
    def seconds(self) -> float:
        """Of the step: both run at the same time."""
        return max(self.exact, self.fleet)

    @property
    def gpu_idle(self) -> float:
        """The part of the step in which the GPU waits."""
        return 1 - self.exact / self.seconds if self.seconds else 0.0

    @property
    def busy(self) -> float:
        """The part of the step in which a usual worker computes."""
        return self.computing / self.seconds if self.seconds else 0.0


def step_time(machines: Machines, load: StepLoad) -> StepTime:
    """Expected seconds of one step.

    Args:
        machines: declared.
        load: of the step.

    Example:
        >>> machines = Machines(workers=10, worker_flops=1e12, gpu_flops=1e14, latency=0, straggling=0)
        >>> load = StepLoad(microbatches=100, exact=1, flops=1e12, weights=0, gradients=0)
        >>> step_time(machines, load)  # ten predictions each, a second each
        StepTime(exact=0.01, fleet=10.0, computing=10.0)
    """
    used = replace(machines, workers=min(machines.workers, load.microbatches))
    chunk = math.ceil(load.microbatches / used.workers)
    computing = chunk * load.flops / machines.worker_flops
    slow = computing * used.slowest
    interrupted = -math.expm1(-machines.preemptions * slow / 3600 * used.workers)
    sent = used.spread(load.weights) + chunk * load.batch / machines.bandwidth
    returned = used.spread(2 * load.gradients, machines.tree)
    return StepTime(
        exact=load.exact * load.flops / machines.gpu_flops,
        fleet=sent + slow * (1 + interrupted) + returned,
        computing=computing,
    )


def workers_to_hide(machines: Machines, load: StepLoad, most: int = 1_000_000) -> int | None:
    """The least number of workers that predict while the GPU is busy with its exact passes.

    Args:
        machines: declared; its number of workers does not matter.
        load: of the step.
        most: so many at most.

    Returns:
        The number; None where none is enough, because bytes or latency alone take longer.

    Example:
        >>> machines = Machines(worker_flops=1e12, gpu_flops=1e13, latency=0, straggling=0)
        >>> workers_to_hide(machines, StepLoad(microbatches=100, exact=2, flops=1e12, weights=0, gradients=0))
        >>> workers_to_hide(machines, StepLoad(microbatches=100, exact=20, flops=1e12, weights=0, gradients=0))
        50
    """
    for chunk in range(load.microbatches, 0, -1):  # the fewer workers, the longer their chunks
        workers = math.ceil(load.microbatches / chunk)
        if workers > most:
            return None
        found = step_time(replace(machines, workers=workers), load)
        if found.fleet <= found.exact:
            return workers
    return None
