"""Several fits with one Trainer or one set of callbacks, and checkpoints that change hands."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
)

from lightning_ledger.callbacks import ComputeLedger
from lightning_ledger.ledger import read_ledger
from tests.settings_runs import (
    Model,
    every_arm,
    fresh,
    ledger_of,
    stack,
    trainer,
)

# ------------------------------------------------------------------------------------------- several fits, checkpoints


@every_arm
def test_two_fits_in_a_row_with_one_trainer(arm: str, tmp_path: Path) -> None:
    def twice(strategy: Any, *callbacks: L.Callback) -> tuple[L.Trainer, Any]:
        runner, model = trainer(tmp_path, *callbacks, strategy=strategy, max_epochs=1), fresh(Model)
        runner.fit(model)
        runner.fit_loop.max_epochs = 2
        runner.fit(model)
        return runner, model

    callbacks = stack(arm)
    (stock, reference), (runner, model) = twice("auto"), twice("predicted_gradients", *callbacks)
    assert runner.global_step == stock.global_step == ledger_of(callbacks).steps == 8
    torch.testing.assert_close(model.head.weight, reference.head.weight, rtol=1e-5, atol=1e-6)
    history = read_ledger(tmp_path)
    assert history.steps == 8
    assert history.totals == ledger_of(callbacks).totals()


def test_the_same_callbacks_in_a_new_trainer_go_on_counting(tmp_path: Path) -> None:
    callbacks, model = stack(engine="eager"), fresh(Model)
    trainer(tmp_path, *callbacks).fit(model)
    first = ledger_of(callbacks).totals()
    trainer(tmp_path, *callbacks).fit(model)
    assert ledger_of(callbacks).steps == 16
    # The second fit repeats the first one's work: the check as well.
    assert {account: work.flops for account, work in ledger_of(callbacks).totals().items()} == {
        account: 2 * work.flops for account, work in first.items()
    }
    assert read_ledger(tmp_path).totals == ledger_of(callbacks).totals()


@every_arm
def test_a_checkpoint_of_the_plug_in_loads_without_it(arm: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ours", save_last=True)
    trainer(tmp_path, *stack(arm, refresh_every=3), checkpoint, enable_checkpointing=True).fit(fresh(Model))
    path = tmp_path / "ours" / "last.ckpt"
    saved = torch.load(path, weights_only=True)  # plain containers and tensors
    assert list(saved["state_dict"]) == list(fresh(Model).state_dict())
    assert {"ComputeLedger", "GradientPrediction"} <= saved["callbacks"].keys()

    stock, model = trainer(tmp_path, strategy="auto", max_epochs=3), fresh(Model)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        stock.fit(model, ckpt_path=path)
    assert stock.global_step == 12


@every_arm
def test_a_stock_checkpoint_loads_with_the_plug_in(arm: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "stock", save_last=True)
    trainer(tmp_path, checkpoint, strategy="auto", enable_checkpointing=True).fit(fresh(Model))
    path = tmp_path / "stock" / "last.ckpt"

    def resume(strategy: Any, *callbacks: L.Callback) -> tuple[L.Trainer, Any]:
        runner, model = trainer(tmp_path, *callbacks, strategy=strategy, max_epochs=3), fresh(Model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`", category=UserWarning)
            runner.fit(model, ckpt_path=path)
        return runner, model

    callbacks = stack(arm)
    (_, reference), (runner, model) = resume("auto"), resume("predicted_gradients", *callbacks)
    assert runner.global_step == 12
    assert ledger_of(callbacks).steps == 4  # it counts what it saw
    torch.testing.assert_close(model.head.weight, reference.head.weight, rtol=1e-5, atol=1e-6)


def test_the_best_checkpoint_is_chosen_by_the_users_metric(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "best", monitor="val_loss")
    runner, model = trainer(tmp_path, *stack(), checkpoint, enable_checkpointing=True), fresh(Model)
    runner.fit(model)
    [metrics] = runner.validate(model, ckpt_path="best", verbose=False)
    assert metrics["val_loss"] == pytest.approx(float(checkpoint.best_model_score), rel=1e-6)


# ------------------------------------------------------------------------------------------- the ledger, elsewhere


def test_the_ledger_observes_ddp(tmp_path: Path) -> None:
    class Synced(Model):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

    def run(strategy: str, *callbacks: L.Callback) -> Any:
        model = fresh(Synced)
        trainer(tmp_path, *callbacks, strategy=strategy, devices=1, accumulate_grad_batches=3).fit(model)
        return model

    single, distributed = ComputeLedger(), ComputeLedger()
    run("auto", single)
    try:
        without, observed = run("ddp"), run("ddp", distributed)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(without.head.weight, observed.head.weight)
    assert distributed.ledger.totals() == single.ledger.totals()
    assert distributed.ledger.steps == 4
