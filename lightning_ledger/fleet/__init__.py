"""Where predictions run: a fleet takes micro-batches and returns their weighted sums."""

from lightning_ledger.fleet.base import Fleet, Job, Predictions
from lightning_ledger.fleet.in_process import InProcessFleet

__all__ = ["Fleet", "InProcessFleet", "Job", "Predictions"]
