"""A real Ray cluster on this machine, and two workers that many tests share: starting them takes longer than most."""

from __future__ import annotations

import functools

import lightning as L

from lightning_ledger.fleet import FleetBackend, FleetSettings
from lightning_ledger.fleet.cluster import Cluster, require_ray
from lightning_ledger.fleet.ray import RayBackend


@functools.cache
def workers() -> Cluster:
    """Two workers, on a cluster with room for others; :func:`stop` ends both."""
    ray = require_ray(local=True)
    ray.init("local", num_cpus=12, include_dashboard=False, object_store_memory=300 * 2**20, log_to_driver=False)
    cluster = Cluster(workers=2, threads=1, address=None, object_store=0, retry_every=1.0)
    cluster.start()
    return cluster


def stop() -> None:
    """End them, if they were started."""
    if workers.cache_info().currsize:
        workers().stop()
        workers.cache_clear()
        require_ray().shutdown()


class Shared(FleetSettings):
    """Those workers as an argument of ``GradientPrediction``: they outlive the run."""

    def __init__(self, cluster: Cluster, deadline: float = 60.0) -> None:
        self.cluster, self.deadline = cluster, deadline

    def open(self, module: L.LightningModule) -> FleetBackend:
        return _Kept(self.cluster, module, self.deadline)


class _Kept(RayBackend):
    def close(self) -> None:
        """The workers stay."""
