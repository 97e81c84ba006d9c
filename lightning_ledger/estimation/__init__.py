"""Estimate a batch's gradient from a few exact and many predicted micro-batch gradients."""

from lightning_ledger.estimation.estimator import GradientEstimator
from lightning_ledger.estimation.settings import Correction, PredictionSettings, PredictionState

__all__ = ["Correction", "GradientEstimator", "PredictionSettings", "PredictionState"]
