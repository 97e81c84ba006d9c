"""Second moments of exact and predicted gradients over one batch, from sums: no gradient set outlives its turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ledger.control_variate import Gradients, Layout, Variances, WeightedSum
from lightning_ledger.control_variate.estimates import COEFFICIENT_RANGE

# Entries of a sketch: a prime, so that the columns of no matrix line up in it.
SKETCH = 131_071


def sketch(gradients: Gradients, parameters: Mapping[str, Tensor], size: int = SKETCH) -> Tensor:
    """A short vector whose inner products with others stand for those of whole gradient sets.

    Coordinate j of the set is multiplied by a fixed random sign and added to entry ``j mod size``. Over the signs, the
    inner product of two sketches has the mean of the sets' own, and differs from it by about
    ``sqrt(2 / size) ||a|| ||b||``; sets of at most ``size`` coordinates lose nothing. It is the count sketch of
    Charikar, Chen and Farach-Colton (Finding Frequent Items in Data Streams, 2002) with a fixed hash.

    Args:
        gradients: a gradient set; a missing gradient is zero.
        parameters: all of them, by name, in the order of their coordinates.
        size: of the sketch, at most; it has no more entries than there are coordinates.

    Returns:
        [size] in double precision, on the CPU.

    Example:
        >>> shape = {"w": torch.zeros(3)}
        >>> a, b = (sketch({"w": torch.tensor(x)}, shape) for x in ([1.0, 2.0, 3.0], [1.0, 0.0, -1.0]))
        >>> float(a @ b)
        -2.0
    """
    size = min(size, sum(parameter.numel() for parameter in parameters.values()))
    total, start = torch.zeros(size, dtype=torch.float64), 0
    for place, (name, parameter) in enumerate(parameters.items()):
        count, offset = parameter.numel(), start % size
        start += count
        if (gradient := gradients.get(name)) is None:
            continue
        generator = torch.Generator(gradient.device).manual_seed(place)
        signs = torch.randint(0, 2, (count,), generator=generator, device=gradient.device, dtype=torch.int8)
        signed = gradient.reshape(-1).float() * signs.mul_(2).sub_(1)
        if offset + count <= size:
            total[offset : offset + count] += signed.cpu()
        else:
            rows = torch.nn.functional.pad(signed, (0, -count % size)).view(-1, size)
            total += rows.sum(0, dtype=torch.float64).cpu().roll(offset)
    return total


@dataclass(frozen=True)
class BatchMoments:
    """What one batch says of one kind of prediction. With h_i for n w_i h_i and e_i for n w_i (g_i - h_i):

    Attributes:
        n: micro-batches in the batch.
        covariance: [2, 2, L] traces of the covariances of (h, e) across micro-batches, by layer, with n - 1 degrees.
        squared_step_bias: ``||mean e||^2`` over the micro-batches there might have been, with this batch's rounding of
            the weights: from products of different micro-batches, so free of sampling error, and possibly negative.
        error: [SKETCH] of the batch's mean e.
    """

    n: int
    covariance: Tensor
    squared_step_bias: float
    error: Tensor


@dataclass(frozen=True)
class ExactMoments:
    """What one batch says of the exact gradients; x_i is n w_i g_i.

    Attributes:
        n: micro-batches in the batch.
        variance: V, tr Cov(x) across micro-batches, with n - 1 degrees.
        squares: sum of ``||x_i||^2``.
        mean: [SKETCH] of the batch's mean x.
    """

    n: int
    variance: float
    squares: float
    mean: Tensor


class BatchSums:
    """Running sums over the micro-batches of one batch: one gradient set for x, and one for e of each kind.

    Args:
        parameters: trainable ones, by name.
        layout: their layers.
        kinds: how many kinds of prediction there are.
    """

    def __init__(self, parameters: Mapping[str, Tensor], layout: Layout, kinds: int) -> None:
        self._parameters = parameters
        self._layout = layout
        self._n, self._squares = 0, 0.0
        self._exact = WeightedSum()
        self._errors = [WeightedSum() for _ in range(kinds)]
        self._products = [torch.zeros(2, 2, len(layout.layers), dtype=torch.float64) for _ in range(kinds)]

    def add_exact(self, gradients: Gradients, scale: float) -> dict[str, Tensor]:
        """Add x = scale * g of the next micro-batch.

        Returns:
            x in single precision or better, without the gradients that are None.
        """
        x = _scaled(gradients, scale)
        self._n += 1
        self._squares += float(self._layout.squared_norms(x).sum())
        self._exact.add(x, 1.0)
        return x

    def add_predicted(self, kind: int, x: Mapping[str, Tensor], gradients: Gradients, scale: float) -> None:
        """Add the prediction h of a kind on the same micro-batch, and e = x - scale * h."""
        h = _scaled(gradients, scale)
        e = _difference(x, h)
        self._products[kind] += self._layout.inner_products(h, e)
        self._errors[kind].add(e, 1.0)

    def close(self) -> tuple[ExactMoments, list[BatchMoments]]:
        """The moments of the batch, which has two micro-batches or more."""
        n, exact = self._n, self._exact.total
        square = float(self._layout.squared_norms(exact).sum())
        found = []
        for errors, products in zip(self._errors, self._products, strict=True):
            error = errors.total
            of_sums = self._layout.inner_products(_difference(exact, error), error)
            squares, of_sum = float(products[1, 1].sum()), float(of_sums[1, 1].sum())
            found.append(
                BatchMoments(
                    n,
                    (products - of_sums / n) / (n - 1),
                    (of_sum - squares) / (n * (n - 1)),
                    sketch(error, self._parameters) / n,
                )
            )
        variance = (self._squares - square / n) / (n - 1)
        return ExactMoments(n, variance, self._squares, sketch(exact, self._parameters) / n), found


def _scaled(gradients: Gradients, scale: float) -> dict[str, Tensor]:
    """Times ``scale``, in single precision or better: sums of many small gradients need its bits."""
    kept = {name: g for name, g in gradients.items() if g is not None}
    return {name: (g if g.dtype == torch.float64 else g.float()) * scale for name, g in kept.items()}


def _difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """a - b; what one of them lacks is zero."""
    return {name: x - b[name] if name in b else x for name, x in a.items()} | {
        name: -y for name, y in b.items() if name not in a
    }


def mean_covariance(batches: Sequence[BatchMoments]) -> Variances:
    """H, tr Cov(e, h) and tr Cov(e) by layer, averaged over batches."""
    mean = torch.stack([batch.covariance for batch in batches]).mean(0)
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

    With one batch there are no others, and delta comes out somewhat small.
    """
    exact = float(mean_covariance(batches).of_exact().sum())
    residuals = []
    for batch in batches:
        others = [other for other in batches if other is not batch] or [batch]
        lam = best_coefficient(mean_covariance(others))
        residuals.append(float(mean_covariance([batch]).of_residual(lam).sum()))
    return sum(residuals) / len(residuals) / exact


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
