"""The plug-in beside Lightning's own callbacks that change training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger

from tests.settings_runs import (
    Model,
    Same,
    every_arm,
    stack,
)

# ------------------------------------------------------------------------------------------------ other callbacks


@every_arm
def test_pt139476_newly_unfrozen_parameters_have_gradients_in_the_next_step(arm: str, tmp_path: Path) -> None:
    class Backbone(Model):
        def __init__(self) -> None:
            super().__init__()
            self.trained: list[bool] = []

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradient = self.backbone.weight.grad
            self.trained.append(gradient is not None and bool(gradient.any()))

    def finetuning() -> list[L.Callback]:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1)]

    same = Same(tmp_path, Backbone, callbacks=finetuning)
    _, model = same.check(arm)
    assert model.trained == same.reference.trained == [False] * 4 + [True] * 4


@every_arm
def test_pt139476_freezing_by_hand_mid_run(arm: str, tmp_path: Path) -> None:
    class Switch(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.backbone.requires_grad_(batch_idx % 2 == 0)

    same = Same(tmp_path, Switch)
    same.check(arm)
    # With the weights that predictions see refreshed every third step, the set still changes at once.
    runner, _ = same.run("predicted_gradients", *stack(arm, refresh_every=3))
    assert runner.global_step == 8


@every_arm
def test_early_stopping_on_the_validation_loss(arm: str, tmp_path: Path) -> None:
    def stopping() -> list[L.Callback]:
        return [EarlyStopping("val_loss", patience=1, min_delta=0.3)]

    same = Same(tmp_path, callbacks=stopping, max_epochs=30)
    runner, _ = same.check(arm)
    assert runner.current_epoch < 30


@every_arm
def test_learning_rate_schedules_and_weight_averaging(arm: str, tmp_path: Path) -> None:
    class Scheduled(Model):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    def averaging() -> list[L.Callback]:
        return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1), LearningRateMonitor()]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Swapping scheduler")
        settings = {"logger": CSVLogger(tmp_path), "callbacks": averaging, "max_epochs": 3}
        Same(tmp_path, Scheduled, **settings).check(arm)
