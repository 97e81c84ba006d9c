"""What is read from the statistics: bias, noise scale, effective batch, and the break-even price with its interval."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_ledger.control_variate import (
    Statistics,
    best_share,
    break_even,
    coefficients,
    delta_interval,
    effective_batch,
    mean_gradient_square,
    noise_scale,
    observe,
    relative_bias,
    report,
)
from lightning_ledger.control_variate.estimates import student_quantile
from tests.gradient_problems import LAM, RUNS, Problem, assert_estimates, layout_of, observation, run

LAMS = torch.tensor(LAM, dtype=torch.float64)
EQUAL = [1.0] * 6


@functools.cache
def truth() -> tuple[float, float, float]:
    """V, D at these coefficients, and ||mean g||^2."""
    problem = Problem.make()
    gg, gh, hh = (problem.moment(*pair, EQUAL, "n - 1") for pair in ("gg", "gh", "hh"))
    return float(gg.sum()), float((gg - 2 * LAMS * gh + LAMS**2 * hh).sum()), float(problem.products(0, 0).sum())


# ------------------------------------------------------------------------------------------------- bias and noise scale


@pytest.mark.parametrize("k", [1, 2])
def test_the_bias_matches_closed_form(k: int) -> None:
    problem, (_, _, signal) = Problem.make(), truth()
    mean = problem.products(0, 0) - 2 * problem.products(0, 1) + problem.products(1, 1)
    assert_estimates([run(k, seed).mean("mean_residual") for seed in RUNS], mean, 0.05)
    assert_estimates([mean_gradient_square(run(k, seed), LAMS, 6, k) for seed in RUNS], signal, 0.05)
    found = [relative_bias(run(k, seed), LAMS, 6, k) or 0.0 for seed in RUNS]
    assert_estimates(found, math.sqrt(float(mean.sum()) / signal), 0.03)


@pytest.mark.parametrize("k", [1, 2])
def test_sampling_error_is_no_bias(k: int) -> None:
    """Predictions without bias: mean e = 0, while each step's mean residual is far from it."""
    problem, layout, squares, naive = Problem.make(), layout_of(), [], []
    unbiased = Problem({n: torch.stack([x[0], x[0]]) for n, x in problem.mean.items()}, problem.mixing)
    for seed in RUNS:
        generator, statistics = torch.Generator().manual_seed(seed), Statistics.start(layout.layers)
        for _ in range(60):
            seen = observation(layout, *unbiased.draw(6, generator), list(range(k)))
            statistics = observe(statistics, layout, seen, torch.ones(3))
        squares.append(statistics.mean("mean_residual").sum())
        naive.append(statistics.mean("residual").sum() / k)
        bias, signal = (f(statistics, torch.ones(3), 6, k) for f in (relative_bias, mean_gradient_square))
        assert bias is not None
        assert bias**2 == pytest.approx(max(0.0, float(squares[-1])) / signal)
    found = torch.stack(squares)
    assert abs(found.mean()) < 5 * found.std() / math.sqrt(len(found))
    assert found.abs().max() < 0.3 * min(naive)
    assert min(found) < 0 < max(found)  # so that the clamp is met


@pytest.mark.parametrize("k", [1, 2])
def test_the_noise_scale_in_samples_is_that_of_single_samples(k: int) -> None:
    # A micro-batch of 4 samples has a quarter of one sample's covariance: tr Sigma = 4 V.
    v, _, signal = truth()
    assert_estimates([noise_scale(run(k, seed), LAMS, 6, k, samples=4) or 0.0 for seed in RUNS], 4 * v / signal, 0.05)
    values = report(run(k, 0), LAMS, 6, k, 0.05, 0.9, samples=4.0)
    assert values["gpcv/noise_scale_samples"] == 4 * values["gpcv/noise_scale"]


def test_without_a_signal_there_is_neither_noise_scale_nor_bias() -> None:
    statistics = run(1, 0)
    nothing = statistics.averages["est"]._replace(total=torch.zeros(3, dtype=torch.float64))
    silent = replace(statistics, averages={**statistics.averages, "est": nothing})
    assert noise_scale(silent, LAMS, 6, 1) is None
    assert relative_bias(silent, LAMS, 6, 1) is None
    assert not {"gpcv/noise_scale", "gpcv/bias"} & report(silent, LAMS, 6, 1, 0.05, 0.9).keys()


# ------------------------------------------------------------------------------ variance of the estimate, by simulation


def flat(sets: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten(1) for x in sets.values()], 1).double()


@functools.cache
def variance_by_simulation(n: int, k: int, lam: float, batches: int = 4000) -> float:
    """Trace of the covariance of the estimate, over batches and draws; k = n is plain exact training."""
    generator, problem = torch.Generator().manual_seed(n * 1000 + k), Problem.make()
    g, h = (flat(x).view(batches, n, -1) for x in problem.draw(batches * n, generator))
    orders = torch.rand(batches, n, generator=generator).argsort(1)
    by_batch = [coefficients([1 / n] * n, order[:k], coefficient=lam) for order in orders.tolist()]
    exact, predicted = (torch.tensor(c, dtype=torch.float64) for c in zip(*by_batch, strict=True))
    estimates = torch.einsum("bn,bnd->bd", exact, g) + torch.einsum("bn,bnd->bd", predicted, h)
    return float(estimates.var(0).sum())


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_effective_batch_is_the_plain_batch_of_the_same_variance(k: int) -> None:
    v, _, _ = truth()
    problem = Problem.make()
    gg, gh, hh = (problem.moment(*pair, EQUAL, "n - 1").sum() for pair in ("gg", "gh", "hh"))
    delta = float((gg - 2 * 0.9 * gh + 0.81 * hh) / gg)
    found = v / variance_by_simulation(6, k, 0.9)
    # 4000 batches in about 40 dimensions, of unequal variance: the trace is known to about 0.5%.
    assert found == pytest.approx(effective_batch(delta, 6, k / 6), rel=0.02)
    assert k < found < 6


@pytest.mark.parametrize("k", [1, 2])
def test_the_reported_allocation_matches_closed_form(k: int) -> None:
    v, d, _ = truth()
    reports = [report(run(k, seed), LAMS, 6, k, 0.05, 0.9) for seed in RUNS]
    effective = [values["gpcv/effective_batch"] for values in reports]
    assert_estimates(effective, v / (v / 6 + d * (1 / k - 1 / 6)), 0.03)
    assert_estimates([values["gpcv/optimal_share"] for values in reports], best_share(d / v, 0.05), 0.03)


def test_break_even_is_where_the_simulated_cost_at_equal_variance_crosses_one() -> None:
    """Measured variances and the best k for each price, against the formula and against the running statistics."""
    n, exact, forwards, lam = 16, 3.0, 3.0, 0.9
    variances = {k: variance_by_simulation(n, k, lam, batches=1500) for k in range(1, n)}
    plain = variance_by_simulation(n, n, lam, batches=1500)

    def relative_cost(price: float) -> float:
        """Cost at equal variance: as many times the batch as its variance exceeds the plain batch's."""
        costs = [variance / plain * n * (forwards * price + k / n * exact) for k, variance in variances.items()]
        return min(costs) / (n * exact)

    low, high = 0.0, 1.0
    assert relative_cost(low) < 1 < relative_cost(high)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if relative_cost(middle) < 1 else (low, middle)
    problem = Problem.make()
    gg, gh, hh = (float(problem.moment(*pair, EQUAL, "n - 1").sum()) for pair in ("gg", "gh", "hh"))
    formula = break_even((gg - 2 * lam * gh + lam**2 * hh) / gg) * exact / forwards
    assert formula == pytest.approx(low, rel=0.1)
    lams = torch.full((3,), lam, dtype=torch.float64)
    values = [report(run(1, seed), lams, 6, 1, 0.05, unit_cost_ratio=forwards / exact) for seed in RUNS]
    observed = sum(x["gpcv/break_even_price"] for x in values) / len(values)
    assert observed == pytest.approx(low, rel=0.1)


# --------------------------------------------------------------------------------------------------------- its interval


def covered(k: int, runs: int, steps: int, decay: float = 0.95) -> tuple[int, float]:
    """How many of these runs' 95% intervals hold the true break-even price, and their mean width relative to it."""
    problem, layout, held, width = Problem.make(), layout_of(), 0, 0.0
    v, d, _ = truth()
    price = break_even(d / v) / 0.9
    for seed in range(runs):
        generator, statistics = torch.Generator().manual_seed(seed), Statistics.start(layout.layers, decay)
        for _ in range(steps):
            control = torch.randperm(6, generator=generator)[:k].tolist()
            statistics = observe(statistics, layout, observation(layout, *problem.draw(6, generator), control), LAMS)
        values = report(statistics, LAMS, 6, k, 0.05, 0.9)
        assert values["gpcv/break_even_low"] <= values["gpcv/break_even_price"] <= values["gpcv/break_even_high"]
        held += values["gpcv/break_even_low"] <= price <= values["gpcv/break_even_high"]
        width += (values["gpcv/break_even_high"] - values["gpcv/break_even_low"]) / price / runs
    return held, width


@pytest.mark.parametrize("k", [1, 2])
def test_the_interval_holds_the_break_even_price(k: int) -> None:
    held, width = covered(k, runs=40, steps=25)
    assert held >= 34  # of 40 at 95%, fewer than that happen once in 300
    assert width < 1  # and it says something: all prices would be several times the true one


@pytest.mark.slow
@pytest.mark.parametrize(("k", "decay"), [(1, 0.95), (2, 0.95), (1, 0.8)])
def test_the_interval_s_coverage(k: int, decay: float) -> None:
    held, _ = covered(k, runs=300, steps=40, decay=decay)
    assert 0.915 < held / 300 < 0.99  # within about three standard errors


def test_the_interval_shrinks_with_the_square_root_of_steps() -> None:
    problem, layout, widths = Problem.make(), layout_of(), {40: 0.0, 160: 0.0}
    for seed in range(4):
        generator, statistics = torch.Generator().manual_seed(seed), Statistics.start(layout.layers, 1 - 1e-6)
        for step in range(1, 161):
            seen = observation(layout, *problem.draw(6, generator), [0, 1])
            statistics = observe(statistics, layout, seen, LAMS)
            low, high = delta_interval(statistics, LAMS)
            assert ((low, high) == (0.0, 1.0)) == (step < 10)
            if step in widths:
                widths[step] += high - low
    assert widths[40] / widths[160] == pytest.approx(2, rel=0.25)
    # A higher confidence is a wider interval, around the same delta.
    wide = delta_interval(statistics, LAMS, confidence=0.99)
    assert wide[0] < low < high < wide[1]
    assert sum(wide) == pytest.approx(low + high)


def test_student_s_quantile_is_that_of_the_tables() -> None:
    assert student_quantile(0.95, 8) == pytest.approx(2.306, rel=3e-3)
    assert student_quantile(0.95, 20) == pytest.approx(2.086, rel=1e-3)
    assert student_quantile(0.99, 1e9) == pytest.approx(2.5758, rel=1e-4)
