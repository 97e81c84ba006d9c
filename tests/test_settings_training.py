"""Trainer settings and data loaders that change how training goes, against stock Lightning and over every draw."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler, Timer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.settings_runs import (
    ARMS,
    BATCH,
    SAMPLES,
    Model,
    Same,
    check_unbiased,
    every_arm,
    fresh,
    gradients,
    ledger_of,
    stack,
    tensors,
    trainer,
)

# ------------------------------------------------------------------------------------------- settings of the Trainer

WHOLE = (4, 4, 4, 2)  # micro-batches of an epoch's batches
SETTINGS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, WHOLE),
    "ragged windows": ({"accumulate_grad_batches": 3}, WHOLE),
    "a window longer than the epoch": ({"accumulate_grad_batches": 9}, WHOLE),
    "growing windows": ({"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], "max_epochs": 2}, WHOLE),
    "shrinking windows": ({"callbacks": lambda: [GradientAccumulationScheduler({0: 3, 1: 2})], "max_epochs": 2}, WHOLE),
    "clipped by norm": ({"gradient_clip_val": 1e-3}, WHOLE),
    "clipped by value": ({"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, WHOLE),
    "limited batches": ({"limit_train_batches": 2, "max_epochs": 2}, (4, 4)),
    "overfitting": ({"overfit_batches": 1, "max_epochs": 2}, (4,)),
    "a limit of time": ({"max_time": datetime.timedelta(hours=1)}, WHOLE),
    "anomaly detection": ({"detect_anomaly": True}, WHOLE),
    "validation within the epoch": ({"val_check_interval": 2, "limit_val_batches": 1}, WHOLE),
    "loaders made anew": ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, WHOLE),
    "deterministic": ({"deterministic": "warn"}, WHOLE),
    "no sanity check": ({"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2, "max_epochs": 2}, WHOLE),
}


@pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly", "ignore:You requested to overfit")
@pytest.mark.parametrize("name", SETTINGS)
def test_with_one_exact_micro_batch_a_setting_averages_to_the_exact_gradient(name: str, tmp_path: Path) -> None:
    settings, sizes = SETTINGS[name]
    check_unbiased(tmp_path, sizes=sizes, **settings)


@every_arm
@pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly")
@pytest.mark.parametrize(
    "name",
    [
        "a window longer than the epoch",
        "shrinking windows",
        "a limit of time",
        "anomaly detection",
        "loaders made anew",
        "deterministic",
        "no sanity check",
    ],
)
def test_a_setting_equals_stock(name: str, arm: str, tmp_path: Path) -> None:
    Same(tmp_path, **SETTINGS[name][0]).check(arm)


class Late(L.Callback):
    """Turns a timer's clock forward in the third batch."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            self.timer.load_state_dict({"time_elapsed": {"train": 3600.0}})


def timed() -> list[L.Callback]:
    timer = Timer(datetime.timedelta(minutes=30), interval="step")
    return [timer, Late(timer)]


@every_arm
def test_max_time_ends_with_the_step_in_which_it_is_over(arm: str, tmp_path: Path) -> None:
    assert Same(tmp_path, callbacks=timed).check(arm)[0].global_step == 3


# ------------------------------------------------------------------------------------------------------- data loaders


class Columns(TensorDataset):
    """Samples as dicts."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}


class Paired(Model):
    """Takes a batch from each of two loaders, of 24 and of 32 samples."""

    MODE, OTHER = "min_size", 32

    def loss(self, batch: Any) -> Tensor:
        if not isinstance(batch, dict):
            return super().loss(batch)
        parts = [part for part in batch.values() if part is not None]
        return torch.stack([Model.loss(self, (part["x"], part["y"])) for part in parts]).mean()

    def train_dataloader(self) -> Any:
        sets = {"a": tensors(24, 1), "b": tensors(self.OTHER, 5)}
        loaders = {name: DataLoader(Columns(*data.tensors), BATCH) for name, data in sets.items()}
        return CombinedLoader(loaders, self.MODE)


class Cycled(Paired):
    MODE = "max_size_cycle"


class Longest(Paired):
    MODE = "max_size"


class Uneven(Paired):
    OTHER = 18  # its last batch has 2 samples


class Stream(IterableDataset[Any]):
    """Samples without a length, and None in place of a batch where asked."""

    def __init__(self, missing: int | None = None) -> None:
        self.missing = missing

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(DataLoader(tensors(SAMPLES, 1), BATCH)):
            yield None if number == self.missing else batch


class Streamed(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=None)


class Gappy(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(missing=1), batch_size=None)


LOADERS: dict[str, tuple[type[Model], tuple[int, ...]]] = {
    "the shortest of two loaders": (Paired, (4, 4, 4)),
    "the shorter of two loaders cycled": (Cycled, (4, 4, 4, 4)),
    "the longer of two loaders, then alone": (Longest, (4, 4, 4, 4)),
    "an iterable dataset": (Streamed, WHOLE),
    "a batch that is None": (Gappy, (4, 4, 2)),
}


@every_arm
@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_equal_stock(name: str, arm: str, tmp_path: Path) -> None:
    Same(tmp_path, LOADERS[name][0], max_epochs=2).check(arm)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_average_to_the_exact_gradient(name: str, tmp_path: Path) -> None:
    model, sizes = LOADERS[name]
    check_unbiased(tmp_path, model, sizes=sizes)


def test_loaders_whose_batches_differ_in_length_are_refused_by_name(tmp_path: Path) -> None:
    # 8 samples of one and 2 of the other: no cut takes the same share of both.
    with pytest.raises(ValueError, match=r"batch\['b'\]\['x'\] has 2 samples where 8 were expected.*split_fn"):
        trainer(tmp_path, *stack(), max_epochs=1).fit(fresh(Uneven))


@every_arm
@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_batch_that_is_none_costs_nothing(arm: str, tmp_path: Path) -> None:
    callbacks = stack(arm)
    trainer(tmp_path, *callbacks, max_epochs=1).fit(fresh(Gappy))
    ledger = ledger_of(callbacks)
    assert ledger.exact_equivalent.samples == SAMPLES - BATCH


# ------------------------------------------------------------------------------------------ hooks that read gradients

HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


class Hooked(Model):
    """Keeps the gradients that each hook sees, the user's own ``backward`` included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[Tensor]] = {name: [] for name in (*HOOKS, "backward")}

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)
        self.seen["backward"].append(loss.detach().clone())

    def on_after_backward(self) -> None:
        self.seen["on_after_backward"].append(gradients(self))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["on_before_optimizer_step"].append(gradients(self))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen["on_before_zero_grad"].append(gradients(self))


@every_arm
@pytest.mark.parametrize("accumulate", [1, 3])
def test_hooks_see_the_gradients_that_they_see_in_stock(accumulate: int, arm: str, tmp_path: Path) -> None:
    same = Same(tmp_path, Hooked, accumulate_grad_batches=accumulate)
    _, model = same.check(arm)
    for hook, expected in same.reference.seen.items():
        assert len(model.seen[hook]) == len(expected) > 0
        for ours, theirs in zip(model.seen[hook], expected, strict=True):
            if hook != "backward":
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            elif ARMS[arm][0] in (0, 4):  # else the loss is that of the exact micro-batches
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- what is trained when


def finetuning() -> list[L.Callback]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1)]


def test_pt139476_unfreezing_averages_to_the_exact_gradient(tmp_path: Path) -> None:
    check_unbiased(tmp_path, callbacks=finetuning, max_epochs=2)


class Compiled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.compile(self.head, backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, as it compiles
def test_a_compiled_submodule_averages_to_the_exact_gradient(tmp_path: Path) -> None:
    check_unbiased(tmp_path, Compiled)


@every_arm
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Predictions run eagerly from now on.*dynamo-optimized")
def test_pl20233_a_module_compiled_as_a_whole_keeps_its_keys(arm: str, tmp_path: Path) -> None:
    class Silent(Model):
        """Dynamo, in this version, cannot follow Lightning's ``self.log``."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    def run(strategy: str, *callbacks: L.Callback) -> Any:
        settings: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
        runner, model = trainer(tmp_path, *callbacks, strategy=strategy, **settings), fresh(Silent)
        runner.fit(torch.compile(model, backend="eager"))
        runner.save_checkpoint(path := tmp_path / f"{strategy}.ckpt")
        return model, torch.load(path, weights_only=True)["state_dict"]

    (_, theirs), (model, ours) = run("auto"), run("predicted_gradients", *stack(arm))
    assert list(ours) == list(theirs) == list(fresh(Model).state_dict())
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)
