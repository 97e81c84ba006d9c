"""The running statistics: exactly, by enumeration of every draw, and on a linear-Gaussian problem in closed form."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_ledger.control_variate import (
    Layout,
    Observation,
    Statistics,
    bias_z,
    observe,
    optimal_coefficient,
    relative_cost,
    report,
    variances,
)
from lightning_ledger.estimation import Correction, GradientEstimator, PredictionSettings, PredictionState
from tests.gradient_problems import (
    FOREVER,
    LAM,
    LAYER_OF,
    RUNS,
    SHAPES,
    Problem,
    Sets,
    assert_estimates,
    layout_of,
    observation,
    per_layer,
    run,
)

# ------------------------------------------------------------------------------------- one batch, over all of its draws


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("weights", [None, [0.4, 0.3, 0.15, 0.1, 0.05]])
def test_over_all_draws_every_statistic_is_the_batch_s_own(k: int, weights: list[float] | None) -> None:
    """No distribution is assumed: what is averaged over C estimates the covariances across this batch's n members."""
    n, generator, layout = 5, torch.Generator().manual_seed(0), layout_of()
    g = {name: 1 + torch.randn(n, *shape, generator=generator) for name, shape in SHAPES.items()}
    h = {name: 0.5 * x + 0.3 * torch.randn(x.shape, generator=generator) for name, x in g.items()}
    lam = torch.tensor([0.8, 1.0, 0.3], dtype=torch.float64)
    states = [
        observe(Statistics.start(layout.layers), layout, observation(layout, g, h, c, weights, scale=128.0), lam)
        for c in itertools.combinations(range(n), k)
    ]

    def mean(name: str) -> Tensor:
        return torch.stack([state.mean(name) for state in states]).mean(0)

    w = n * torch.tensor(weights or [1 / n] * n, dtype=torch.float64)

    def members(x: Sets, name: str) -> Tensor:
        return w[:, None] * x[name].double().flatten(1)  # n w_i x_i

    def covariance(a: Callable[[str], Tensor], b: Callable[[str], Tensor]) -> Tensor:
        def one(name: str) -> float:
            x, y = a(name), b(name)
            return float(((x - x.mean(0)) * (y - y.mean(0))).sum() / (n - 1))

        return per_layer(one)

    def big_g(name: str) -> Tensor:
        return members(g, name)

    def big_h(name: str) -> Tensor:
        return members(h, name)

    def e(name: str) -> Tensor:
        return big_g(name) - big_h(name)

    def d(name: str) -> Tensor:
        return big_g(name) - lam[LAYER_OF[name]] * big_h(name)

    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}  # sums of float32 products
    torch.testing.assert_close(mean("h_variance"), covariance(big_h, big_h), **close)
    torch.testing.assert_close(mean("h_spread"), covariance(big_h, big_h), **close)
    torch.testing.assert_close(mean("eh_covariance"), covariance(e, big_h), **close)
    if k > 1:
        torch.testing.assert_close(mean("within"), covariance(e, e), **close)
    # ||estimate||^2 is ||G||^2 and the variance over the draw of C.
    target = per_layer(lambda name: float(big_g(name).mean(0).square().sum()))
    torch.testing.assert_close(mean("est"), target + covariance(d, d) * (1 / k - 1 / n), **close)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_optimal_coefficient_has_the_least_variance_over_draws(scope: Any) -> None:
    n, k, generator, layout = 5, 2, torch.Generator().manual_seed(1), layout_of()
    g = {name: torch.randn(n, *shape, generator=generator) for name, shape in SHAPES.items()}
    # Predictions too small in one layer, too large in another, and noisy in the third.
    factors = {"first.weight": 0.6, "first.bias": 0.6, "second.weight": 1.5, "third.weight": 1.0}
    h = {name: factors[name] * x + 0.5 * torch.randn(x.shape, generator=generator) for name, x in g.items()}
    draws = list(itertools.combinations(range(n), k))

    def variance(lam: Tensor) -> float:
        """Of the estimate, by enumeration."""
        total = 0.0
        for name in SHAPES:
            x = g[name].double().flatten(1) - lam[LAYER_OF[name]] * h[name].double().flatten(1)
            means = torch.stack([x[list(c)].mean(0) for c in draws])
            total += float((means - means.mean(0)).square().sum(1).mean())
        return total

    statistics = Statistics.start(layout.layers, FOREVER)
    for control in draws:  # ten draws: just enough to be ready, and each of them once
        statistics = observe(statistics, layout, observation(layout, g, h, control), torch.ones(3))
    lam = optimal_coefficient(statistics, scope)
    best = variance(lam)
    assert best < 0.9 * variance(torch.ones(3))
    ways = [torch.ones(3)] if scope == "global" else list(torch.eye(3))
    for way in ways:
        assert variance(lam + 0.02 * way) > best
        assert variance(lam - 0.02 * way) > best
    assert (len(set(lam.tolist())) == 1) == (scope == "global")


# ------------------------------------------------------------------------------------------------------ linear-Gaussian


UNEQUAL = (0.3, 0.25, 0.2, 0.15, 0.06, 0.04)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("weights", [None, UNEQUAL])
def test_covariances_match_closed_form(k: int, weights: tuple[float, ...] | None) -> None:
    problem = Problem.make()
    runs = [variances(run(k, seed, weights=weights)) for seed in RUNS]
    nw = [6 * w for w in weights or [1 / 6] * 6]
    assert_estimates([v.h for v in runs], problem.moment("h", "h", nw, "n - 1"), 0.05)
    assert_estimates([v.eh for v in runs], problem.moment("e", "h", nw, "n - 1"), 0.3)
    # One residual a step: its mean square less the product of successive steps, so deviations are from the mean of
    # all n weights, known to be 1. Two: from the mean of the step.
    e = problem.moment("e", "e", nw, "n" if k == 1 else "n - 1")
    assert_estimates([v.e for v in runs], e, 0.05)
    if k > 1 or weights is None:
        v = problem.moment("g", "g", nw, "n - 1")
        assert_estimates([found.of_exact() for found in runs], v, 0.1)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_optimal_coefficient_matches_closed_form(scope: Any) -> None:
    problem = Problem.make()
    gh, hh = (problem.moment(a, "h", [1.0] * 6, "n - 1") for a in "gh")
    truth = gh / hh if scope == "layer" else (gh.sum() / hh.sum()).expand(3)  # lam* = tr Cov(g, h) / tr Cov(h)
    assert (truth - 1).abs().max() > 0.1
    assert_estimates([optimal_coefficient(run(1, seed), scope) for seed in RUNS], truth, 0.05)


def test_batches_of_changing_size_estimate_the_same_covariances() -> None:
    problem = Problem.make()
    runs = [run(1, seed, sizes=(6, 3, 4)) for seed in RUNS]
    equal = [1.0] * 6
    assert_estimates([variances(s).h for s in runs], problem.moment("h", "h", equal, "n - 1"), 0.05)
    assert_estimates([variances(s).e for s in runs], problem.moment("e", "e", equal, "n - 1"), 0.05)
    truth = problem.moment("g", "h", equal, "n - 1") / problem.moment("h", "h", equal, "n - 1")
    assert_estimates([optimal_coefficient(s) for s in runs], truth, 0.05)


@pytest.mark.parametrize("k", [1, 2])
def test_logged_values_match_closed_form(k: int) -> None:
    problem, n, equal = Problem.make(), 6, [1.0] * 6
    lam = torch.tensor(LAM, dtype=torch.float64)
    gg, gh, hh = (problem.moment(*pair, equal, "n - 1") for pair in ("gg", "gh", "hh"))
    exact, residual = gg.sum(), (gg - 2 * lam * gh + lam**2 * hh).sum()
    means = {pair: problem.products(*pair).sum() for pair in ((0, 0), (0, 1), (1, 1))}
    delta = float(residual / exact)
    cosine = (means[0, 1] + gh.sum() / k) / ((means[0, 0] + gg.sum() / k) * (means[1, 1] + hh.sum() / k)).sqrt()

    w, unit_w = 0.05, 0.9
    reports = [report(run(k, seed), lam, n, k, w, unit_w) for seed in RUNS]
    found = {name: [values[name] for values in reports] for name in reports[0]}
    assert_estimates(found["gpcv/delta"], delta, 0.03)
    assert_estimates(found["gpcv/rho2"], float((gh**2 / hh).sum() / exact), 0.03)
    assert_estimates(found["gpcv/cosine"], float(cosine), 0.03)
    assert_estimates(found["gpcv/noise_scale"], float(exact / means[0, 0]), 0.05)
    assert_estimates(found["gpcv/relative_cost"], relative_cost(delta, w), 0.03)
    # The cost ratio is proportional to the fleet price: R = 1 at that price times unit_w.
    assert_estimates(found["gpcv/break_even_price"], (1 - delta**0.5) / (1 + delta**0.5) / unit_w, 0.03)
    assert_estimates(found["gpcv/coefficient"], float((lam * hh).sum() / hh.sum()), 0.01)


# -------------------------------------------------------------------------------------------------- sampled coordinates


def test_inner_products_on_sampled_coordinates_are_unbiased() -> None:
    shapes = {"large.weight": (40, 50), "small.weight": (3, 7)}
    generator = torch.Generator().manual_seed(0)
    # Squares of a uniform: the coordinates contribute very unequally, and all with the same sign.
    a, b = ({name: torch.rand(shape, generator=generator) ** 2 for name, shape in shapes.items()} for _ in range(2))
    truth = torch.tensor([float((a[name] * b[name]).sum()) for name in shapes], dtype=torch.float64)
    found = []
    for seed in range(300):
        layout = layout_of(shapes, per_parameter=64, seed=seed)
        assert len(layout.coordinates[0]) < 2000
        found.append(layout.inner(layout.sample(a), layout.sample(b)))
    values = torch.stack(found)
    torch.testing.assert_close(values[:, 1], truth[1].expand(300), rtol=1e-5, atol=0)  # sampled whole
    error = values[:, 0].std() / math.sqrt(300)
    assert error < 0.02 * truth[0]
    assert abs(values[:, 0].mean() - truth[0]) < 4 * error


def test_residual_variance_on_sampled_coordinates_matches_closed_form() -> None:
    shapes, n = {"layer.weight": (60, 50)}, 4
    deviation = torch.rand(3000, generator=torch.Generator().manual_seed(0)) ** 2  # of e, coordinate by coordinate
    truth = float(deviation.double().square().sum())
    found = []
    for seed in RUNS:
        layout, generator = layout_of(shapes, per_parameter=256, seed=seed), torch.Generator().manual_seed(seed)
        statistics = Statistics.start(layout.layers, FOREVER)
        for _ in range(40):
            g = torch.randn(n, 3000, generator=generator)
            h = g - 1 - deviation * torch.randn(n, 3000, generator=generator)
            sets = [{"layer.weight": x.reshape(n, 60, 50)} for x in (g, h)]
            statistics = observe(statistics, layout, observation(layout, *sets, [0]), torch.ones(1))
        found.append(variances(statistics).e)
    assert_estimates(found, torch.tensor([truth]), 0.1)


# --------------------------------------------------------------------------------------------------------------- bias_z


def drift(seed: int, spoil: float = 1.0, loud: float = 1.0) -> float:
    """``bias_z`` after a hundred steps.

    ``spoil`` scales predictions if they were drawn; ``loud`` makes one direction of the predictions' noise dominate.
    """
    problem, layout, generator = Problem.make(), layout_of(), torch.Generator().manual_seed(seed)
    statistics = Statistics.start(layout.layers)
    for _ in range(100):
        g, h = problem.draw(6, generator)
        h["third.weight"][:, 0] *= loud
        seen = observation(layout, g, h, torch.randperm(6, generator=generator)[:1].tolist())
        seen = replace(seen, control={name: spoil * x for name, x in seen.control.items()})
        statistics = observe(statistics, layout, seen, torch.ones(3))
    return bias_z(statistics)


@pytest.mark.parametrize("loud", [1.0, 100.0])
def test_bias_z_stays_in_its_band_for_an_unbiased_estimate(loud: float) -> None:
    # A standardised sum of 8 squares: mean 0 and deviation 1, skew. Beyond 4 lie 2 in 1000 where the projections are
    # independent, 10 in 1000 where one direction dominates and all projections are the same number.
    values = torch.tensor([drift(seed, loud=loud) for seed in range(24)])
    assert values.max() < 4
    assert values.mean().abs() < 4 * values.std() / math.sqrt(24)
    assert 0.5 < values.std() < 1.5


def test_bias_z_leaves_its_band_if_predictions_depend_on_the_draw() -> None:
    # As a scale shared with other micro-batches would make them.
    assert min(drift(seed, spoil=0.5) for seed in range(6)) > 4


# ----------------------------------------------------------------------------------------------------- the state itself


def some_statistics(steps: int = 12) -> tuple[Statistics, Layout, Observation]:
    problem, layout, generator = Problem.make(), layout_of(), torch.Generator().manual_seed(3)
    statistics = Statistics.start(layout.layers)
    for step in range(steps):
        seen = observation(layout, *problem.draw(4, generator), [step % 4])
        statistics = observe(statistics, layout, seen, torch.ones(3))
    return statistics, layout, observation(layout, *problem.draw(4, generator), [1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["exact", "control", "rest", "squared_norms", "residuals"])
def test_gradients_that_are_not_finite_leave_the_statistics_unchanged(value: float, where: str) -> None:
    statistics, layout, seen = some_statistics()
    spoilt = getattr(seen, where)
    if isinstance(spoilt, Tensor):
        spoilt = spoilt.clone()
        spoilt.view(-1)[0] = value
    else:
        spoilt = {name: x.clone() for name, x in spoilt.items()}
        spoilt["second.weight"][0, 0] = value
    after = observe(statistics, layout, replace(seen, **{where: spoilt}), torch.ones(3))
    assert after.previous is None  # the next residual has no predecessor to be compared with
    kept, before = after.state_dict(), statistics.state_dict()
    del kept["previous"], before["previous"]
    assert kept == before
    assert observe(after, layout, seen, torch.ones(3)).steps == statistics.steps + 1


def test_the_statistics_travel_in_a_checkpoint() -> None:
    statistics, layout, seen = some_statistics()
    file = io.BytesIO()
    torch.save(statistics.state_dict(), file)
    file.seek(0)
    restored = Statistics.from_state_dict(torch.load(file, weights_only=True))
    expected, found = (observe(s, layout, seen, torch.ones(3)) for s in (statistics, restored))
    assert found.layers == expected.layers
    assert found.steps == 13
    arguments: Any = (torch.ones(3), 4, 1, 0.05, 1.0)
    assert report(found, *arguments) == report(expected, *arguments)
    assert torch.equal(optimal_coefficient(found), optimal_coefficient(expected))


def test_observing_returns_a_new_state() -> None:
    statistics, layout, seen = some_statistics()
    before = report(statistics, torch.ones(3), 4, 1, 0.05, 1.0)
    assert observe(statistics, layout, seen, torch.ones(3)).steps == statistics.steps + 1
    assert report(statistics, torch.ones(3), 4, 1, 0.05, 1.0) == before


def test_the_coefficient_is_one_until_ten_steps_were_seen() -> None:
    assert optimal_coefficient(some_statistics(9)[0]).tolist() == [1.0, 1.0, 1.0]
    assert (optimal_coefficient(some_statistics(10)[0]) != 1).all()


def test_the_coefficient_stays_in_its_range() -> None:
    layout, generator = layout_of(), torch.Generator().manual_seed(0)
    for factor, limit in ((-3.0, 0.0), (0.1, 2.0)):  # lam* would be -1/3 and 10
        statistics = Statistics.start(layout.layers)
        for _ in range(12):
            g = {name: torch.randn(4, *shape, generator=generator) for name, shape in SHAPES.items()}
            seen = observation(layout, g, {name: factor * x for name, x in g.items()}, [0])
            statistics = observe(statistics, layout, seen, torch.ones(3))
        assert optimal_coefficient(statistics).tolist() == [limit] * 3


class Linear(pl.LightningModule):
    """Least squares, for an estimator that runs without a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) - batch[:, :3]).square().mean()


def coefficients_logged(last: Tensor) -> list[float]:
    """The coefficient of the last two of fourteen steps, where the thirteenth batch is ``last``."""
    torch.manual_seed(0)
    module, found = Linear(), []
    state = PredictionState(torch.Generator().manual_seed(0))
    prediction = PredictionSettings(format="int4", microbatches=4, exact=1)
    estimator = GradientEstimator(module, prediction, state, Correction(scope="global"))
    batches = [*torch.randn(12, 8, 6, generator=torch.Generator().manual_seed(1)), last, torch.ones(8, 6)]
    for step, batch in enumerate(batches):
        estimator.forward(batch, step).backward()
        estimator.backward()
        found.append(estimator.statistics_values.get("gpcv/coefficient", math.nan))
        state.steps += 1
    return found[-2:]


def test_the_coefficient_of_a_step_comes_from_earlier_steps_only() -> None:
    usual = coefficients_logged(torch.randn(8, 6, generator=torch.Generator().manual_seed(2)))
    other = coefficients_logged(5 * torch.randn(8, 6, generator=torch.Generator().manual_seed(3)))
    # It is logged as an average over layers by their share of the variance, here of equal numbers, hence the rounding.
    assert usual[0] == pytest.approx(other[0], rel=1e-12)
    assert abs(usual[0] - 1) > 1e-4
    assert abs(usual[1] - other[1]) > 1e-4
