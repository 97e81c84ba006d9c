"""The lowering table: operations, whole training steps, the reuse of weights, tracing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from lightning_ledger.precision import Format, Lowering, derive_seed
from tests.precision_oracle import (
    ShapesOf,
    close,
    every_format,
    every_rounding,
    oracle,
    rand,
    rounded_formats,
)

aten = torch.ops.aten


@rounded_formats
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 1), (1, -2), (0.25, 3), (0, 1)])
def test_beta_and_alpha(fmt: Format, beta: float, alpha: float) -> None:
    a, b, base = rand(6, 40), rand(40, 5, seed=1), rand(6, 5, seed=2)
    if beta == 0:
        base.fill_(math.nan)  # as torch has it: not even read
    lowering = Lowering(fmt)
    with lowering.mode(0):
        ab, batched = a @ b, a[None] @ b[None]
        added = torch.addmm(base, a, b, beta=beta, alpha=alpha)
        added_batch = torch.baddbmm(base[None], a[None], b[None], beta=beta, alpha=alpha)
        row = torch.addmm(base[0], a, b, beta=beta, alpha=alpha)
    close(added, alpha * ab + beta * base if beta else alpha * ab, 4)
    close(added_batch, alpha * batched + beta * base if beta else alpha * batched, 4)
    close(row, alpha * ab + beta * base[0] if beta else alpha * ab, 4)


@rounded_formats
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_results_keep_the_dtype_of_the_operation(fmt: Format, dtype: torch.dtype) -> None:
    a, b = rand(6, 40).to(dtype), rand(40, 5, seed=1).to(dtype)
    image, kernel = rand(2, 3, 5, 5).to(dtype), rand(4, 3, 3, 3).to(dtype)
    with Lowering(fmt).mode(0):
        results = [
            a @ b,
            torch.addmm(b[0], a, b),
            a[None] @ b[None],
            torch.conv2d(image, kernel, kernel[:, 0, 0, 0]),
        ]
        low = a.float() @ b.float()
    assert all(y.dtype == dtype for y in results)
    assert torch.equal(results[0], low.to(dtype))
    with torch.autocast("cpu", torch.bfloat16), Lowering(fmt).mode(0):
        assert linear(a.float(), b.mT.float()).dtype == torch.bfloat16


@every_format
def test_what_the_table_does_not_cover_is_untouched(fmt: Format) -> None:
    whole, empty, complex_ = (
        torch.arange(6).view(2, 3),
        torch.empty(0, 3),
        torch.complex(rand(3, 3), rand(3, 3)),
    )
    x, kernel = rand(1, 4, 5), rand(4, 2, 3, seed=1)
    operations: list[Callable[[], Tensor]] = [
        lambda: whole @ whole.mT,
        lambda: empty @ rand(3, 2),
        lambda: rand(2, 0) @ rand(0, 3),
        lambda: complex_ @ complex_,
        lambda: torch.sparse.mm(torch.eye(3).to_sparse(), rand(3, 2)),
        lambda: torch.conv_transpose1d(x, kernel),
        lambda: rand(3, 4) @ rand(4),
        lambda: rand(3, 4).softmax(-1).cumsum(0),
    ]
    for operation in operations:
        expected = operation()
        with Lowering(fmt).mode(0):
            actual = operation()
        assert torch.equal(actual, expected)


def test_operations_that_torch_refuses_are_still_refused() -> None:
    with Lowering("int4").mode(0), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(rand(2, 3), rand(3, 2).double())


class Block(nn.Module):
    """Convolution, attention and linear layers: every operation of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(6, 24, 3, padding=1)
        self.qkv = nn.Linear(24, 72, bias=False)
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).mT
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            y: Tensor = scaled_dot_product_attention(q, k, v, is_causal=True)
        loss: Tensor = self.out(x + y.transpose(1, 2).flatten(2)).square().mean()
        return loss


def step(model: nn.Module, lowering: Lowering | None, seed: int = 0) -> list[Tensor]:
    """The loss and the gradients of one training step."""
    x = rand(3, 6, 10).to(next(model.parameters()))
    if lowering is None:
        loss = model(x)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    with lowering.mode(seed):
        loss = model(x)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def block() -> Block:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Block()


@every_rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp32_is_bit_identical_to_no_mode(block: Block, rounding: str, dtype: torch.dtype) -> None:
    block.to(dtype)
    lowering = Lowering("fp32", rounding)
    lowering.refresh(block.parameters(), seed=0)
    assert same(step(block, lowering), step(block, None))


@rounded_formats
@every_rounding
def test_any_other_format_differs_but_not_by_much(block: Block, fmt: Format, rounding: str) -> None:
    exact, rounded = step(block, None), step(block, Lowering(fmt, rounding))
    assert not same(exact, rounded)
    for g, h in zip(exact, rounded, strict=True):
        assert torch.cosine_similarity(g.flatten(), h.flatten(), dim=0) > 0.9


@rounded_formats
def test_the_same_seed_gives_the_same_bits(block: Block, fmt: Format) -> None:
    nearest, stochastic = Lowering(fmt), Lowering(fmt, "stochastic")
    assert same(step(block, nearest, seed=1), step(block, nearest, seed=2))
    assert same(step(block, stochastic, seed=1), step(block, stochastic, seed=1))
    assert not same(step(block, stochastic, seed=1), step(block, stochastic, seed=2))


@every_format
@every_rounding
def test_the_global_generator_is_untouched(block: Block, fmt: Format, rounding: str) -> None:
    lowering = Lowering(fmt, rounding)
    lowering.refresh(block.parameters(), seed=0)
    before = torch.get_rng_state()
    first = step(block, lowering)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("anything else"))
        assert same(step(block, lowering), first)


@every_format
def test_linear_gradients_equal_a_reference_that_rounds_all_three_products(fmt: Format) -> None:
    x, w, bias = rand(4, 9, 40, requires_grad=True), rand(7, 40, seed=1, requires_grad=True), rand(7, seed=2)
    dy = rand(4, 9, 7, seed=3)
    with Lowering(fmt).mode(0):
        y = linear(x, w, bias)
        dx, dw = torch.autograd.grad(y, (x, w), dy)

    rows, drows, weight = x.detach().view(-1, 40), dy.view(-1, 7), w.detach()

    def low(a: Tensor, b: Tensor) -> Tensor:
        return oracle(fmt, a, -1).double() @ oracle(fmt, b, -2).double()

    close(y.detach().view(-1, 7), low(rows, weight.mT) + bias, 40, fmt)
    close(dx.view(-1, 40), low(drows, weight), 7, fmt)
    close(dw, low(drows.mT, rows), 36, fmt)


@every_format
def test_attention_gradients_equal_a_reference_that_rounds_every_product(fmt: Format) -> None:
    q, k, v = (rand(3, 9, 40, seed=s, requires_grad=True) for s in range(3))
    dy = rand(3, 9, 40, seed=3)
    with Lowering(fmt).mode(0):
        p = torch.bmm(q, k.mT).div(40**0.5).softmax(-1)
        dq, dk, dv = torch.autograd.grad(torch.bmm(p, v), (q, k, v), dy)

    def low(a: Tensor, b: Tensor) -> Tensor:
        product = oracle(fmt, a, -1) @ oracle(fmt, b, -2)
        return product.bfloat16().float() if fmt.name == "bf16" else product

    q, k, v = q.detach(), k.detach(), v.detach()
    p = (low(q, k.mT) / 40**0.5).softmax(-1)
    dp = low(dy, v.mT)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / 40**0.5
    # Sums in another order may round the next operand to another neighbour: one step in a few, of up to 1/14.
    for actual, expected in ((dv, low(p.mT, dy)), (dq, low(ds, k)), (dk, low(ds.mT, q))):
        assert (actual - expected).norm() < 1e-2 * expected.norm()


CONVOLUTIONS = [
    pytest.param(nn.Conv1d(6, 8, 3, padding=1), (2, 6, 11), id="1d"),
    pytest.param(nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 9, 8), id="2d-stride"),
    pytest.param(nn.Conv2d(8, 6, (3, 2), groups=2, dilation=2), (3, 8, 9, 7), id="2d-groups"),
    pytest.param(nn.Conv2d(6, 6, 3, groups=6, bias=False), (2, 6, 5, 5), id="2d-depthwise"),
    pytest.param(nn.Conv2d(5, 7, 1), (1, 5, 1, 1), id="2d-pointwise"),
    pytest.param(nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 3), id="3d"),
]


@every_format
@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS)
def test_convolutions_equal_a_reference_that_rounds_all_three_products(
    fmt: Format, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    x = rand(*shape, requires_grad=True)
    with Lowering(fmt).mode(0):
        y = layer(x)
        dy = rand(*y.shape, seed=1)
        dx, dw, *db = torch.autograd.grad(y, (x, *layer.parameters()), dy)

    weight, groups, sample = layer.weight.detach(), layer.groups, x.detach()
    outputs, output_padding = weight.shape[0], [0] * (x.dim() - 2)
    geometry = (layer.stride, layer.padding, layer.dilation, False, output_padding, groups)

    def along_channels(t: Tensor) -> Tensor:
        return oracle(fmt, t.reshape(t.shape[0], groups, t.shape[1] // groups, -1), 2).reshape(t.shape)

    def along_positions(t: Tensor) -> Tensor:
        by_channel = t.transpose(0, 1)
        return oracle(fmt, by_channel.flatten(1), 1).view(by_channel.shape).transpose(0, 1)

    def gradients(dy: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        found = aten.convolution_backward(dy.double(), x.double(), w.double(), None, *geometry, [True, True, False])
        return [g for g in found if g is not None]

    by_kernel = oracle(fmt, weight.flatten(1), 1).view(weight.shape)
    by_output = oracle(fmt, weight.reshape(groups, outputs // groups, -1), 1).reshape(weight.shape)
    expected = aten.convolution(along_channels(sample).double(), by_kernel.double(), None, *geometry)
    if layer.bias is not None:
        expected = expected + layer.bias.detach().view(-1, *[1] * (x.dim() - 2))
        close(db[0], dy.double().transpose(0, 1).flatten(1).sum(1), dy.numel() // outputs)
    close(y.detach(), expected, by_kernel[0].numel(), fmt)
    close(dx, gradients(along_channels(dy), sample, by_output)[0], by_kernel.numel() // weight.shape[1], fmt)
    close(dw, gradients(along_positions(dy), along_positions(sample), weight)[1], dy.numel() // outputs, fmt)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_convolutions_compute_the_wanted_gradients_alone(wanted: tuple[bool, bool, bool]) -> None:
    x, w, dy = rand(2, 3, 6), rand(4, 3, 3, seed=1), rand(2, 4, 4, seed=2)
    with Lowering("int8").mode(0):
        found = aten.convolution_backward(dy, x, w, [4], [1], [0], [1], False, [0], 1, wanted)
    assert tuple(g is not None for g in found) == wanted


def rounded_weight(lowering: Lowering, w: Tensor, seed: int = 0) -> Tensor:
    """``w`` as the mode sees it: rows of the identity are exact in every format."""
    with lowering.mode(seed):
        return torch.eye(w.shape[0]) @ w


@rounded_formats
def test_weights_equal_rounding_on_every_pass(block: Block, fmt: Format) -> None:
    cached, plain = Lowering(fmt), Lowering(fmt)
    cached.refresh(block.parameters(), seed=0)
    assert same(step(block, cached), step(block, plain))
    assert same(step(block, cached), step(block, plain))


@rounded_formats
def test_weights_are_rounded_once_until_the_next_refresh(fmt: Format) -> None:
    w = rand(40, 30)
    lowering = Lowering(fmt, "stochastic")
    assert not torch.equal(rounded_weight(lowering, w, seed=1), rounded_weight(lowering, w, seed=2))
    lowering.refresh([w], seed=0)
    first = rounded_weight(lowering, w, seed=1)
    assert torch.equal(rounded_weight(lowering, w, seed=2), first)
    lowering.refresh([w], seed=0)
    assert torch.equal(rounded_weight(lowering, w), first)
    lowering.refresh([w], seed=1)
    assert not torch.equal(rounded_weight(lowering, w), first)


def test_the_noise_of_weights_does_not_depend_on_the_order_of_use() -> None:
    weights = [rand(40, 30, seed=s) for s in range(3)]

    def used(order: list[int]) -> dict[int, Tensor]:
        lowering = Lowering("int4", "stochastic")
        lowering.refresh(weights, seed=5)
        return {i: rounded_weight(lowering, weights[i], seed=i) for i in order}

    forward, backward = used([0, 1, 2]), used([2, 0, 1])
    assert all(torch.equal(forward[i], backward[i]) for i in range(3))


def test_equal_weights_get_different_noise() -> None:
    weights = [rand(40, 30), rand(40, 30)]
    lowering = Lowering("int4", "stochastic")
    lowering.refresh(weights, seed=0)
    assert not torch.equal(*(rounded_weight(lowering, w) for w in weights))


def test_views_of_a_weight_are_the_weight() -> None:
    w = nn.Parameter(rand(40, 40))
    lowering = Lowering("int4", "stochastic")
    lowering.refresh([w], seed=0)
    for view in (w.t(), w[:20], w.detach().t(), w.view(20, 80)):
        assert torch.equal(rounded_weight(lowering, view, seed=1), rounded_weight(lowering, view, seed=2))


def sgd(w: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([w], lr=0.1)


def adam_foreach(w: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([w], lr=0.1, foreach=True)


def adam_fused(w: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([w], lr=0.1, fused=True)  # does not advance the version


@pytest.mark.parametrize("make", [sgd, adam_foreach, adam_fused])
def test_a_refresh_after_any_optimizer_step_leaves_no_stale_weight(
    make: Callable[[nn.Parameter], torch.optim.Optimizer],
) -> None:
    w = nn.Parameter(rand(40, 30))
    lowering, plain = Lowering("int8"), Lowering("int8")
    lowering.refresh([w], seed=0)
    optimizer = make(w)
    for _ in range(2):
        before = rounded_weight(lowering, w.detach())
        w.grad = rand(40, 30, seed=1)
        optimizer.step()
        lowering.refresh([w], seed=0)
        after = rounded_weight(lowering, w.detach())
        assert torch.equal(after, rounded_weight(plain, w.detach()))
        assert not torch.equal(after, before)


def test_an_in_place_write_leaves_no_stale_weight() -> None:
    w = rand(40, 30)
    lowering = Lowering("int8")
    lowering.refresh([w], seed=0)
    before = rounded_weight(lowering, w)
    w.t()[3:5].mul_(-2)
    assert torch.equal(rounded_weight(lowering, w), rounded_weight(Lowering("int8"), w))
    assert not torch.equal(rounded_weight(lowering, w), before)


@rounded_formats
def test_the_forward_pass_is_lowered_without_autograd_too(block: Block, fmt: Format) -> None:
    x = rand(3, 6, 10)
    exact = block(x)
    with Lowering(fmt).mode(0):
        expected = block(x)
    for without in (torch.no_grad, torch.inference_mode):
        with without(), Lowering(fmt).mode(0):
            loss = block(x)
        # Torch may fold the same product into other shapes, and so add in another order.
        assert (loss - expected).abs() < 0.05 * (expected - exact).abs()


def test_inference_tensors_are_never_cached() -> None:
    with torch.inference_mode():
        w = rand(40, 30)
        lowering = Lowering("int8")
        lowering.refresh([w], seed=0)
        before = rounded_weight(lowering, w)
        w.mul_(-1)
        assert torch.equal(rounded_weight(lowering, w), -before)


@rounded_formats
def test_a_traced_program_equals_the_mode_and_bakes_in_no_weight(fmt: Format) -> None:
    x, w = rand(5, 33), rand(7, 33, seed=1)
    lowering = Lowering(fmt)
    lowering.refresh([w], seed=0)

    def program(x: Tensor, w: Tensor) -> Tensor:
        with lowering.mode(0):
            return linear(x, w).relu().sum(0)

    assert program(x, w).shape == (7,)
    traced = make_fx(program)(x, w)
    assert torch.equal(traced(x, w), program(x, w))
    assert torch.equal(traced(x, w - 1), program(x, w - 1))


def test_tracing_refuses_stochastic_rounding() -> None:
    def program(x: Tensor) -> Tensor:
        with Lowering("int8", "stochastic").mode(0):
            return x @ x

    with pytest.raises(NotImplementedError, match="rounding='stochastic' cannot be traced"):
        make_fx(program)(rand(3, 3))


@every_format
def test_format_of_names_what_is_lowered_and_executes_nothing(fmt: Format) -> None:
    x = torch.empty(4, 4, device="meta")
    image, dy = torch.empty(1, 4, 5, device="meta"), torch.empty(1, 4, 5, device="meta")
    kernel = torch.empty(4, 4, 1, device="meta")
    convolution = [image, kernel, None, [1], [0], [1]]
    backward = [dy, image, kernel, [4], [1], [0], [1]]
    lowered: list[tuple[Any, list[Any]]] = [
        (aten.mm.default, [x, x]),
        (aten.bmm.default, [x[None], x[None]]),
        (aten.addmm.default, [x[0], x, x]),
        (aten.baddbmm.default, [x[None], x[None], x[None]]),
        (aten.convolution.default, [*convolution, False, [0], 1]),
        (aten.convolution_backward.default, [*backward, False, [0], 1, [True, True, True]]),
    ]
    plain: list[tuple[Any, list[Any]]] = [
        (aten.add.Tensor, [x, x]),
        (aten.mv.default, [x, x[0]]),
        (aten.mm.default, [x.int(), x.int()]),
        (aten.mm.default, [x[:0], x]),
        (aten.convolution.default, [*convolution, True, [0], 1]),
        (aten.convolution_backward.default, [*backward, True, [0], 1, [True, True, True]]),
    ]
    lowering = Lowering(fmt)
    with ShapesOf(aten.mm.default) as seen:
        assert [lowering.format_of(func, args) for func, args in lowered] == [fmt.name] * len(lowered)
        assert [lowering.format_of(func, args) for func, args in plain] == [None] * len(plain)
    assert not seen.shapes
