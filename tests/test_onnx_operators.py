"""Each operation in ONNX Runtime against torch, and those that are written out in others against torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ledger.engines.decompositions import convolution_backward, sum_rows
from tests.onnx_graphs import in_onnxruntime
from tests.program_cases import integers, normal

aten = torch.ops.aten

FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "arithmetic": lambda x, y, i: (x + 2 * y - 1).div(3) * x.abs().sqrt() - torch.sub(x, y, alpha=0.5),
    "integers": lambda x, y, i: (i * 3 + i.int() - 7) * 2 + (i > 2),
    "powers": lambda x, y, i: x**2 + x**3 + x.abs() ** 1.5 + 2.0**y + x.abs() ** y,
    "unary": lambda x, y, i: x.tanh() + y.sigmoid() + x.exp().log1p() + x.sin() * y.cos() + x.erf() + x.neg().relu(),
    "rounding": lambda x, y, i: (10 * x).round() + (3 * y).floor() + y.ceil() + x.sign() + (i + 0.5).round(),
    "roots": lambda x, y, i: x.abs().add(1).rsqrt() + y.abs().add(1).reciprocal(),
    "comparisons": lambda x, y, i: (x < y) | (x >= 0.5) & ~(y == x) ^ (i.unsqueeze(-1)[..., :1] != 2).any(),
    "where": lambda x, y, i: torch.where(x > y, x, 0.5) + torch.maximum(x, y) - torch.minimum(x, y).clamp(-1, 0.3),
    "masks": lambda x, y, i: x.masked_fill(y > 0, -1.0) + (x.isnan() | (y > 0)).float() + x.clamp(min=0.1),
    "reductions": lambda x, y, i: x.sum(0) + x.mean() + y.amax(0) - y.amin() + x.var(0) + y.std(0, correction=0),
    "any and all": lambda x, y, i: (x > 1).any(1) | (y > -5).all(1) & (x > 0).any(),
    "softmax": lambda x, y, i: x.softmax(-1) + y.log_softmax(0) + x.logsumexp(1, keepdim=True),
    "cumsum": lambda x, y, i: x.cumsum(1) + y.cumsum(0),
    "products": lambda x, y, i: (x @ y.T).T @ x + torch.addmm(y[:, :5].mean(), x, y[:, :6].T @ x, beta=0.5, alpha=2),
    "gelu": lambda x, y, i: F.gelu(x) + F.gelu(y, approximate="tanh") + F.silu(x),
    "shapes": lambda x, y, i: x.reshape(2, -1).unsqueeze(1).expand(2, 3, -1).permute(2, 0, 1).flatten(1).squeeze(),
    "slices": lambda x, y, i: torch.cat([x[1:4:2], y[-2:], y[:1]]).T[0:-1],
    "selecting": lambda x, y, i: (
        torch.stack([x[0], y[-1], x.select(0, 2)]) + torch.cat(x.split([1, 2, 3], 1)[1:], 1).sum()
    ),
    "padding": lambda x, y, i: F.pad(x, (1, 2, 0, 3), value=0.5),
    "indexing": lambda x, y, i: x[i] + y[i, i].unsqueeze(1) + x.gather(1, i.unsqueeze(0).expand(6, -1) % 6)[i],
    "writing": lambda x, y, i: x.clone().index_fill_(0, i[:1], 2.0) + y.clone().scatter_(1, i[:1].expand(6, 1), 1.5),
    "slices written": lambda x, y, i: aten.slice_backward(x[:, :2], [6, 6], 1, 1, 5, 2) + y,
    "rows written": lambda x, y, i: aten.select_backward(x[0], [6, 6], 0, -2) + y,
    "repeated places": lambda x, y, i: y.index_put((i, i.flip(0)), x[:, 0], accumulate=True),
    "repeated rows": lambda x, y, i: y.index_put((i - 6,), x, accumulate=True),
    "dtypes": lambda x, y, i: x.double().float() + i.unsqueeze(1) + (x * 10).to(torch.int32) + (x > 0).to(torch.int8),
    "constants": lambda x, y, i: x + torch.arange(6) + torch.full((6, 1), 2.0) + torch.zeros_like(x) + torch.ones(1),
    "bits": lambda x, y, i: (x.view(torch.int32) & 0x7F800000).view(torch.float32) + ((i.int() | 1) ^ 2).unsqueeze(1),
    "bfloat16": lambda x, y, i: (x.bfloat16() @ y.bfloat16() + x.bfloat16().exp() * 3).float(),
    "float16": lambda x, y, i: (x.half() * y.half() + 1).sum(0).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operation_gives_in_onnxruntime_what_it_gives_in_torch(name: str) -> None:
    inputs = normal(6, 6, seed=1), normal(6, 6, seed=2), integers(6, 6, seed=3)
    expected = FUNCTIONS[name](*inputs)
    found = in_onnxruntime(FUNCTIONS[name], *inputs)
    # Rounded to 8 bits of mantissa, a number near the middle may fall to the other side.
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3}.get(name, 1e-5)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=True)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_sums_of_rows_are_those_of_a_scatter(rows: int, count: int) -> None:
    values, index = normal(count, 3), integers(rows, count, seed=rows)
    expected = torch.zeros(rows, 3).index_add_(0, index, values)
    torch.testing.assert_close(sum_rows(values, index, rows), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolutions_gradients_are_torchs(dims: int, transposed: bool) -> None:
    for stride, padding, dilation, groups in product((1, 2), (0, 1), (1, 2), (1, 2)):
        x = normal(3, 4, *(7, 8, 6)[:dims]).double()
        weight = normal(*((4, 6 // groups) if transposed else (6, 4 // groups)), *(3, 2, 3)[:dims], seed=1).double()
        extra = int(transposed and max(stride, dilation) > 1)
        how = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [extra] * dims, groups)
        y = aten.convolution(x, weight, None, *how)
        arguments = (normal(*y.shape, seed=2).double(), x, weight, [6], *how, [True] * 3)
        for found, expected in zip(
            convolution_backward(*arguments), aten.convolution_backward(*arguments), strict=True
        ):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_and_its_gradient_match(causal: bool) -> None:
    def gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return torch.stack([y, *backward(2 * y, q, k, v, y, sums, 0.0, causal)])

    inputs = [normal(2, 2, 5, 4, seed=seed) for seed in range(3)]
    torch.testing.assert_close(in_onnxruntime(gradients, *inputs), gradients(*inputs), rtol=1e-4, atol=1e-5)
