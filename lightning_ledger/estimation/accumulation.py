"""Adds the predicted part of the estimate to ``.grad``; the exact passes have added theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout, centre_coefficient, sum_factors
from lightning_ledger.estimation.centre import by_parameter
from lightning_ledger.fleet import Predictions

if TYPE_CHECKING:
    from lightning_ledger.estimation.batch import Batch


def accumulate(
    step: Batch,
    predictions: Predictions,
    layout: Layout,
    scale: float,
    parameters: Mapping[str, Tensor],
    keep: bool = False,
) -> None:
    """``.grad += scale * (lam * (factor_C * sum over C + factor_rest * sum over the rest) + centre)``, in place.

    Args:
        step: says by what the sums are multiplied.
        predictions: their sums, which are used up unless ``keep``.
        layout: names the layer of each parameter.
        scale: of the loss.
        parameters: by name.
        keep: leave the sums as they are, at the memory of another gradient set.
    """
    lam = by_parameter(layout, step.lam)
    factors = sum_factors(step.n, step.k, step.corrected, step.share)
    for gradients, factor in zip((predictions.control, predictions.rest), factors, strict=True):
        held = {name: g for name, g in gradients.items() if g is not None}
        times = {name: scale * factor * lam[name] for name in held}
        add({name: g * times[name] if keep else g.mul_(times[name]) for name, g in held.items()}, parameters)
    if step.centre is not None and step.share is not None:
        # b is a mean of n w_i (g_i - lam h_i), and w_i do not always sum to 1.
        factor = scale * centre_coefficient(step.weights, step.control, step.share) / sum(step.weights)
        add({name: b * factor for name, b in step.centre.mean.items()}, parameters)


def add(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Add to every ``.grad``, in place; a new one may be the gradient itself.

    Args:
        gradients: by name.
        parameters: by name.
    """
    held, added = [], []
    for name, gradient in gradients.items():
        parameter = parameters[name]
        addend = gradient.to(parameter.dtype)
        if parameter.grad is None:
            # In the parameter's own layout, as autograd leaves it: DDP's buckets and fused optimizers expect that.
            same = addend.stride() == parameter.stride()
            parameter.grad = addend if same else torch.empty_like(parameter).copy_(addend)
        else:
            held.append(parameter.grad)
            added.append(addend)
    if held:
        torch._foreach_add_(held, added)
