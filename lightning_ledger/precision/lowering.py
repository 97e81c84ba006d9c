"""The one table from aten operations to their low-precision form, and the dispatch mode that applies it.

Each product in the table is replaced by the same product of rounded operands; sums, biases and everything
outside the table stay as they are. Run a training step *and its backward pass* inside the mode and all three
products of a layer, output, input gradient and weight gradient, run in the format, each with scales along its
own contraction:

    y = q(x) q(W)'        dx = q(dy) q(W)        dW = q(dy)' q(x)

Derivatives are therefore those of the unrounded program, evaluated in low precision (straight-through). Fused
kernels are single operations to torch: attention's stay outside the table, so select math attention
(``torch.nn.attention.sdpa_kernel``) to have its products lowered too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ledger.precision.formats import Format, Identity, Operand, get_format
from lightning_ledger.precision.rounding import ROUNDINGS, Noise, derive_seed, noise_from

aten = torch.ops.aten


class Lowering:
    """A number format applied to every matrix product and convolution that runs inside ``mode``.

    Args:
        format: a name in ``FORMATS``, or a ``Format``.
        rounding: "nearest", or "stochastic": unbiased, from private generators only.

    Raises:
        ValueError: unknown format or rounding.

    Example:
        >>> lowering = Lowering("int8")
        >>> x, w = torch.tensor([[1.0, 0.003]]), torch.eye(2)
        >>> with lowering.mode(seed=0):
        ...     y = x @ w
        >>> y
        tensor([[1., 0.]])
    """

    def __init__(self, format: str | Format, rounding: str = "nearest") -> None:
        if rounding not in ROUNDINGS:
            known = " or ".join(map(repr, ROUNDINGS))
            raise ValueError(f"rounding={rounding!r} is not a way of rounding; use {known}.")
        self.format = get_format(format)
        self.rounding = rounding
        self._weights = _Weights()

    def mode(self, seed: int) -> AbstractContextManager[Any]:
        """Return a context in which the operations of the table run in the format.

        Args:
            seed: of the noise of stochastic rounding. The same seed, and the same operations in the same
                order, give the same bits; torch's global generators are neither read nor advanced.

        Raises:
            NotImplementedError: stochastic rounding while ``make_fx`` traces.
        """
        # Unchanged operations need no mode at all: nothing could be closer to bit-identical.
        return nullcontext() if isinstance(self.format, Identity) else _LoweringMode(self, seed)

    def refresh(self, weights: Iterable[Tensor], seed: int) -> None:
        """Declare which tensors are weights: each is rounded once per kind of use, again only after a change.

        Views of a weight are recognised by its storage; casts of it (autocast's) are not weights. Rounded
        weights are dropped at the next refresh, and when torch records a write to the weight. Fused optimizers
        and writes through ``.data`` leave no such record: refresh after every optimizer step.

        Args:
            weights: parameters, or copies of them; they are kept alive until the next refresh.
            seed: of the noise of stochastic rounding. A weight's noise depends on the seed, its place among
                ``weights`` and the contracted axis, not on the order in which weights are used.
        """
        self._weights = _Weights(weights, seed)

    def format_of(self, func: Any, args: Sequence[Any]) -> str | None:
        """The name of the format in which an aten operation runs inside ``mode``, None if it is not lowered.

        Nothing is executed; for counting work per format.

        Args:
            func: an operator overload, such as ``torch.ops.aten.mm.default``.
            args: its positional arguments.

        Example:
            >>> a = torch.ones(2, 2)
            >>> Lowering("int4").format_of(torch.ops.aten.mm.default, (a, a))
            'int4'
            >>> Lowering("int4").format_of(torch.ops.aten.add.Tensor, (a, a)) is None
            True
        """
        return self.format.name if func in _RULES and _applies(func, args) else None

    def noise(self, device: torch.device, *parts: object) -> Noise | None:
        """Noise from a new private generator seeded by ``parts``; None for nearest rounding."""
        if self.rounding == "nearest":
            return None
        return noise_from(Generator(device).manual_seed(derive_seed(*parts)))


class _LoweringMode(TorchDispatchMode):
    """Runs the operations of the table in a format; see ``Lowering.mode``."""

    def __init__(self, lowering: Lowering, seed: int) -> None:
        super().__init__()
        self._lowering = lowering
        self._seed = seed
        self._noise: dict[torch.device, Noise | None] = {}
        self._weights = lowering._weights
        if get_proxy_mode() is not None:
            if lowering.rounding != "nearest":
                raise NotImplementedError(
                    f"rounding={lowering.rounding!r} cannot be traced: its generator has no place in a "
                    "traced program; trace rounding='nearest', or run the program eagerly."
                )
            # A weight rounded before the trace would be baked into the program as a constant.
            self._weights = _Weights()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and _applies(func, args):
            return rule(self, *args, **kwargs)
        if torch.is_inference_mode_enabled():
            # Without autograd, composite operations such as linear arrive whole; their parts come back here.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def operand(self, x: Tensor, dim: int) -> Operand:
        """``x`` rounded for a product that contracts ``dim``; a weight may come from the cache."""
        lowering = self._lowering
        if (identity := self._weights.identify(x, dim)) is not None:

            def quantize(*parts: object) -> Operand:
                return lowering.format.quantize(x, dim, lowering.noise(x.device, *parts))

            return self._weights.recall(identity, x, quantize)
        if x.device not in self._noise:
            self._noise[x.device] = lowering.noise(x.device, "activations", self._seed)
        return lowering.format.quantize(x, dim, self._noise[x.device])

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """The low-precision product of two matrices, or of two batches of them, in fp32."""
        return self._lowering.format.multiply(self.operand(a, -1), self.operand(b, -2))


class _Weights:
    """Rounded weights, by where and how they lie in memory."""

    def __init__(self, weights: Iterable[Tensor] = (), seed: int = 0) -> None:
        self._seed = seed
        self._forms: dict[tuple[object, ...], tuple[int, Operand]] = {}
        # The storages are held so that no activation can be given the address of a weight that was freed.
        self._storages: dict[int, tuple[int, UntypedStorage]] = {}
        for weight in weights:
            storage = weight.untyped_storage()
            if storage.data_ptr():  # a meta tensor has none
                self._storages.setdefault(storage.data_ptr(), (len(self._storages), storage))

    def identify(self, x: Tensor, dim: int) -> tuple[object, ...] | None:
        """Which weight, which view of it and which axis; None if ``x`` is no weight."""
        if not self._storages:
            return None
        index, _ = self._storages.get(x.untyped_storage().data_ptr(), (None, None))
        # Inference tensors keep no version: writes to them would go unnoticed.
        if index is None or x.is_inference():
            return None
        return index, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, dim

    def recall(self, identity: tuple[object, ...], x: Tensor, quantize: Callable[..., Operand]) -> Operand:
        """The rounded form; unless up to date, from ``quantize``, which is told what the noise depends on."""
        known = self._forms.get(identity)
        if known is None or known[0] != x._version:
            known = x._version, quantize("weight", self._seed, *identity)
            self._forms[identity] = known
        return known[1]


_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _applies(func: Any, args: Sequence[Any]) -> bool:
    """Whether the rule fits: dense tensors of one float dtype, none empty; no transposed convolution."""
    transposed = _TRANSPOSED.get(func)
    if transposed is not None and args[transposed]:
        return False
    tensors = [x for x in args if isinstance(x, Tensor)]
    dtype = tensors[0].dtype
    return dtype in _FLOATS and all(x.dtype == dtype and x.layout is torch.strided and x.numel() for x in tensors)


def _mm(mode: _LoweringMode, a: Tensor, b: Tensor) -> Tensor:
    """mm and bmm: a b."""
    return mode.product(a, b).to(a.dtype)


def _addmm(mode: _LoweringMode, base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """addmm and baddbmm: beta base + alpha a b, with ``base`` exact, and not even read where beta is 0."""
    product = mode.product(a, b)
    if alpha != 1:
        product.mul_(alpha)
    if beta != 0:
        product.add_(base, alpha=beta)
    return product.to(a.dtype)


def _convolution(mode: _LoweringMode, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Contracts input channels and kernel: rounded operands, convolved in high precision, an exact bias."""
    groups = geometry[-1]
    inputs, kernel = _along_channels(mode, x, groups), _along_kernel(mode, weight)
    y: Tensor = aten.convolution.default(inputs, kernel, None, *geometry).float()
    if bias is not None:
        y.add_(bias.view(-1, *[1] * (x.dim() - 2)))
    return y.to(x.dtype)


def _convolution_backward(
    mode: _LoweringMode, dy: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
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
    if wants_dx:
        outputs, kernel = _along_channels(mode, dy, groups), _along_outputs(mode, weight, groups)
        dx = backward(outputs, torch.empty_like(x, dtype=kernel.dtype), kernel, 0).to(x.dtype)
    if wants_dw:
        outputs, inputs = _along_positions(mode, dy), _along_positions(mode, x)
        dw = backward(outputs, inputs, torch.empty_like(weight, dtype=inputs.dtype), 1).to(weight.dtype)
    if wants_db:
        db = backward(dy, x, weight, 2)
    return dx, dw, db


def _along_channels(mode: _LoweringMode, x: Tensor, groups: int) -> Tensor:
    """[batch, channels, *positions] rounded along the channels of each group."""
    batch, channels = x.shape[:2]
    rows = x.reshape(batch, groups, channels // groups, -1)
    return mode.operand(rows, -2).dequantize().reshape(x.shape)


def _along_positions(mode: _LoweringMode, x: Tensor) -> Tensor:
    """[batch, channels, *positions] rounded, channel by channel, along batch and positions together."""
    by_channel = x.transpose(0, 1)
    rows = by_channel.reshape(1, x.shape[1], -1)
    return mode.operand(rows, -1).dequantize().reshape(by_channel.shape).transpose(0, 1)


def _along_kernel(mode: _LoweringMode, weight: Tensor) -> Tensor:
    """[outputs, inputs / groups, *kernel] rounded, output by output, along inputs and kernel together."""
    rows = weight.reshape(1, weight.shape[0], -1)
    return mode.operand(rows, -1).dequantize().reshape(weight.shape)


def _along_outputs(mode: _LoweringMode, weight: Tensor, groups: int) -> Tensor:
    """[outputs, inputs / groups, *kernel] rounded along the outputs of each group."""
    rows = weight.reshape(groups, weight.shape[0] // groups, -1)
    return mode.operand(rows, -2).dequantize().reshape(weight.shape)


_RULES: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}

# Where the arguments say that a convolution is transposed: those stay in high precision.
_TRANSPOSED = {aten.convolution.default: 6, aten.convolution_backward.default: 7}
