"""Formats without scales: the numbers themselves, and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ledger.precision.formats.base import Format, Operand, Role
from lightning_ledger.precision.formats.native import instructions
from lightning_ledger.precision.rounding import Noise, round_to_bfloat16


@dataclass(frozen=True)
class Identity(Format):
    """No rounding: lowered operations run unchanged."""

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        return Operand(x.float())

    def is_native(self, device: torch.device | str) -> bool:
        return True

    def describe(self, device: torch.device | str) -> str:
        return f"{self.name}: native (operations unchanged)"


@dataclass(frozen=True)
class BFloat16(Format):
    """Torch's own bfloat16 kernels: sums in fp32, results rounded to bfloat16 as those kernels do."""

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        return Operand(round_to_bfloat16(x, noise))

    def is_native(self, device: torch.device | str) -> bool:
        return instructions(torch.device(device), "bf16") is not None

    def describe(self, device: torch.device | str) -> str:
        unit = instructions(torch.device(device), "bf16")
        how = f"native (torch's bfloat16 kernels, {unit})" if unit else "emulated (torch's bfloat16 kernels)"
        return f"{self.name}: {how}"
