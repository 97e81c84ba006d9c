"""Three levels of fidelity in training: coarser predictions, finer ones on some micro-batches, exact gradients."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_ledger import PriceBook
from lightning_ledger.callbacks import AdaptiveAllocation, ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import multilevel_coefficients, multilevel_relative_cost, variances
from lightning_ledger.estimation import Allocation, Correction, allocate_levels, drawing
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.gradient_problems import FOREVER, Problem, layout_of, observation
from tests.lightning_runs import Samples, relative_error, trainer, weights
from tests.test_adaptive_allocation import N, Run, SaveAtBatchEnd
from tests.test_estimator_shares import LAM, RELATIVE, SEEDS, WEIGHTS, Step
from tests.test_estimator_shares import N as PARTS

# torchdata 0.11 tells torch a vital that torch 2.13 no longer wants to know.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
FORMATS = ["int4", "int8"]
PRICES = {"int4": 0.001, "int8": 0.05}


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "draw_seeds", lambda n, generator: SEEDS[:n] if n == PARTS else (*range(n),))


@pytest.mark.parametrize(("m", "k"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("weighting", WEIGHTS)
def test_the_mean_over_all_draws_is_the_full_batch_gradient(
    weighting: str, m: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(weighting)
    allocation = Allocation("int8", k / PARTS, below="int4", between=m / PARTS)
    found = []
    for control in itertools.combinations(range(PARTS), k):
        for members in itertools.combinations(range(PARTS - k), m):
            drawn = iter([control, members])
            monkeypatch.setattr(drawing, "draw_control", lambda n, k, generator, drawn=drawn: next(drawn))
            found.append(step.estimate(allocation))
            assert next(drawn, None) is None
    truth = step.weighted(step.exact())
    assert relative_error(torch.stack(found).mean(0), truth) < RELATIVE
    assert min(relative_error(g, truth) for g in found) > 100 * RELATIVE


def test_the_estimate_is_the_multilevel_one_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("tokens")
    drawn = iter([(1,), (0, 2)])  # of those left, 0, 2 and 3, the first and the last
    monkeypatch.setattr(drawing, "draw_control", lambda n, k, generator: next(drawn))
    found = step.estimate(Allocation("int8", 1 / PARTS, below="int4", between=2 / PARTS))
    coefficients = multilevel_coefficients(step.shares, [(0, 3), (1,)], [LAM, LAM])
    passes = [step.predicted("int4"), step.predicted("int8"), step.exact()]
    terms = [c * g for row, level in zip(coefficients, passes, strict=True) for c, g in zip(row, level, strict=True)]
    assert relative_error(found, torch.stack(terms).sum(0)) < RELATIVE


def test_every_pass_is_booked_once() -> None:
    step = Step()
    step.estimate(Allocation("int8", 1 / PARTS, below="int4", between=2 / PARTS))
    totals = step.ledger.totals()
    assert totals["scarce/forward"].passes == 1
    assert totals["fleet/prediction"].passes == PARTS + 2  # coarse ones on all, fine ones on M
    assert totals["fleet/control"].passes == 1  # fine on C
    assert {"int4", "int8"} <= totals["fleet/prediction"].flops_by_format.keys()


@pytest.mark.parametrize("n", [3, 8, 64])
@pytest.mark.parametrize("between", [0.01, 0.1])
@pytest.mark.parametrize("costs", [(0.001, 0.05), (0.02, 0.05)])
def test_the_best_numbers_are_the_best_of_all(n: int, between: float, costs: tuple[float, float]) -> None:
    residual, ratios = 0.002, (*costs, 1 + costs[1])

    def cost(m: int, k: int) -> float:
        return multilevel_relative_cost([between, residual], ratios, [m / n, k / n])

    found = allocate_levels(between, residual, costs, n, 1e-3, 1.0)
    assert found is not None
    best = min(cost(m, k) for k in range(1, n) for m in range(1, n - k + 1))
    assert found.relative_cost == pytest.approx(cost(round(found.between * n), round(found.share * n)), rel=1e-12)
    assert found.relative_cost <= 1.02 * best  # each number is rounded by itself


def run_with(directory: Path, prices: dict[str, float], **settings: Any) -> Run:
    """32 micro-batches of one sample each: one exact among them leaves a gap for cheaper passes to close."""
    run = Run(directory, format=FORMATS, multilevel=True, microbatches=32, **settings)
    run.ledger = ComputeLedger(prices=PriceBook(fleet_formats=prices))
    run.callbacks[1] = run.ledger
    return run


def test_three_levels_where_the_coarser_format_is_nearly_free(tmp_path: Path) -> None:
    run = run_with(tmp_path, PRICES).fit(70)
    shares = run.column("between_share")
    assert shares[:10] == [0.0] * 10
    assert shares[-1] > 0
    assert run.column("format_index")[-1] == 1  # int8 is what exact gradients correct
    mark = run.marks()[-1].metrics
    costs = [mark[f"gpcv/allocation_relative_cost_{name}"] for name in ("0", "1", "levels")]
    assert costs[2] == min(costs)
    between = run.variate.correction.between
    assert between is not None
    assert between.statistics is not None
    # The difference of the formats was measured: about the coarser one's own error, and no more than the worst case.
    coarse = run.variate.correction.of("int4").evidence()
    seen, fine = between.evidence(), run.variate.correction.evidence()
    assert coarse is not None
    assert seen is not None
    assert fine is not None
    assert 0.3 * coarse.residual < seen.residual < 3 * coarse.residual
    assert mark["gpcv/allocation_between_delta"] < 3 * coarse.residual / fine.variance
    assert run.column("loss")[-1] < 0.5 * run.column("loss")[0]


def test_one_format_where_the_coarser_is_as_dear(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"int4": 0.05, "int8": 0.05}).fit(50)
    assert set(run.column("between_share")) == {0.0}


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    whole = run_with(tmp_path / "whole", PRICES).fit(45)
    first, checkpoint = run_with(tmp_path / "first", PRICES), tmp_path / "saved.ckpt"
    first.callbacks.append(SaveAtBatchEnd(checkpoint, 36))
    first.fit(36)
    assert first.column("between_share")[-1] > 0
    resumed = run_with(tmp_path / "resumed", PRICES)
    resumed.fit(45, checkpoint)
    assert torch.equal(weights(resumed.module), weights(whole.module))
    for key in ("between_share", "format_index", "exact_share"):
        assert first.column(key) + resumed.column(key) == whole.column(key)


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ({"format": "int8"}, "format=['int8'], microbatches=8"),
        ({"format": FORMATS, "microbatches": 2}, "microbatches=2"),
    ],
)
def test_without_room_for_three_levels_it_refuses(prediction: dict[str, Any], said: str, tmp_path: Path) -> None:
    callbacks = [GradientPrediction(**prediction), ControlVariate(), AdaptiveAllocation(multilevel=True)]
    run = trainer(tmp_path, *callbacks, strategy=PredictedGradientStrategy(), max_steps=1)
    with pytest.raises(MisconfigurationException, match=re.escape(said)):
        run.fit(Run(tmp_path).module, DataLoader(Samples(N), batch_size=N))


def test_the_noise_of_an_estimated_sum_is_not_taken_for_variance() -> None:
    """With a poor coarse format the spread of the fine sums is mostly noise; H comes from the comparison instead."""
    torch.manual_seed(0)
    layout = layout_of()
    allocation = Allocation("int8", 1 / 8, below="int4", between=1 / 8)
    correction = Correction(1.0, decay=FOREVER, allocation=allocation)
    between = correction.between = Correction(1.0, decay=FOREVER, allocation=allocation)
    problem = Problem.make()
    generator = torch.Generator().manual_seed(1)
    for _ in range(600):
        g, h = problem.draw(8, generator)
        coarse = {name: x + 0.7 * torch.randn(x.shape, generator=generator) for name, x in h.items()}
        lower = observation(layout, h, coarse, control=[0])
        # C = {1}, M = {0}
        rest = {name: c.mean(0) + h[name][0] - c[0] - h[name][1] / 8 for name, c in coarse.items()}
        seen = replace(observation(layout, g, h, control=[1]), rest=rest, squared_norms=torch.zeros(8, 0))
        for own, shown in ((correction, seen), (between, lower)):
            own.observe(layout, shown, own.now(layout), {})
    assert correction.statistics is not None
    correction.cost_ratios = (0.05, 1.0)
    truth = float(problem.moment("g", "g", [1.0] * 8, "n - 1").sum())
    naive = float(variances(correction.statistics).of_exact().sum())
    evidence = correction.evidence()
    assert evidence is not None
    assert naive > 1.3 * truth
    assert evidence.variance == pytest.approx(truth, rel=0.15)
