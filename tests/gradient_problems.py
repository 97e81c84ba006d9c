"""Gradients and predictions of known covariance, and what a step of the estimator would show of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout, Observation, Statistics, observe

SHAPES = {"first.weight": (3, 4), "first.bias": (3,), "second.weight": (5, 2), "third.weight": (8,)}
LAYER_OF = {"first.weight": 0, "first.bias": 0, "second.weight": 1, "third.weight": 2}
FOREVER = 1 - 1e-6  # a decay that weighs all of a test's steps alike

Sets = Mapping[str, Tensor]  # parameter name -> [n, *shape]


def observation(
    layout: Layout, g: Sets, h: Sets, control: Sequence[int], weights: Sequence[float] | None = None, scale: float = 1.0
) -> Observation:
    """What a step shows that ran exact passes on ``control`` and predicted everything."""
    n = len(next(iter(h.values())))
    w = torch.tensor(weights or [1 / n] * n)
    chosen = torch.tensor([i in control for i in range(n)])

    def total(x: Tensor, which: Tensor) -> Tensor:
        return torch.tensordot(w * which, x, 1)

    def at(x: Sets, i: int) -> dict[str, Tensor]:
        return {name: n * w[i] * value[i] for name, value in x.items()}

    return Observation(
        exact={name: scale * n / len(control) * total(x, chosen) for name, x in g.items()},
        control={name: total(x, chosen) for name, x in h.items()},
        rest={name: total(x, ~chosen) for name, x in h.items()},
        squared_norms=layout.per_layer(
            torch.stack([(n * w) ** 2 * x.flatten(1).square().sum(1) for x in h.values()], 1)
        ),
        residuals=torch.stack([layout.sample(at(g, i)) - layout.sample(at(h, i)) for i in control]),
        loss_scale=scale,
    )


def layout_of(shapes: Mapping[str, tuple[int, ...]] = SHAPES, **settings: int) -> Layout:
    return Layout.of({name: torch.zeros(shape) for name, shape in shapes.items()}, **settings)


def per_layer(value: Callable[[str], float]) -> Tensor:
    sums = torch.zeros(3, dtype=torch.float64)
    for name, layer in LAYER_OF.items():
        sums[layer] += value(name)
    return sums


@dataclass(frozen=True)
class Problem:
    """Gradients and predictions of known covariance: ``[g, h] = mean + mixing z``, z standard normal.

    One such pair for each parameter; g and h are correlated, h is biased, and every parameter has its own dimension.
    """

    mean: Mapping[str, Tensor]  # [2, d]
    mixing: Mapping[str, Tensor]  # [2, d, r]

    @classmethod
    def make(cls, seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        means, mixings = {}, {}
        for index, (name, shape) in enumerate(SHAPES.items()):
            d = math.prod(shape)
            a = torch.randn(d, d + 2, generator=generator) / math.sqrt(d)
            noise = (0.2 + 0.2 * index) * torch.randn(d, d + 2, generator=generator) / math.sqrt(d)
            mean = 0.5 * torch.randn(d, generator=generator)
            bias = 0.7 * torch.randn(d, generator=generator)
            means[name] = torch.stack([mean, mean + bias])
            mixings[name] = torch.stack([a, (1.2 - 0.2 * index) * a + noise])
        return cls(means, mixings)

    def draw(self, n: int, generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """n micro-batches of one step."""
        g, h = {}, {}
        for name, shape in SHAPES.items():
            z = torch.randn(n, self.mixing[name].shape[2], generator=generator)
            both = self.mean[name][:, None] + torch.einsum("sdr,nr->snd", self.mixing[name], z)
            g[name], h[name] = both.reshape(2, n, *shape)
        return g, h

    def divided_by(self, metric: Mapping[str, Tensor]) -> Problem:
        """The same gradients, every coordinate divided by d: their moments are those in the metric."""
        return Problem(
            {name: x / metric[name] for name, x in self.mean.items()},
            {name: x / metric[name][:, None] for name, x in self.mixing.items()},
        )

    def moment(self, a: str, b: str, n_weights: Sequence[float], of_mean: str) -> Tensor:
        """[L] expected tr Cov across micro-batches of n w_i a_i and n w_i b_i; a, b are "g", "h" or "e".

        Independent members of means m_i = n w_i mu and covariances (n w_i)^2 S give, with n - 1 degrees of freedom,
        mean((n w_i)^2) tr S and mu mu' times the variance of n w_i. ``of_mean`` says with how many degrees of freedom
        that last variance is meant: "n - 1", or "n" where residuals are compared across steps.
        """
        nw = torch.tensor(n_weights, dtype=torch.float64)
        spread = nw.var(correction=1 if of_mean == "n - 1" else 0)
        pick = {"g": torch.tensor([1.0, 0.0]), "h": torch.tensor([0.0, 1.0]), "e": torch.tensor([1.0, -1.0])}

        def one(name: str) -> float:
            mixings = [torch.tensordot(pick[x], self.mixing[name], 1).double() for x in (a, b)]
            means = [torch.tensordot(pick[x], self.mean[name], 1).double() for x in (a, b)]
            covariance = (mixings[0] * mixings[1]).sum()
            return float(nw.square().mean() * covariance + spread * (means[0] * means[1]).sum())

        return per_layer(one)

    def products(self, a: int, b: int) -> Tensor:
        """[L] <mean a, mean b>, 0 for g and 1 for h."""
        return per_layer(lambda name: float((self.mean[name][a] * self.mean[name][b]).sum()))


LAM = (0.7, 0.9, 1.0)
# Root second moments over two orders of magnitude, as Adam's are.
METRIC = {name: 10 ** torch.linspace(-1, 1, math.prod(shape)) for name, shape in SHAPES.items()}


@functools.cache
def run(
    k: int, seed: int, sizes: Sequence[int] = (6,), weights: Sequence[float] | None = None, metric: bool = False
) -> Statistics:
    """The statistics after 200 steps of batches of these sizes, in turn; C drawn uniformly; at fixed coefficients.

    With ``metric`` they are those of gradients divided by ``METRIC``.
    """
    problem, layout, generator = Problem.make(), layout_of(), torch.Generator().manual_seed(seed)
    lam = torch.tensor(LAM, dtype=torch.float64)
    statistics = Statistics.start(layout.layers, FOREVER)
    for step in range(200):
        n = sizes[step % len(sizes)]
        g, h = problem.draw(n, generator)
        control = torch.randperm(n, generator=generator)[:k].tolist()
        seen = observation(layout, g, h, sorted(control), weights, scale=64.0)
        statistics = observe(statistics, layout, seen, lam, layout.sample(METRIC) if metric else None)
    return statistics


RUNS = range(8)


def assert_estimates(found: Sequence[Tensor | float], truth: Tensor | float, resolution: float) -> None:
    """Independent runs agree with the truth within their own sampling error, which must resolve that truth.

    Five standard errors of the mean, estimated from R = 8 runs: with 7 degrees of freedom a correct estimate exceeds
    them once in 600 comparisons; the seeds are fixed. ``resolution`` bounds the standard error relative to the truth,
    so that the comparison would notice an error of five times as much.
    """
    values = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in found])
    truth = torch.as_tensor(truth, dtype=torch.float64)
    error = values.std(0) / math.sqrt(len(values))
    assert (error < resolution * truth.abs()).all(), (error, truth)
    assert ((values.mean(0) - truth).abs() < 5 * error).all(), (values.mean(0), truth, error)
