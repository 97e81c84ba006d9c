"""The statistics in the optimizer's metric: closed form, the error of sampled coordinates, and what torch does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ledger.control_variate import (
    Layout,
    Statistics,
    adam_metric,
    observe,
    optimal_coefficient,
    relative_cost,
    report,
    variances,
)
from tests.gradient_problems import (
    FOREVER,
    LAM,
    METRIC,
    RUNS,
    SHAPES,
    Problem,
    assert_estimates,
    layout_of,
    observation,
    run,
)

EQUAL = [1.0] * 6


@pytest.mark.parametrize("k", [1, 2])
def test_covariances_match_closed_form(k: int) -> None:
    problem = Problem.make().divided_by(METRIC)
    runs = [variances(run(k, seed, metric=True)) for seed in RUNS]
    # H has one degree of freedom a step here, not n - 1 as without a metric.
    assert_estimates([v.h for v in runs], problem.moment("h", "h", EQUAL, "n - 1"), 0.05)
    assert_estimates([v.e for v in runs], problem.moment("e", "e", EQUAL, "n - 1"), 0.1)
    assert_estimates([v.of_exact() for v in runs], problem.moment("g", "g", EQUAL, "n - 1"), 0.1)
    truth = problem.moment("g", "h", EQUAL, "n - 1") / problem.moment("h", "h", EQUAL, "n - 1")
    assert_estimates([optimal_coefficient(run(k, seed, metric=True)) for seed in RUNS], truth, 0.05)


@pytest.mark.parametrize("k", [1, 2])
def test_reported_values_match_closed_form(k: int) -> None:
    problem, n, lam = Problem.make().divided_by(METRIC), 6, torch.tensor(LAM, dtype=torch.float64)
    gg, gh, hh = (problem.moment(*pair, EQUAL, "n - 1") for pair in ("gg", "gh", "hh"))
    v, d = float(gg.sum()), float((gg - 2 * lam * gh + lam**2 * hh).sum())
    means = {pair: float(problem.products(*pair).sum()) for pair in ((0, 0), (0, 1), (1, 1))}
    bias = math.sqrt((means[0, 0] - 2 * means[0, 1] + means[1, 1]) / means[0, 0])

    reports = [report(run(k, seed), lam, n, k, 0.05, 0.9, adam=run(k, seed, metric=True)) for seed in RUNS]
    found = {name: [values[name] for values in reports] for name in reports[0]}
    assert_estimates(found["gpcv/adam/delta"], d / v, 0.05)
    assert_estimates(found["gpcv/adam/rho2"], float((gh**2 / hh).sum() / gg.sum()), 0.05)
    assert_estimates(found["gpcv/adam/relative_cost"], relative_cost(d / v, 0.05), 0.05)
    assert_estimates(found["gpcv/adam/noise_scale"], v / means[0, 0], 0.1)
    assert_estimates(found["gpcv/adam/bias"], bias, 0.05)
    assert_estimates(found["gpcv/adam/effective_batch"], v / (v / n + d * (1 / k - 1 / n)), 0.05)
    # The metric leaves the plain values as they are.
    plain = report(run(k, 0), lam, n, k, 0.05, 0.9)
    assert {name: value for name, value in reports[0].items() if "adam/" not in name} == plain
    assert {name for name in reports[0] if "adam/" in name} == {
        name.replace("gpcv/", "gpcv/adam/")
        for name in plain
        if name not in ("gpcv/coefficient", "gpcv/cosine", "gpcv/bias_z")
    }


def test_a_metric_of_ones_is_neutral() -> None:
    problem, layout, generator = Problem.make(), layout_of(), torch.Generator().manual_seed(0)
    lam, plain = torch.tensor(LAM, dtype=torch.float64), Statistics.start(layout.layers)
    ones = twos = plain
    for _ in range(3):
        seen = observation(layout, *problem.draw(5, generator), [1, 3], scale=8.0)
        plain = observe(plain, layout, seen, lam)
        ones = observe(ones, layout, seen, lam, torch.ones_like(layout.inflation))
        twos = observe(twos, layout, seen, lam, torch.full_like(layout.inflation, 2.0))
    for name in plain.averages:
        if name != "h_variance":  # from all n predictions without a metric, from two means with one
            torch.testing.assert_close(ones.mean(name), plain.mean(name), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(twos.mean(name), ones.mean(name) / 4, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ones.drift, plain.drift)


def test_a_coordinate_without_a_scale_counts_nothing() -> None:
    problem, layout, generator = Problem.make(), layout_of(), torch.Generator().manual_seed(0)
    metric = layout.sample(METRIC)
    metric[3] = 0.0
    quiet, loud = Statistics.start(layout.layers), Statistics.start(layout.layers)
    for _ in range(3):
        g, h = problem.draw(5, generator)
        quiet = observe(quiet, layout, observation(layout, g, h, [2]), torch.ones(3), metric)
        g["first.weight"].view(5, -1)[:, 3] += 1e6 * torch.randn(5, generator=generator)
        loud = observe(loud, layout, observation(layout, g, h, [2]), torch.ones(3), metric)
    for name in quiet.averages:
        assert torch.equal(quiet.mean(name), loud.mean(name)), name


def test_a_metric_that_is_not_finite_leaves_the_statistics_unchanged() -> None:
    layout, generator = layout_of(), torch.Generator().manual_seed(0)
    seen = observation(layout, *Problem.make().draw(5, generator), [2])
    statistics = observe(Statistics.start(layout.layers), layout, seen, torch.ones(3), layout.sample(METRIC))
    spoilt = layout.sample(METRIC) * 1e-45  # its inverse overflows
    after = observe(statistics, layout, seen, torch.ones(3), spoilt)
    assert after.steps == statistics.steps
    assert after.averages == statistics.averages
    assert after.previous is None


def test_the_error_of_sampled_coordinates_is_the_documented_one() -> None:
    shape, size = {"layer.weight": (80, 50)}, 4000
    generator = torch.Generator().manual_seed(0)
    metric = {"layer.weight": 10 ** torch.rand(80, 50, generator=generator)}
    g = {"layer.weight": torch.randn(2, 80, 50, generator=generator) * metric["layer.weight"]}
    h = {"layer.weight": 0.9 * g["layer.weight"]}
    contributions = (g["layer.weight"][0] / metric["layer.weight"]).square()
    found, sampled = [], []
    for seed in range(200):
        layout = layout_of(shape, per_parameter=256, seed=seed)
        seen = observation(layout, g, h, [0])
        statistics = observe(Statistics.start(layout.layers), layout, seen, torch.ones(1), layout.sample(metric))
        found.append(statistics.mean("gg"))
        sampled.append(len(layout.coordinates[0]))
    values = torch.cat(found)
    cv = float(contributions.std() / contributions.mean())
    error = cv * math.sqrt(200 / sum(sampled) - 1 / size)
    relative = values / contributions.sum().double()
    assert abs(float(relative.mean()) - 1) < 4 * error / math.sqrt(200)
    # A standard deviation from 200 values is known to about 5%.
    assert float(relative.std()) == pytest.approx(error, rel=0.2)


# ------------------------------------------------------------------------------------------------------ what torch does

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=0.1),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=1e-3, eps=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.9), eps=0.1, weight_decay=0.0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3, betas=(0.9, 0.99), eps=1e-12),  # another place for eps
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=0.1),
    "centred RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=0.1, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, eps=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_metric_is_what_the_update_was_divided_by(name: str) -> None:
    """Gradients that differ by a factor from step to step: the numerator of any rule is then proportional to them."""
    generator = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    parameters = {n: torch.zeros(s, dtype=torch.float64, requires_grad=True) for n, s in SHAPES.items()}
    layout = Layout.of(parameters)
    optimizer = OPTIMIZERS[name](list(parameters.values()))
    assert adam_metric(optimizer, parameters, layout) is None
    assert len(optimizer.state) == (len(SHAPES) if name == "Adagrad" else 0)  # asking leaves no trace
    for factor in (1.0, 3.0, 0.5, 2.0, 0.2, 1.5, 0.7, 2.5):
        before = {n: p.detach().clone() for n, p in parameters.items()}
        for n, p in parameters.items():
            p.grad = factor * direction[n]
        optimizer.step()
    found = adam_metric(optimizer, parameters, layout)
    assert found is not None
    update = layout.sample({n: before[n] - p.detach() for n, p in parameters.items()})
    ratio = update * found / layout.sample(direction)
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-4, atol=0)
    assert found.max() > 2 * found.min()
    if name in ("Adagrad", "RMSprop", "centred RMSprop"):  # no momentum: the numerator is the last gradient
        assert float(ratio.mean()) == pytest.approx(1e-3 * 2.5, rel=1e-4)


def test_optimizers_without_a_second_moment_have_no_metric() -> None:
    kinds: list[Any] = [torch.optim.SGD, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.Rprop]
    for kind in kinds:
        weight = torch.zeros(3, requires_grad=True)
        optimizer, layout = kind([weight], lr=0.1), Layout.of({"weight": weight})
        weight.grad = torch.ones(3)
        optimizer.step()
        assert adam_metric(optimizer, {"weight": weight}, layout) is None, kind


def test_what_has_no_second_moment_yet_has_no_scale() -> None:
    parameters = {name: torch.zeros(4, requires_grad=True) for name in ("seen", "unseen", "elsewhere")}
    layout = Layout.of(parameters)
    optimizer = torch.optim.Adam([parameters["seen"], parameters["unseen"]])
    parameters["seen"].grad = torch.tensor([1.0, 0.0, -2.0, 0.0])  # two rows of an embedding that no batch named
    optimizer.step()
    found = adam_metric(optimizer, parameters, layout)
    assert found is not None
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 2.0, 0.0] + [0.0] * 8))


def test_statistics_in_a_metric_travel_in_a_checkpoint() -> None:
    state = run(1, 0, metric=True).state_dict()
    restored = Statistics.from_state_dict(state)
    arguments: Any = (torch.tensor(LAM, dtype=torch.float64), 6, 1, 0.05, 0.9)
    assert report(restored, *arguments) == report(run(1, 0, metric=True), *arguments)


def test_an_older_state_without_the_newer_averages_can_be_read() -> None:
    state, fresh = run(1, 0).state_dict(), Statistics.start(run(1, 0).layers, FOREVER)
    del state["ratio"], state["averages"]["mean_residual"]
    restored = Statistics.from_state_dict(state)
    assert restored.mean("gg").tolist() == run(1, 0).mean("gg").tolist()
    assert restored.mean("mean_residual").tolist() == fresh.mean("mean_residual").tolist()
    arguments: Any = (torch.tensor(LAM, dtype=torch.float64), 6, 1, 0.05, 0.9)
    kept = report(replace(run(1, 0), ratio=fresh.ratio), *arguments)
    # Until they have seen something, nothing is known of the break-even price.
    assert (kept["gpcv/break_even_low"], kept["gpcv/break_even_high"]) == (0.0, 1 / 0.9)
