"""``AdaptiveAllocation`` chooses among number formats, each at its own price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger import PriceBook
from lightning_ledger.callbacks import AdaptiveAllocation, ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.estimation import Allocation, Correction, GradientEstimator, PredictionSettings, PredictionState
from lightning_ledger.strategies import PredictedGradientDDPStrategy, PredictedGradientStrategy
from tests.lightning_runs import Samples, TokenModel, flat, token_batch, trainer, weights
from tests.test_adaptive_allocation import N, Run, SaveAtBatchEnd

# torchdata 0.11 tells torch a vital that torch 2.13 no longer wants to know.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
FORMATS = ["int4", "int8"]


def run_with(directory: Path, prices: dict[str, float], **settings: Any) -> Run:
    """A run that starts with four bits."""
    run = Run(directory, format=FORMATS, **settings)
    run.ledger = ComputeLedger(prices=PriceBook(fleet_formats=prices))
    run.callbacks[1] = run.ledger
    return run


@pytest.mark.parametrize(
    ("prices", "chosen"),
    [
        ({"int4": 0.05, "int8": 0.05}, 1),  # as dear, and more faithful
        ({"int4": 0.001, "int8": 0.9}, 0),
    ],
)
def test_the_format_that_pays_best_is_used(prices: dict[str, float], chosen: int, tmp_path: Path) -> None:
    run = run_with(tmp_path, prices).fit(60)
    used = run.column("format_index")
    assert used[:10] == [0.0] * 10  # too little is known
    assert used[-1] == chosen
    totals = run.ledger.ledger.totals()
    # The other one is tried at each step until it is known as well, and then at step 40.
    assert totals["fleet/probe"].passes == 2 * (30 + 1)
    by_format = totals["fleet/prediction"].flops_by_format
    per_step = by_format["int4"] / used.count(0.0)
    assert by_format.get("int8", 0) == pytest.approx(per_step * used.count(1.0))
    for mark in run.marks():
        costs = {index: mark.metrics[f"gpcv/allocation_relative_cost_{index}"] for index in (0, 1)}
        assert min(costs, key=lambda index: costs[index]) == chosen


def test_where_one_format_is_hopeless_the_other_goes_on(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"int4": 3.0, "int8": 0.05}, patience=5).fit(50)
    assert set(run.column("predicting")) == {1.0}
    assert run.column("format_index")[-1] == 1


def test_where_none_can_pay_none_is_probed(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"int4": 2.0, "int8": 2.0}, probe_every=4).fit(20)
    assert set(run.column("predicting")) == {0.0}
    assert "fleet/probe" not in run.ledger.ledger.totals()


def test_without_predictions_formats_are_probed_in_turn() -> None:
    off = Correction(allocation=Allocation("int4", 1.0, predicting=False, probe_every=4))
    assert [off.probed(FORMATS, step) for step in range(0, 16, 4)] == ["int4", "int8"] * 2
    assert [off.probed(FORMATS, step) for step in (1, 2, 3)] == [None] * 3
    off.allocate(Allocation("int4", 1.0, predicting=False, probe_every=0))
    assert [off.probed(FORMATS, step) for step in (0, 4)] == [None] * 2


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    prices = {"int4": 0.05, "int8": 0.05}
    whole = run_with(tmp_path / "whole", prices).fit(50)
    first, checkpoint = run_with(tmp_path / "first", prices), tmp_path / "saved.ckpt"
    first.callbacks.append(SaveAtBatchEnd(checkpoint, 33))
    first.fit(33)
    resumed = run_with(tmp_path / "resumed", prices)
    resumed.fit(50, checkpoint)
    assert torch.equal(weights(resumed.module), weights(whole.module))
    for key in ("format_index", "exact_share"):
        assert first.column(key) + resumed.column(key) == whole.column(key)
    assert set(whole.column("format_index")) == {0.0, 1.0}
    mine, expected = resumed.ledger.ledger.totals(), whole.ledger.ledger.totals()
    assert mine["fleet/probe"] == expected["fleet/probe"]


def test_a_probe_leaves_the_estimate_as_it_is() -> None:
    def estimate(others: tuple[str, ...]) -> tuple[Tensor, Correction]:
        torch.manual_seed(7)
        module, state = TokenModel(), PredictionState(torch.Generator().manual_seed(3))
        settings = PredictionSettings("int4", engine="eager", microbatches=4, check_separable=False, others=others)
        correction = Correction(allocation=Allocation("int4", 1 / 4))
        estimator = GradientEstimator(module, settings, state, correction)
        estimator.forward(token_batch(8, seed=1), 0).backward()
        estimator.backward()
        return flat(module, {name: p.grad for name, p in module.named_parameters()}), correction

    plain, alone = estimate(())
    probed, correction = estimate(("int8",))
    assert torch.equal(plain, probed)
    assert alone.statistics is not None
    assert correction.statistics is not None
    assert torch.equal(alone.statistics.mean("gg"), correction.statistics.mean("gg"))
    other = correction.of("int8").statistics
    assert other is not None
    # int8 is nearer to the same exact gradient than int4 is.
    assert 0 < float(other.mean("residual").sum()) < 0.1 * float(alone.statistics.mean("residual").sum())


@pytest.mark.parametrize("formats", ["fp8", ["fp8", "int4"]])
def test_resumed_with_other_formats_it_begins_with_the_first_of_these(formats: Any, tmp_path: Path) -> None:
    first, checkpoint = run_with(tmp_path / "first", {"int4": 0.05, "int8": 0.05}), tmp_path / "saved.ckpt"
    first.callbacks.append(SaveAtBatchEnd(checkpoint, 20))
    first.fit(20)
    assert first.column("format_index")[-1] == 1  # int8
    other = Run(tmp_path / "other", format=formats)
    other.fit(22, checkpoint)
    totals = other.ledger.ledger.totals()
    assert totals["fleet/prediction"].flops_by_format["fp8"] > 0
    correction = other.variate.correction
    assert correction.format == "fp8"
    # What was known of int8 is not taken for fp8's: two steps are.
    assert correction.statistics is not None
    assert correction.statistics.steps == 2
    assert correction.others["int8"].statistics is not None
    assert correction.others["int8"].statistics.steps >= 9


def test_statistics_of_another_format_are_not_gone_on_with_without_allocation(tmp_path: Path) -> None:
    def fit(name: str, format: str, steps: int, checkpoint: Path | None = None) -> Run:
        run = Run(tmp_path / name, format=format)
        run.callbacks.remove(run.allocation)
        return run.fit(steps, checkpoint)

    first, checkpoint = fit("first", "int8", 12), tmp_path / "saved.ckpt"
    first.trainer.save_checkpoint(checkpoint)
    same, other = (fit(name, name, 14, checkpoint).variate.correction.statistics for name in ("int8", "int4"))
    assert same is not None
    assert other is not None
    assert (same.steps, other.steps) == (14, 2)


def test_finding_a_learning_rate_leaves_nothing_known_behind(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"int4": 0.05, "int8": 0.05})
    run.module.lr = 1e-3
    run.callbacks.append(LearningRateFinder(num_training_steps=8, min_lr=1e-5, max_lr=1e-3))
    run.fit(5)
    correction = run.variate.correction
    assert correction.statistics is not None
    assert correction.statistics.steps == 5
    other = correction.of("int8").statistics
    assert other is not None
    assert other.steps == 5


def test_fractional_draws_on_several_processes_are_refused() -> None:
    callbacks = [GradientPrediction(), ControlVariate(), allocation := AdaptiveAllocation(fractional=True)]
    run = pl.Trainer(
        accelerator="cpu", devices=2, strategy=PredictedGradientDDPStrategy(), callbacks=callbacks, logger=False
    )
    with pytest.raises(MisconfigurationException, match="fractional=True on 2 processes"):
        allocation.setup(run, TokenModel(), "fit")


def test_a_list_without_anybody_to_choose_is_refused(tmp_path: Path) -> None:
    callbacks = [GradientPrediction(format=FORMATS, microbatches=N, engine="eager"), ControlVariate()]
    run = trainer(tmp_path, *callbacks, strategy=PredictedGradientStrategy(), max_steps=1)
    with pytest.raises(MisconfigurationException, match="nothing chooses: add"):
        run.fit(Run(tmp_path).module, DataLoader(Samples(32), batch_size=32))


@pytest.mark.parametrize("formats", [[], ["int8", "int8"]])
def test_a_list_must_have_different_formats(formats: list[str]) -> None:
    with pytest.raises(ValueError, match="a list of different ones"):
        GradientPrediction(format=formats)
