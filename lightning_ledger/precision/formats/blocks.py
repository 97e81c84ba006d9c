"""Formats with one scale per block of numbers along the contraction; emulated.

Such scales do not factor out of the sum: an operand carries the products of numbers and scales.

Sources: OCP Microscaling Formats (MX) specification 1.0, with the scale rule, and e4m3 for gradients too, of
Mishra et al., arXiv 2506.08027; NVFP4 after NVIDIA, arXiv 2509.25149. To nearest, both give the bits of
torchao's ``to_mx`` (mode RCEIL) and ``nvfp4_quantize``. They are written out here because torchao's, which round
to nearest only, took 5 (e4m3) to 60 (e2m3) times as long on one CPU thread at 512x512.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_ledger.precision.formats.base import SMALLEST_SCALE, Format, Operand, Role, scaled
from lightning_ledger.precision.rounding import (
    E2M1,
    E4M3,
    FloatType,
    Noise,
    floor_power_of_two,
    round_to_floats_,
    round_to_integers_,
)


@dataclass(frozen=True)
class BlockInteger(Format):
    """Symmetric integers, one fp32 scale per block; emulated.

    |x - q s| <= s / 2 for nearest rounding and < s for stochastic, s = max|block| / (2**(bits-1) - 1). The
    last block may be short.

    Args:
        block: numbers that share a scale.
    """

    block: int

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        limit = 2 ** (self.bits - 1) - 1
        length = x.shape[dim]
        x = x.float()
        if missing := -length % self.block:
            x = pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))
        y, scale = scaled(x.unflatten(dim, (-1, self.block)), dim, limit)
        values = round_to_integers_(y, noise).mul_(scale)
        return Operand(values.flatten(dim - 1, dim).narrow(dim, 0, length))

    def describe(self, device: torch.device | str) -> str:
        return f"{self.name}: emulated (values rounded to {self.bits} bits, products in fp32)"


@dataclass(frozen=True)
class _BlockFloat(Format):
    """Small floating-point numbers in blocks that must fill the contraction.

    Args:
        element: the type of the numbers.
        block: numbers that share a scale.
    """

    element: FloatType
    block: int

    def refuses(self, length: int) -> str:
        return f"contracts {length} numbers, not a multiple of {self.block}" if length % self.block else ""

    def describe(self, device: torch.device | str) -> str:
        return f"{self.name}: emulated (blocks of {self.block} {self.element.name} numbers, products in fp32)"


@dataclass(frozen=True)
class Microscaled(_BlockFloat):
    """An OCP Microscaling format: the scale of a block is a power of two.

        s = 2**ceil(log2(max|block| / largest)),   x ~ q s

    The specification's own example rounds the exponent down, so that up to a quarter of the range is cut off:
    a bias that no stochastic rounding removes. Rounded up, nothing is.
    """

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        blocks = x.float().unflatten(dim, (-1, self.block))
        y = blocks.abs()
        exact = y.amax(dim, keepdim=True).div_(self.element.largest)
        power = floor_power_of_two(exact)
        scale = torch.where(exact > power, 2 * power, power).clamp_(min=SMALLEST_SCALE)
        torch.div(blocks, scale, out=y)
        values = round_to_floats_(y, self.element, noise).mul_(scale)
        return Operand(values.flatten(dim - 1, dim))


# Small enough for any tensor that matters, large enough for the reciprocal of tensor and block scale to be finite.
_SMALLEST_TENSOR_SCALE = 2.0**-120
_SMALLEST_BLOCK_SCALE = 2.0**E4M3.min_exponent


@dataclass(frozen=True)
class NVFP4(_BlockFloat):
    """NVIDIA's four-bit format: an e4m3 scale per block of e2m1 numbers, an fp32 scale per matrix.

        s_tensor = max|x| / (448 * 6),   s_block = e4m3(max|block| / 6 / s_tensor),   x ~ q s_block s_tensor

    Block scales are rounded to nearest, which may cut off up to a sixteenth of the largest number. For
    stochastic rounding they are rounded up, since what is cut off is a bias.
    """

    element: FloatType = E2M1
    block: int = 16

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        blocks = x.float().unflatten(dim, (-1, self.block))
        y = blocks.abs()
        largest = y.amax(dim, keepdim=True)
        limit = self.element.largest
        tensor_scale = largest.amax((-3, -2, -1), keepdim=True).div_(E4M3.largest * limit)
        tensor_scale.clamp_(min=_SMALLEST_TENSOR_SCALE)
        block_scale = largest.div_(limit).div_(tensor_scale).clamp_(_SMALLEST_BLOCK_SCALE, E4M3.largest)
        if noise is None:
            round_to_floats_(block_scale, E4M3, None)
        else:
            step = floor_power_of_two(block_scale).mul_(2.0**-E4M3.mantissa_bits)
            block_scale.div_(step).ceil_().mul_(step).clamp_(max=E4M3.largest)
        torch.mul(blocks, tensor_scale.reciprocal() / block_scale, out=y)
        values = round_to_floats_(y.clamp_(-limit, limit), self.element, noise)
        return Operand(values.mul_(tensor_scale * block_scale).flatten(dim - 1, dim))
