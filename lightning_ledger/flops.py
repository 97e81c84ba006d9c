"""Count the floating-point operations of a real training step, forward and backward apart.

Counting happens at the level of aten operations, on the shapes the model really multiplies: padding that a kernel
adds for itself is invisible here. The formulas are PyTorch's own (``torch.utils.flop_counter``); this module adds
those it lacks (attention, LSTM and integer products on CPU) or has wrong (the backward of grouped convolutions), and
names the heavy operations that stay uncounted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_ledger.ledger import Work

aten = torch.ops.aten

FORMAT_OF_DTYPE = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
}

# An operation with such a name does work that grows faster than its operands: leaving it out would be a wrong bill.
_HEAVY = re.compile(
    r"(attention|transformer|conv|rnn|lstm|gru|matmul|linear|(^|_)(b|add|badd)?b?mm|fft|linalg|cdist|solve)"
)
_LIGHT = re.compile(r"(pool|unfold|shape|view|size|is_|_stack|upsample|vector_norm|linalg_cross|fused_(gru|lstm)_cell)")
_AUTHORED_BY_TORCH = {
    "aten",
    "prim",
    "prims",
    "profiler",
    "_c10d_functional",
    "c10d",
    "inductor",
    "debugprims",
}


def _attention_forward(query: Tensor, key: Tensor, value: Tensor) -> int:
    # scores = q k^T and output = p v: 2 * rows * columns * depth each, for every batch entry and query head.
    batch, heads, rows, depth = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (depth + value.shape[-1])


def _attention_backward(query: Tensor, key: Tensor, value: Tensor) -> int:
    # A fused backward recomputes the scores, then needs grad_q, grad_k (depth of q) and grad_v, grad_p (depth of v).
    batch, heads, rows, depth = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (3 * depth + 2 * value.shape[-1])


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    # One convolution's worth for each of the two gradients that is wanted. PyTorch's own formula counts that of the
    # weight as if there were one group.
    *_, transposed, _, _, (wants_x, wants_weight, _) = rest
    positions = (x if transposed else grad)[0, 0].numel()
    return 2 * x.shape[0] * positions * weight.numel() * (int(wants_x) + int(wants_weight))


def _int_mm(a: Tensor, b: Tensor) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _matrix_vector(matrix: Tensor) -> int:
    return 2 * matrix.numel()


def _recurrent_layer(inputs: Tensor, *weights: Tensor) -> int:
    # Each time step multiplies every sample with the input-to-hidden and the hidden-to-hidden matrix.
    return 2 * inputs.shape[0] * inputs.shape[1] * sum(w.numel() for w in weights if w.dim() == 2)


# name of the operation -> FLOPs from its arguments, ahead of PyTorch's own table.
EXTRA_FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: _attention_forward(q, k, v),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *_: _attention_backward(q, k, v),
    "_scaled_dot_product_fused_attention_overrideable": lambda q, k, v, *_: _attention_forward(q, k, v),
    "_scaled_dot_product_fused_attention_overrideable_backward": lambda g, q, k, v, *_: _attention_backward(q, k, v),
    "convolution_backward": _convolution_backward,
    "_int_mm": lambda a, b, *_: _int_mm(a, b),
    "mv": lambda m, *_: _matrix_vector(m),
    "addmv": lambda _, m, *__: _matrix_vector(m),
    "mkldnn_rnn_layer": lambda x, w_ih, w_hh, *_: _recurrent_layer(x, w_ih, w_hh),
    "mkldnn_rnn_layer_backward": lambda x, w_ih, w_hh, *_: 2 * _recurrent_layer(x, w_ih, w_hh),
    "_cudnn_rnn": lambda x, weights, *_: _recurrent_layer(x, *weights),
    "_cudnn_rnn_backward": lambda x, weights, *_: 2 * _recurrent_layer(x, *weights),
}

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one micro-batch's training step, by number format, forward and backward apart.

    Attributes:
        forward: FLOPs of the forward pass by format name.
        backward: FLOPs of the backward pass by format name.

    Example:
        >>> step = StepFlops({"fp32": 100}, {"fp32": 200})
        >>> step.total
        300
    """

    forward: Mapping[str, int]
    backward: Mapping[str, int]

    @property
    def total(self) -> int:
        """FLOPs of both passes together."""
        return sum(self.forward.values()) + sum(self.backward.values())

    def forward_equivalent(self, samples: int, unit_samples: int | None) -> int:
        """FLOPs of one forward-equivalent: of this forward pass, or of its share for ``unit_samples`` samples.

        Args:
            samples: in the micro-batch that was counted; 0 where unknown.
            unit_samples: samples in one forward-equivalent, or None for the pass as it is.
        """
        forward = sum(self.forward.values())
        return max(1, round(forward * unit_samples / samples)) if unit_samples and samples else forward

    def by_format(self) -> dict[str, int]:
        """Both passes together, by format name."""
        return dict(Counter(self.forward) + Counter(self.backward))

    def work(self, phase: Phase | None = None, **fields: Any) -> Work:
        """This count as ledger work: one phase, or both where ``phase`` is None."""
        counts = self.by_format() if phase is None else dict(getattr(self, phase))
        return Work(flops_by_format={name: n for name, n in counts.items() if n}, **fields)


@dataclass
class FlopCounter(TorchDispatchMode):
    """A dispatch mode that counts FLOPs while the real computation runs, unchanged.

    Enter it around a forward pass, set ``phase = "backward"``, and run the backward pass inside it. It computes
    nothing itself: every operation runs as it would have run.

    Args:
        formats_of: names the number formats in which an operation's products will run, with equal FLOPs each; empty,
            or one empty name, for the format of its own operands. Enter the counter *inside* a lowering mode, so that
            it sees each product before it is lowered.

    Attributes:
        phase: what runs now.
        uncounted: heavy operations without a formula.
        lowered: FLOPs whose format ``formats_of`` named.

    Example:
        >>> weight = torch.ones(3, 4, requires_grad=True)
        >>> with FlopCounter() as counter:
        ...     loss = (torch.ones(2, 3) @ weight).sum()
        ...     counter.phase = "backward"
        ...     loss.backward()
        >>> counter.counts().forward, counter.counts().backward      # 2*2*3*4, and one product for the weight
        ({'fp32': 48}, {'fp32': 48})
    """

    formats_of: Callable[[Any, Sequence[Any]], Sequence[str]] | None = None
    phase: Phase = "forward"
    uncounted: set[str] = field(default_factory=set)
    lowered: int = 0
    _counts: dict[Phase, Counter[str]] = field(default_factory=lambda: {"forward": Counter(), "backward": Counter()})

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        known = func._overloadpacket in flop_registry or name in EXTRA_FORMULAS
        if not known and func._can_decompose():
            # Under inference mode composite operations arrive whole; their parts are what the tables know.
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if known:
            formula = EXTRA_FORMULAS.get(name)
            flops = (
                formula(*args)
                if formula is not None
                else flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            )
            self._add(func, args, int(flops))
        elif self._is_heavy(func, name, args):
            self.uncounted.add(f"{func.namespace}::{name}")
        return out

    def _add(self, func: Any, args: Sequence[Any], flops: int) -> None:
        names = (self.formats_of(func, args) if self.formats_of is not None else ()) or ("",)
        share, rest = divmod(flops, len(names))
        for place, name in enumerate(names):
            part = share + (rest if place == 0 else 0)
            self._counts[self.phase][name or _format_of_operands(args)] += part
            self.lowered += part if name else 0

    @staticmethod
    def _is_heavy(func: Any, name: str, args: Sequence[Any]) -> bool:
        if func.namespace not in _AUTHORED_BY_TORCH:
            return sum(isinstance(a, Tensor) and a.is_floating_point() for a in args) >= 2
        return bool(_HEAVY.search(name)) and not _LIGHT.search(name)

    def counts(self) -> StepFlops:
        """What was counted so far."""
        return StepFlops(dict(self._counts["forward"]), dict(self._counts["backward"]))


def _format_of_operands(args: Sequence[Any]) -> str:
    dtype = next((a.dtype for a in args if isinstance(a, Tensor)), torch.float32)
    return FORMAT_OF_DTYPE.get(dtype, str(dtype).removeprefix("torch."))


class UncountedWarning:
    """Tells a user, once for each, which heavy operations of the model have no FLOP formula."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, names: set[str]) -> None:
        """Warn of the names that were not told yet."""
        new = names - self._told
        if new:
            self._told |= new
            rank_zero_warn(
                f"No FLOP formula for {', '.join(sorted(new))}: this work is missing from the ledger. Register one "
                "with torch.utils.flop_counter.register_flop_formula."
            )
