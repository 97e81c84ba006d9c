"""The estimator, its statistics and its allocation: pure functions of explicit state.

A batch is split into n micro-batches with weights w_i; the target is the full-batch gradient G = sum_i w_i g_i. A set
C of k micro-batches is drawn uniformly at random; g_i (exact) is computed on C, h_i (predicted) on all:

    estimate = sum_i w_i lam h_i  +  (n/k) sum_{i in C} w_i (g_i - lam h_i)

Averaged over the draw of C this equals G exactly, for any batch, any weights and any predictor. The method is that of
Gradient Prediction with Control Variates (arXiv 2511.05187v2); the formulas here are this project's own derivation.

Throughout, with x_i standing for n w_i g_i or n w_i h_i:

    exact    (n/k) sum_C w_i g_i          mean of the exact gradients over C
    control  (n/k) sum_C w_i h_i          mean of the predictions over C
    rest     n/(n-k) sum_{not C} w_i h_i  mean of the predictions outside C
    e = g - h      H = tr Cov(h)      V = tr Cov(g)      D = tr Cov(g - lam h)      delta = D / V
"""

from lightning_ledger.control_variate.allocation import best_share, break_even, relative_cost
from lightning_ledger.control_variate.coefficients import Coefficients, coefficients, estimate_loss, sum_factors
from lightning_ledger.control_variate.gradients import Gradients, WeightedSum
from lightning_ledger.control_variate.layout import Layout
from lightning_ledger.control_variate.statistics import (
    Average,
    Observation,
    Scope,
    Statistics,
    Variances,
    bias_z,
    delta_by_layer,
    observe,
    optimal_coefficient,
    report,
    variances,
)

__all__ = [
    "Average",
    "Coefficients",
    "Gradients",
    "Layout",
    "Observation",
    "Scope",
    "Statistics",
    "Variances",
    "WeightedSum",
    "best_share",
    "bias_z",
    "break_even",
    "coefficients",
    "delta_by_layer",
    "estimate_loss",
    "observe",
    "optimal_coefficient",
    "relative_cost",
    "report",
    "sum_factors",
    "variances",
]
