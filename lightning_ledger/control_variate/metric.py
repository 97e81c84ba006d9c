"""The optimizer's metric: by what an Adam-like optimizer divides each coordinate of its update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import RMSprop

from lightning_ledger.control_variate.layout import Layout


def adam_metric(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], layout: Layout) -> Tensor | None:
    """d, the root of the second moment, on the sampled coordinates.

        Adam, AdamW, NAdam, RAdam    sqrt(exp_avg_sq / (1 - beta_2^step)) + eps      (AMSGrad: of its maximum)
        RMSprop                      sqrt(square_avg) + eps                          (centred: of the variance)
        Adagrad                      sqrt(sum) + eps

    as ``torch.optim`` documents them; RAdam's rectification is one factor for all coordinates, which no ratio of
    variances feels, and left out. Read it before the optimizer's step: then it holds earlier gradients only, and the
    statistics in it are unbiased.

    Args:
        optimizer: any torch optimizer.
        parameters: name to the very tensors that the optimizer steps.
        layout: names the parameters and their sampled coordinates.

    Returns:
        [m]; 0 where a coordinate has no second moment yet (it never had a gradient, or is another optimizer's): there
        it counts nothing. None if the optimizer has no second moments, or none yet.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> optimizer, layout = torch.optim.Adam([weight], eps=0.0), Layout.of({"weight": weight})
        >>> adam_metric(optimizer, {"weight": weight}, layout) is None
        True
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> optimizer.step()
        >>> adam_metric(optimizer, {"weight": weight}, layout).round(decimals=4)
        tensor([3., 4.])
    """
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    parts = []
    for name, at in zip(layout.names, layout.coordinates, strict=True):
        parameter = parameters[name]
        # Not optimizer.state[parameter]: that would create an entry for a parameter that has none.
        state = optimizer.state.get(parameter)
        root = _root(optimizer, group_of[id(parameter)], state, at) if state else None
        parts.append(layout.inflation.new_zeros(len(at)) if root is None else root.to(layout.inflation))
    metric = torch.cat(parts) if parts else layout.inflation
    return metric if bool(metric.any()) else None


def _root(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[str, Any], at: Tensor
) -> Tensor | None:
    """sqrt(second moment) + eps at these coordinates; None if the optimizer keeps none."""

    def sampled(key: str) -> Tensor:
        moment: Tensor = state[key]
        return moment.reshape(-1)[at].float()

    if "exp_avg_sq" in state and "betas" in group and "step" in state:
        square = sampled("max_exp_avg_sq" if "max_exp_avg_sq" in state else "exp_avg_sq")
        # In single precision 1 - 0.999^t would lose half its digits.
        steps = torch.as_tensor(state["step"], dtype=torch.float64)
        square = square / (1 - group["betas"][1] ** steps)
    elif "square_avg" in state and isinstance(optimizer, RMSprop):  # Adadelta has one too, and another rule
        square = sampled("square_avg")
        if "grad_avg" in state:
            square = (square - sampled("grad_avg") ** 2).clamp(min=0)
    elif "sum" in state:
        square = sampled("sum")
    else:
        return None
    return torch.where(square > 0, square.sqrt() + float(group["eps"]), 0.0)
