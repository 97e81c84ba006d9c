"""Where predictions run: a fleet takes micro-batches and returns their weighted sums."""

from lightning_ledger.fleet.base import Fleet, FleetLost, Job, Predictions
from lightning_ledger.fleet.in_process import InProcessFleet
from lightning_ledger.fleet.recipe import PredictorRecipe
from lightning_ledger.fleet.settings import (
    FleetBackend,
    FleetSettings,
    InProcessSettings,
    Observers,
    RaySettings,
    fleet_settings,
)
from lightning_ledger.fleet.simulated import SimulatedSettings
from lightning_ledger.fleet.two_level import TwoLevelFleet

__all__ = [
    "Fleet",
    "FleetBackend",
    "FleetLost",
    "FleetSettings",
    "InProcessFleet",
    "InProcessSettings",
    "Job",
    "Observers",
    "Predictions",
    "PredictorRecipe",
    "RaySettings",
    "SimulatedSettings",
    "TwoLevelFleet",
    "fleet_settings",
]
