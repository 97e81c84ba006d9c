"""Adds the predicted part of the estimate to ``.grad``; the exact passes have added theirs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout, centre_coefficient, sum_factors
from lightning_ledger.estimation.batch import Batch
from lightning_ledger.estimation.centre import by_parameter
from lightning_ledger.fleet import Predictions


def accumulate(
    step: Batch, predictions: Predictions, layout: Layout, scale: float, parameters: Mapping[str, Tensor]
) -> None:
    """``.grad += scale * (lam * (factor_C * sum over C + factor_rest * sum over the rest) + centre)``, in place.

    Args:
        step: says by what the sums are multiplied.
        predictions: their sums, which are used up.
        layout: names the layer of each parameter.
        scale: of the loss.
        parameters: by name.
    """
    lam = by_parameter(layout, step.lam)
    factors = sum_factors(step.n, step.k, step.corrected, step.share)
    for gradients, factor in zip((predictions.control, predictions.rest), factors, strict=True):
        _add({name: g.mul_(scale * factor * lam[name]) for name, g in gradients.items() if g is not None}, parameters)
    if step.centre is not None and step.share is not None:
        # b is a mean of n w_i (g_i - lam h_i), and w_i do not always sum to 1.
        factor = scale * centre_coefficient(step.weights, step.control, step.share) / sum(step.weights)
        _add({name: b * factor for name, b in step.centre.mean.items()}, parameters)


def _add(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    held, added = [], []
    for name, gradient in gradients.items():
        parameter = parameters[name]
        addend = gradient.to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = addend
        else:
            held.append(parameter.grad)
            added.append(addend)
    if held:
        torch._foreach_add_(held, added)
