"""Number formats: every format in ``FORMATS`` faces the same contract."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from lightning_ledger.precision import FORMATS, ROUNDINGS, Format, Lowering, derive_seed, get_format
from lightning_ledger.precision.formats import int_product
from lightning_ledger.precision.rounding import dither, noise_from
from tests.precision_oracle import (
    ROUNDED,
    ShapesOf,
    close,
    every_device,
    every_format,
    every_rounding,
    generator,
    grid_step,
    oracle,
    rand,
    rounded_formats,
)

aten = torch.ops.aten

SHAPES = [(1, 1), (5, 33), (16, 64), (17, 40), (3, 20, 31), (2, 3, 70, 9)]

# Dividing by a scale moves a number by half an ulp, 2**-24 of 127 steps; dither is resolved to 2**-16 steps.
STEP_SLACK = 2.0**-12


@every_device
@every_format
@every_rounding
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("transposed", [False, True])
def test_rounding_moves_numbers_by_less_than_a_grid_step(
    device: str, fmt: Format, rounding: str, shape: tuple[int, ...], dim: int, transposed: bool
) -> None:
    x = rand(*shape, device=device)
    x = x.mT.contiguous().mT if transposed else x
    before = x.clone()
    rounded = fmt.quantize(x, dim, generator(rounding, device)).dequantize()
    error = (rounded.double() - x.double()).abs()
    step = grid_step(fmt, x, dim)
    assert torch.equal(x, before)
    assert rounded.shape == x.shape
    assert (error <= step * (0.5 if rounding == "nearest" else 1.0) + step * STEP_SLACK).all()


@every_format
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [-1, -2])
def test_nearest_equals_the_slow_oracle(fmt: Format, shape: tuple[int, ...], dim: int) -> None:
    x = rand(*shape) * 10.0 ** rand(*shape, seed=1)  # several magnitudes, so that fp8 meets its subnormals
    assert torch.equal(fmt.quantize(x, dim).dequantize().float(), oracle(fmt, x, dim))


def test_every_number_of_e4m3_survives_both_roundings() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()
    grid = codes[codes.isfinite()].view(1, -1)
    assert grid.abs().max() == 448
    for rounding in ROUNDINGS:
        assert torch.equal(FORMATS["fp8"].quantize(grid, -1, generator(rounding)).dequantize(), grid)


def test_numbers_of_bfloat16_survive_both_roundings() -> None:
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(1, -1)
    grid = codes[codes.isfinite()].float().view(1, -1)
    for rounding in ROUNDINGS:
        assert torch.equal(FORMATS["bf16"].quantize(grid, -1, generator(rounding)).dequantize().float(), grid)
    nans = torch.tensor([[0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1]], dtype=torch.int32).view(torch.float32)
    assert FORMATS["bf16"].quantize(nans, -1, generator("stochastic")).dequantize().isnan().all()


@rounded_formats
def test_stochastic_rounding_is_unbiased_and_nearest_is_not(fmt: Format) -> None:
    draws = 4096
    x = rand(1, 48)
    rows = x.expand(draws, -1).contiguous()
    step = grid_step(fmt, x, -1)

    def offset(rounding: str) -> Tensor:
        rounded = fmt.quantize(rows, -1, generator(rounding)).dequantize().double()
        return (rounded.mean(0) - x.double()).abs() / step

    # A draw between neighbours deviates by half a step at most, the mean by that / sqrt(draws). Take five.
    tolerance = 5 * 0.5 / math.sqrt(draws) + STEP_SLACK
    assert offset("stochastic").max() < tolerance
    assert offset("nearest").max() > 4 * tolerance


@rounded_formats
def test_the_product_of_stochastically_rounded_operands_is_unbiased(fmt: Format) -> None:
    draws = 1000
    a, b = rand(3, 40), rand(40, 2, seed=1)
    samples = []
    for seed in range(draws):
        with Lowering(fmt, "stochastic").mode(seed):
            samples.append(a @ b)
    products = torch.stack(samples).double()
    error = (products.mean(0) - a.double() @ b.double()).abs()
    # bfloat16 kernels round the result to nearest, which no number of draws averages away.
    floor = 2.0**-8 * (a @ b).abs() if fmt.name == "bf16" else 0
    assert (error <= 5 * products.std(0) / math.sqrt(draws) + floor).all()


@every_device
@every_format
@every_rounding
def test_zeros_stay_zeros(device: str, fmt: Format, rounding: str) -> None:
    x = rand(4, 40, device=device)
    x[1] = 0
    x[2, ::3] = 0
    rounded = fmt.quantize(x, -1, generator(rounding, device)).dequantize()
    assert (rounded[x == 0] == 0).all()
    with Lowering(fmt, rounding).mode(0):
        assert ((x @ rand(40, 3, device=device))[1] == 0).all()
        assert (torch.zeros_like(x) @ x.mT == 0).all()


@every_format
@every_rounding
def test_the_smallest_numbers_stay_finite(fmt: Format, rounding: str) -> None:
    x = torch.tensor([[1e-45, -3e-42, 0.0], [1e-38, 2e-38, -1e-39], [3e38, -1e30, 1.0]])
    rounded = fmt.quantize(x, -1, generator(rounding)).dequantize()
    assert rounded.isfinite().all()
    assert ((rounded - x).abs() <= x.abs().amax(-1, keepdim=True) + torch.finfo(torch.float32).tiny).all()


@every_format
@every_rounding
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_never_becomes_finite(fmt: Format, rounding: str, bad: float) -> None:
    a, b = rand(3, 40), rand(40, 5, seed=1)
    a[1, 7] = bad
    with Lowering(fmt, rounding).mode(0):
        left, right, batched = a @ b, b.mT @ a.mT, torch.bmm(a[None], b[None])
    for product in (left, right.mT, batched[0]):
        assert not product[1].isfinite().any()
        assert product[[0, 2]].isfinite().all()
    image, kernel = rand(2, 3, 5, 5), rand(4, 3, 3, 3)
    image[1, 2, 2, 2] = bad
    with Lowering(fmt, rounding).mode(0):
        y = torch.conv2d(image, kernel)
    assert not y[1].isfinite().any()
    assert y[0].isfinite().all()


@pytest.mark.parametrize("fmt", [fmt for fmt in ROUNDED if fmt.name != "bf16"], ids=lambda fmt: fmt.name)
def test_dither_pushes_no_number_past_the_largest(fmt: Format) -> None:
    # Rows of one number: each is its own largest, and an ulp off it after the division, one way or the other.
    x = rand(2**18, 1)
    rounded = fmt.quantize(x, -1, generator("stochastic")).dequantize()
    assert ((rounded - x).abs() <= 2.0**-23 * x.abs()).all()


def test_dither_is_uniform_symmetric_and_short_of_a_half() -> None:
    noise = dither(torch.empty(2**18 + 1), noise_from(Generator().manual_seed(0))).double() / 2**16
    assert noise.shape == (2**18 + 1,)
    assert (noise.abs() * 2**16 % 2 == 1).all()
    assert noise.abs().max() < 0.5
    # Standard deviations of the mean and of the mean square of a uniform number, sqrt(1/12) and sqrt(1/180).
    draws = len(noise)
    assert noise.mean().abs() < 5 * math.sqrt(1 / 12 / draws)
    assert (noise.square().mean() - 1 / 12).abs() < 5 * math.sqrt(1 / 180 / draws)
    # The four numbers of one 64-bit draw, and neighbouring draws, are unrelated.
    for lag in (1, 2, 3, 4):
        assert (noise[lag:] * noise[:-lag]).mean().abs() < 5 / 12 / math.sqrt(draws)


def test_derived_seeds_differ_and_repeat() -> None:
    parts = [("a", 1), ("a", 2), ("a1",), ("a", "1"), ("a", 1, 0), ()]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("stable across processes", 1) == 8202865841805060536


@every_device
@every_format
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 1), (1, 1)),
        ((5, 33), (33, 7)),
        ((64, 96), (96, 32)),
        ((3, 5, 70), (3, 70, 9)),
        ((2, 1, 32), (2, 32, 1)),
    ],
)
def test_a_product_is_the_product_of_its_rounded_operands(
    device: str, fmt: Format, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    a, b = rand(*left, device=device), rand(*right, seed=1, device=device)
    expected = oracle(fmt, a.cpu(), -1).double() @ oracle(fmt, b.cpu(), -2).double()
    layouts: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x.mT.contiguous().mT]
    for lay_a in layouts:
        for lay_b in layouts:
            with Lowering(fmt).mode(0):
                product = lay_a(a) @ lay_b(b)
            assert product.dtype == torch.float32
            close(product.cpu(), expected, a.shape[-1], fmt)


@every_device
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 8), (16, 40, 24), (17, 33, 7), (24, 13, 16), (300, 129, 65)])
def test_pt_pr178469_int_mm_pads_short_rows(device: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    noise = Generator().manual_seed(0)
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=noise)
    b = torch.randint(-127, 128, (k, n), dtype=torch.int8, generator=noise)
    expected = a.int() @ b.int()
    with ShapesOf(aten._int_mm.default) as seen:
        product = int_product(a.to(device), b.to(device), padded=True)
    assert product.dtype == torch.int32
    assert torch.equal(product.cpu(), expected)
    if device == "cpu":
        assert torch.equal(int_product(a, b, padded=False), expected)
    # What CUDA's kernel accepts: more than 16 rows, K and N multiples of 8.
    [((rows, inner), (_, columns))] = seen.shapes
    assert rows > 16
    assert inner % 8 == columns % 8 == 0


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
    with Lowering("int8").mode(0):
        product = ones @ ones.mT
    assert product.item() == pytest.approx(length, rel=1e-3)


@every_device
@every_format
def test_a_format_says_what_it_is_on_this_machine(device: str, fmt: Format) -> None:
    kind = "native" if fmt.is_native(device) else "emulated"
    assert fmt.describe(device).startswith(f"{fmt.name}: {kind} (")


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match=r"format='int' is not a number format. Did you mean format='int8'\?"):
        Lowering("int")
    with pytest.raises(ValueError, match="Known formats: fp32, bf16, int8, fp8, int4"):
        get_format("posit")
    with pytest.raises(ValueError, match="rounding='up' is not a way of rounding; use 'nearest' or 'stochastic'"):
        Lowering("int8", rounding="up")
    with pytest.raises(ValueError, match="dim=0: a matrix product contracts dim=-1"):
        get_format("int8").quantize(rand(2, 2), dim=0)
    assert get_format(FORMATS["int4"]) is FORMATS["int4"]
