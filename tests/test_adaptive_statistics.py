"""What decisions rest on: the centre's error, statistics as k changes, the drift of an uncorrected mix."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_ledger.control_variate import Average, Draw, Layout, Plan, best_share, bias_z, relative_cost
from lightning_ledger.estimation import (
    Allocation,
    Centre,
    Correction,
    Evidence,
    GradientEstimator,
    PredictionSettings,
    PredictionState,
    allocate,
)
from lightning_ledger.microbatches import draw_control
from tests.gradient_problems import METRIC, Problem, layout_of, observation
from tests.lightning_runs import TokenModel, exact_gradient, token_batch

LAM = torch.tensor([0.7, 0.9, 1.0], dtype=torch.float64)
ROOTS = {name: value.sqrt() for name, value in METRIC.items()}  # over one order of magnitude


@pytest.mark.parametrize("measured", [False, True])
def test_what_the_centre_misses_has_no_sampling_error(measured: bool) -> None:
    """Against ``||mean residual - b_t||^2``, known in closed form, over 100 steps of 8 runs."""
    problem, layout = Problem.make(), layout_of()
    by_name = dict(zip(layout.names, LAM[layout.layer_of].tolist(), strict=True))
    mean = {name: x[0] - by_name[name] * x[1] for name, x in problem.mean.items()}
    metric = layout.sample(ROOTS) if measured else None
    differences, truths = [], []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        centre, known = Centre(decay=0.9), Average.zeros(1)
        for step in range(100):
            if step:
                b = {name: centre.mean[name] - mean[name].reshape(centre.mean[name].shape) for name in mean}
                scaled = [x / (ROOTS[name].reshape(x.shape) if measured else 1.0) for name, x in b.items()]
                known = known.add(torch.stack([x.square().sum() for x in scaled]).sum().reshape(1), 0.9)
            g, h = problem.draw(6, generator)
            control = torch.randperm(6, generator=generator)[:1].tolist()
            centre, missed = centre.after(layout, observation(layout, g, h, control, scale=8.0), LAM, metric)
            centre = centre.counted(missed)
        differences.append(float(centre.missed[measured].mean - known.mean))
        truths.append(float(known.mean))
    found, truth = torch.tensor(differences), sum(truths) / len(truths)
    error = float(found.std()) / math.sqrt(len(found))
    assert error < 0.5 * truth, (error, truth)  # twice the truth, or none of it, would be noticed
    assert abs(float(found.mean())) < 5 * error, (found.mean(), error, truth)


def test_changing_k_keeps_one_estimate_of_the_residuals_variance() -> None:
    """With an allocation k = 2 leaves nothing behind that k = 1 would not renew."""
    problem, layout, generator = Problem.make(), layout_of(), torch.Generator().manual_seed(1)
    correction = Correction(allocation=Allocation("int8", 0.5))
    lam = correction.now(layout)
    for step in range(40):
        g, h = problem.draw(6, generator)
        control = torch.randperm(6, generator=generator)[: 2 if step < 20 else 1].tolist()
        correction.observe(layout, observation(layout, g, h, control), lam, {})
    assert correction.statistics is not None
    assert correction.statistics.averages["within"].weight == 0
    assert correction.statistics.averages["lagged"].weight > 0.8


def evidence(delta: float, w: float, missed: float | None = None) -> Evidence:
    return Evidence(2.0, 2.0 * delta, 0.5 * delta, 2 * delta, w, None if missed is None else 2.0 * missed)


def allocated(known: Evidence, n: int, floor: float, ceiling: float, fractional: Draw | None = None) -> Plan:
    """The plan for one format."""
    return allocate({"int8": known}, "int8", n, floor, ceiling, fractional)["int8"]


@pytest.mark.parametrize("n", [2, 8, 64])
@pytest.mark.parametrize("w", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("delta", [0.0, 0.002, 0.1, 0.5])
def test_whole_numbers_are_the_best_of_all(delta: float, w: float, n: int) -> None:
    def cost(k: int) -> float:  # variance x cost, relative to plain exact training
        return (1 + delta * (n / k - 1)) * (w + k / n)

    best = min(range(1, max(2, n)), key=cost)
    plan = allocated(evidence(delta, w), n, 0.001, 1.0)
    assert plan.draw == "uniform"
    assert plan.relative_cost == pytest.approx(cost(best), rel=1e-12)
    assert Allocation("int8", plan.share).count(n) == best


def test_limits_hold() -> None:
    assert allocated(evidence(0.1, 0.05), 64, 0.25, 1.0).share == 16 / 64
    assert allocated(evidence(0.5, 0.5), 64, 0.001, 0.125).share == 8 / 64
    assert allocated(evidence(0.9, 5.0), 4, 0.001, 1.0).share == 3 / 4  # one is always left to predictions


def test_fewer_than_one_in_n_only_where_that_is_cheaper() -> None:
    # best share .0101 of 8: one in 12 batches, and R falls from .16 to near .07 if b leaves nothing
    plan = allocated(evidence(0.002, 0.05, missed=0.0), 8, 1e-3, 1.0, "systematic")
    assert (plan.draw, plan.share) == ("systematic", pytest.approx(best_share(0.002, 0.05)))
    assert plan.relative_cost == pytest.approx(relative_cost(0.002, 0.05))
    # A centre that leaves a mean residual as large as the predictions' own noise is no help.
    assert allocated(evidence(0.002, 0.05, missed=1.0), 8, 1e-3, 1.0, "systematic").draw == "uniform"
    # Nothing known of the centre, or nobody asked for it.
    assert allocated(evidence(0.002, 0.05), 8, 1e-3, 1.0, "systematic").draw == "uniform"
    assert allocated(evidence(0.002, 0.05, missed=0.0), 8, 1e-3, 1.0).draw == "uniform"


def test_of_several_formats_the_one_of_least_cost_but_not_for_a_trifle() -> None:
    known = {"int8": evidence(0.002, 0.05), "int4": evidence(0.1, 0.025)}
    plans = allocate(known, "int4", 64, 1e-3, 1.0)
    assert list(plans) == ["int8", "int4"]
    for name, plan in plans.items():
        assert plan == allocated(known[name], 64, 1e-3, 1.0)._replace(name=name)
    # At a price that makes int8 a little dearer than int4, each stays where it is in use.
    even = {"int8": evidence(0.002, 0.175), "int4": evidence(0.1, 0.025)}
    costs = {name: plan.relative_cost for name, plan in allocate(even, "int4", 64, 1e-3, 1.0).items()}
    assert 0.95 < costs["int8"] / costs["int4"] < 1.05
    for active in even:
        assert next(iter(allocate(even, active, 64, 1e-3, 1.0))) == active


def drift(corrected: bool, format: str, steps: int) -> float:
    """``bias_z`` over random batches, at fixed weights so large that four bits round the gradients badly."""
    torch.manual_seed(0)
    module = TokenModel()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4.0)
    correction = Correction(1.0) if corrected else None
    state = PredictionState(torch.Generator().manual_seed(0))
    settings = PredictionSettings(format=format, engine="eager", microbatches=4, check_separable=False)
    estimator = GradientEstimator(module, settings, state, correction)
    for step in range(steps):
        estimator.forward(token_batch(8, seed=step), 0).backward()
        estimator.backward()
        module.zero_grad(set_to_none=True)
    if correction is None:
        return estimator.loss_values["gpcv/bias_z"]
    assert correction.statistics is not None
    return bias_z(correction.statistics)


def test_the_mix_drifts_and_unbiased_estimates_do_not() -> None:
    mixed, corrected, unbiased = drift(False, "int4", 80), drift(True, "int4", 80), drift(False, "fp32", 80)
    assert mixed > 6, mixed
    assert abs(corrected) < 3, corrected
    assert abs(unbiased) < 3, unbiased


def test_the_drift_of_the_mix_is_its_difference_from_the_exact_gradients() -> None:
    """By hand: the mix is what ``.grad`` holds, the exact gradient on C plain autograd's."""
    torch.manual_seed(0)
    module, state = TokenModel(), PredictionState(torch.Generator().manual_seed(0))
    settings = PredictionSettings(format="int4", engine="eager", microbatches=2, check_separable=False)
    estimator = GradientEstimator(module, settings, state)
    batch = token_batch(2, seed=3)
    # The private generator's first draw is C.
    (control,) = draw_control(2, 1, torch.Generator().manual_seed(0))
    (32.0 * estimator.forward(batch, 0)).backward()
    estimator.backward()
    layout = Layout.of(dict(module.named_parameters()))
    mix = layout.sample({name: p.grad for name, p in module.named_parameters()}) / 32
    part = {key: value[control : control + 1] for key, value in batch.items()}
    exact = layout.sample(exact_gradient(module, part, 0)[1])
    assert state.mixed is not None
    expected = layout.signs @ (mix - exact)
    torch.testing.assert_close(state.mixed.drift[0].mean.float(), expected, rtol=1e-4, atol=1e-5)
