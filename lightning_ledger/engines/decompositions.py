"""Operations of backward passes written out in those of forward ones, for engines that know no others.

torch's own table of decompositions, and what it leaves: fused attention as plain products, the gradients of
convolutions as convolutions, and sums over repeated indices as products. Engines are free to run a
scatter with repeated indices in parallel, and then lose updates; a product they must add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions

from lightning_ledger.engines import arithmetic, movement  # noqa: F401  they fill the table
from lightning_ledger.engines.operators import OPERATORS
from lightning_ledger.precision import Operand
from lightning_ledger.precision.rules import RULES

aten = torch.ops.aten

FUSED_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_FUSED_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def decompositions() -> dict[Any, Callable[..., Any]]:
    """From operator overload to the function that replaces it: of every operation that ONNX has no form of."""
    torchs = {op: how for op, how in core_aten_decompositions().items() if op not in OPERATORS}
    written_out = {
        FUSED_ATTENTION: attention,
        _FUSED_BACKWARD: _attention_backward,
        aten.convolution_backward.default: convolution_backward,
        aten.embedding_dense_backward.default: _embedding_backward,
        aten.index_put.default: _index_put,
        aten.native_layer_norm.default: _layer_norm,
        aten.native_group_norm.default: _group_norm,
        aten.var.correction: _variance,
    }
    return {**torchs, **written_out}


def sum_rows(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Add up the values that share a row: a scatter-add, as a matrix product.

        result[r] = sum_{t: index[t] = r} values[t]

    Where there are more rows than values, each value first becomes the sum of all that share its row, and the first
    of them alone is written: the product is then [T, T] by [T, D] in place of [rows, T] by [T, D].

    Args:
        values: [T, D].
        index: [T], integers from 0 to ``rows`` - 1.
        rows: how many rows there are.

    Returns:
        [rows, D].

    Example:
        >>> sum_rows(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2)
        tensor([[2.],
                [5.]])
    """
    count = len(index)
    if rows <= count:
        member = torch.arange(rows, device=index.device).unsqueeze(1) == index
        return member.to(values.dtype) @ values
    equal = index.unsqueeze(1) == index
    place = torch.arange(count, device=index.device)
    earlier = place < place.unsqueeze(1)
    repeated = (equal & earlier).any(1)
    # All but the first go to a row that is cut off.
    target = torch.where(repeated, rows, index)
    total = equal.to(values.dtype) @ values
    written = values.new_zeros(rows + 1, values.shape[1]).index_put((target,), total)
    return written.narrow(0, 0, rows)


def convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution, as convolutions: of ``aten.convolution_backward``'s arguments and results."""
    axes = range(x.dim() - 2)
    dx = dw = db = None
    if wanted[0]:
        # What the strides cut off at the end of each axis has to be put back.
        span = [(dy.shape[2 + i] - 1) * stride[i] - 2 * padding[i] for i in axes]
        reach = [dilation[i] * (weight.shape[2 + i] - 1) + 1 for i in axes]
        missing = [0 if transposed else x.shape[2 + i] - span[i] - reach[i] for i in axes]
        dx = aten.convolution.default(dy, weight, None, stride, padding, dilation, not transposed, missing, groups)
        for i in axes:  # padding added to a transposed convolution's output, of which no input is the cause
            dx = dx.narrow(2 + i, 0, x.shape[2 + i])
    if wanted[1]:
        # A transposed convolution is the gradient of one that maps its output to its input.
        inputs, outputs = (dy, x) if transposed else (x, dy)
        dw = _kernel_gradient(inputs, outputs, weight.shape[2:], stride, padding, dilation, groups)
    if wanted[2]:
        db = dy.sum([0, *(2 + i for i in axes)])
    return dx, dw, db


def _kernel_gradient(
    inputs: Tensor,
    outputs: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """[outputs, inputs / groups, *kernel]: the inputs convolved with the output's gradient, summed over samples."""
    samples, channels, *size = inputs.shape
    by_group = inputs.reshape(samples, groups, channels // groups, *size).transpose(0, 2)
    by_channel = by_group.reshape(channels // groups, groups * samples, *size)
    gradient: Tensor = aten.convolution.default(
        by_channel, outputs.transpose(0, 1), None, dilation, padding, stride, False, [0] * len(size), groups
    )
    for axis, length in enumerate(kernel):
        gradient = gradient.narrow(2 + axis, 0, length)
    return gradient.transpose(0, 1)


def _embedding_backward(gradient: Tensor, index: Tensor, rows: int, padding: int, by_frequency: bool) -> Any:
    if by_frequency:
        return NotImplemented
    values, flat = gradient.flatten(0, -2), index.flatten()
    if padding >= 0:
        values = torch.where((flat == padding).unsqueeze(1), 0, values)
    return sum_rows(values, flat, rows)


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """What differentiating ``x[i, j]`` gives: a sum over repeated places, where ``accumulate`` is set."""
    known = [index for index in indices if index is not None and index.dtype in (torch.int32, torch.int64)]
    if not accumulate or len(known) != len(indices):
        return NotImplemented
    indexed = x.shape[: len(known)]
    flat = torch.zeros((), dtype=torch.int64, device=x.device)
    for index, size in zip(known, indexed, strict=True):
        flat = flat * size + torch.where(index < 0, index + size, index)
    rest = x.shape[len(known) :]
    rows, width = indexed.numel(), rest.numel()
    spread = values.expand(*flat.shape, *rest).reshape(flat.numel(), width)
    return x + sum_rows(spread, flat.flatten(), rows).reshape(x.shape)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    axes = list(range(x.dim() - len(shape), x.dim()))
    y, mean, rstd = _normalised(x.float(), axes, eps)
    return _affine(y, weight, bias).to(x.dtype), mean, rstd


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _normalised(x.float().reshape(samples, groups, -1), [2], eps)
    per_channel = (None if p is None else p.reshape(channels, *[1] * (x.dim() - 2)) for p in (weight, bias))
    normal = _affine(y.reshape(x.shape), *per_channel)
    return normal.to(x.dtype), mean.squeeze(2).to(x.dtype), rstd.squeeze(2).to(x.dtype)


def _normalised(x: Tensor, axes: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    rstd = (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    return centred * rstd, mean, rstd


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _variance(x: Tensor, dim: Any = None, *, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    axes = dim or list(range(x.dim()))
    mean = x.mean(axes, keepdim=True)
    count = x.numel() // max(1, mean.numel())
    return (x - mean).square().sum(axes, keepdim) / max(0, count - (1 if correction is None else correction))


class _Exact:
    """What the lowering's rules ask of an operation, for one that is written out but not lowered."""

    def lowers(self, product: Any) -> bool:
        return False

    def native(self, product: Any) -> bool:
        return False

    def rounds_weights_once(self, product: Any) -> bool:
        return False

    def operand(self, x: Tensor, dim: int, role: Any, product: Any) -> Operand:
        return Operand(x.float())

    def product(self, a: Tensor, b: Tensor, roles: Any = None) -> Tensor:
        return a.float() @ b.float()


def attention(*arguments: Any, **options: Any) -> Any:
    """Fused attention, forward, in its products."""
    return RULES[FUSED_ATTENTION].run(_Exact(), *arguments, **options)


def _attention_backward(*arguments: Any, **options: Any) -> Any:
    return RULES[_FUSED_BACKWARD].run(_Exact(), *arguments, **options)
