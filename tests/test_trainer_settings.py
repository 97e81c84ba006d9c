"""The plug-in under every Trainer setting a user may have: what trains in stock Lightning trains alike here.

The yardstick is stock Lightning on the same data and weights. Four arms must equal it up to rounding: all micro-batches
exact; and, because an fp32 prediction *is* the gradient, fp32 predictions alone, mixed with exact ones, and corrected.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import Ledger, read_ledger

SAMPLES, BATCH, N = 26, 8, 4  # 4 batches, the last one of 2 samples
VALIDATION = 6


def tensors(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 5, generator=generator), torch.randn(samples, 1, generator=generator))


class Model(L.LightningModule):
    """A perceptron for regression, trained with momentum, which remembers every earlier gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(5, 8)
        self.head = nn.Linear(8, 1)
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(gradients).norm()) if gradients else 0.0)

    def train_dataloader(self) -> Any:
        return DataLoader(tensors(SAMPLES, 1), batch_size=BATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(tensors(VALIDATION, 2), batch_size=3)

    test_dataloader = predict_dataloader = val_dataloader


ARMS: dict[str, tuple[int, bool]] = {
    "all exact": (N, True),
    "predictions": (0, False),
    "mixed": (1, False),
    "corrected": (1, True),
}
every_arm = pytest.mark.parametrize("arm", ARMS)


def stack(arm: str = "corrected", **arguments: Any) -> list[L.Callback]:
    exact, corrected = ARMS[arm]
    prediction = GradientPrediction(**{"format": "fp32", "microbatches": N, "exact": exact, **arguments})
    return [ComputeLedger(), prediction, *([ControlVariate()] if corrected else [])]


def trainer(
    tmp_path: Path, *callbacks: L.Callback, strategy: Any = "predicted_gradients", **settings: Any
) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "max_epochs": 2, "enable_checkpointing": False, "log_every_n_steps": 1}
    return L.Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        **(quiet | settings),
    )


def fresh(model: type[L.LightningModule]) -> L.LightningModule:
    torch.manual_seed(0)
    return model()


class Same:
    """Trains a model in stock Lightning and in every arm, with the same settings, and compares the outcome."""

    def __init__(self, tmp_path: Path, model: type[L.LightningModule] = Model, **settings: Any) -> None:
        self.path, self.model, self.settings = tmp_path, model, settings
        self.stock, self.reference = self.run("auto")

    def run(self, strategy: Any, *callbacks: L.Callback) -> tuple[L.Trainer, Any]:
        settings = dict(self.settings)
        own = settings.pop("callbacks", list)()
        model = fresh(self.model)
        runner = trainer(self.path, *own, *callbacks, strategy=strategy, **settings)
        runner.fit(model)
        return runner, model

    def check(self, arm: str, rtol: float = 1e-5, atol: float = 1e-6, **arguments: Any) -> tuple[L.Trainer, Any]:
        """Equal to stock; the tolerance is that of fp32 sums of some hundred terms, carried over some ten steps."""
        callbacks = stack(arm, **arguments)
        runner, model = self.run("predicted_gradients", *callbacks)
        assert runner.global_step == self.stock.global_step > 0
        assert runner.current_epoch == self.stock.current_epoch
        ours, theirs = model.state_dict(), self.reference.state_dict()
        assert list(ours) == list(theirs)
        assert any(not torch.equal(theirs[name], value) for name, value in fresh(self.model).state_dict().items())
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol)
        ledger = callbacks[0].ledger
        assert ledger.steps == runner.global_step
        exact, _ = ARMS[arm]
        assert ("scarce/forward" in ledger.totals()) == (exact > 0)
        assert ("fleet/prediction" in ledger.totals()) == (exact < N)
        return runner, model


# ------------------------------------------------------------------------------------------------ how long, how much


@every_arm
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 3}, 12),
        ({"max_steps": 5, "max_epochs": -1}, 5),
        ({"limit_train_batches": 2}, 4),
        ({"limit_train_batches": 0.5}, 4),
        ({"overfit_batches": 1}, 2),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 3}, 3),
        ({"accumulate_grad_batches": 3}, 4),  # windows of 3 and of 1 batches, in each of two epochs
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_lengths_and_limits_equal_stock(settings: dict[str, Any], steps: int, arm: str, tmp_path: Path) -> None:
    runner, _ = Same(tmp_path, **settings).check(arm)
    assert runner.global_step == steps


@every_arm
def test_pl19987_a_growing_accumulation_window_equals_stock(arm: str, tmp_path: Path) -> None:
    def schedule() -> list[L.Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 3})]

    # 4 single batches; then windows of 3 and 1.
    assert Same(tmp_path, callbacks=schedule).check(arm)[0].global_step == 4 + 2


@every_arm
def test_fast_dev_run_leaves_no_file(arm: str, tmp_path: Path) -> None:
    trainer(tmp_path, *stack(arm), fast_dev_run=True).fit(fresh(Model))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- clipping and precision


@every_arm
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_pl18669_clipping_sees_the_estimate(algorithm: str, arm: str, tmp_path: Path) -> None:
    value = 0.05
    same = Same(tmp_path, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    _, model = same.check(arm)
    # on_before_optimizer_step comes before clipping: the norms are the estimate's, and exceed the limit.
    assert model.norms == pytest.approx(same.reference.norms, rel=1e-4)
    assert max(model.norms) > 2 * value
    # And the limit bites: without it the same training ends elsewhere.
    free, _ = Same(tmp_path).reference, None
    assert not torch.allclose(free.head.weight, model.head.weight, rtol=1e-2)


@every_arm
def test_double_precision_equals_stock_to_double_rounding(arm: str, tmp_path: Path) -> None:
    same = Same(tmp_path, precision="64-true", accumulate_grad_batches=3)
    runner, model = same.check(arm, rtol=1e-12, atol=1e-12)
    assert model.head.weight.dtype == torch.float64
    assert runner.callback_metrics["val_loss"].dtype == torch.float64


@every_arm
def test_bf16_mixed_is_as_close_to_stock_as_bf16_rounds(arm: str, tmp_path: Path) -> None:
    # Each product is rounded to 8 bits, relative error 2^-9, and the batch's sums are rounded in other places: a few
    # roundings per gradient, averaged by momentum. A wrong scale of any kind would be 25 % or more.
    same = Same(tmp_path, precision="bf16-mixed", max_epochs=1)
    seen: list[torch.dtype] = []

    class Probe(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pl_module.head.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))

    runner, model = same.run("predicted_gradients", *stack(arm), Probe())
    assert set(seen) == {torch.bfloat16}
    assert runner.global_step == same.stock.global_step
    start = fresh(Model)
    for name, ours in model.state_dict().items():
        moved = (same.reference.state_dict()[name] - start.state_dict()[name]).norm()
        assert (ours - same.reference.state_dict()[name]).norm() <= 8 * 2**-9 * moved


# --------------------------------------------------------------------------------------------------------- validation


def validation_flops(passes: int) -> int:
    # Each batch has 3 samples: products 3x5 by 5x8 and 3x8 by 8x1, a multiply-add counted as two.
    return passes * 2 * 3 * (5 * 8 + 8 * 1)


def test_validation_during_training_is_charged_apart(tmp_path: Path) -> None:
    # 4 batches an epoch, validated after every second; 2 validation batches each, and 2 more in the sanity check.
    callbacks = stack()
    runner = trainer(tmp_path, *callbacks, val_check_interval=2, num_sanity_val_steps=2)
    runner.fit(fresh(Model))
    validation = callbacks[0].ledger.totals()["scarce/validation"]
    assert validation.passes == 2 + 2 * 2 * 2
    assert validation.flops == validation_flops(10)
    assert validation.samples == 3 * 10
    marks = read_ledger(tmp_path).marks
    assert [mark.step for mark in marks] == [2, 4, 6, 8]
    assert all("val_loss" in mark.metrics for mark in marks)


@every_arm
def test_validation_during_training_changes_nothing(arm: str, tmp_path: Path) -> None:
    _, model = Same(tmp_path, val_check_interval=2).check(arm)
    _, without = Same(tmp_path, limit_val_batches=0).check(arm)
    assert torch.equal(model.head.weight, without.head.weight)


@every_arm
def test_several_validation_loaders(arm: str, tmp_path: Path) -> None:
    class Several(Model):
        def val_dataloader(self) -> Any:
            return [DataLoader(tensors(VALIDATION, seed), batch_size=3) for seed in (2, 3)]

    same = Same(tmp_path, Several, num_sanity_val_steps=0)
    runner, _ = same.check(arm)
    keys = {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    assert keys <= runner.callback_metrics.keys()
    for key in keys:
        torch.testing.assert_close(runner.callback_metrics[key], same.stock.callback_metrics[key], rtol=1e-5, atol=1e-6)
    ledger = next(c for c in runner.callbacks if isinstance(c, ComputeLedger)).ledger
    assert ledger.totals()["scarce/validation"].flops == validation_flops(2 * 2 * 2)  # loaders, batches, epochs


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_evaluation_needs_no_prediction(entry: str, tmp_path: Path) -> None:
    stock = getattr(trainer(tmp_path, strategy="auto"), entry)(fresh(Model), **quietly(entry))
    for callbacks in ([], stack()):
        ours = getattr(trainer(tmp_path, *callbacks), entry)(fresh(Model), **quietly(entry))
        assert str(ours) == str(stock)
        assert ours
    ledger = callbacks[0].ledger
    assert ledger.steps == 0
    assert set(ledger.totals()) <= {"scarce/validation"}


def quietly(entry: str) -> dict[str, Any]:
    return {} if entry == "predict" else {"verbose": False}


def test_evaluation_after_fit_with_the_same_trainer(tmp_path: Path) -> None:
    runner, model = trainer(tmp_path, *stack()), fresh(Model)
    runner.fit(model)
    with torch.no_grad():
        loss = torch.stack([model.loss(batch) for batch in model.val_dataloader()]).mean()
    for entry, key in (("validate", "val_loss"), ("test", "test_loss")):
        [metrics] = getattr(runner, entry)(model, verbose=False)
        assert metrics[key] == pytest.approx(float(loss), rel=1e-6)


# --------------------------------------------------------------------------------------------- batches and their steps


@every_arm
def test_an_iterable_dataset(arm: str, tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(tensors(SAMPLES, 1))

    class Streamed(Model):
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=BATCH)

    Same(tmp_path, Streamed).check(arm)


@every_arm
def test_a_training_step_without_batch_index(arm: str, tmp_path: Path) -> None:
    class Short(Model):
        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

    Same(tmp_path, Short).check(arm)


@every_arm
def test_a_dict_output_reaches_the_hooks_with_its_extras(arm: str, tmp_path: Path) -> None:
    class Extras(Model):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[dict[str, Any]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"loss": loss, "double": 2 * loss, "index": batch_idx}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.outputs.append(outputs)

    same = Same(tmp_path, Extras)
    _, model = same.check(arm)
    assert len(model.outputs) == len(same.reference.outputs) == 8
    exact, _ = ARMS[arm]
    for ours, theirs in zip(model.outputs, same.reference.outputs, strict=True):
        # Extras are those of the last exact pass; a prediction has none.
        assert ours.keys() == (theirs.keys() if exact else {"loss"})
        assert ours.get("index", theirs["index"]) == theirs["index"]
        if exact in (0, N):  # else the loss is the exact micro-batches' share of it, and noisy
            torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-5, atol=1e-6)


@every_arm
def test_pl5243_a_skipped_batch_leaves_nothing_behind(arm: str, tmp_path: Path) -> None:
    class Skipping(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    # Lightning counts the step of a skipped batch, and the optimizer takes it with no gradient.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`training_step` returned `None`", category=UserWarning)
        # No program can skip: where an exact pass did, predictions run eagerly from there on, and say so. Without
        # exact passes nobody would ask the training step.
        warnings.filterwarnings("ignore", message="Predictions run eagerly from now on: the training step returned")
        engine = "eager" if ARMS[arm][0] == 0 else "captured"
        Same(tmp_path, Skipping, max_epochs=1).check(arm, engine=engine)


@every_arm
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, as it compiles
@pytest.mark.filterwarnings("ignore:Predictions run eagerly from now on.*dynamo-optimized")
def test_pl17177_a_compiled_submodule_trains_and_is_counted(arm: str, tmp_path: Path) -> None:
    class Compiled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.compile(self.head, backend="eager")

    runner, model = Same(tmp_path, Compiled, max_epochs=1, limit_val_batches=0).check(arm)
    assert "head._orig_mod.weight" in model.state_dict()
    plain = stack(arm)
    trainer(tmp_path, *plain, max_epochs=1, limit_val_batches=0).fit(fresh(Model))
    compiled = next(c for c in runner.callbacks if isinstance(c, ComputeLedger)).ledger
    for account, work in plain[0].ledger.totals().items():
        if account != "setup/checks":  # a compiled step is counted in a shadow of it
            assert compiled.totals()[account].flops == work.flops > 0


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


def test_pt139476_freezing_by_hand_mid_run(tmp_path: Path) -> None:
    class Switch(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.backbone.requires_grad_(batch_idx % 2 == 0)

    for arm in ARMS:
        Same(tmp_path, Switch).check(arm)
        # With the weights that predictions see refreshed every third step, the set still changes at once.
        runner, _ = Same(tmp_path, Switch).run("predicted_gradients", *stack(arm, refresh_every=3))
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


# ------------------------------------------------------------------------------------------- several fits, checkpoints


def ledger_of(callbacks: list[L.Callback]) -> Ledger:
    return callbacks[0].ledger


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
