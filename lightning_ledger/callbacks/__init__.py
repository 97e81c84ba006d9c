"""Lightning callbacks: they configure the strategy and observe what it does.

Stacked, they are the arms of the experiment: ``ComputeLedger`` alone is the baseline, with ``GradientPrediction`` the
biased ablation, with ``ControlVariate`` the method, whose exact share ``AdaptiveAllocation`` sets as it goes.
``BudgetStopping`` ends any of them when a budget is spent.
"""

from lightning_ledger.callbacks.adaptive_allocation import AdaptiveAllocation
from lightning_ledger.callbacks.budget import BudgetStopping
from lightning_ledger.callbacks.compute_ledger import ComputeLedger
from lightning_ledger.callbacks.control_variate import ControlVariate
from lightning_ledger.callbacks.gradient_prediction import GradientPrediction

__all__ = ["AdaptiveAllocation", "BudgetStopping", "ComputeLedger", "ControlVariate", "GradientPrediction"]
