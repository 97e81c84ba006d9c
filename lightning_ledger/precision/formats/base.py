"""What every number format is: operands, how a tensor becomes one, and how two are multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_ledger.precision.rounding import Noise

Role = Literal["weight", "activation", "gradient"]
"""What an operand is: a parameter, something computed forward, or a gradient with respect to such a thing."""

# Keeps the scale of an all-zero row from being zero: 0 / tiny is 0, where 0 / 0 would be NaN.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Operand:
    """A tensor in some format: ``values``, or ``values * scale`` where there is a scale.

    Args:
        values: [..., M, K], in whatever dtype the format multiplies.
        scale: fp32, broadcasts against ``values``, size 1 along the contraction; None for no scale.
    """

    values: Tensor
    scale: Tensor | None = None

    def transpose(self) -> Operand:
        """The operand with its last two axes swapped."""
        return Operand(self.values.mT, None if self.scale is None else self.scale.mT)

    def dequantize(self) -> Tensor:
        """The numbers that the operand stands for."""
        return self.values if self.scale is None else self.values * self.scale


@dataclass(frozen=True)
class Format(ABC):
    """One number format.

    Args:
        name: the key in ``FORMATS``.
        bits: bits per number, scales not counted; where weights differ from the rest, bits per weight.
    """

    name: str
    bits: int

    @property
    def rounds_weights_once(self) -> bool:
        """Whether one rounded copy of a weight, made for the forward product, serves the backward one too."""
        return False

    def refuses(self, length: int) -> str:
        """Why a product that contracts ``length`` numbers cannot run in the format; empty where it can.

        Example:
            >>> from lightning_ledger.precision import get_format
            >>> get_format("mxfp4").refuses(20)
            'contracts 20 numbers, not a multiple of 32'
        """
        return ""

    def quantize(self, x: Tensor, dim: int, noise: Noise | None = None, role: Role = "activation") -> Operand:
        """Round ``x`` for a product that contracts ``dim``.

        Args:
            x: floating point, [..., M, K] or [..., K, N]; it is not changed.
            dim: the contracted axis: -1 for a left operand, -2 for a right one.
            noise: for stochastic rounding, drawn from once per rounding; None rounds to nearest.
            role: what ``x`` is, for formats that treat weights, activations and gradients differently.

        Returns:
            The operand. Zeros stay zeros. Where ``x`` is infinite or NaN, neither it nor what it is scaled
            with contributes anything finite to a product.

        Raises:
            ValueError: ``dim`` is neither -1 nor -2, or the format refuses the length of that axis.

        Example:
            >>> from lightning_ledger.precision import get_format
            >>> get_format("int8").quantize(torch.tensor([[0.5, -127.0]]), dim=-1).dequantize()
            tensor([[   0., -127.]])
        """
        if dim not in (-1, -2):
            raise ValueError(
                f"dim={dim}: a matrix product contracts dim=-1 of its left or dim=-2 of its right operand; "
                "reshape the tensor so that the contracted axis is one of these."
            )
        if reason := self.refuses(x.shape[dim]):
            raise ValueError(
                f"format={self.name!r} cannot round a tensor of shape {tuple(x.shape)} along dim={dim}: the product "
                f"{reason}. Run it in a format that does not refuse it, or pad the axis with zeros."
            )
        # Elementwise work on a transposed view is several times slower, so round what it is a view of.
        if x.stride(-2) == 1 != x.stride(-1):
            return self._encode(x.mT, -3 - dim, noise, role).transpose()
        return self._encode(x, dim, noise, role)

    @abstractmethod
    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        """``quantize`` for a checked ``dim`` and a layout that is cheap to read."""

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """The product of a left operand [..., M, K] and a right one [..., K, N], as fp32 [..., M, N]."""
        product = torch.matmul(a.values, b.values).float()
        for scale in (a.scale, b.scale):
            if scale is not None:
                product.mul_(scale)
        return product

    def is_native(self, device: torch.device | str) -> bool:
        """Whether matrix products run in the machine's own instructions for this format."""
        return False

    @abstractmethod
    def describe(self, device: torch.device | str) -> str:
        """One line that says what the format is on this machine: native or emulated, and how."""


def scaled(x: Tensor, dim: int | tuple[int, ...], largest: float) -> tuple[Tensor, Tensor]:
    """Divide fp32 ``x`` by a scale that makes the largest magnitude along ``dim`` equal ``largest``.

    Returns:
        x / scale and scale. A scale is infinite or NaN where there is such a number to share it.
    """
    y = x.abs()
    scale = y.amax(dim, keepdim=True).div_(largest).clamp_(min=SMALLEST_SCALE)
    # The magnitudes have served: their memory takes the quotient, since fresh pages cost more than dividing.
    return torch.div(x, scale, out=y), scale
