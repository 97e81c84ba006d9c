"""Averaged weights, adapters, and checkpoints that change hands: what is saved is what stock Lightning saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_ledger.callbacks import ComputeLedger
from tests.settings_runs import (
    SAMPLES,
    Model,
    Same,
    check_unbiased,
    every_arm,
    fresh,
    ledger_of,
    stack,
    trainer,
)

# ----------------------------------------------------------------------------------------------------------- averages


def averaged() -> list[L.Callback]:
    return [WeightAveraging()]


def exponential() -> list[L.Callback]:
    return [EMAWeightAveraging(decay=0.7, update_every_n_steps=2)]


def stochastic() -> list[L.Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]


AVERAGES: dict[str, Callable[[], list[L.Callback]]] = {
    "mean": averaged,
    "exponential": exponential,
    "stochastic": stochastic,
}


@every_arm
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_weights_equal_stock(name: str, arm: str, tmp_path: Path) -> None:
    same = Same(tmp_path, callbacks=AVERAGES[name], max_epochs=3)
    runner, model = same.check(arm, rtol=1e-4, atol=1e-5)
    # Validation sees the averages, and the fit ends with them: not with the weights of the last step.
    for key, value in same.stock.callback_metrics.items():
        if key.startswith("val_"):
            torch.testing.assert_close(runner.callback_metrics[key], value, rtol=1e-4, atol=1e-5)
    plain, _ = Same(tmp_path, max_epochs=3).reference, None
    assert (plain.head.weight - model.head.weight).norm() > 1e-2 * model.head.weight.norm()


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("name", AVERAGES)
def test_under_averaging_estimates_average_to_the_exact_gradient(name: str, tmp_path: Path) -> None:
    check_unbiased(tmp_path, callbacks=AVERAGES[name], max_epochs=2)


# ----------------------------------------------------------------------------------------------------------- adapters


class Adapted(Model):
    """A frozen perceptron, 5 -> 8 -> 1, whose first layer has a low-rank adapter 5 -> 2 -> 8."""

    def __init__(self) -> None:
        super().__init__()
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["backbone"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, self)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which peft imports
class TestAdapters:
    @every_arm
    def test_adapters_train_as_in_stock(self, arm: str, tmp_path: Path) -> None:
        same = Same(tmp_path, Adapted)
        _, model = same.check(arm)
        start = fresh(Adapted).state_dict()
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
        assert moved == {f"backbone.lora_{part}.default.weight" for part in "AB"}

    def test_an_adapters_estimates_average_to_the_exact_gradient(self, tmp_path: Path) -> None:
        check_unbiased(tmp_path, Adapted)

    @pytest.mark.parametrize("arm", ["ledger", "all exact", "predictions"])
    def test_frozen_weights_are_priced_as_such(self, arm: str, tmp_path: Path) -> None:
        callbacks = [ComputeLedger()] if arm == "ledger" else stack(arm)
        strategy = "auto" if arm == "ledger" else "predicted_gradients"
        trainer(tmp_path, *callbacks, strategy=strategy, limit_val_batches=0).fit(fresh(Adapted))
        totals, samples = ledger_of(callbacks).totals(), 2 * SAMPLES
        # Products of a sample, a multiply-add counted as two: the frozen layers and the adapter forward; backward the
        # inputs' gradients down to the adapter (1 -> 8, 8 -> 2), and the weights' of the adapter alone.
        forward = 2 * (5 * 8 + 8 * 1 + 5 * 2 + 2 * 8)
        backward = 2 * (8 * 1 + 2 * 8) + 2 * (2 * 8 + 5 * 2)
        if arm == "predictions":
            assert totals["fleet/prediction"].flops == samples * (forward + backward)
        else:
            assert totals["scarce/forward"].flops == samples * forward
            assert totals["scarce/backward"].flops == samples * backward


# -------------------------------------------------------------------------------------------------------- checkpoints


class Momentum(Model):
    """Has a buffer, and an optimizer with state of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((1,), 0.25))

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.offset

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def saved(runner: L.Trainer, path: Path) -> dict[str, Any]:
    runner.save_checkpoint(path)
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


@every_arm
def test_pl17415_a_checkpoint_differs_from_stock_in_the_callbacks_alone(arm: str, tmp_path: Path) -> None:
    same = Same(tmp_path, Momentum)
    runner, _ = same.check(arm, rtol=1e-4, atol=1e-5)
    ours, theirs = saved(runner, tmp_path / "ours.ckpt"), saved(same.stock, tmp_path / "stock.ckpt")
    assert ours.keys() == theirs.keys()
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert set(ours["callbacks"]) - set(theirs["callbacks"]) == {type(c).__name__ for c in stack(arm)}
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-4, atol=1e-5)
    for state in ("optimizer_states", "lr_schedulers", "loops"):
        torch.testing.assert_close(numbers(ours[state]), numbers(theirs[state]), rtol=1e-4, atol=1e-5)


def numbers(state: Any, path: str = "") -> dict[str, Any]:
    """The numbers of a nested state by their path; times, which differ between runs, left out."""
    if isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        parts = [numbers(value, f"{path}/{key}") for key, value in items if "time" not in str(key)]
        return {name: number for part in parts for name, number in part.items()}
    return {path: state} if isinstance(state, torch.Tensor | float | int) else {}


@every_arm
@pytest.mark.parametrize("direction", ["ours to stock", "stock to ours"])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_continues_across_the_plug_in_as_if_nothing_had_changed(direction: str, arm: str, tmp_path: Path) -> None:
    def run(predicted: bool, epochs: int, path: Path | None = None) -> tuple[L.Trainer, Any]:
        callbacks = stack(arm) if predicted else []
        strategy = "predicted_gradients" if predicted else "auto"
        runner = trainer(tmp_path, *callbacks, strategy=strategy, max_epochs=epochs)
        runner.fit(model := fresh(Momentum), ckpt_path=path)
        return runner, model

    first = direction == "ours to stock"
    path = tmp_path / "half.ckpt"
    saved(run(first, 1)[0], path)
    runner, model = run(not first, 3, path)
    whole, reference = run(False, 3)
    assert runner.global_step == whole.global_step == 12
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        numbers(runner.optimizers[0].state_dict()), numbers(whole.optimizers[0].state_dict()), rtol=1e-3, atol=1e-5
    )


def test_weights_of_a_checkpoint_load_into_a_plain_module(tmp_path: Path) -> None:
    runner, model = trainer(tmp_path, *stack()), fresh(Momentum)
    runner.fit(model)
    saved(runner, path := tmp_path / "ours.ckpt")
    loaded = Momentum.load_from_checkpoint(path, map_location="cpu")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert isinstance(loaded.head, nn.Linear)
