"""Elementwise operations, products and reductions in ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ledger.engines.operators import (
    OPERATORS,
    Builder,
    Translation,
    dtype_of,
    held_as,
    register,
    shape_of,
    type_of,
)

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------- elementwise


def _unary(kind: str) -> Translation:
    return lambda b, node, x: b.op(kind, b.tensor(x, held_as(dtype_of(node))))


for _name, _kind in {
    "abs": "Abs",
    "neg": "Neg",
    "exp": "Exp",
    "log": "Log",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "sqrt": "Sqrt",
    "relu": "Relu",
    "erf": "Erf",
    "sin": "Sin",
    "cos": "Cos",
    "round": "Round",
    "floor": "Floor",
    "ceil": "Ceil",
    "sign": "Sign",
    "reciprocal": "Reciprocal",
}.items():
    OPERATORS[getattr(aten, _name).default] = _unary(_kind)


@register(aten.rsqrt.default)
def _rsqrt(b: Builder, node: fx.Node, x: fx.Node) -> str:
    return b.op("Reciprocal", b.op("Sqrt", b.tensor(x, held_as(dtype_of(node)))))


@register(aten.log1p.default)
def _log1p(b: Builder, node: fx.Node, x: fx.Node) -> str:
    dtype = held_as(dtype_of(node))
    return b.op("Log", b.op("Add", b.tensor(x, dtype), b.constant(1, dtype)))


@register(aten.isnan.default)
def _isnan(b: Builder, node: fx.Node, x: fx.Node) -> str:
    return b.op("IsNaN", b[x])


@register(aten.logical_not.default)
def _not(b: Builder, node: fx.Node, x: fx.Node) -> str:
    return b.op("Not", b.tensor(x, torch.bool))


@register(aten.bitwise_not.default)
def _bitwise_not(b: Builder, node: fx.Node, x: fx.Node) -> str:
    return b.op("Not" if dtype_of(x) == torch.bool else "BitwiseNot", b[x])


@register(aten.gelu.default)
def _gelu(b: Builder, node: fx.Node, x: fx.Node, approximate: str = "none") -> str:
    return b.op("Gelu", b[x], approximate=approximate)


def _arithmetic(kind: str) -> Translation:
    def translate(b: Builder, node: fx.Node, x: Any, y: Any, alpha: float = 1) -> str:
        dtype = held_as(dtype_of(node))
        right = b.tensor(y, dtype)
        if alpha != 1:
            right = b.op("Mul", right, b.constant(alpha, dtype))
        return b.op(kind, b.tensor(x, dtype), right)

    return translate


for _name, _kind in {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}.items():
    for _overload in ("Tensor", "Scalar"):
        OPERATORS[getattr(getattr(aten, _name), _overload)] = _arithmetic(_kind)
OPERATORS[aten.pow.Tensor_Tensor] = OPERATORS[aten.pow.Scalar] = _arithmetic("Pow")
OPERATORS[aten.maximum.default], OPERATORS[aten.minimum.default] = _arithmetic("Max"), _arithmetic("Min")


@register(aten.remainder.Tensor, aten.remainder.Scalar)
def _remainder(b: Builder, node: fx.Node, x: fx.Node, y: Any) -> str:
    """Of the divisor's sign."""
    dtype = held_as(dtype_of(node))
    left, right = b.tensor(x, dtype), b.tensor(y, dtype)
    if not dtype.is_floating_point:
        return b.op("Mod", left, right)
    whole = b.op("Floor", b.op("Div", left, right))
    return b.op("Sub", left, b.op("Mul", whole, right))


@register(aten.pow.Tensor_Scalar)
def _power(b: Builder, node: fx.Node, x: fx.Node, exponent: float) -> str:
    dtype = held_as(dtype_of(node))
    base = b.tensor(x, dtype)
    if exponent in (2, 3):  # torch multiplies too
        square = b.op("Mul", base, base)
        return b.op("Mul", square, base) if exponent == 3 else square
    return b.op("Pow", base, b.constant(exponent, dtype))


def _comparison(kind: str, negated: bool = False) -> Translation:
    def translate(b: Builder, node: fx.Node, x: Any, y: Any) -> str:
        values = [z.meta["val"] if isinstance(z, fx.Node) else z for z in (x, y)]
        common = held_as(torch.result_type(*values))
        if common == torch.bool and kind != "Equal":
            common = torch.int32
        found = b.op(kind, b.tensor(x, common), b.tensor(y, common))
        return b.op("Not", found) if negated else found

    return translate


for _name, _comparing in {
    "eq": _comparison("Equal"),
    "ne": _comparison("Equal", negated=True),
    "lt": _comparison("Less"),
    "le": _comparison("LessOrEqual"),
    "gt": _comparison("Greater"),
    "ge": _comparison("GreaterOrEqual"),
}.items():
    for _overload in ("Tensor", "Scalar"):
        OPERATORS[getattr(getattr(aten, _name), _overload)] = _comparing


def _bitwise(of_bools: str, of_integers: str) -> Translation:
    def translate(b: Builder, node: fx.Node, x: Any, y: Any) -> str:
        dtype = dtype_of(node)
        kind = of_bools if dtype == torch.bool else of_integers
        return b.op(kind, b.tensor(x, dtype), b.tensor(y, dtype))

    return translate


for _name, _kinds in {"and": ("And", "BitwiseAnd"), "or": ("Or", "BitwiseOr"), "xor": ("Xor", "BitwiseXor")}.items():
    for _overload in ("Tensor", "Scalar"):
        OPERATORS[getattr(getattr(aten, f"bitwise_{_name}"), _overload)] = _bitwise(*_kinds)
    OPERATORS[getattr(aten, f"logical_{_name}").default] = lambda b, node, x, y, kind=_kinds[0]: b.op(
        kind, b.tensor(x, torch.bool), b.tensor(y, torch.bool)
    )


@register(aten.where.self)
def _where(b: Builder, node: fx.Node, condition: fx.Node, x: Any, y: Any) -> str:
    dtype = dtype_of(node)
    return b.op("Where", b.tensor(condition, torch.bool), b.tensor(x, dtype), b.tensor(y, dtype))


@register(aten.clamp.default)
def _clamp(b: Builder, node: fx.Node, x: fx.Node, low: float | None = None, high: float | None = None) -> str:
    dtype = held_as(dtype_of(node))
    ends = ["" if end is None else b.constant(end, dtype) for end in (low, high)]
    return b.op("Clip", b.tensor(x, dtype), *ends)


@register(aten._to_copy.default, moves=True)
def _to_copy(b: Builder, node: fx.Node, x: fx.Node, **options: Any) -> str:
    return b.tensor(x, dtype_of(node))


@register(aten.view.dtype, moves=True)
def _bits(b: Builder, node: fx.Node, x: fx.Node, dtype: torch.dtype) -> str:
    return b.op("BitCast", b[x], to=type_of(dtype))


# ---------------------------------------------------------------------------------------------- products, reductions


@register(aten.mm.default, aten.bmm.default)
def _product(b: Builder, node: fx.Node, x: fx.Node, y: fx.Node) -> str:
    return b.op("MatMul", b[x], b[y])


@register(aten._int_mm.default)
def _int_product(b: Builder, node: fx.Node, x: fx.Node, y: fx.Node) -> str:
    return b.op("MatMulInteger", b[x], b[y])


@register(aten.addmm.default)
def _addmm(b: Builder, node: fx.Node, base: fx.Node, x: fx.Node, y: fx.Node, beta: float = 1, alpha: float = 1) -> str:
    return b.op("Gemm", b[x], b[y], b[base], alpha=float(alpha), beta=float(beta))


@register(aten.convolution.default)
def _convolution(
    b: Builder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    inputs = [b[x], b[weight], *([] if bias is None else [b[bias]])]
    more: dict[str, Any] = {"output_padding": list(output_padding)} if transposed else {}
    return b.op(
        "ConvTranspose" if transposed else "Conv",
        *inputs,
        strides=list(stride),
        pads=[*padding, *padding],
        dilations=list(dilation),
        group=groups,
        **more,
    )


@register(aten._softmax.default)
def _softmax(b: Builder, node: fx.Node, x: fx.Node, dim: int, half: bool) -> str:
    return b.op("Softmax", b[x], axis=dim)


@register(aten._log_softmax.default)
def _log_softmax(b: Builder, node: fx.Node, x: fx.Node, dim: int, half: bool) -> str:
    return b.op("LogSoftmax", b[x], axis=dim)


def _reduction(kind: str, inside: torch.dtype | None = None) -> Translation:
    """``inside`` is the dtype that it runs in, where that is not the result's."""

    def translate(b: Builder, node: fx.Node, x: fx.Node, dim: Any = None, keep: bool = False, **options: Any) -> str:
        dtype = inside or held_as(dtype_of(node))
        axes = [dim] if isinstance(dim, int) else list(dim or ())
        which = b.constant(axes or list(range(len(shape_of(x)))))
        value = b.tensor(x, torch.bool) if inside else b.tensor(x, dtype)
        value = b.cast(value, torch.bool, inside) if inside else value
        if not shape_of(x):
            return value if not inside else b.cast(value, inside, dtype_of(node))
        found = b.op(kind, value, which, keepdims=int(keep))
        return b.cast(found, dtype, dtype_of(node)) if inside else found

    return translate


OPERATORS[aten.sum.dim_IntList] = OPERATORS[aten.sum.default] = _reduction("ReduceSum")
OPERATORS[aten.mean.dim] = OPERATORS[aten.mean.default] = _reduction("ReduceMean")
OPERATORS[aten.amax.default], OPERATORS[aten.amin.default] = _reduction("ReduceMax"), _reduction("ReduceMin")
for _overload in ("default", "dim", "dims"):
    OPERATORS[getattr(aten.any, _overload)] = _reduction("ReduceMax", inside=torch.int32)
    OPERATORS[getattr(aten.all, _overload)] = _reduction("ReduceMin", inside=torch.int32)


@register(aten.cumsum.default)
def _cumsum(b: Builder, node: fx.Node, x: fx.Node, dim: int, **options: Any) -> str:
    return b.op("CumSum", b.tensor(x, held_as(dtype_of(node))), b.constant(dim))
