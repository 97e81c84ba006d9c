"""The one table from aten operations to their low-precision form.

Each product of a lowered operation is replaced by the same product of rounded operands; sums, biases, softmax and
everything outside the table stay as they are. Fused attention is taken apart into its products, one layer's scores at
a time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_ledger.precision.formats import Operand, Role
from lightning_ledger.precision.specs import Product

aten = torch.ops.aten


class Run(Protocol):
    """One lowered operation, as the rules see it: its products, each in the format chosen for it."""

    def lowers(self, product: Product) -> bool:
        """Whether this product runs in a format at all."""

    def native(self, product: Product) -> bool:
        """Whether torch's own kernel for the whole operation takes operands in the format."""

    def rounds_weights_once(self, product: Product) -> bool:
        """Whether the forward product's rounded weight serves this product too."""

    def operand(self, x: Tensor, dim: int, role: Role, product: Product) -> Operand:
        """``x`` rounded for a product that contracts ``dim``; a weight may come from the cache."""

    def product(self, a: Tensor, b: Tensor, roles: tuple[Role, Role] | None = None) -> Tensor:
        """The low-precision product of two matrices, or of two batches of them, in fp32."""


Lengths = Callable[[Product, Sequence[Any]], tuple[int, ...]]


class Rule(NamedTuple):
    """How an operation is lowered.

    Attributes:
        run: the operation in low precision.
        operands: where the tensors that it multiplies stand among its arguments.
        lengths: how many numbers each product contracts.
        products: what they are, from the arguments; None where that depends on the operands and on the pass.
        transposed: where the arguments say that a convolution is transposed, which stays in high precision.
    """

    run: Callable[..., Any]
    operands: tuple[int, ...]
    lengths: Lengths
    products: Callable[[Sequence[Any]], tuple[Product, ...]] | None = None
    transposed: int | None = None


_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def applies(func: Any, args: Sequence[Any]) -> bool:
    """Whether a rule fits: dense tensors of one float dtype, none empty; no transposed convolution."""
    rule = RULES.get(func)
    if rule is None or (rule.transposed is not None and args[rule.transposed]):
        return False
    tensors = [args[i] for i in rule.operands]
    dtype = tensors[0].dtype
    return dtype in _FLOATS and all(x.dtype == dtype and x.layout is torch.strided and x.numel() for x in tensors)


def _mm(run: Run, a: Tensor, b: Tensor) -> Tensor:
    """mm and bmm: a b."""
    return run.product(a, b).to(a.dtype)


def _addmm(run: Run, base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """addmm and baddbmm: beta base + alpha a b, with ``base`` exact, and not even read where beta is 0."""
    product = run.product(a, b)
    if alpha != 1:
        product.mul_(alpha)
    if beta != 0:
        product.add_(base, alpha=beta)
    return product.to(a.dtype)


def _convolution(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Contracts input channels and kernel: rounded operands, convolved in high precision, an exact bias."""
    groups = geometry[-1]
    inputs, kernel = _along_channels(run, x, groups, "activation", "output"), _along_kernel(run, weight, "output")
    y: Tensor = aten.convolution.default(inputs, kernel, None, *geometry).float()
    if bias is not None:
        y.add_(bias.view(-1, *[1] * (x.dim() - 2)))
    return y.to(x.dtype)


def _convolution_backward(
    run: Run, dy: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The input gradient contracts the output channels, the weight gradient the batch and its positions."""
    *geometry, (wants_dx, wants_dw, wants_db) = rest
    groups = geometry[-1]
    dx = dw = db = None

    def backward(dy: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        mask = [which == i for i in range(3)]
        gradients = aten.convolution_backward.default(dy, x, weight, bias_sizes, *geometry, mask)
        gradient: Tensor = gradients[which]
        return gradient

    # Where an argument serves for its shape alone, an empty tensor of the right dtype stands in.
    if wants_dx and not run.lowers("grad_input"):
        dx = backward(dy, x, weight, 0)
    elif wants_dx:
        outputs = _along_channels(run, dy, groups, "gradient", "grad_input")
        once = run.rounds_weights_once("grad_input")
        kernel = _along_kernel(run, weight, "grad_input") if once else _along_outputs(run, weight, groups)
        dx = backward(outputs, torch.empty_like(x, dtype=kernel.dtype), kernel, 0).to(x.dtype)
    if wants_dw and not run.lowers("grad_weight"):
        dw = backward(dy, x, weight, 1)
    elif wants_dw:
        outputs, inputs = _along_positions(run, dy, "gradient"), _along_positions(run, x, "activation")
        dw = backward(outputs, inputs, torch.empty_like(weight, dtype=inputs.dtype), 1).to(weight.dtype)
    if wants_db:
        db = backward(dy, x, weight, 2)
    return dx, dw, db


def _along_channels(run: Run, x: Tensor, groups: int, role: Role, product: Product) -> Tensor:
    """[batch, channels, *positions] rounded along the channels of each group."""
    batch, channels = x.shape[:2]
    rows = x.reshape(batch, groups, channels // groups, -1)
    return run.operand(rows, -2, role, product).dequantize().reshape(x.shape)


def _along_positions(run: Run, x: Tensor, role: Role) -> Tensor:
    """[batch, channels, *positions] rounded, channel by channel, along batch and positions together."""
    by_channel = x.transpose(0, 1)
    rows = by_channel.reshape(1, x.shape[1], -1)
    return run.operand(rows, -1, role, "grad_weight").dequantize().reshape(by_channel.shape).transpose(0, 1)


def _along_kernel(run: Run, weight: Tensor, product: Product) -> Tensor:
    """[outputs, inputs / groups, *kernel] rounded, output by output, along inputs and kernel together."""
    rows = weight.reshape(1, weight.shape[0], -1)
    return run.operand(rows, -1, "weight", product).dequantize().reshape(weight.shape)


def _along_outputs(run: Run, weight: Tensor, groups: int) -> Tensor:
    """[outputs, inputs / groups, *kernel] rounded along the outputs of each group."""
    rows = weight.reshape(groups, weight.shape[0] // groups, -1)
    return run.operand(rows, -2, "weight", "grad_input").dequantize().reshape(weight.shape)


def _attention(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores and output in low precision, softmax in high: what torch's fused kernel on CPU returns."""
    if run.native("attention"):
        operands = [run.operand(x, -1, "activation", "attention").values for x in (q, k, v)]
        mask = None if attn_mask is None else attn_mask.to(operands[0].dtype)
        y, sums = _FORWARD(*operands, dropout, causal, attn_mask=mask, scale=scale)
        return y.to(q.dtype), sums.float()
    groups = q.shape[1] // k.shape[1]
    scores = _scores(run, q, _per_query(k, groups), causal, attn_mask, scale)
    sums = scores.logsumexp(-1)
    y = run.product(_probabilities(scores, attn_mask), _per_query(v, groups), ("activation", "activation"))
    return torch.empty_like(q).copy_(y), sums  # laid out as the kernel's: the user's code may take a view of it


def _attention_backward(
    run: Run,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores once more, as fused kernels do, and the four products of the backward pass."""
    if run.native("attention"):
        low = [run.operand(dy, -1, "gradient", "attention").values]
        low += [run.operand(x, -1, "activation", "attention").values for x in (q, k, v)]
        mask = None if attn_mask is None else attn_mask.to(low[0].dtype)
        gradients = _BACKWARD(*low, y.to(low[0].dtype), sums, dropout, causal, attn_mask=mask, scale=scale)
        return tuple(g.to(q.dtype) for g in gradients)
    groups = q.shape[1] // k.shape[1]
    keys, values = _per_query(k, groups), _per_query(v, groups)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    p = _probabilities(_scores(run, q, keys, causal, attn_mask, scale), attn_mask)
    dv = run.product(p.mT, dy, ("activation", "gradient"))
    dp = run.product(dy, values.mT, ("gradient", "activation"))
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * factor
    dq = run.product(ds, keys, ("gradient", "activation"))
    dk = run.product(ds.mT, q, ("gradient", "activation"))
    return dq.to(q.dtype), _per_key(dk, groups).to(k.dtype), _per_key(dv, groups).to(v.dtype)


def _scores(run: Run, q: Tensor, keys: Tensor, causal: bool, attn_mask: Tensor | None, scale: float | None) -> Tensor:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = run.product(q, keys.mT, ("activation", "activation")) * factor
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores


def _probabilities(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Softmax; zeros where a mask hides a whole row, as in torch's kernels."""
    p = scores.softmax(-1)
    return p if attn_mask is None else p.masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)


def _per_query(x: Tensor, groups: int) -> Tensor:
    """Heads of keys or values repeated for each query head that shares them."""
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _per_key(x: Tensor, groups: int) -> Tensor:
    """The sum over query heads that share a key's or value's head."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _of_left(at: int) -> Lengths:
    return lambda product, args: (args[at].shape[-1],)


def _of_convolution(product: Product, args: Sequence[Any]) -> tuple[int, ...]:
    weight = args[1]
    return weight.shape[1], weight[0].numel()


def _of_convolution_backward(product: Product, args: Sequence[Any]) -> tuple[int, ...]:
    dy, x, weight, groups = args[0], args[1], args[2], args[9]
    if product == "grad_input":
        return (weight.shape[0] // groups,)
    return dy.numel() // dy.shape[1], x.numel() // x.shape[1]


def _wanted(args: Sequence[Any]) -> tuple[Product, ...]:
    wants_dx, wants_dw, _ = args[10]
    wanted: dict[Product, bool] = {"grad_input": wants_dx, "grad_weight": wants_dw}
    return tuple(product for product, wants in wanted.items() if wants)


def _of_attention(q: int) -> Lengths:
    def lengths(product: Product, args: Sequence[Any]) -> tuple[int, ...]:
        rows, depth = args[q].shape[-2:]
        return (depth, args[q + 1].shape[-2], *([rows, args[q + 2].shape[-1]] if q else []))

    return lengths


RULES: dict[Any, Rule] = {
    aten.mm.default: Rule(_mm, (0, 1), _of_left(0)),
    aten.bmm.default: Rule(_mm, (0, 1), _of_left(0)),
    aten.addmm.default: Rule(_addmm, (1, 2), _of_left(1)),
    aten.baddbmm.default: Rule(_addmm, (1, 2), _of_left(1)),
    aten.convolution.default: Rule(_convolution, (0, 1), _of_convolution, lambda _: ("output",), transposed=6),
    aten.convolution_backward.default: Rule(
        _convolution_backward, (0, 1, 2), _of_convolution_backward, _wanted, transposed=7
    ),
    _FORWARD: Rule(_attention, (0, 1, 2), _of_attention(0), lambda _: ("attention",)),
    _BACKWARD: Rule(_attention_backward, (0, 1, 2, 3), _of_attention(1), lambda _: ("attention",)),
}
"""Every operation that is lowered."""
