"""What the tests of formats and of the lowering table share: the formats, and slow, obvious rounding.

The oracle rounds by looking numbers up: each format is a list of the numbers that it can store, times a scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ledger.precision import FORMATS, ROUNDINGS, Format
from lightning_ledger.precision.formats import Role, RowInteger, WeightOnly
from lightning_ledger.precision.rounding import Noise, noise_from

# A format nobody registered: the contract must hold for a newcomer too.
ALL_FORMATS = [*FORMATS.values(), RowInteger("int6", bits=6)]
ROUNDED = [fmt for fmt in ALL_FORMATS if fmt.name != "fp32"]
# Every format once, and once more for a role that it treats differently.
CASES: list[tuple[Format, Role]] = [
    *((fmt, "activation") for fmt in ALL_FORMATS),
    *((fmt, "weight") for fmt in ALL_FORMATS if isinstance(fmt, WeightOnly)),
    (FORMATS["fp8"], "gradient"),
    (FORMATS["fp8_tensor"], "gradient"),
]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

every_format = pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: fmt.name)
rounded_formats = pytest.mark.parametrize("fmt", ROUNDED, ids=lambda fmt: fmt.name)
every_case = pytest.mark.parametrize(("fmt", "role"), CASES, ids=lambda x: getattr(x, "name", x))
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
every_device = pytest.mark.parametrize("device", DEVICES)


class Scheme(NamedTuple):
    """How a format stores numbers.

    Args:
        numbers: those it can store, from zero up, in the order of their codes; empty for bfloat16 and fp32.
        block: how many numbers share a scale: 0 for a row, -1 for a matrix.
        scale: "linear", "power" of two, or "nested" (an e4m3 scale per block in an fp32 one per matrix).
    """

    numbers: Tensor
    block: int = 0
    scale: str = "linear"


def codes(dtype: torch.dtype) -> Tensor:
    """The finite non-negative numbers of an eight-bit type, from its codes."""
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    return numbers[numbers.isfinite()]


def integers(bits: int) -> Tensor:
    return torch.arange(2.0 ** (bits - 1))


E4M3, E5M2 = codes(torch.float8_e4m3fn), codes(torch.float8_e5m2)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# fmt: off
E2M3 = torch.tensor([
    0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875,
    2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5,
])
# fmt: on

SCHEMES = {
    "fp32": Scheme(torch.empty(0)),
    "bf16": Scheme(torch.empty(0)),
    "int8": Scheme(integers(8)),
    "int6": Scheme(integers(6)),
    "fp8": Scheme(E4M3),
    "fp8 gradient": Scheme(E5M2),
    "fp8_tensor": Scheme(E4M3, -1),
    "fp8_tensor gradient": Scheme(E5M2, -1),
    "mxfp8": Scheme(E4M3, 32, "power"),
    "mxfp6": Scheme(E2M3, 32, "power"),
    "mxfp4": Scheme(E2M1, 32, "power"),
    "nvfp4": Scheme(E2M1, 16, "nested"),
    "int4": Scheme(integers(4), 32),
    "w8a16": Scheme(torch.empty(0)),
    "w8a16 weight": Scheme(integers(8)),
    "w4a16": Scheme(torch.empty(0)),
    "w4a16 weight": Scheme(integers(4), 128),
    "w4a8": Scheme(integers(8)),
    "w4a8 weight": Scheme(integers(4), 128),
}


def scheme(fmt: Format, role: Role) -> Scheme:
    return SCHEMES.get(f"{fmt.name} {role}", SCHEMES[fmt.name])


def in_bfloat16(fmt: Format) -> bool:
    """Whether products run in torch's bfloat16 kernels, which round their results."""
    return fmt.name in ("bf16", "w8a16", "w4a16")


def rand(*shape: int, seed: int = 0, device: str = "cpu", requires_grad: bool = False) -> Tensor:
    x = torch.randn(shape, generator=Generator().manual_seed(seed)).to(device)
    return x.requires_grad_(requires_grad)


def generator(rounding: str, device: str = "cpu", seed: int = 0) -> Noise | None:
    return None if rounding == "nearest" else noise_from(Generator(device).manual_seed(seed))


def product(
    fmt: Format, a: Tensor, b: Tensor, noise: Noise | None = None, roles: tuple[Role, Role] = ("activation", "weight")
) -> Tensor:
    """The product of rounded operands."""
    return fmt.multiply(fmt.quantize(a, -1, noise, roles[0]), fmt.quantize(b, -2, noise, roles[1]))


def scales(how: Scheme, rows: Tensor, rounding: str = "nearest") -> Tensor:
    """The scale of each number of fp32 ``rows``, which are contracted along the last axis: block by block."""
    largest = how.numbers[-1]
    scale = torch.ones(rows.shape)
    for matrix, out in zip(rows.reshape(-1, *rows.shape[-2:]), scale.view(-1, *rows.shape[-2:]), strict=True):
        whole = matrix.abs().max()
        if how.block < 0:
            out[:] = whole / largest
            continue
        for row, row_out in zip(matrix, out, strict=True):
            size = how.block or len(row)
            for part, part_out in zip(row.split(size), row_out.split(size), strict=True):
                part_out[:] = _scale(how, part.abs().max(), whole, rounding)
    return scale.clamp(min=torch.finfo(torch.float32).tiny)


def _scale(how: Scheme, most: Tensor, whole: Tensor, rounding: str) -> Tensor:
    """The scale of numbers of which the largest is ``most``, in a matrix of which the largest is ``whole``."""
    exact = most / how.numbers[-1]
    if how.scale == "power":
        return torch.exp2(exact.double().log2().ceil()).float()
    if how.scale == "nested":
        outer = whole / (448 * 6)
        inner = (exact / outer).clamp(2.0**-6, 448)
        if rounding == "nearest":
            return outer * inner.to(torch.float8_e4m3fn).float()
        return outer * E4M3[inner <= E4M3].min()
    return exact


def _neighbours(numbers: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each |y| the code of the number below (or equal), that number and the next one, as float64."""
    code = (torch.searchsorted(numbers, y.abs().contiguous(), right=True) - 1).clamp(max=len(numbers) - 2)
    return code, numbers[code].double(), numbers[code + 1].double()


def grid_step(fmt: Format, x: Tensor, dim: int, role: Role = "activation", rounding: str = "nearest") -> Tensor:
    """The distance between the numbers of the format to either side, from the format's definition."""
    how = scheme(fmt, role)
    x = x.cpu().float()
    step = torch.zeros(x.shape, dtype=torch.float64)
    if len(how.numbers):
        rows = x.movedim(dim, -1)
        scale = scales(how, rows, rounding)
        _, below, above = _neighbours(how.numbers, rows / scale)
        step += ((above - below) * scale).movedim(-1, dim)
    if in_bfloat16(fmt):
        # A number that was rounded already may have moved up to the next power of two.
        step += torch.exp2((x.double().abs() + step).log2().floor() - 7)
    return step


def oracle(fmt: Format, x: Tensor, dim: int, role: Role = "activation") -> Tensor:
    """Round to nearest the slow way: by search among the numbers of the format, ties to the even code."""
    how = scheme(fmt, role)
    rounded = x.float()
    if len(how.numbers):
        rows = rounded.movedim(dim, -1)
        scale = scales(how, rows)
        code, below, above = _neighbours(how.numbers, rows / scale)
        y = (rows / scale).double().abs()
        up = (y - below > above - y) | ((y - below == above - y) & (code % 2 == 1))
        rounded = (torch.where(up, above, below).float() * scale).copysign(rows).movedim(-1, dim)
    return rounded.to(torch.bfloat16).float() if in_bfloat16(fmt) else rounded


def close(actual: Tensor, expected: Tensor, terms: int, fmt: Format | None = None) -> None:
    """Equal up to the rounding of an fp32 sum of so many terms; bfloat16 kernels round the result as well."""
    tolerance = terms * 2.0**-23 + (2.0**-8 if fmt is not None and in_bfloat16(fmt) else 0)
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
