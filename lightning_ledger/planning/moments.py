"""Second moments of exact and predicted gradients over one batch, from sketches: no gradient set outlives its turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_ledger.control_variate import Gradients, Layout, Variances
from lightning_ledger.control_variate.estimates import COEFFICIENT_RANGE

# Entries of a layer's sketch: a prime, so that the columns of no matrix line up in it.
SKETCH = 8191


class Sketches:
    """Short vectors, one a layer, whose inner products with others stand for those of whole gradients.

    Coordinate j of a layer is multiplied by a fixed random sign and added to entry ``j mod size``. Over the signs, the
    inner product of two sketches has the mean of the gradients' own, and differs from it by about
    ``sqrt(2 / size) ||a|| ||b||``; layers of at most ``size`` coordinates lose nothing. It is the count sketch of
    Charikar, Chen and Farach-Colton (Finding Frequent Items in Data Streams, 2002) with a fixed hash.

    Args:
        parameters: trainable ones, by name.
        layout: their layers.
        size: of a layer's sketch, at most; it has no more entries than the largest layer has coordinates.

    Attributes:
        shape: of a gradient set's sketch, (L, size).

    Example:
        >>> parameters = {"w": torch.zeros(3)}
        >>> sketch = Sketches(parameters, Layout.of(parameters))
        >>> a, b = (sketch({"w": torch.tensor(x)}) for x in ([1.0, 2.0, 3.0], [1.0, 0.0, -1.0]))
        >>> float((a * b).sum())
        -2.0
    """

    def __init__(self, parameters: Mapping[str, Tensor], layout: Layout, size: int = SKETCH) -> None:
        counts = [0] * len(layout.layers)
        self._places: dict[str, tuple[int, int]] = {}  # the layer, and where in it the parameter starts
        self._signs: dict[str, Tensor] = {}  # a byte for each coordinate: drawing them anew would take as long as using
        for name, layer in zip(layout.names, layout.layer_of.tolist(), strict=True):
            parameter = parameters[name]
            generator = torch.Generator(parameter.device).manual_seed(len(self._places))
            signs = torch.randint(
                0, 2, (parameter.numel(),), generator=generator, device=parameter.device, dtype=torch.int8
            )
            self._signs[name] = signs.mul_(2).sub_(1)
            self._places[name] = layer, counts[layer]
            counts[layer] += parameter.numel()
        self.shape = len(counts), min(size, max(counts, default=0))

    def __call__(self, gradients: Gradients, scale: float = 1.0) -> Tensor:
        """The sketch of a gradient set, times a number.

        Args:
            gradients: by name; a missing gradient is zero.
            scale: the number.

        Returns:
            [L, size] on the CPU, in double precision where a gradient is, else in single.
        """
        size = self.shape[1]
        double = any(g is not None and g.dtype == torch.float64 for g in gradients.values())
        total = torch.zeros(self.shape, dtype=torch.float64)
        for name, (layer, start) in self._places.items():
            if (gradient := gradients.get(name)) is None:
                continue
            signed = gradient.reshape(-1).to(torch.float64 if double else torch.float32) * self._signs[name]
            rows = torch.nn.functional.pad(signed, (0, -signed.numel() % size)).view(-1, size)
            total[layer] += rows.sum(0).double().cpu().roll(start % size)
        return total.mul_(scale).to(torch.float64 if double else torch.float32)


@dataclass(frozen=True)
class BatchMoments:
    """What one batch says of one kind of prediction. With h_i for n w_i h_i and e_i for n w_i (g_i - h_i):

    Attributes:
        n: micro-batches that were looked at.
        covariance: [2, 2, L] traces of the covariances of (h, e) across micro-batches, by layer, with n - 1 degrees.
        left_out: [n, 2, 2, L] the same without each of them in turn; of no meaning for n = 2.
        squared_step_bias: ``||mean e||^2`` over the micro-batches there might have been, with this batch's rounding of
            the weights: from products of different micro-batches, so free of sampling error, and possibly negative.
        error: sketch of the mean e, flattened.
    """

    n: int
    covariance: Tensor
    left_out: Tensor
    squared_step_bias: float
    error: Tensor

    @classmethod
    def of(cls, exact: Sequence[Tensor], predicted: Sequence[Tensor]) -> BatchMoments:
        """From the sketches of n w_i g_i and n w_i h_i, of two micro-batches or more."""
        n, covariances, left_out, squares = len(exact), [], [], 0.0
        for layer in range(len(exact[0])):
            h = torch.stack([row[layer] for row in predicted]).double()
            e = torch.stack([row[layer] for row in exact]).double() - h
            products = torch.stack([torch.stack([a @ b.T for b in (h, e)]) for a in (h, e)])  # [2, 2, n, n]
            own, sums = products.diagonal(dim1=-2, dim2=-1), products.sum(-1) + products.sum(-2)
            total, trace = products.sum((-2, -1)), own.sum(-1)
            covariances.append((trace - total / n) / (n - 1))
            rest = total[..., None] - sums + own  # over the pairs without micro-batch i
            left_out.append((trace[..., None] - own - rest / (n - 1)) / max(1, n - 2))
            squares += float(total[1, 1] - trace[1, 1])
        error = torch.stack([x.double() - y.double() for x, y in zip(exact, predicted, strict=True)]).mean(0)
        return cls(
            n,
            torch.stack(covariances, -1),
            torch.stack(left_out, -1).movedim(-2, 0),
            squares / (n * (n - 1)),
            error.flatten(),
        )

    def without(self, micro_batch: int) -> BatchMoments:
        """The covariances of the others; what else there is stays."""
        return replace(self, n=self.n - 1, covariance=self.left_out[micro_batch])


@dataclass(frozen=True)
class ExactMoments:
    """What one batch says of the exact gradients; x_i is n w_i g_i.

    Attributes:
        n: micro-batches that were looked at.
        variance: V, tr Cov(x) across micro-batches, with n - 1 degrees.
        squares: sum of ``||x_i||^2``.
        mean: sketch of the mean x, flattened.
    """

    n: int
    variance: float
    squares: float
    mean: Tensor

    @classmethod
    def of(cls, exact: Sequence[Tensor]) -> ExactMoments:
        """From the sketches of n w_i g_i, of two micro-batches or more."""
        n, total = len(exact), torch.stack([x.double() for x in exact]).sum(0)
        squares = sum(float(x.double().square().sum()) for x in exact)
        return cls(n, (squares - float(total.square().sum()) / n) / (n - 1), squares, total.flatten() / n)


def mean_covariance(batches: Sequence[BatchMoments]) -> Variances:
    """H, tr Cov(e, h) and tr Cov(e) by layer, averaged over batches by their degrees of freedom."""
    degrees = torch.tensor([batch.n - 1.0 for batch in batches], dtype=torch.float64)
    mean = torch.tensordot(degrees / degrees.sum(), torch.stack([batch.covariance for batch in batches]), 1)
    return Variances(mean[0, 0], mean[0, 1], mean[1, 1])


def best_coefficient(moments: Variances) -> Tensor:
    """[L] lam* = 1 + tr Cov(e, h) / tr Cov(h), within the range that training allows; 1 where predictions are alike."""
    lam = torch.where(moments.h > 0, 1 + moments.eh / moments.h.clamp(min=1e-300), torch.ones_like(moments.h))
    return lam.clamp(*COEFFICIENT_RANGE)


def delta_at_one(batches: Sequence[BatchMoments]) -> float:
    """delta = D / V at lam = 1."""
    moments = mean_covariance(batches)
    return float(moments.e.sum()) / float(moments.of_exact().sum())


def delta_at_best(batches: Sequence[BatchMoments]) -> float:
    """delta at lam*, each batch at the lam* of the others, as training chooses lam from other steps than its own.

    With one batch there are no others, and it is delta at lam = 1, where training starts.
    """
    if len(batches) == 1:
        return delta_at_one(batches)
    exact = float(mean_covariance(batches).of_exact().sum())
    residuals = 0.0
    for batch in batches:
        lam = best_coefficient(mean_covariance([other for other in batches if other is not batch]))
        residuals += (batch.n - 1) * float(mean_covariance([batch]).of_residual(lam).sum())
    return residuals / sum(batch.n - 1 for batch in batches) / exact


def squared_mean(batches: Sequence[ExactMoments]) -> float:
    """``||mean gradient||^2`` from products of different micro-batches: free of sampling error, possibly negative."""
    n = sum(batch.n for batch in batches)
    total = torch.stack([batch.mean * batch.n for batch in batches]).sum(0)
    return (float(total @ total) - sum(batch.squares for batch in batches)) / (n * (n - 1))


def squared_bias(batches: Sequence[BatchMoments]) -> float:
    """``||mean(g - h)||^2`` from products of different batches: free of their samples' and of rounding's own noise.

    Under stochastic rounding the weights are rounded anew for each batch, so what averages out over steps is no bias.
    With one batch it is that of the step.
    """
    if len(batches) == 1:
        return batches[0].squared_step_bias
    sums = torch.stack([batch.error * batch.n for batch in batches])
    total = sums.sum(0)
    pairs = sum(batch.n for batch in batches) ** 2 - sum(batch.n**2 for batch in batches)
    return (float(total @ total) - float((sums * sums).sum())) / pairs
