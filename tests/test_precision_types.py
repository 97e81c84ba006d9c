"""The numbers that each type can store, and the same rounding by torchao."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_ledger.precision import FORMATS, ROUNDINGS
from lightning_ledger.precision.formats import Role
from lightning_ledger.precision.rounding import E2M1, E2M3, E4M3, E5M2, FloatType, round_to_floats_
from tests import precision_oracle
from tests.precision_oracle import generator, rand

GRIDS = [
    (E4M3, precision_oracle.E4M3),
    (E5M2, precision_oracle.E5M2),
    (E2M3, precision_oracle.E2M3),
    (E2M1, precision_oracle.E2M1),
]
every_type = pytest.mark.parametrize(("element", "grid"), GRIDS, ids=lambda x: getattr(x, "name", ""))


@every_type
def test_every_number_of_a_type_survives_both_roundings(element: FloatType, grid: Tensor) -> None:
    signed = torch.cat([-grid, grid])
    assert grid.max() == element.largest
    for rounding in ROUNDINGS:
        assert torch.equal(round_to_floats_(signed.clone(), element, generator(rounding)), signed)


@every_type
def test_numbers_between_two_of_a_type_go_to_the_nearer_and_ties_to_the_even_code(
    element: FloatType, grid: Tensor
) -> None:
    below, above = grid[:-1], grid[1:]
    for share in (0.01, 0.25, 0.49, 0.51, 0.75, 0.99):
        y = below + share * (above - below)
        assert torch.equal(round_to_floats_(y, element, None), below if share < 0.5 else above)
    even = torch.where(torch.arange(len(below)) % 2 == 0, below, above)
    assert torch.equal(round_to_floats_((below + above) / 2, element, None), even)


@every_type
def test_stochastic_rounding_only_ever_gives_the_two_neighbours(element: FloatType, grid: Tensor) -> None:
    below, above = grid[:-1], grid[1:]
    y = (below + 0.3 * (above - below)).expand(2000, -1).contiguous()
    rounded = round_to_floats_(y, element, generator("stochastic"))
    assert ((rounded == below) | (rounded == above)).all()
    # Of 2000 draws at probability 0.3, five standard deviations are 0.051.
    assert ((rounded == above).double().mean(0) - 0.3).abs().max() < 0.052


@pytest.mark.parametrize(("name", "role", "grid"), [("fp8", "weight", GRIDS[0][1]), ("fp8", "gradient", GRIDS[1][1])])
def test_fp8_keeps_every_number_of_torchs_own_types(name: str, role: Role, grid: Tensor) -> None:
    row = torch.cat([-grid, grid]).view(1, -1)
    for fmt in (FORMATS[name], FORMATS[f"{name}_tensor"]):
        for rounding in ROUNDINGS:
            assert torch.equal(fmt.quantize(row, -1, generator(rounding), role).dequantize(), row)


def test_numbers_of_bfloat16_survive_both_roundings() -> None:
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(1, -1)
    grid = codes[codes.isfinite()].float().view(1, -1)
    for rounding in ROUNDINGS:
        assert torch.equal(FORMATS["bf16"].quantize(grid, -1, generator(rounding)).dequantize().float(), grid)
    nans = torch.tensor([[0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1]], dtype=torch.int32).view(torch.float32)
    assert FORMATS["bf16"].quantize(nans, -1, generator("stochastic")).dequantize().isnan().all()


# ---------------------------------------------------------------------------------------------------------- torchao


@pytest.fixture(scope="module")
def torchao() -> SimpleNamespace:
    """What the tests use of torchao, whose import takes seconds."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise

    def mx(x: Tensor, element: torch.dtype | str) -> Tensor:
        scale, values = to_mx(x, element, 32, ScaleCalculationMode.RCEIL)
        rounded: Tensor = to_dtype(values, scale, element, 32, torch.float32)
        return rounded

    def nvfp4(x: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(x.abs().amax())
        rounded: Tensor = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
        return rounded

    return SimpleNamespace(mx=mx, nvfp4=nvfp4, int8=quantize_int8_rowwise)


def wide(*shape: int) -> Tensor:
    """Numbers of many magnitudes, with zeros, and a block of nothing else."""
    x = rand(*shape) * 10.0 ** (2 * rand(*shape, seed=1))
    x[rand(*shape, seed=2) > 1] = 0
    x[0, :32] = 0
    return x


@pytest.mark.parametrize(
    ("name", "element"),
    [("mxfp8", torch.float8_e4m3fn), ("mxfp6", "fp6_e2m3"), ("mxfp4", torch.float4_e2m1fn_x2)],
)
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (300, 416)])
def test_microscaled_rounding_equals_torchaos_bit_for_bit(
    torchao: SimpleNamespace, name: str, element: torch.dtype | str, shape: tuple[int, int]
) -> None:
    for x in (rand(*shape), wide(*shape)):
        expected = torchao.mx(x, element)
        assert torch.equal(FORMATS[name].quantize(x, -1).dequantize(), expected)
        assert torch.equal(FORMATS[name].quantize(x.mT.contiguous(), -2).dequantize(), expected.mT)


@pytest.mark.parametrize("shape", [(1, 32), (16, 48), (300, 416)])
def test_nvfp4_rounding_equals_torchaos_bit_for_bit(torchao: SimpleNamespace, shape: tuple[int, int]) -> None:
    nvfp4 = FORMATS["nvfp4"]
    first, second = rand(*shape), wide(*shape)
    second[0, -1] = 1.0  # not all zero, where torchao divides zero by zero
    expected = [torchao.nvfp4(x) for x in (first, second)]
    assert torch.equal(nvfp4.quantize(first, -1).dequantize(), expected[0])
    assert torch.equal(nvfp4.quantize(second.mT.contiguous(), -2).dequantize(), expected[1].mT)
    # Each matrix of a batch has a scale of its own.
    assert torch.equal(nvfp4.quantize(torch.stack([first, second]), -1).dequantize(), torch.stack(expected))


def test_int8_rounding_equals_torchaos_but_at_ties(torchao: SimpleNamespace) -> None:
    x = rand(300, 400)
    values, scale = torchao.int8(x)
    ours = FORMATS["int8"].quantize(x, -1)
    assert ours.scale is not None
    assert torch.equal(ours.scale[:, 0], scale)
    # torchao multiplies by the reciprocal of the scale, which moves a number by an ulp: past a tie at most.
    y = x.double() / ours.scale.double()
    differ = ours.values != values
    assert ((y - y.floor() - 0.5).abs()[differ] < 127 * 2.0**-23).all()
    assert differ.double().mean() < 1e-4
