"""The plug-in under every Trainer setting a user may have: what trains in stock Lightning trains alike here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
)
from torch.utils.data import DataLoader, IterableDataset

from lightning_ledger.callbacks import ComputeLedger
from lightning_ledger.ledger import read_ledger
from tests.settings_runs import (
    ARMS,
    BATCH,
    SAMPLES,
    VALIDATION,
    Model,
    N,
    Same,
    every_arm,
    fresh,
    stack,
    tensors,
    trainer,
)

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
