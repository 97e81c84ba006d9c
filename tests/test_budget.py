"""BudgetStopping in real, short trainings: when it ends them, what it leaves behind, and that a resume goes on."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ledger.callbacks import BudgetStopping, ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import read_ledger
from lightning_ledger.prices import PriceBook
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import Regression, Samples, ValidatedRegression, trainer, weights

pytestmark = [
    # torchdata 0.11 tells torch a vital that torch 2.13 no longer wants to know.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
]

# Eight batches of 4 an epoch. The perceptron multiplies 8 x 16 + 16 x 3 = 176 weights a sample: forward 2 x 176 FLOPs,
# backward twice that without the inputs' gradient, 2 x (176 + 16 x 3). A step is 1 + 448/352 forwards.
BATCHES, BATCH = 8, 4
STEP = 1 + 448 / 352


def fit(
    directory: Path,
    *callbacks: pl.Callback,
    module: pl.LightningModule | None = None,
    ckpt_path: Path | None = None,
    validate: bool = False,
    **options: Any,
) -> pl.Trainer:
    torch.manual_seed(0)
    module = module or (ValidatedRegression() if validate else Regression())
    run = trainer(directory, *callbacks, **{"max_epochs": 2, **options})
    train = StatefulDataLoader(Samples(BATCHES * BATCH), batch_size=BATCH)
    run.fit(
        module, train, DataLoader(Samples(BATCH, seed=9), batch_size=BATCH) if validate else None, ckpt_path=ckpt_path
    )
    return run


def total(directory: Path) -> float:
    return read_ledger(directory).cost(PriceBook())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["ledger first", "budget first"])
def test_the_step_that_reaches_the_budget_is_the_last(tmp_path: Path, order: tuple[int, int]) -> None:
    callbacks = [ComputeLedger(), BudgetStopping(2.5 * STEP)]
    run = fit(tmp_path, *(callbacks[i] for i in order))
    assert run.global_step == 3
    assert total(tmp_path) == pytest.approx(3 * STEP)
    # A budget of exactly three steps is three steps too.
    assert fit(tmp_path / "exactly", ComputeLedger(), BudgetStopping(3 * STEP - 1e-9)).global_step == 3


def test_a_budget_that_lasts_changes_nothing(tmp_path: Path) -> None:
    plain, watched = Regression(), Regression()
    watched.load_state_dict(plain.state_dict())
    fit(tmp_path / "plain", ComputeLedger(), module=plain)
    run = fit(tmp_path / "watched", BudgetStopping(1e9), ComputeLedger(), module=watched)
    assert run.global_step == 2 * BATCHES
    assert torch.equal(weights(plain), weights(watched))
    assert total(tmp_path / "plain") == total(tmp_path / "watched")
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("tier", "max_cost", "steps"),
    # A micro-batch is one sample here, and the unit its forward. A step is one exact micro-batch, STEP, and four
    # predictions at .05, STEP / 5.
    [("fleet", 0.5 * STEP, 3), ("scarce", 1e9, 2 * BATCHES), ("transfer", 1.0, 2 * BATCHES)],
)
def test_tiers_under_predicted_gradients(tmp_path: Path, tier: Any, max_cost: float, steps: int) -> None:
    arm = predicted(BudgetStopping(max_cost, tier=tier))
    assert fit(tmp_path, *arm, strategy=PredictedGradientStrategy()).global_step == steps


def test_the_total_holds_set_up_and_predictions(tmp_path: Path) -> None:
    run = fit(tmp_path, *predicted(BudgetStopping(12 * STEP)), strategy=PredictedGradientStrategy())
    assert run.global_step < 2 * BATCHES
    # The last step, an exact micro-batch and four predictions, is the one that reached the budget.
    assert 0 <= total(tmp_path) - 12 * STEP < (1 + 4 * 0.05) * STEP


def predicted(budget: BudgetStopping) -> list[pl.Callback]:
    prediction = GradientPrediction(microbatches=4, exact=1, check_separable=False)
    return [budget, prediction, ControlVariate(), ComputeLedger(prices=PriceBook(fleet_forward=0.05))]


def test_its_own_prices(tmp_path: Path) -> None:
    budget = BudgetStopping(2.5 * STEP, prices=PriceBook(scarce_forward=0.5))
    assert fit(tmp_path, ComputeLedger(), budget).global_step == 5


def test_no_stop_within_an_accumulation(tmp_path: Path) -> None:
    # Steps are of two batches; the budget is spent in the third batch.
    run = fit(tmp_path, ComputeLedger(), BudgetStopping(2.5 * STEP), accumulate_grad_batches=2)
    assert run.global_step == 2
    assert total(tmp_path) == pytest.approx(4 * STEP)


def test_it_says_so_once_and_saves_in_the_runs_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(tmp_path, ComputeLedger(), BudgetStopping(2.5 * STEP), validate=True)
    (said,) = [record.getMessage() for record in caplog.records if "BudgetStopping" in record.getMessage()]
    assert "of ledger/total spent, with a budget of" in said
    assert "training ends after step 3" in said
    assert f"Saved {tmp_path / 'budget-step=3.ckpt'}" in said
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["budget-step=3.ckpt"]


def test_it_saves_beside_the_trainers_checkpoints(tmp_path: Path) -> None:
    own = ModelCheckpoint(dirpath=tmp_path / "checkpoints", monitor="val_loss")
    fit(tmp_path, ComputeLedger(), BudgetStopping(2.5 * STEP), own, validate=True, enable_checkpointing=True)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["budget-step=3.ckpt", "epoch=0-step=3.ckpt"]
    assert own.best_model_path.endswith("epoch=0-step=3.ckpt")  # its own schedule is untouched


@pytest.mark.parametrize("validate", [False, True])
def test_a_resume_does_not_restart_spending(tmp_path: Path, validate: bool) -> None:
    stopped = fit(tmp_path, BudgetStopping(2.5 * STEP), ComputeLedger(), validate=validate)
    spent = total(tmp_path)
    saved = tmp_path / "budget-step=3.ckpt"
    # The same budget: nothing is left to train, and nothing is spent.
    again = fit(tmp_path, ComputeLedger(), BudgetStopping(2.5 * STEP), validate=validate, ckpt_path=saved)
    assert (stopped.global_step, again.global_step) == (3, 3)
    assert total(tmp_path) == pytest.approx(spent)
    # Two steps more: it goes on in the middle of the epoch, and what the checkpoint holds is no waste.
    more = fit(tmp_path, ComputeLedger(), BudgetStopping(spent + 1.5 * STEP), validate=validate, ckpt_path=saved)
    assert more.global_step == 5
    assert not any(account.startswith("waste/") for account in read_ledger(tmp_path).totals)
    assert read_ledger(tmp_path).totals["scarce/forward"].samples == 5 * BATCH


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, parts = Regression(), Regression()
    parts.load_state_dict(whole.state_dict())
    fit(tmp_path / "whole", ComputeLedger(), module=whole)
    fit(tmp_path / "parts", ComputeLedger(), BudgetStopping(10.5 * STEP), module=parts)
    fit(tmp_path / "parts", ComputeLedger(), module=parts, ckpt_path=tmp_path / "parts" / "budget-step=11.ckpt")
    assert torch.equal(weights(whole), weights(parts))
    assert read_ledger(tmp_path / "parts").totals == read_ledger(tmp_path / "whole").totals


def test_without_a_ledger_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"none among the callbacks .*BudgetStopping.*ComputeLedger\(\)"
    ):
        fit(tmp_path, BudgetStopping(1.0))


@pytest.mark.parametrize("max_cost", [0, -1.0, float("nan"), float("inf"), True, "5"])
def test_budgets_that_are_none(max_cost: Any) -> None:
    with pytest.raises(ValueError, match="max_cost="):
        BudgetStopping(max_cost)


def test_unknown_tier() -> None:
    with pytest.raises(ValueError, match="tier='gpu' is unknown: pass 'total'"):
        BudgetStopping(1.0, tier="gpu")  # type: ignore[arg-type]


def test_it_pickles() -> None:
    copy = pickle.loads(pickle.dumps(BudgetStopping(7, tier="fleet")))
    assert (copy.max_cost, copy.tier) == (7.0, "fleet")
