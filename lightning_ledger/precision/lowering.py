"""A number format applied to a whole training step: every product of its forward and backward pass.

Run a training step *and its backward pass* inside the mode and all three products of a layer, output, input gradient
and weight gradient, run in the format, each with scales along its own contraction:

    y = q(x) q(W)'        dx = q(dy) q(W)        dW = q(dy)' q(x)

Derivatives are therefore those of the unrounded program, evaluated in low precision (straight-through). Which
operations are lowered, and how, stands in ``rules.py``; everything else runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ledger.precision.formats import BFloat16, Format, Identity, Operand, Role
from lightning_ledger.precision.layers import Layers
from lightning_ledger.precision.rotation import rotate
from lightning_ledger.precision.rounding import ROUNDINGS, Noise, derive_seed, noise_from
from lightning_ledger.precision.rules import RULES, applies
from lightning_ledger.precision.specs import Product, ProductFormats, parse_formats
from lightning_ledger.precision.weights import RoundedWeights, Tape, WeightUse

aten = torch.ops.aten


class Lowering:
    """A number format applied to every matrix product, convolution and attention that runs inside ``mode``.

    Args:
        format: a name in ``FORMATS``, a ``Format``, or a spec that sets products apart, such as
            ``"int8:grad_weight=bf16"`` (see ``parse_formats``).
        rounding: "nearest", or "stochastic": unbiased, from private generators only.
        rotation: rotate both operands of every matrix product by a random Hadamard matrix first, which spreads
            outliers over their block and leaves the exact product as it is.
        keep: globs of layers that stay in high precision, such as ``["head", "blocks.0"]``.
        module: the module whose layers ``keep`` names, and the reports in ``unlowered``.

    Attributes:
        unlowered: why products stayed in high precision, by layer and product, as far as seen.

    Raises:
        ValueError: unknown format or rounding, a glob that matches no layer, or a rotation that does not apply.

    Example:
        >>> lowering = Lowering("int8")
        >>> x, w = torch.tensor([[1.0, 0.003]]), torch.eye(2)
        >>> with lowering.mode(seed=0):
        ...     y = x @ w
        >>> y
        tensor([[1., 0.]])
    """

    def __init__(
        self,
        format: str | Format | ProductFormats,
        rounding: str = "nearest",
        rotation: bool = False,
        keep: Sequence[str] = (),
        module: torch.nn.Module | None = None,
    ) -> None:
        if rounding not in ROUNDINGS:
            known = " or ".join(map(repr, ROUNDINGS))
            raise ValueError(f"rounding={rounding!r} is not a way of rounding; use {known}.")
        self.formats = parse_formats(format)
        once = [fmt.name for fmt in self.formats.distinct if fmt.rounds_weights_once]
        if rotation and once:
            raise ValueError(
                f"rotation=True does not apply to {once[0]}: its weights are rounded once, for products that contract "
                "either axis, and a rotation turns one axis. Choose rotation=False or another format."
            )
        self.rounding = rounding
        self.rotation = rotation
        self.keep = tuple(keep)
        self.unlowered: dict[tuple[str, str], str] = {}
        self._layers = Layers(module)
        if unmatched := self._layers.unmatched(self.keep):
            raise ValueError(
                f"keep={list(self.keep)!r}: {', '.join(map(repr, unmatched))} matches no layer of "
                f"{type(module).__name__}. Globs are matched against module paths, such as 'head' or 'blocks.*.mlp_in'."
            )
        self._names: tuple[str, ...] = ()
        self._weights = RoundedWeights()
        self._forward: dict[int, _Seen] = {}
        self._activations: set[StorageWeakRef] = set()

    @contextmanager
    def mode(self, seed: int, tape: Tape | None = None) -> Iterator[None]:
        """A context in which the operations of the table run in the format.

        Args:
            seed: of the noise of stochastic rounding. The same seed, and the same operations in the same
                order, give the same bits; torch's global generators are neither read nor advanced.
            tape: where a trace writes down the rounded weights and the noise that it used.
        """
        if all(isinstance(fmt, Identity) for fmt in self.formats.distinct):
            yield  # nothing could be closer to bit-identical
            return
        self._forward, self._activations = {}, set()
        try:
            with self._layers.watched(), _LoweringMode(self, seed, tape):
                yield
        finally:
            self._weights.forget_casts()

    def refresh(self, weights: Mapping[str, Tensor] | Iterable[Tensor], seed: int) -> None:
        """Declare which tensors are weights: each is rounded once per kind of use, again only after a change.

        Views of a weight are recognised by its storage, and so are its casts (autocast's), which are rounded from
        the weight itself. Rounded weights are dropped at the next refresh, and when torch records a write to the
        weight. Fused optimizers and writes through ``.data`` leave no such record: refresh after every optimizer step.

        Args:
            weights: parameters, or copies of them, kept alive until the next refresh; by name, where ``keep`` shall
                find the layers they belong to.
            seed: of the noise of stochastic rounding. A weight's noise depends on the seed, its place among
                ``weights`` and the contracted axis, not on the order in which weights are used.
        """

        def quantize(use: WeightUse, view: Tensor) -> Operand:
            noise = self.noise(view.device, "weight", seed, *use[:5])
            return self._quantize(view, use.dim, use.format, noise, "weight", use.rotated)

        named = weights if isinstance(weights, Mapping) else dict(enumerate(weights))
        self._names = tuple(map(str, named))
        self._weights = RoundedWeights(named.values(), quantize)

    def rounded(self, use: WeightUse) -> Operand:
        """The rounded form of a weight, for a program that takes it as an input."""
        return self._weights.recall(use)

    def weight_bytes(self) -> int:
        """What the weights that were rounded since the last refresh take in the format, with their scales."""
        sizes = [(use.format.bits * held.values.numel(), held.scale) for use, held in self._weights.held().items()]
        return sum(n // 8 + (0 if s is None else s.numel() * s.element_size()) for n, s in sizes)

    def noise(self, device: torch.device, *parts: object) -> Noise | None:
        """Noise from a new private generator seeded by ``parts``; None for nearest rounding."""
        if self.rounding == "nearest":
            return None
        return noise_from(Generator(device).manual_seed(derive_seed(*parts)))

    def pass_noise(self, device: torch.device, seed: int) -> Noise | None:
        """The noise of one pass, drawn from in the order of its operations."""
        return self.noise(device, "activations", seed)

    def formats_of(self, func: Any, args: Sequence[Any]) -> tuple[str, ...]:
        """The formats in which an aten operation's products run inside ``mode``; empty if it is not lowered.

        Nothing is executed; for counting work per format. Where several products share an operation (a convolution's
        backward pass) there is one entry for each, ``""`` for one that stays in high precision.

        Args:
            func: an operator overload, such as ``torch.ops.aten.mm.default``.
            args: its positional arguments.

        Example:
            >>> a = torch.ones(2, 2)
            >>> Lowering("int4").formats_of(torch.ops.aten.mm.default, (a, a))
            ('int4',)
            >>> Lowering("int4").formats_of(torch.ops.aten.add.Tensor, (a, a))
            ()
        """
        if not applies(func, args):
            return ()
        names = tuple(fmt.name if fmt else "" for fmt in self._choose(func, args).formats.values())
        return names if any(names) else ()

    def _choose(self, func: Any, args: Sequence[Any]) -> _Chosen:
        """The format of each product of an operation; None for one that stays in high precision."""
        rule = RULES[func]
        operands = [args[i] for i in rule.operands]
        indices = [self._weights.index(x) for x in operands]
        node, backward = torch._C._current_autograd_node(), _in_backward()
        seen = self._forward.get(node._sequence_nr()) if node is not None and backward else None
        if seen is None:
            seen = self._look(rule, operands, indices)
            if not backward:
                self.remember_activations(operands)
                # The first to come with a number made the node; one without a node of its own comes later.
                seen = self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, seen)
        if rule.products is not None:
            products = rule.products(args)
        else:
            products = (_product(backward, seen.attention, any(i is not None for i in indices)),)
        formats = {product: self._format(product, rule.lengths(product, args), seen) for product in products}
        return _Chosen(formats, backward)

    def remember_activations(self, tensors: Iterable[Any]) -> None:
        """What the forward pass multiplies or computes, also where it is computed again: the rest are gradients.

        References that keep no numbers alive, but no other storage gets their address.
        """
        dense = (x for x in tensors if isinstance(x, Tensor) and x.layout is torch.strided)
        self._activations.update(StorageWeakRef(x.untyped_storage()) for x in dense)

    def is_activation(self, x: Tensor) -> bool:
        """Whether the forward pass multiplied or computed ``x``, or what it is a view of."""
        return StorageWeakRef(x.untyped_storage()) in self._activations

    def _look(self, rule: Any, operands: Sequence[Tensor], indices: Sequence[int | None]) -> _Seen:
        weights = [self._names[i] for i in indices if i is not None]
        paths = [self._layers.current, *(path for name in weights for path in self._layers.owners(name))]
        attention = not weights and operands[0].dim() == 3
        return _Seen(tuple(paths), attention)

    def _format(self, product: Product, lengths: Sequence[int], seen: _Seen) -> Format | None:
        fmt: Format = getattr(self.formats, product)
        kept = next((glob for glob in self.keep if any(Layers.matching(glob, path) for path in seen.paths)), None)
        reason = f"kept by keep={kept!r}" if kept else next(filter(None, map(fmt.refuses, lengths)), "")
        if not reason:
            return fmt
        self.unlowered[next(filter(None, seen.paths), ""), product] = reason
        return None

    def _quantize(self, x: Tensor, dim: int, fmt: Format, noise: Noise | None, role: Role, rotated: bool) -> Operand:
        return fmt.quantize(rotate(x, dim) if rotated else x, dim, noise, role)


def _in_backward() -> bool:
    """Whether a backward pass runs; a forward pass that it computes again (checkpointing) has gradients enabled."""
    return torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()


def _product(backward: bool, attention: bool, weighted: bool) -> Product:
    """What a matrix product is: of a layer, forward or backward, or of two activations in attention."""
    if attention:
        return "attention"
    if not backward:
        return "output"
    return "grad_input" if weighted else "grad_weight"


class _Seen(NamedTuple):
    """What a forward operation leaves for its backward ones.

    Attributes:
        paths: the layer whose forward ran, and those that own its weights.
        attention: whether it multiplied batches of matrices, none of them a weight.
    """

    paths: tuple[str, ...]
    attention: bool


class _Chosen(NamedTuple):
    """The format of each product of an operation, and whether it belongs to the backward pass."""

    formats: dict[Product, Format | None]
    backward: bool


class _LoweringMode(TorchDispatchMode):
    """Runs the operations of the table in a format; see ``Lowering.mode``."""

    def __init__(self, lowering: Lowering, seed: int, tape: Tape | None) -> None:
        super().__init__()
        self.lowering = lowering
        self.tape = tape
        self._seed = seed
        self._noise: dict[torch.device, Noise | None] = {}
        self._weights = lowering._weights
        if tape is None and get_proxy_mode() is not None:
            if lowering.rounding != "nearest":
                raise NotImplementedError(
                    f"rounding={lowering.rounding!r} cannot be traced without a tape for its noise: pass "
                    "mode(seed, tape=Tape()), and give the program new noise in every run."
                )
            self._weights = RoundedWeights()  # what was rounded before would be baked into the program

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if applies(func, args):
            chosen = self.lowering._choose(func, args)
            if any(fmt is not None and not isinstance(fmt, Identity) for fmt in chosen.formats.values()):
                return self._remember(RULES[func].run(_Run(self, chosen), *args, **kwargs))
        elif torch.is_inference_mode_enabled():
            # Without autograd, composite operations such as linear arrive whole; their parts come back here.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if func is aten._to_copy.default:
            self._weights.remember_cast(args[0], result)
        return self._remember(result)

    def _remember(self, result: Any) -> Any:
        if not _in_backward():
            self.lowering.remember_activations(result if isinstance(result, list | tuple) else (result,))
        return result

    def weight(self, use: WeightUse) -> Operand:
        """A rounded weight."""
        operand = self._weights.recall(use)
        if self.tape is not None and all(use != known for known, _ in self.tape.weights):
            self.tape.weights.append((use, operand))
        return operand

    def noise(self, device: torch.device) -> Noise | None:
        """The noise of this pass on a device."""
        if device not in self._noise:
            self._noise[device] = self.lowering.pass_noise(device, self._seed)
        draw = self._noise[device]
        if draw is None or self.tape is None:
            return draw
        tape = self.tape.noise

        def drawn(like: Tensor) -> Tensor:
            with disable_proxy_modes_tracing():
                tape.append(draw(torch.empty(like.shape, device=like.device)))
            return tape[-1]

        return drawn


class _Run:
    """One lowered operation; see ``rules.Run``."""

    def __init__(self, mode: _LoweringMode, chosen: _Chosen) -> None:
        self._mode = mode
        self._formats = chosen.formats
        self._backward = chosen.backward

    def lowers(self, product: Product) -> bool:
        return not isinstance(self._formats[product], Identity | None)

    def native(self, product: Product) -> bool:
        return isinstance(self._formats[product], BFloat16)

    def rounds_weights_once(self, product: Product) -> bool:
        fmt = self._formats[product]
        return fmt is not None and fmt.rounds_weights_once

    def operand(self, x: Tensor, dim: int, role: Role, product: Product, rotated: bool = False) -> Operand:
        fmt = self._formats[product]
        assert fmt is not None
        use = self._mode._weights.use(x, dim, fmt, rotated) if role == "weight" else None
        if use is not None:
            return self._mode.weight(use)
        return self._mode.lowering._quantize(x, dim, fmt, self._mode.noise(x.device), role, rotated)

    def product(self, a: Tensor, b: Tensor, roles: tuple[Role, Role] | None = None) -> Tensor:
        (product, fmt), *_ = self._formats.items()
        assert fmt is not None
        role_a, role_b = roles or (self._role(a, product), self._role(b, product))
        return fmt.multiply(self._side(a, -1, role_a, product), self._side(b, -2, role_b, product))

    def _side(self, x: Tensor, dim: int, role: Role, product: Product) -> Operand:
        if role == "weight" and product == "grad_input" and self.rounds_weights_once(product):
            # The forward product contracted the other axis of this weight, and its numbers serve here too.
            return self.operand(x.mT, dim, role, product).transpose()
        return self.operand(x, dim, role, product, rotated=self._mode.lowering.rotation)

    def _role(self, x: Tensor, product: Product) -> Role:
        if self._mode._weights.index(x) is not None:
            return "weight"
        return "gradient" if self._backward and not self._mode.lowering.is_activation(x) else "activation"
