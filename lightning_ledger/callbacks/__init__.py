"""Lightning callbacks: they configure the strategy and observe what it does.

Stacked, they are the arms of the experiment: ``ComputeLedger`` alone is the baseline, with ``GradientPrediction`` the
biased ablation, with ``ControlVariate`` the method.
"""

from lightning_ledger.callbacks.compute_ledger import ComputeLedger
from lightning_ledger.callbacks.control_variate import ControlVariate
from lightning_ledger.callbacks.gradient_prediction import GradientPrediction

__all__ = ["ComputeLedger", "ControlVariate", "GradientPrediction"]
