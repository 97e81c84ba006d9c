"""Formats with one scale per row, or per tensor, of an operand: it factors out of the sum.

    x ~ q * s,   s = max|x| / largest q

"Row" means all numbers that one sum contracts: a row of the left operand, a column of the right one.

Sources: row-wise int8 after Dettmers et al., arXiv 2208.07339; e4m3 forward and e5m2 for gradients after
Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ledger.precision.formats.base import Format, Operand, Role, scaled
from lightning_ledger.precision.formats.native import instructions, int_product
from lightning_ledger.precision.rounding import FloatType, Noise, round_to_floats_, round_to_integers_


@dataclass(frozen=True)
class RowInteger(Format):
    """Symmetric integers, one scale per row of the left and per column of the right operand.

    |x - q s| <= s / 2 for nearest rounding and < s for stochastic, s = max|x| / (2**(bits-1) - 1).

    Two matrices are multiplied by ``torch._int_mm`` wherever the machine has 8-bit dot products: with
    AVX512-VNNI it took a quarter of the fp32 product's time from 256x192x192 to 2048x768x3072, and was no
    slower from 16x64x64 on. Batches of matrices and convolutions multiply the same integers in fp32, which
    gives the same numbers while sums stay below 2**24 (a contraction of up to 1040 at 8 bits).
    """

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        limit = 2 ** (self.bits - 1) - 1
        y, scale = scaled(x.float(), dim, limit)
        values = round_to_integers_(y, noise)
        # A longer sum of 8-bit products could overflow the kernel's int32.
        if x.dim() == 2 and x.shape[dim] * limit**2 < 2**31 and self.is_native(x.device):
            values = values.to(torch.int8)
        return Operand(values, scale)

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        if a.values.dtype != torch.int8 or a.scale is None or b.scale is None:
            return super().multiply(a, b)
        product = int_product(a.values, b.values, padded=a.values.device.type != "cpu")
        return product.float().mul_(a.scale).mul_(b.scale)

    def is_native(self, device: torch.device | str) -> bool:
        return self.bits <= 8 and instructions(torch.device(device), "int8") is not None

    def describe(self, device: torch.device | str) -> str:
        if self.is_native(device):
            unit = instructions(torch.device(device), "int8")
            return f"{self.name}: native (torch._int_mm, {unit}; batched products and convolutions emulated)"
        return f"{self.name}: emulated (values rounded to {self.bits} bits, products in fp32)"


@dataclass(frozen=True)
class ScaledFloat(Format):
    """Small floating-point numbers, one scale per row or per tensor; emulated.

    The largest magnitude is scaled to the type's largest number. Scaled numbers y are rounded to within half
    a step, 2**(max(floor(log2 |y|), min_exponent) - mantissa_bits), and multiplied in fp32.

    Args:
        element: the type of weights and activations.
        gradient_element: the type of gradients.
        per_tensor: one scale for all of a matrix (for each matrix of a batch) in place of one per row.
    """

    element: FloatType
    gradient_element: FloatType
    per_tensor: bool = False

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        element = self.gradient_element if role == "gradient" else self.element
        y, scale = scaled(x.float(), (-2, -1) if self.per_tensor else dim, element.largest)
        return Operand(round_to_floats_(y, element, noise), scale)

    def describe(self, device: torch.device | str) -> str:
        types = f"values rounded to {self.element.name}, gradients to {self.gradient_element.name}"
        return f"{self.name}: emulated ({types}, products in fp32)"
