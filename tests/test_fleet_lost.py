"""A fleet that is lost, before or in the middle of a batch: that batch is exact, whatever was drawn."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_runs import Regression, Samples, trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet import (
    Fleet,
    FleetBackend,
    FleetLost,
    FleetSettings,
    InProcessFleet,
    InProcessSettings,
    Job,
    Observers,
    Predictions,
    PredictorRecipe,
)
from lightning_ledger.fleet.settings import make_predictor
from lightning_ledger.flops import StepFlops
from lightning_ledger.ledger import Work

LOST = Work(flops_by_format={"int8": 7})


class Losing(FleetSettings):
    """Predicts in process, and is lost at every batch in ``batches``, at one moment of it."""

    def __init__(self, moment: str, batches: Sequence[int]) -> None:
        self.moment, self.batches, self.batch = moment, batches, -1

    def open(self, module: L.LightningModule) -> FleetBackend:
        return _Losing(self, module)

    def maybe(self, moment: str) -> None:
        if moment == self.moment and self.batch in self.batches:
            lost = FleetLost("on purpose")
            lost.work = {"fleet/prediction": LOST}
            raise lost


class _Losing(FleetBackend):
    def __init__(self, plan: Losing, module: L.LightningModule) -> None:
        self._plan, self._module = plan, module
        plan.batch = 0  # the machines are opened in the first batch, after it was asked whether they are there

    def available(self) -> bool:
        self._plan.batch += 1
        return not (self._plan.moment == "before" and self._plan.batch in self._plan.batches)

    def fleet(self, recipe: PredictorRecipe, layout: Layout, observers: Observers) -> Fleet:
        return _LosingFleet(self._plan, InProcessFleet(make_predictor(self._module, recipe, observers), layout))


class _LosingFleet(Fleet):
    def __init__(self, plan: Losing, fleet: InProcessFleet) -> None:
        self._plan, self._fleet = plan, fleet

    def work(self, shape: Hashable) -> StepFlops | None:
        return self._fleet.work(shape)

    def refresh(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Work]:
        self._plan.maybe("refresh")
        return self._fleet.refresh(weights, seed)

    def submit(self, jobs: Sequence[Job], arguments: Sequence[Any], observe: bool) -> None:
        self._plan.maybe("submit")
        self._fleet.submit(jobs, arguments, observe)

    def gather(self) -> Predictions:
        self._plan.maybe("gather")
        return self._fleet.gather()


def fit(
    fleet: FleetSettings, directory: Path, exact: int = 1, corrected: bool = True, **options: Any
) -> tuple[Tensor, list[float], dict[str, Work]]:
    L.seed_everything(0, verbose=False)
    module, ledger, shares = Regression(), ComputeLedger(), []

    class Shares(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            shares.append(float(args[0].strategy.loss_values["gpcv/exact_share"]))

    callbacks = [GradientPrediction(microbatches=4, exact=exact, fleet=fleet), ledger, Shares()]
    callbacks += [ControlVariate()] if corrected else []
    runner = trainer(directory, *callbacks, strategy="predicted_gradients", max_epochs=1, **options)
    runner.fit(module, DataLoader(Samples(47), batch_size=8))  # the last micro-batches are unequal
    return weights(module), shares, ledger.ledger.totals()


ARMS = {"corrected": (1, True), "two exact": (2, True), "mixed": (1, False), "predictions only": (0, False)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Weights after training with exact gradients alone."""
    return fit(InProcessSettings(), tmp_path_factory.mktemp("exact"), exact=4, corrected=False)[0]


@pytest.mark.parametrize("moment", ["before", "refresh", "submit", "gather"])
@pytest.mark.parametrize("arm", ARMS)
def test_a_batch_whose_predictions_are_lost_is_exact(arm: str, moment: str, reference: Tensor, tmp_path: Path) -> None:
    exact, corrected = ARMS[arm]
    first = 1 if moment == "before" else 0
    found, shares, work = fit(Losing(moment, range(first, 9)), tmp_path, exact, corrected)
    assert shares[first:] == [1.0] * (6 - first)
    if not first:
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-6)
    if moment != "before":
        assert work["waste/lost_prediction"].flops >= 6 * LOST.flops


def test_a_fleet_that_comes_back_predicts_again(reference: Tensor, tmp_path: Path) -> None:
    healthy, *_ = fit(InProcessSettings(), tmp_path)
    assert float((healthy - reference).abs().max()) > 1e-4  # what lost predictions would look like
    found, shares, work = fit(Losing("gather", [2, 3]), tmp_path)
    assert shares == [0.25, 0.25, 1.0, 1.0, 0.25, 0.25]
    assert work["fleet/prediction"].passes == 3 * 4
    assert work["scarce/backward"].flops > 0
    assert not torch.equal(found, healthy)


def test_it_is_exact_under_accumulation(tmp_path: Path) -> None:
    reference, *_ = fit(InProcessSettings(), tmp_path, exact=4, corrected=False, accumulate_grad_batches=2)
    found, *_ = fit(Losing("gather", range(9)), tmp_path, accumulate_grad_batches=2)
    torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-6)
