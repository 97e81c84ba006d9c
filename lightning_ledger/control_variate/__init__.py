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

from lightning_ledger.control_variate.allocation import (
    Draw,
    best_share,
    break_even,
    effective_batch,
    estimate_variance,
    predictions_only_error,
    relative_cost,
    relative_cost_interval,
    step_cost,
)
from lightning_ledger.control_variate.coefficients import (
    Coefficients,
    centre_coefficient,
    coefficients,
    estimate_loss,
    sum_factors,
)
from lightning_ledger.control_variate.estimates import (
    Scope,
    Variances,
    bias_z,
    delta_by_layer,
    delta_interval,
    mean_gradient_square,
    noise_scale,
    optimal_coefficient,
    relative_bias,
    variances,
)
from lightning_ledger.control_variate.gradients import Gradients, WeightedSum
from lightning_ledger.control_variate.layout import Layout
from lightning_ledger.control_variate.metric import adam_metric
from lightning_ledger.control_variate.multilevel import (
    level_costs,
    multilevel_coefficients,
    multilevel_relative_cost,
    multilevel_shares,
    multilevel_variance,
)
from lightning_ledger.control_variate.plans import Candidate, Plan, best_plan, plans
from lightning_ledger.control_variate.reporting import report
from lightning_ledger.control_variate.statistics import (
    Average,
    Observation,
    Statistics,
    fold,
    measure,
    measured_sizes,
    observe,
)
from lightning_ledger.control_variate.switching import Switch, watch

__all__ = [
    "Average",
    "Candidate",
    "Coefficients",
    "Draw",
    "Gradients",
    "Layout",
    "Observation",
    "Plan",
    "Scope",
    "Statistics",
    "Switch",
    "Variances",
    "WeightedSum",
    "adam_metric",
    "best_plan",
    "best_share",
    "bias_z",
    "break_even",
    "centre_coefficient",
    "coefficients",
    "delta_by_layer",
    "delta_interval",
    "effective_batch",
    "estimate_loss",
    "estimate_variance",
    "fold",
    "level_costs",
    "mean_gradient_square",
    "measure",
    "measured_sizes",
    "multilevel_coefficients",
    "multilevel_relative_cost",
    "multilevel_shares",
    "multilevel_variance",
    "noise_scale",
    "observe",
    "optimal_coefficient",
    "plans",
    "predictions_only_error",
    "relative_bias",
    "relative_cost",
    "relative_cost_interval",
    "report",
    "step_cost",
    "sum_factors",
    "variances",
    "watch",
]
