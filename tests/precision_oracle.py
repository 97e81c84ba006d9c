"""What the tests of formats and of the lowering table share: the formats, and slow, obvious rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ledger.precision import FORMATS, ROUNDINGS, Format
from lightning_ledger.precision.formats import RowInteger
from lightning_ledger.precision.rounding import Noise, noise_from

# A format nobody registered: the contract must hold for a newcomer too.
ALL_FORMATS = [*FORMATS.values(), RowInteger("int6", bits=6)]
ROUNDED = [fmt for fmt in ALL_FORMATS if fmt.name != "fp32"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

every_format = pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: fmt.name)
rounded_formats = pytest.mark.parametrize("fmt", ROUNDED, ids=lambda fmt: fmt.name)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
every_device = pytest.mark.parametrize("device", DEVICES)


def rand(*shape: int, seed: int = 0, device: str = "cpu", requires_grad: bool = False) -> Tensor:
    x = torch.randn(shape, generator=Generator().manual_seed(seed)).to(device)
    return x.requires_grad_(requires_grad)


def generator(rounding: str, device: str = "cpu", seed: int = 0) -> Noise | None:
    return None if rounding == "nearest" else noise_from(Generator(device).manual_seed(seed))


def grid_step(fmt: Format, x: Tensor, dim: int) -> Tensor:
    """The distance between the numbers of the format to either side, from the format's definition."""
    x = x.double().movedim(dim, -1)
    if fmt.name == "fp32":
        step = torch.zeros_like(x)
    elif fmt.name == "bf16":
        step = torch.exp2(x.abs().log2().floor() - 7)
    elif fmt.name == "fp8":
        scale = x.abs().amax(-1, keepdim=True) / 448
        step = scale * torch.exp2((x / scale).abs().log2().floor().clamp(min=-6) - 3)
    else:
        block = 32 if fmt.name == "int4" else x.shape[-1]
        largest = 2 ** (fmt.bits - 1) - 1
        blocks = [b.abs().amax(-1, keepdim=True).expand(b.shape) / largest for b in x.split(block, -1)]
        step = torch.cat(blocks, -1)
    return step.movedim(-1, dim)


def oracle(fmt: Format, x: Tensor, dim: int) -> Tensor:
    """Round to nearest the slow way: one row or block at a time, fp8 by torch's own type."""
    if fmt.name == "fp32":
        return x.float()
    if fmt.name == "bf16":
        return x.to(torch.bfloat16).float()
    rows = x.float().movedim(dim, -1)
    rounded = torch.zeros(rows.shape)
    for row, out in zip(rows.reshape(-1, rows.shape[-1]), rounded.view(-1, rows.shape[-1]), strict=True):
        for start in range(0, len(row), 32 if fmt.name == "int4" else len(row)):
            part = row[start : start + (32 if fmt.name == "int4" else len(row))]
            largest = 448 if fmt.name == "fp8" else 2 ** (fmt.bits - 1) - 1
            scale = part.abs().max() / largest
            q = part / scale
            q = q.to(torch.float8_e4m3fn).float() if fmt.name == "fp8" else q.round()
            out[start : start + len(part)] = q * scale if scale > 0 else 0
    return rounded.movedim(-1, dim)


def close(actual: Tensor, expected: Tensor, terms: int, fmt: Format | None = None) -> None:
    """Equal up to the rounding of an fp32 sum of so many terms; bfloat16 kernels round the result as well."""
    tolerance = terms * 2.0**-23 + (2.0**-8 if fmt is not None and fmt.name == "bf16" else 0)
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= tolerance


class ShapesOf(TorchDispatchMode):
    """Records the shapes that reach one operation."""

    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func = func
        self.shapes: list[tuple[torch.Size, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.func:
            self.shapes.append(tuple(x.shape for x in args))
        return func(*args, **(kwargs or {}))
