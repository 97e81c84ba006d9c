"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray_runs

from lightning_ledger.fleet.cluster import Cluster


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    ray_runs.stop()


@pytest.fixture
def ray_workers() -> Cluster:
    """Two workers on a real Ray cluster, started when a test first asks for them."""
    return ray_runs.workers()


@pytest.fixture
def ray_fleet(ray_workers: Cluster) -> ray_runs.Shared:
    """Those workers as an argument of ``GradientPrediction``."""
    return ray_runs.Shared(ray_workers)
