"""Number formats: every format in ``FORMATS`` faces the same contract."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from lightning_ledger.precision import FORMATS, Format, Lowering, derive_seed, get_format
from lightning_ledger.precision.formats import Role
from lightning_ledger.precision.rounding import dither, noise_from
from tests.precision_oracle import (
    ROUNDED,
    close,
    every_case,
    every_device,
    every_format,
    every_rounding,
    generator,
    grid_step,
    oracle,
    product,
    rand,
    rounded_formats,
)

SHAPES = [(1, 1), (5, 33), (16, 64), (17, 40), (64, 96), (3, 20, 31), (3, 32, 48), (2, 3, 70, 9)]

# Dividing by a scale moves a number by half an ulp, 2**-24 of 127 steps; dither is resolved to 2**-16 steps.
STEP_SLACK = 2.0**-12

# Formats in which all of a matrix shares a scale.
PER_MATRIX = ("fp8_tensor", "nvfp4")


def refused(fmt: Format, x: Tensor, dim: int) -> bool:
    """Whether the format refuses the contraction; then it must say why."""
    block = {"mxfp8": 32, "mxfp6": 32, "mxfp4": 32, "nvfp4": 16}.get(fmt.name, 1)
    length = x.shape[dim]
    if length % block == 0:
        assert fmt.refuses(length) == ""
        return False
    reason = f"contracts {length} numbers, not a multiple of {block}"
    assert fmt.refuses(length) == reason
    with pytest.raises(ValueError, match=f"format='{fmt.name}' cannot round .* along dim={dim}: the product {reason}"):
        fmt.quantize(x, dim)
    return True


@every_device
@every_case
@every_rounding
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [-1, -2])
def test_rounding_moves_numbers_by_less_than_a_grid_step(
    device: str, fmt: Format, role: Role, rounding: str, shape: tuple[int, ...], dim: int
) -> None:
    x = rand(*shape, device=device)
    if refused(fmt, x, dim):
        return
    step = grid_step(fmt, x, dim, role, rounding).to(device)
    for laid in (x, x.mT.contiguous().mT):
        before = laid.clone()
        rounded = fmt.quantize(laid, dim, generator(rounding, device), role).dequantize()
        error = (rounded.double() - x.double()).abs()
        assert torch.equal(laid, before)
        assert rounded.shape == x.shape
        assert (error <= step * (0.5 if rounding == "nearest" else 1.0) + step * STEP_SLACK).all()


@every_case
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [-1, -2])
def test_nearest_equals_the_slow_oracle(fmt: Format, role: Role, shape: tuple[int, ...], dim: int) -> None:
    x = rand(*shape) * 10.0 ** rand(*shape, seed=1)  # several magnitudes, so that fp8 meets its subnormals
    if not refused(fmt, x, dim):
        assert torch.equal(fmt.quantize(x, dim, role=role).dequantize().float(), oracle(fmt, x, dim, role))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_case
def test_other_dtypes_are_rounded_as_their_fp32_numbers(fmt: Format, role: Role, dtype: torch.dtype) -> None:
    x = rand(4, 64).to(dtype)
    rounded = fmt.quantize(x, -1, role=role).dequantize()
    assert torch.equal(rounded, fmt.quantize(x.float(), -1, role=role).dequantize())


@every_case
def test_stochastic_rounding_is_unbiased_and_nearest_is_not(fmt: Format, role: Role) -> None:
    if fmt.name == "fp32":
        return
    draws = 4096
    x = rand(1, 64)
    rows = x.expand(draws, -1).contiguous()

    def offset(rounding: str) -> Tensor:
        rounded = fmt.quantize(rows, -1, generator(rounding), role).dequantize().double()
        return (rounded.mean(0) - x.double()).abs() / grid_step(fmt, x, -1, role, rounding)

    # A draw between neighbours deviates by half a step at most, the mean by that / sqrt(draws). Take five.
    tolerance = 5 * 0.5 / math.sqrt(draws) + STEP_SLACK
    assert offset("stochastic").max() < tolerance
    assert offset("nearest").max() > 4 * tolerance


@rounded_formats
def test_the_product_of_stochastically_rounded_operands_is_unbiased(fmt: Format) -> None:
    draws = 1000
    a, b = rand(3, 64), rand(64, 2, seed=1)
    noise = generator("stochastic")
    products = torch.stack([product(fmt, a, b, noise, ("gradient", "weight")) for _ in range(draws)]).double()
    error = (products.mean(0) - a.double() @ b.double()).abs()
    # bfloat16 kernels round the result to nearest, which no number of draws averages away.
    floor = 2.0**-8 * (a @ b).abs() if fmt.name in ("bf16", "w8a16", "w4a16") else 0
    assert (error <= 5 * products.std(0) / math.sqrt(draws) + floor).all()


@every_device
@every_case
@every_rounding
def test_zeros_stay_zeros(device: str, fmt: Format, role: Role, rounding: str) -> None:
    x = rand(4, 64, device=device)
    x[1] = 0
    x[2, ::3] = 0
    noise = generator(rounding, device)
    assert (fmt.quantize(x, -1, noise, role).dequantize()[x == 0] == 0).all()
    assert (product(fmt, x, rand(64, 3, device=device), noise, (role, "weight"))[1] == 0).all()
    assert (product(fmt, torch.zeros_like(x), x.mT, noise, (role, "weight")) == 0).all()


@every_case
@every_rounding
def test_the_smallest_numbers_stay_finite(fmt: Format, role: Role, rounding: str) -> None:
    x = torch.zeros(3, 32)
    x[:, :3] = torch.tensor([[1e-45, -3e-42, 0.0], [1e-38, 2e-38, -1e-39], [1e38, -1e30, 1.0]])
    for part in (x, x[:2], x[:1]):
        rounded = fmt.quantize(part, -1, generator(rounding), role).dequantize()
        assert rounded.isfinite().all()
        assert ((rounded - part).abs() <= part.abs().amax(-1, keepdim=True) + torch.finfo(torch.float32).tiny).all()


@every_format
@every_rounding
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_never_becomes_finite(fmt: Format, rounding: str, bad: float) -> None:
    a, b = rand(3, 64), rand(64, 5, seed=1)
    a[1, 7] = bad
    noise = generator(rounding)
    left, right = product(fmt, a, b, noise), product(fmt, b.mT, a.mT, noise)
    batched = product(fmt, torch.stack([a, rand(3, 64)]), torch.stack([b, b]), noise)
    for result in (left, right.mT, batched[0]):
        assert not result[1].isfinite().any()
        assert result[[0, 2]].isfinite().all() != (fmt.name in PER_MATRIX)
    assert batched[1].isfinite().all()
    image, kernel = rand(2, 32, 5, 5), rand(4, 32, 3, 3)
    image[1, 2, 2, 2] = bad
    with Lowering(fmt, rounding).mode(0):
        y = torch.conv2d(image, kernel)
    assert not y[1].isfinite().any()
    assert y[0].isfinite().all()


@every_rounding
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_number_that_is_not_finite_spoils_what_it_is_scaled_with_and_no_more(rounding: str, bad: float) -> None:
    x = rand(2, 64)
    x[1, 40] = bad
    spoilt: dict[str, tuple[int | slice, slice]] = {
        "int8": (1, slice(None)),
        "fp8": (1, slice(None)),
        "fp8_tensor": (slice(None), slice(None)),
        "mxfp8": (1, slice(32, 64)),
        "mxfp6": (1, slice(32, 64)),
        "mxfp4": (1, slice(32, 64)),
        "nvfp4": (slice(None), slice(None)),
        "int4": (1, slice(32, 64)),
    }
    for name, where in spoilt.items():
        expected = torch.zeros(2, 64, dtype=torch.bool)
        expected[where] = True
        rounded = FORMATS[name].quantize(x, -1, generator(rounding)).dequantize()
        assert torch.equal(rounded.isnan(), expected), name


# Of a power-of-two or nested scale the largest number of a block is in general no grid point.
@pytest.mark.parametrize("fmt", [f for f in ROUNDED if f.name in ("int8", "int6", "fp8", "int4")], ids=lambda f: f.name)
def test_dither_pushes_no_number_past_the_largest(fmt: Format) -> None:
    # Rows of one number: each is its own largest, and an ulp off it after the division, one way or the other.
    x = rand(2**18, 1)
    rounded = fmt.quantize(x, -1, generator("stochastic")).dequantize()
    assert ((rounded - x).abs() <= 2.0**-23 * x.abs()).all()


@pytest.mark.parametrize(
    ("name", "largest", "smallest"), [("mxfp8", 448, 2**-9), ("mxfp6", 7.5, 2**-3), ("mxfp4", 6, 2**-1)]
)
def test_power_of_two_scales_are_as_small_as_they_can_be(name: str, largest: float, smallest: float) -> None:
    # A block whose largest number is the type's largest times a power of two has that power as its scale, so that
    # it keeps the type's smallest number as well. A little more doubles the scale: half the smallest goes to zero.
    powers = 2.0 ** torch.arange(-20, 21)
    x = torch.zeros(len(powers), 32)
    x[:, 0], x[:, 1] = largest * powers, smallest * powers
    for noise in (None, generator("stochastic")):
        assert torch.equal(FORMATS[name].quantize(x, -1, noise).dequantize(), x)
    x[:, 0] *= 1 + 2.0**-20
    assert (FORMATS[name].quantize(x, -1).dequantize()[:, 1] == 0).all()


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
    if refused(fmt, a, -1):
        return
    roles: list[tuple[Role, Role]] = [("activation", "activation"), ("gradient", "weight"), ("gradient", "activation")]
    layouts: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x.mT.contiguous().mT]
    for of_a, of_b in roles:
        expected = oracle(fmt, a.cpu(), -1, of_a).double() @ oracle(fmt, b.cpu(), -2, of_b).double()
        for lay_a in layouts:
            for lay_b in layouts:
                result = product(fmt, lay_a(a), lay_b(b), roles=(of_a, of_b))
                assert result.dtype == torch.float32
                close(result.cpu(), expected, a.shape[-1], fmt)


@pytest.mark.parametrize("name", ["w8a16", "w4a16", "w4a8"])
def test_a_weight_rounded_for_the_forward_product_serves_the_backward_one(name: str) -> None:
    fmt = FORMATS[name]
    x, dy, weight = rand(20, 300), rand(20, 70, seed=1), rand(70, 300, seed=2)
    assert fmt.rounds_weights_once
    stored = fmt.quantize(weight.mT, -2, role="weight")
    assert stored.scale is None
    assert stored.values.dtype == (torch.float32 if name == "w4a8" else torch.bfloat16)
    numbers = oracle(fmt, weight, -1, "weight").double()
    y = fmt.multiply(fmt.quantize(x, -1), stored)
    dx = fmt.multiply(fmt.quantize(dy, -1, role="gradient"), stored.transpose())
    close(y, oracle(fmt, x, -1).double() @ numbers.mT, 300, fmt)
    close(dx, oracle(fmt, dy, -1, "gradient").double() @ numbers, 70, fmt)


def test_formats_that_round_weights_for_each_use_say_so() -> None:
    once = {name for name, fmt in FORMATS.items() if fmt.rounds_weights_once}
    assert once == {"w8a16", "w4a16", "w4a8"}


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match=r"format='int' is not a number format. Did you mean format='int8'\?"):
        Lowering("int")
    with pytest.raises(ValueError, match=f"Known formats: {', '.join(FORMATS)}"):
        get_format("posit")
    with pytest.raises(ValueError, match="rounding='up' is not a way of rounding; use 'nearest' or 'stochastic'"):
        Lowering("int8", rounding="up")
    with pytest.raises(ValueError, match="dim=0: a matrix product contracts dim=-1"):
        get_format("int8").quantize(rand(2, 2), dim=0)
    assert get_format(FORMATS["int4"]) is FORMATS["int4"]
