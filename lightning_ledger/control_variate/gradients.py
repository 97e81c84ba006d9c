"""Gradient sets: one tensor per parameter name, None or absent where the loss does not depend on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor | None]


class WeightedSum:
    """``sum_i w_i g_i`` over gradient sets that may miss some parameters; one set in memory.

    Attributes:
        total: the sum so far; a parameter that every set misses is absent.

    Example:
        >>> s = WeightedSum()
        >>> s.add({"w": torch.ones(2), "b": None}, 0.5)
        >>> s.add({"w": torch.ones(2)}, 2.0)
        >>> s.total
        {'w': tensor([2.5000, 2.5000])}
    """

    def __init__(self) -> None:
        self.total: dict[str, Tensor] = {}

    def add(self, gradients: Gradients, weight: float) -> None:
        """Add one set, times ``weight``; the set itself stays as it is."""
        held, new = [], []
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if name in self.total:
                held.append(self.total[name])
                new.append(gradient)
            else:
                self.total[name] = gradient.mul(weight)
        if held:
            torch._foreach_add_(held, new, alpha=weight)
