"""Which parameter belongs to which layer, and the coordinates that residuals are kept on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from lightning_ledger.control_variate.gradients import Gradients

PROJECTIONS = 8


@dataclass(frozen=True)
class Layout:
    """Which parameter belongs to which layer, and the fixed sample of coordinates that residuals are kept on.

    Attributes:
        names: trainable parameter names, P of them.
        layers: layer names, L of them: the module that owns the parameter.
        layer_of: [P] layer index of each parameter.
        coordinates: per parameter, the flat indices that are sampled.
        coordinate_layer: [m] layer index of each sampled coordinate.
        inflation: [m] numel / number sampled, so that a sum over the sample estimates the sum over the parameter.
        signs: [J, m] random signs, the fixed projections of the online test of unbiasedness.
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]
    layer_of: Tensor
    coordinates: tuple[Tensor, ...]
    coordinate_layer: Tensor
    inflation: Tensor
    signs: Tensor

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], per_parameter: int = 1024, seed: int = 0) -> Layout:
        """Lay out these parameters.

        Args:
            parameters: name to tensor, trainable ones only.
            per_parameter: coordinates sampled of each parameter (all of a smaller one).
            seed: of the private generator that samples them.

        Returns:
            The layout, on the parameters' device.

        Example:
            >>> layout = Layout.of({"head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)})
            >>> layout.layers, layout.layer_of.tolist(), len(layout.inflation)
            (('head',), [0, 0], 8)
        """
        generator = torch.Generator().manual_seed(seed)
        layers: dict[str, int] = {}
        layer_of, coordinates, inflation = [], [], []
        for name, parameter in parameters.items():
            layer = layers.setdefault(name.rpartition(".")[0] or name, len(layers))
            numel = parameter.numel()
            if numel <= per_parameter:
                chosen = torch.arange(numel)
            else:  # with replacement, then unique: a permutation of a large embedding would cost more than a step
                chosen = torch.randint(numel, (per_parameter,), generator=generator).unique()
            layer_of.append(layer)
            coordinates.append(chosen.to(parameter.device))
            inflation.append(torch.full((len(chosen),), numel / max(len(chosen), 1)))
        sizes = torch.tensor([len(c) for c in coordinates], dtype=torch.long)
        owners = torch.tensor(layer_of, dtype=torch.long)
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        signs = torch.randint(0, 2, (PROJECTIONS, int(sizes.sum())), generator=generator) * 2.0 - 1
        return cls(
            names=tuple(parameters),
            layers=tuple(layers),
            layer_of=owners,
            coordinates=tuple(coordinates),
            coordinate_layer=owners.repeat_interleave(sizes).to(device),
            inflation=(torch.cat(inflation) if inflation else torch.zeros(0)).to(device),
            signs=signs.to(device),
        )

    def sample(self, gradients: Gradients) -> Tensor:
        """[m] the sampled coordinates of a gradient set; a missing gradient is zero."""
        held = {name: g for name in self.names if (g := gradients.get(name)) is not None}
        return self.assemble({name: g.reshape(-1)[self.coordinates_of(name)] for name, g in held.items()})

    def assemble(self, samples: Mapping[str, Tensor]) -> Tensor:
        """[m] from the sampled coordinates of each parameter, by name; those of a missing one are zero."""
        parts = [
            samples[name].to(self.inflation) if name in samples else self.inflation.new_zeros(len(at))
            for name, at in zip(self.names, self.coordinates, strict=True)
        ]
        return torch.cat(parts) if parts else self.inflation.new_zeros(0)

    def coordinates_of(self, name: str) -> Tensor:
        """The flat indices that are sampled of this parameter."""
        return self.coordinates[self.place(name)]

    def place(self, name: str) -> int:
        """Which parameter has this name."""
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def per_layer(self, per_parameter: Tensor) -> Tensor:
        """Sums [..., P] values into [..., L] layers, on the CPU in double precision."""
        values = per_parameter.detach().to("cpu", torch.float64)
        return values.new_zeros(*values.shape[:-1], len(self.layers)).index_add_(-1, self.layer_of, values)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """[L] inner products of two sampled gradients, inflated to the whole parameters."""
        values = (a * b * self.inflation).double()
        return values.new_zeros(len(self.layers)).index_add_(0, self.coordinate_layer, values).cpu()

    def sampled_products(self, samples: Sequence[Tensor]) -> Tensor:
        """[S, S, L] inner products of every two of S sampled gradients, inflated to the whole parameters."""
        return torch.stack([torch.stack([self.inner(a, b) for b in samples]) for a in samples])

    def squared_norms(self, gradients: Gradients) -> Tensor:
        """[P] squared norm of each parameter's gradient; a missing gradient is zero."""
        held = {i: g for i, name in enumerate(self.names) if (g := gradients.get(name)) is not None}
        squares = torch.zeros(len(self.names), dtype=torch.float64)
        if held:
            norms = torch._foreach_norm([g.float() for g in held.values()])
            squares[list(held)] = torch.stack(norms).cpu().double().square()
        return squares

    def inner_products(self, *sets: Gradients) -> Tensor:
        """[S, S, L] inner products of every two of S gradient sets, layer by layer; a missing gradient is zero."""
        pairs = list(combinations_with_replacement(range(len(sets)), 2))
        zero = self.inflation.new_zeros(())
        values = []
        for name in self.names:  # all pairs of one parameter together: each gradient is read from memory once
            flat = [None if (g := gradients.get(name)) is None else g.reshape(-1).float() for gradients in sets]
            for i, j in pairs:
                x, y = flat[i], flat[j]
                values.append(zero if x is None or y is None else torch.dot(x, y))
        by_pair = self.per_layer(torch.stack(values).view(-1, len(pairs)).T)
        products = by_pair.new_zeros(len(sets), len(sets), len(self.layers))
        for (i, j), value in zip(pairs, by_pair, strict=True):
            products[i, j] = products[j, i] = value
        return products
