"""What runs in the machine's own instructions, and what formats say of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Generator

from lightning_ledger.precision import FORMATS, Format
from lightning_ledger.precision.formats import int_product
from tests.precision_oracle import ShapesOf, every_device, every_format, product, rand

aten = torch.ops.aten

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "formats.md"


@every_device
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 8), (16, 40, 24), (17, 33, 7), (24, 13, 16), (300, 129, 65)])
def test_pt_pr178469_int_mm_pads_short_rows(device: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    noise = Generator().manual_seed(0)
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=noise)
    b = torch.randint(-127, 128, (k, n), dtype=torch.int8, generator=noise)
    expected = a.int() @ b.int()
    with ShapesOf(aten._int_mm.default) as seen:
        result = int_product(a.to(device), b.to(device), padded=True)
    assert result.dtype == torch.int32
    assert torch.equal(result.cpu(), expected)
    if device == "cpu":
        assert torch.equal(int_product(a, b, padded=False), expected)
    # What CUDA's kernel accepts: more than 16 rows, K and N multiples of 8.
    [((rows, inner), (_, columns))] = seen.shapes
    assert rows > 16
    assert inner % 8 == columns % 8 == 0


@every_device
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 33, 7), (16, 64, 24), (50, 1040, 30), (40, 3000, 20)])
def test_the_int8_product_equals_the_int32_reference_bit_for_bit(device: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    int8 = FORMATS["int8"]
    a, b = int8.quantize(rand(m, k, device=device), -1), int8.quantize(rand(k, n, seed=1, device=device), -2)
    assert a.scale is not None
    assert b.scale is not None
    exact = (a.values.cpu().to(torch.int32) @ b.values.cpu().to(torch.int32)).to(device)
    assert torch.equal(int8.multiply(a, b), exact.float() * a.scale * b.scale)


@every_device
def test_native_int8_equals_its_emulation_bit_for_bit(device: str) -> None:
    int8 = FORMATS["int8"]
    a, b = rand(50, 1040, device=device), rand(1040, 30, seed=1, device=device)
    one, batch = ((int8.quantize(x, -1), int8.quantize(y, -2)) for x, y in ((a, b), (a[None], b[None])))
    # Every sum stays below 2**24, so that fp32 holds it exactly, in whatever order it is added.
    assert torch.equal(int8.multiply(*one), int8.multiply(*batch)[0])
    if int8.is_native(device):
        assert one[0].values.dtype == one[1].values.dtype == torch.int8


def test_int8_sums_that_could_overflow_int32_are_not_given_to_the_kernel() -> None:
    length = 2**31 // 127**2 + 1
    ones = torch.ones(1, length)
    assert product(FORMATS["int8"], ones, ones.mT).item() == pytest.approx(length, rel=1e-3)


@every_device
@every_format
def test_a_format_says_what_it_is_on_this_machine(device: str, fmt: Format) -> None:
    kind = "native" if fmt.is_native(device) else "emulated"
    assert fmt.describe(device).startswith(f"{fmt.name}: {kind} (")


def test_native_formats_on_a_cpu_are_those_that_torch_has_kernels_for() -> None:
    native = {name for name, fmt in FORMATS.items() if fmt.is_native("cpu")}
    assert {"fp32"} <= native <= {"fp32", "bf16", "int8"}


def test_the_documented_table_lists_every_format() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(name, str(fmt.bits)) for name, fmt in FORMATS.items()]
