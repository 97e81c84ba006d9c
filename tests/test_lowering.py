"""The lowering table: matrix products, whole training steps, tracing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear

from lightning_ledger.precision import Format, Lowering, Tape, derive_seed
from lightning_ledger.precision.formats import Role
from tests.lowered_steps import make_block, same, step
from tests.precision_oracle import (
    ROUNDED,
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
    a, b, base = rand(6, 64), rand(64, 5, seed=1), rand(6, 5, seed=2)
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
    a, b = rand(6, 64).to(dtype), rand(64, 5, seed=1).to(dtype)
    image, kernel = rand(2, 32, 5, 5).to(dtype), rand(4, 32, 3, 3).to(dtype)
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
        lowering = Lowering(fmt)
        with lowering.mode(0):
            actual = operation()
        assert torch.equal(actual, expected)
        assert not lowering.unlowered


def test_operations_that_torch_refuses_are_still_refused() -> None:
    with Lowering("int4").mode(0), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(rand(2, 3), rand(3, 2).double())


@every_rounding
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp32_is_bit_identical_to_no_mode(rounding: str, fused: bool, dtype: torch.dtype) -> None:
    block = make_block(fused).to(dtype)
    lowering = Lowering("fp32", rounding)
    lowering.refresh(block.parameters(), seed=0)
    assert same(step(block, lowering), step(block, None))


@rounded_formats
@every_rounding
@pytest.mark.parametrize("fused", [False, True])
def test_any_other_format_differs_but_not_by_much(fused: bool, fmt: Format, rounding: str) -> None:
    block = make_block(fused)
    lowering = Lowering(fmt, rounding)
    lowering.refresh(block.parameters(), seed=0)
    exact, rounded = step(block, None), step(block, lowering)
    for g, h in zip(exact, rounded, strict=True):
        assert not torch.equal(g, h)
        assert torch.cosine_similarity(g.flatten(), h.flatten(), dim=0) > 0.8
    assert not lowering.unlowered


@rounded_formats
def test_the_same_seed_gives_the_same_bits(fmt: Format) -> None:
    block, nearest, stochastic = make_block(), Lowering(fmt), Lowering(fmt, "stochastic")
    assert same(step(block, nearest, seed=1), step(block, nearest, seed=2))
    assert same(step(block, stochastic, seed=1), step(block, stochastic, seed=1))
    assert not same(step(block, stochastic, seed=1), step(block, stochastic, seed=2))


@every_format
@every_rounding
def test_the_global_generator_is_untouched(fmt: Format, rounding: str) -> None:
    block, lowering = make_block(), Lowering(fmt, rounding)
    lowering.refresh(block.parameters(), seed=0)
    before = torch.get_rng_state()
    first = step(block, lowering)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("anything else"))
        assert same(step(block, lowering), first)


@every_format
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        pytest.param(36, 40, 7, id="all odd"),  # which formats in blocks of 16 and 32 refuse
        pytest.param(64, 32, 96, id="whole blocks"),
        pytest.param(32, 40, 64, id="odd inputs"),
        pytest.param(1, 1, 1, id="one number"),
    ],
)
def test_linear_gradients_equal_a_reference_that_rounds_all_three_products(
    fmt: Format, rows: int, inputs: int, outputs: int
) -> None:
    x, w = rand(rows, inputs, requires_grad=True), rand(outputs, inputs, seed=1, requires_grad=True)
    bias, dy = rand(outputs, seed=2), rand(rows, outputs, seed=3)
    lowering = Lowering(fmt)
    lowering.refresh([w], seed=0)

    def products() -> list[Tensor]:
        y = linear(x, w, bias)
        return [y.detach(), *torch.autograd.grad(y, (x, w), dy)]

    plain = products()
    with lowering.mode(0):
        lowered = products()

    a, b = x.detach(), w.detach()

    def low(left: Tensor, right: Tensor, roles: tuple[Role, Role], along: int = -2) -> Tensor:
        return oracle(fmt, left, -1, roles[0]).double() @ oracle(fmt, right, along, roles[1]).double()

    # The weight that a weight-only format stores was rounded for the forward product, along its inputs.
    once = -1 if fmt.rounds_weights_once else -2
    expected = {
        "output": (low(a, b.mT, ("activation", "weight")) + bias, inputs),
        "grad_input": (low(dy, b, ("gradient", "weight"), once), outputs),
        "grad_weight": (low(dy.mT, a, ("gradient", "activation")), rows),
    }
    refused = {}
    for (product, (reference, length)), actual, exact in zip(expected.items(), lowered, plain, strict=True):
        if reason := fmt.refuses(length):
            refused["", product] = reason
            assert torch.equal(actual, exact)
        else:
            close(actual, reference, length, fmt)
    assert lowering.unlowered == refused


@every_format
@pytest.mark.parametrize(("rows", "depth"), [(9, 40), (32, 64)])
def test_attention_gradients_equal_a_reference_that_rounds_every_product(fmt: Format, rows: int, depth: int) -> None:
    q, k, v = (rand(3, rows, depth, seed=s, requires_grad=True) for s in range(3))
    dy = rand(3, rows, depth, seed=3)
    lowering = Lowering(fmt)
    with lowering.mode(0):
        p = torch.bmm(q, k.mT).div(depth**0.5).softmax(-1)
        dq, dk, dv = torch.autograd.grad(torch.bmm(p, v), (q, k, v), dy)

    def low(a: Tensor, b: Tensor, of_a: Role = "activation", of_b: Role = "activation") -> Tensor:
        if fmt.refuses(a.shape[-1]):
            return a @ b
        product = oracle(fmt, a, -1, of_a) @ oracle(fmt, b, -2, of_b)
        return product.bfloat16().float() if fmt.name in ("bf16", "w8a16", "w4a16") else product

    q, k, v = q.detach(), k.detach(), v.detach()
    p = (low(q, k.mT) / depth**0.5).softmax(-1)
    dp = low(dy, v.mT, "gradient")
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / depth**0.5
    expected = (
        (dv, low(p.mT, dy, "activation", "gradient")),
        (dq, low(ds, k, "gradient")),
        (dk, low(ds.mT, q, "gradient")),
    )
    # Sums in another order may round the next operand to another neighbour: one step in a few, of up to 1/14.
    for actual, reference in expected:
        assert (actual - reference).norm() < 1e-2 * reference.norm()
    assert bool(lowering.unlowered) == bool(fmt.refuses(rows))
    assert {product for _, product in lowering.unlowered} <= {"attention"}


@rounded_formats
def test_the_forward_pass_is_lowered_without_autograd_too(fmt: Format) -> None:
    block = make_block()
    x = rand(2, 32, 32)
    lowering = Lowering(fmt)
    lowering.refresh(block.parameters(), seed=0)
    exact = block(x)
    with lowering.mode(0):
        expected = block(x)
    # Torch may fold the same product into other shapes: so it adds in another order, and scales other matrices.
    tolerance = 1.0 if fmt.name in ("fp8_tensor", "nvfp4") else 0.05
    for without in (torch.no_grad, torch.inference_mode):
        with without(), lowering.mode(0):
            loss = block(x)
        assert (loss - expected).abs() < tolerance * (expected - exact).abs()


@pytest.mark.parametrize("fmt", [f for f in ROUNDED if not f.rounds_weights_once], ids=lambda f: f.name)
def test_a_traced_program_equals_the_mode_and_bakes_in_no_weight(fmt: Format) -> None:
    x, w = rand(5, 64), rand(7, 64, seed=1)
    lowering = Lowering(fmt)
    lowering.refresh([w], seed=0)

    def program(x: Tensor, w: Tensor) -> Tensor:
        with lowering.mode(0):
            return linear(x, w).relu().sum(0)

    assert program(x, w).shape == (7,)
    traced = make_fx(program)(x, w)
    assert torch.equal(traced(x, w), program(x, w))
    assert torch.equal(traced(x, w - 1), program(x, w - 1))


@rounded_formats
@every_rounding
def test_a_tape_holds_the_weights_and_the_noise_of_a_trace(fmt: Format, rounding: str) -> None:
    x, w = rand(32, 64), rand(96, 64, seed=1).requires_grad_()
    lowering = Lowering(fmt, rounding)
    lowering.refresh([w], seed=0)

    def program(x: Tensor, tape: Tape | None = None) -> Tensor:
        with lowering.mode(3, tape):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(linear(x, w).relu().square().sum(), x)[0]

    expected = program(x)
    tape = Tape()
    traced = make_fx(lambda x: program(x, tape))(x)
    assert torch.equal(traced(x), expected)
    # The weight along its inputs, and along its outputs where the backward product rounds it anew.
    assert len(tape.weights) == (1 if fmt.rounds_weights_once else 2)
    assert bool(tape.noise) == (rounding == "stochastic")
    assert all(torch.equal(operand.values, lowering.rounded(use).values) for use, operand in tape.weights)


def test_tracing_refuses_stochastic_rounding_without_a_tape() -> None:
    def program(x: Tensor) -> Tensor:
        with Lowering("int8", "stochastic").mode(0):
            return x @ x

    with pytest.raises(NotImplementedError, match=r"rounding='stochastic' cannot be traced without .*tape=Tape\(\)"):
        make_fx(program)(rand(3, 3))


@every_format
def test_formats_of_names_what_is_lowered_and_executes_nothing(fmt: Format) -> None:
    x = torch.empty(32, 32, device="meta")
    image, dy = torch.empty(1, 32, 32, device="meta"), torch.empty(1, 32, 32, device="meta")
    kernel = torch.empty(32, 32, 1, device="meta")
    heads = torch.empty(1, 2, 32, 32, device="meta")
    convolution = [image, kernel, None, [1], [0], [1]]
    backward = [dy, image, kernel, [32], [1], [0], [1]]
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    fused_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    lowered: list[tuple[Any, list[Any], int]] = [
        (aten.mm.default, [x, x], 1),
        (aten.bmm.default, [x[None], x[None]], 1),
        (aten.addmm.default, [x[0], x, x], 1),
        (aten.baddbmm.default, [x[None], x[None], x[None]], 1),
        (aten.convolution.default, [*convolution, False, [0], 1], 1),
        (aten.convolution_backward.default, [*backward, False, [0], 1, [True, True, True]], 2),
        (aten.convolution_backward.default, [*backward, False, [0], 1, [False, True, False]], 1),
        (fused, [heads, heads, heads], 1),
        (fused_backward, [heads, heads, heads, heads, heads, heads[..., 0], 0.0, False], 1),
    ]
    plain: list[tuple[Any, list[Any]]] = [
        (aten.add.Tensor, [x, x]),
        (aten.mv.default, [x, x[0]]),
        (aten.mm.default, [x.int(), x.int()]),
        (aten.mm.default, [x[:0], x]),
        (aten.convolution.default, [*convolution, True, [0], 1]),
        (aten.convolution_backward.default, [*backward, True, [0], 1, [True, True, True]]),
        (aten.convolution_backward.default, [*backward, False, [0], 1, [False, False, True]]),
    ]
    lowering = Lowering(fmt)
    with ShapesOf(aten.mm.default) as seen:
        for func, args, products in lowered:
            assert lowering.formats_of(func, args) == (fmt.name,) * products
        assert [lowering.formats_of(func, args) for func, args in plain] == [()] * len(plain)
        # A length that the format refuses: of five numbers.
        refused = () if fmt.refuses(5) else (fmt.name,)
        assert lowering.formats_of(aten.mm.default, [x[:, :5], x[:5]]) == refused
    assert not seen.shapes
