"""Gradient predictors: cheap, possibly wrong gradients of a micro-batch's loss."""

from lightning_ledger.predictors.base import GradientPredictor, Prediction
from lightning_ledger.predictors.captured import ENGINES, Engine, ProgramPredictor
from lightning_ledger.predictors.eager import EagerPredictor

__all__ = ["ENGINES", "EagerPredictor", "Engine", "GradientPredictor", "Prediction", "ProgramPredictor"]
