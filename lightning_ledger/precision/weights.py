"""Weights rounded once per refresh, and found again by where they lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from lightning_ledger.precision.formats import Format, Operand


class WeightUse(NamedTuple):
    """One way of using a weight: a view of it, and the axis and the format that the view is rounded in.

    Attributes:
        place: of the weight among those of the refresh.
        offset: where in its storage the view starts.
        shape: of the view.
        stride: of the view.
        dim: the contracted axis.
        format: what it is rounded to.
        rotated: whether it is rotated first.
    """

    place: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dim: int
    format: Format
    rotated: bool


@dataclass
class Tape:
    """What a traced pass took from outside the trace, in order: later runs of the program are given it anew.

    Attributes:
        weights: rounded weights, and how to round them again.
        noise: random numbers of stochastic rounding.
    """

    weights: list[tuple[WeightUse, Operand]] = field(default_factory=list)
    noise: list[Tensor] = field(default_factory=list)


class RoundedWeights:
    """Rounded weights, each rounded when it is first used and again after a change.

    Args:
        weights: parameters, or copies of them; kept alive.
        quantize: rounds a view for a use.
    """

    def __init__(
        self, weights: Iterable[Tensor] = (), quantize: Callable[[WeightUse, Tensor], Operand] | None = None
    ) -> None:
        self._quantize = quantize
        self._weights = [w.detach() for w in weights]
        self._forms: dict[WeightUse, tuple[int, Operand]] = {}
        # The storages are held so that no activation can be given the address of a weight that was freed.
        self._storages: dict[int, tuple[int, UntypedStorage]] = {}
        self._casts: dict[int, tuple[int, Tensor]] = {}
        for index, weight in enumerate(self._weights):
            storage = weight.untyped_storage()
            if storage.data_ptr():  # a meta tensor has none
                self._storages.setdefault(storage.data_ptr(), (index, storage))

    def use(self, x: Tensor, dim: int, format: Format, rotated: bool) -> WeightUse | None:
        """How ``x`` uses a weight; None if it is no weight."""
        index = self.index(x)
        if index is None:
            return None
        return WeightUse(index, int(x.storage_offset()), tuple(x.shape), tuple(x.stride()), dim, format, rotated)

    def index(self, x: Tensor) -> int | None:
        """Which weight ``x`` is, a view of, or a cast of; None if it is none."""
        if not self._storages:
            return None
        address = x.untyped_storage().data_ptr()
        index, _ = self._storages.get(address) or self._casts.get(address) or (None, None)
        # Inference tensors keep no version: writes to them would go unnoticed.
        return None if index is None or x.is_inference() else index

    def remember_cast(self, weight: Tensor, cast: Tensor) -> None:
        """A copy of a weight in another dtype (autocast's) counts as that weight, if it lies in memory alike."""
        index = self.index(weight)
        if index is None or not cast.untyped_storage().data_ptr():
            return
        original = self._weights[index]
        whole = weight.shape == original.shape and weight.storage_offset() == original.storage_offset() == 0
        if whole and weight.stride() == original.stride() == cast.stride() and cast.is_floating_point():
            # Held, like the storages: its address stays its own.
            self._casts[cast.untyped_storage().data_ptr()] = (index, cast)

    def forget_casts(self) -> None:
        """At the end of a pass, whose casts go with it."""
        self._casts.clear()

    def held(self) -> dict[WeightUse, Operand]:
        """All rounded forms there are."""
        return {use: operand for use, (_, operand) in self._forms.items()}

    def recall(self, use: WeightUse) -> Operand:
        """The rounded form, up to date."""
        weight = self._weights[use.place]
        known = self._forms.get(use)
        if known is None or known[0] != weight._version:
            assert self._quantize is not None
            # Outside of any trace and any graph: a program takes it as an input.
            with torch.no_grad(), disable_proxy_modes_tracing():
                view = weight.as_strided(use.shape, use.stride, use.offset)
                known = self._forms[use] = weight._version, self._quantize(use, view)
        return known[1]
