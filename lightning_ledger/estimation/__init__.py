"""Estimate a batch's gradient from a few exact and many predicted micro-batch gradients."""

from lightning_ledger.estimation.allocation import Allocation, Evidence, Levels, allocate, allocate_levels
from lightning_ledger.estimation.centre import Centre
from lightning_ledger.estimation.correction import Correction
from lightning_ledger.estimation.estimator import GradientEstimator
from lightning_ledger.estimation.settings import PredictionSettings, PredictionState

__all__ = [
    "Allocation",
    "Centre",
    "Correction",
    "Evidence",
    "GradientEstimator",
    "Levels",
    "PredictionSettings",
    "PredictionState",
    "allocate",
    "allocate_levels",
]
