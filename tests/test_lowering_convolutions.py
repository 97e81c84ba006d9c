"""Convolutions in a format: their three products against slow rounding, group by group."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_ledger.precision import Format, Lowering, get_format
from lightning_ledger.precision.formats import Role
from tests.precision_oracle import close, every_format, oracle, rand

aten = torch.ops.aten

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

CONVOLUTIONS = [
    pytest.param(nn.Conv1d(6, 8, 3, padding=1), (2, 6, 11), id="1d"),
    pytest.param(nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 9, 8), id="2d-stride"),
    pytest.param(nn.Conv2d(8, 6, (3, 2), groups=2, dilation=2), (3, 8, 9, 7), id="2d-groups"),
    pytest.param(nn.Conv2d(6, 6, 3, groups=6, bias=False), (2, 6, 5, 5), id="2d-depthwise"),
    pytest.param(nn.Conv2d(5, 7, 1), (1, 5, 1, 1), id="2d-pointwise"),
    pytest.param(nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 3), id="3d"),
    # Whole blocks of 32 in every product, and in two of the three.
    pytest.param(nn.Conv2d(64, 64, 3, padding=1, groups=2), (2, 64, 4, 4), id="2d-blocks"),
    pytest.param(nn.Conv1d(32, 48, 3, padding=1), (2, 32, 16), id="1d-some-blocks"),
]
convolutions = pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS)


class Products(NamedTuple):
    """What the three products of a convolution give."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor


def run(layer: Convolution, x: Tensor, dy: Tensor) -> tuple[Products, Tensor | None]:
    """The three products, and the bias gradient."""
    y = layer(x)
    dx, dw, *db = torch.autograd.grad(y, (x, *layer.parameters()), dy)
    return Products(y.detach(), dx, dw), db[0] if db else None


def reference(layer: Convolution, x: Tensor, dy: Tensor, formats: dict[str, Format]) -> Products:
    """The three products of slowly rounded operands, in double precision."""
    weight, groups, x = layer.weight.detach(), layer.groups, x.detach()
    outputs = weight.shape[0]
    geometry = (layer.stride, layer.padding, layer.dilation, False, [0] * (x.dim() - 2), groups)
    output, grad_input, grad_weight = (formats[name] for name in Products._fields)

    def along_channels(fmt: Format, t: Tensor, role: Role) -> Tensor:
        return oracle(fmt, t.reshape(t.shape[0], groups, t.shape[1] // groups, -1), 2, role).reshape(t.shape)

    def along_positions(fmt: Format, t: Tensor, role: Role) -> Tensor:
        by_channel = t.transpose(0, 1)
        return oracle(fmt, by_channel.flatten(1), 1, role).view(by_channel.shape).transpose(0, 1)

    def by_kernel(fmt: Format) -> Tensor:
        return oracle(fmt, weight.flatten(1), 1, "weight").view(weight.shape)

    def by_output(fmt: Format) -> Tensor:
        if fmt.rounds_weights_once:
            return by_kernel(fmt)
        return oracle(fmt, weight.reshape(groups, outputs // groups, -1), 1, "weight").reshape(weight.shape)

    def gradients(dy: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        found = aten.convolution_backward(dy.double(), x.double(), w.double(), None, *geometry, [True, True, False])
        return [g for g in found if g is not None]

    y = aten.convolution(along_channels(output, x, "activation").double(), by_kernel(output).double(), None, *geometry)
    if layer.bias is not None:
        y = y + layer.bias.detach().view(-1, *[1] * (x.dim() - 2))
    dx = gradients(along_channels(grad_input, dy, "gradient"), x, by_output(grad_input))[0]
    rounded = along_positions(grad_weight, dy, "gradient"), along_positions(grad_weight, x, "activation")
    return Products(y, dx, gradients(*rounded, weight)[1])


def lengths(layer: Convolution, x: Tensor, dy: Tensor) -> Products:
    """What each product rounds along, one length or two."""
    kernel = layer.weight[0].numel()
    return Products(
        (layer.weight.shape[1], kernel),
        (layer.weight.shape[0] // layer.groups,),
        (dy.numel() // dy.shape[1], x.numel() // x.shape[1]),
    )


def check(layer: Convolution, shape: tuple[int, ...], spec: str | Format, formats: dict[str, Format]) -> None:
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters(), start=2):
            parameter.copy_(rand(*parameter.shape, seed=seed) / 8)
    x = rand(*shape, requires_grad=True)
    dy = rand(*layer(x).shape, seed=1)
    exact, exact_bias = run(layer, x, dy)
    lowering = Lowering(spec, module=layer)
    lowering.refresh(dict(layer.named_parameters()), seed=0)
    with lowering.mode(0):
        lowered, bias = run(layer, x, dy)
    assert (bias is None) == (exact_bias is None)
    if bias is not None and exact_bias is not None:
        assert torch.equal(bias, exact_bias)
    terms = layer.weight[0].numel(), layer.weight.numel() // layer.weight.shape[1], dy.numel() // dy.shape[1]
    expected, contracted, refused = reference(layer, x, dy, formats), lengths(layer, x, dy), {}
    for name, count in zip(Products._fields, terms, strict=True):
        fmt, actual = formats[name], getattr(lowered, name)
        reasons = [reason for length in getattr(contracted, name) if (reason := fmt.refuses(length))]
        if reasons:
            refused["", name] = reasons[0]
            assert torch.equal(actual, getattr(exact, name))
        else:
            close(actual, getattr(expected, name), count, fmt)
    assert lowering.unlowered == refused


@every_format
@convolutions
def test_convolutions_equal_a_reference_that_rounds_all_three_products(
    fmt: Format, layer: Convolution, shape: tuple[int, ...]
) -> None:
    check(layer, shape, fmt, dict.fromkeys(Products._fields, fmt))


@pytest.mark.parametrize("product", Products._fields)
@convolutions
def test_each_product_runs_in_its_own_format(product: str, layer: Convolution, shape: tuple[int, ...]) -> None:
    for base, apart in (("fp32", "int4"), ("int8", "mxfp4"), ("int4", "fp32"), ("mxfp8", "int8")):
        spec = f"{base}:{product}={apart}"
        formats = {name: get_format(apart if name == product else base) for name in Products._fields}
        if product == "output":
            spec = f"{apart}:grad_input={base},grad_weight={base}"
        check(layer, shape, spec, formats)


def test_whole_blocks_are_lowered_in_every_format_and_single_numbers_are_not() -> None:
    """The cases above do both: no format in blocks is refused everywhere, or nowhere."""
    blocks, some, odd = (
        next(c.values for c in CONVOLUTIONS if c.id == i) for i in ("2d-blocks", "1d-some-blocks", "1d")
    )
    counts = []
    for layer, shape in (blocks, some, odd):
        lowering, x = Lowering("mxfp4", module=layer), rand(*shape, requires_grad=True)
        with lowering.mode(0):
            run(layer, x, rand(*layer(x).shape, seed=1))
        counts.append(len(lowering.unlowered))
    assert counts == [0, 1, 3]


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (True, True, True)])
def test_convolutions_compute_the_wanted_gradients_alone(wanted: tuple[bool, bool, bool]) -> None:
    x, w, dy = rand(2, 3, 6), rand(4, 3, 3, seed=1), rand(2, 4, 4, seed=2)
    with Lowering("int8").mode(0):
        found = aten.convolution_backward(dy, x, w, [4], [1], [0], [1], False, [0], 1, wanted)
    assert tuple(g is not None for g in found) == wanted


@pytest.mark.parametrize(("name", "once"), [("w8a16", True), ("w4a16", True), ("w4a8", True), ("int8", False)])
def test_a_weight_only_kernel_serves_both_products(name: str, once: bool) -> None:
    layer = nn.Conv1d(64, 64, 1, bias=False)
    x, dy = torch.eye(64).unsqueeze(-1).requires_grad_(), torch.eye(64).unsqueeze(-1)
    lowering = Lowering(name)
    lowering.refresh(layer.parameters(), seed=0)
    with lowering.mode(0):
        products, _ = run(layer, x, dy)
    assert torch.equal(products.output[..., 0].mT, products.grad_input[..., 0]) == once
