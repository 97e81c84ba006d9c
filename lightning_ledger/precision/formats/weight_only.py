"""Formats that keep weights in fewer bits than everything else, as inference engines do.

Sources: groups of 128 four-bit weights after Frantar et al. (GPTQ), arXiv 2210.17323, and Lin et al. (AWQ),
arXiv 2306.00978; four-bit weights with eight-bit activations after Lin et al. (QServe), arXiv 2405.04532.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ledger.precision.formats.base import Format, Operand, Role
from lightning_ledger.precision.rounding import Noise, round_to_bfloat16


@dataclass(frozen=True)
class WeightOnly(Format):
    """Weights stored in one format, and multiplied, dequantised, by activations and gradients in another.

    A weight is rounded once, along the axis that the forward product contracts. Its operand holds plain numbers
    without a scale, so that its transpose serves the product of the backward pass. Where ``dtype`` is bfloat16
    these numbers are rounded once more, each rounding with noise of its own where it is stochastic.

    Args:
        weights: the format of weights.
        activations: the format of all else; products without a weight run in it alone.
        dtype: of dequantised weights, bfloat16 or fp32: what their products with the rest are computed in.
    """

    weights: Format
    activations: Format
    dtype: torch.dtype

    @property
    def rounds_weights_once(self) -> bool:
        return True

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        if role == "weight":
            stored = self.weights.quantize(x, dim, noise, role).dequantize()
            return Operand(round_to_bfloat16(stored, noise) if self.dtype == torch.bfloat16 else stored)
        return self.activations.quantize(x, dim, noise, role)

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        if a.values.dtype != b.values.dtype:  # 8-bit integers by a dequantised weight
            a, b = (Operand(x.values.to(self.dtype), x.scale) for x in (a, b))
        return self.activations.multiply(a, b)

    def describe(self, device: torch.device | str) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.name}: emulated ({self.bits}-bit weights dequantised to {kind}, the rest {self.activations.name})"
        )
