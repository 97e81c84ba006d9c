"""torch's fused CPU attention in a format: its products against slow rounding, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightning_ledger.precision import FORMATS, Format, Lowering
from lightning_ledger.precision.formats import Role
from tests.precision_oracle import ShapesOf, every_format, oracle, rand

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default
FUSED_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Those whose whole kernel torch runs in bfloat16.
NATIVE = ("bf16",)


class Case(NamedTuple):
    """One call of attention.

    Args:
        heads: of queries, and of keys and values.
        rows: queries, and keys.
        depth: of queries, keys and values.
        causal: whether a query sees earlier keys only.
        mask: added to the scores: none, a float one for all heads, or a boolean one.
        scale: of the scores.
    """

    heads: tuple[int, int] = (2, 2)
    rows: tuple[int, int] = (32, 32)
    depth: int = 32
    causal: bool = False
    mask: str = ""
    scale: float | None = None


CASES = {
    "plain": Case(),
    "causal": Case(causal=True),
    "scale": Case(scale=0.5),
    "float mask": Case(mask="float"),
    "boolean mask": Case(mask="bool"),
    "fewer key heads": Case(heads=(4, 2), causal=True),
    "one key head, cross": Case(heads=(3, 1), rows=(32, 64), scale=0.3),
    "odd": Case(rows=(9, 13), depth=20),  # which formats in blocks refuse
}


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    (hq, hk), (n, m), d = case.heads, case.rows, case.depth
    q = rand(2, hq, n, d, requires_grad=True)
    k, v = (rand(2, hk, m, d, seed=s, requires_grad=True) for s in (1, 2))
    mask = None
    if case.mask == "float":
        mask = rand(n, m, seed=3)
    elif case.mask == "bool":
        mask = rand(n, m, seed=3) > -1
        mask[:, 0] = True  # a query that sees nothing has no softmax
    return q, k, v, rand(2, hq, n, d, seed=4), mask


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y: Tensor = scaled_dot_product_attention(
            q, k, v, mask, is_causal=case.causal, scale=case.scale, enable_gqa=case.heads[0] != case.heads[1]
        )
    return y


def lowered(case: Case, lowering: Lowering) -> tuple[Tensor, ...]:
    q, k, v, dy, mask = tensors(case)
    with lowering.mode(0):
        y = attend(case, q, k, v, mask)
        return (y.detach(), *torch.autograd.grad(y, (q, k, v), dy))


def reference(case: Case, fmt: Format) -> tuple[Tensor, ...]:
    """The same attention written out, each product of slowly rounded operands."""
    q, k, v, dy, mask = (None if x is None else x.detach() for x in tensors(case))
    assert q is not None
    assert k is not None
    assert v is not None
    assert dy is not None
    groups = case.heads[0] // case.heads[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def low(a: Tensor, b: Tensor, of_a: Role = "activation", of_b: Role = "activation") -> Tensor:
        product = oracle(fmt, a, -1, of_a) @ oracle(fmt, b, -2, of_b)
        return product.bfloat16().float() if fmt.name in ("w8a16", "w4a16") else product

    scale = case.depth**-0.5 if case.scale is None else case.scale
    scores = low(q, keys.mT) * scale
    if case.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    p = scores.softmax(-1)
    y = low(p, values)
    dp = low(dy, values.mT, "gradient")
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    dq = low(ds, keys, "gradient")
    dk, dv = low(ds.mT, q, "gradient"), low(p.mT, dy, "activation", "gradient")
    shared = (2, case.heads[1], groups, *dk.shape[-2:])
    return y, dq, dk.view(shared).sum(2), dv.view(shared).sum(2)


@every_format
@pytest.mark.parametrize("name", CASES)
def test_pt110832_fused_attention_runs_in_the_format_forward_and_backward(fmt: Format, name: str) -> None:
    case, lowering = CASES[name], Lowering(fmt)
    actual, exact = lowered(case, lowering), lowered(case, Lowering("fp32"))
    lengths = (case.depth, *case.rows)
    if any(fmt.refuses(length) for length in lengths) or fmt.name == "fp32":
        assert all(torch.equal(a, b) for a, b in zip(actual, exact, strict=True))
        assert bool(lowering.unlowered) == (fmt.name != "fp32")
        return
    assert not lowering.unlowered
    # The kernel keeps probabilities and the backward pass's intermediate results in bfloat16 as well.
    tolerance = 2e-2 if fmt.name in NATIVE else 1e-2
    for a, expected, plain in zip(actual, reference(case, fmt), exact, strict=True):
        assert a.dtype == torch.float32
        assert not torch.equal(a, plain)
        # Sums in another order may round the next operand to another neighbour.
        assert (a - expected).norm() < tolerance * expected.norm()


def test_bf16_runs_torchs_own_kernel_and_other_formats_its_parts() -> None:
    for name, kernels in (("bf16", 1), ("int8", 0), ("int8:attention=bf16", 1), ("bf16:attention=int8", 0)):
        for func in (FUSED, FUSED_BACKWARD):
            with _Seen(func) as seen:
                lowered(CASES["causal"], Lowering(name))
            assert seen.dtypes == [torch.bfloat16] * kernels


class _Seen(ShapesOf):
    """The dtypes of queries that reach an operation, below the lowering."""

    def __init__(self, func: object) -> None:
        super().__init__(func)
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is self.func:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def test_values_of_another_depth_are_lowered_as_their_products() -> None:
    # torch's fused kernel on CPU takes one depth only; for others attention arrives as matrix products.
    q, k = (rand(2, 2, 32, 32, seed=s, requires_grad=True) for s in (0, 1))
    v = rand(2, 2, 32, 64, seed=2, requires_grad=True)
    for name in ("int8", "mxfp4"):
        lowering = Lowering(name)
        fmt = FORMATS[name]
        with lowering.mode(0):
            y = scaled_dot_product_attention(q, k, v)
        scale = 32**-0.25  # of queries and of keys each
        scores = oracle(fmt, q.detach() * scale, -1) @ oracle(fmt, k.detach().mT * scale, -2)
        expected = oracle(fmt, scores.softmax(-1), -1) @ oracle(fmt, v.detach(), -2)
        assert (y - expected).norm() < 1e-2 * expected.norm()
        assert not lowering.unlowered


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if name != "odd"])
@pytest.mark.parametrize("format", ["int8", "mxfp8"])
def test_stochastic_rounding_repeats_under_its_seed(format: str, name: str) -> None:
    first, again = (lowered(CASES[name], Lowering(format, "stochastic")) for _ in range(2))
    nearest = lowered(CASES[name], Lowering(format))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, nearest, strict=True))


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_the_result_is_laid_out_as_torchs_own(name: str) -> None:
    apart = rand(2, 8, 3 * 3 * 16).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
    for q, k, v in (rand(3, 2, 3, 8, 16), rand(3, 2, 8, 3, 16).transpose(2, 3), apart):
        plain, plain_sums = FUSED(q, k, v)
        with Lowering(name).mode(0):
            y, sums = FUSED(q, k, v)
        assert y.stride() == plain.stride()
        assert (y.dtype, y.shape) == (plain.dtype, plain.shape)
        assert (sums.dtype, sums.shape) == (plain_sums.dtype, plain_sums.shape)
        assert (sums - plain_sums).abs().max() < 0.1
