"""Settings that must change nothing: every micro-batch exact, and the ledger alone. And those that must change much."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import Regression, Samples, ValidatedRegression, relative_error, trainer, weights

RELATIVE = 1e-5
# Of a sum of updates that are each about a hundredth of the weights.
RELATIVE_UPDATE = 1e-4
# bfloat16 rounds each weight gradient to 8 bits: one full-batch gradient, or four of micro-batches, each off by 2^-9.
BF16_UPDATE = 4 * 2.0**-8

# 26 samples in batches of 4: seven batches, the last of 2. Windows of 3: 3 + 3 + 1, so 3 steps an epoch.
BATCH, SAMPLES, WINDOW = 4, 26, 3
EPOCHS, STEPS = 3, 9


class Recorder(pl.Callback):
    """What a run shows: the logged losses, batch by batch, and the batches themselves."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.batches: list[Tensor] = []
        self.epoch_losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (loss := trainer.callback_metrics.get("train_loss_step")) is not None:  # nothing exact, nothing logged
            self.losses.append(float(loss))
        self.batches.append(batch[0].clone())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (loss := trainer.callback_metrics.get("train_loss_epoch")) is not None:
            self.epoch_losses.append(float(loss))


def run(
    directory: Path, module: pl.LightningModule, callbacks: Iterable[pl.Callback] = (), **options: Any
) -> tuple[pl.Trainer, Recorder]:
    """Train from fixed global seeds on shuffled data."""
    recorder = Recorder()
    pl.seed_everything(1, verbose=False)
    fit = trainer(directory, *callbacks, recorder, **{"max_epochs": EPOCHS, **options})
    fit.fit(module, DataLoader(Samples(SAMPLES), batch_size=BATCH, shuffle=True))
    return fit, recorder


def model(**options: Any) -> Regression:
    pl.seed_everything(0, verbose=False)
    return Regression(**options)


def predicted(exact: int, **options: Any) -> dict[str, Any]:
    """The method on 4 micro-batches, ``exact`` of them exact."""
    callbacks: list[pl.Callback] = [GradientPrediction(microbatches=4, exact=exact, **options)]
    if exact:
        callbacks.append(ControlVariate())
    return {"strategy": PredictedGradientStrategy(), "callbacks": callbacks}


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({}, {}),
    "accumulation_with_ragged_window": ({}, {"accumulate_grad_batches": WINDOW}),
    "adamw": ({"optimizer": "adamw"}, {"accumulate_grad_batches": WINDOW}),
    "schedule": ({"schedule": True}, {"accumulate_grad_batches": WINDOW}),
    "clip_norm": ({}, {"accumulate_grad_batches": WINDOW, "gradient_clip_val": 0.2}),
    "clip_value": ({}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "double": ({"optimizer": "adamw"}, {"precision": "64-true"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_all_exact_is_stock_lightning_and_less_is_not(name: str, tmp_path: Path) -> None:
    kind, options = SETTINGS[name]
    start, stock, ours, theirs = (model(**kind) for _ in range(4))
    stock_trainer, stock_seen = run(tmp_path, stock, **options)
    our_trainer, our_seen = run(tmp_path, ours, **predicted(exact=4), **options)
    run(tmp_path, theirs, **predicted(exact=1, format="int4"), **options)

    steps = STEPS if "accumulate_grad_batches" in options else 7 * EPOCHS
    assert stock_trainer.global_step == our_trainer.global_step == steps
    assert relative_error(weights(ours), weights(stock)) < RELATIVE
    moved = weights(stock) - weights(start)
    assert float(moved.norm() / weights(start).norm()) > 0.02
    assert relative_error(weights(ours) - weights(start), moved) < RELATIVE_UPDATE
    # Per batch the exact micro-batches are the batch, so the loss that is logged is its loss.
    assert our_seen.losses == pytest.approx(stock_seen.losses, rel=RELATIVE)
    assert our_seen.epoch_losses == pytest.approx(stock_seen.epoch_losses, rel=RELATIVE)
    assert len(our_seen.losses) == 7 * EPOCHS
    assert len(our_seen.epoch_losses) == EPOCHS
    # The other direction: one exact micro-batch in four is another run.
    assert relative_error(weights(theirs) - weights(start), moved) > 100 * RELATIVE_UPDATE


def test_clipping_of_the_cases_above_bites(tmp_path: Path) -> None:
    for name in ("clip_norm", "clip_value"):
        kind, options = SETTINGS[name]
        free = {key: value for key, value in options.items() if "clip" not in key}
        clipped, unclipped = model(**kind), model(**kind)
        run(tmp_path, clipped, **options)
        run(tmp_path, unclipped, **free)
        assert relative_error(weights(clipped), weights(unclipped)) > 0.01


def test_all_exact_is_stock_lightning_in_bf16_mixed(tmp_path: Path) -> None:
    start, stock, ours, theirs = (model() for _ in range(4))
    options: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": WINDOW}
    _, stock_seen = run(tmp_path, stock, **options)
    _, our_seen = run(tmp_path, ours, **predicted(exact=4), **options)
    run(tmp_path, theirs, **predicted(exact=1, format="int4"), **options)
    moved = weights(stock) - weights(start)
    assert relative_error(weights(ours) - weights(start), moved) < BF16_UPDATE
    assert relative_error(weights(theirs) - weights(start), moved) > 2 * BF16_UPDATE
    assert our_seen.losses == pytest.approx(stock_seen.losses, rel=BF16_UPDATE)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_torchgpipe35_all_exact_does_not_depend_on_the_number_of_micro_batches(n: int, tmp_path: Path) -> None:
    """Batches of 4, and one of 2: more micro-batches than samples make one per sample."""
    stock, ours = model(), model()
    run(tmp_path, stock)
    prediction = GradientPrediction(microbatches=n, exact=n)
    run(tmp_path, ours, [prediction], strategy=PredictedGradientStrategy())
    assert relative_error(weights(ours), weights(stock)) < RELATIVE


@pytest.mark.parametrize("exact", [1, 4])
def test_pl21808_an_epoch_shorter_than_the_window_closes_it(exact: int, tmp_path: Path) -> None:
    """Seven batches an epoch in windows of 10: each epoch's end closes one, and the next epoch begins another."""
    options: dict[str, Any] = {"accumulate_grad_batches": 10}
    start, stock, ours = (model() for _ in range(3))
    stock_trainer, _ = run(tmp_path, stock, **options)
    settings = predicted(exact, format="fp32")
    ledger = ComputeLedger(dirpath=str(tmp_path))
    our_trainer, _ = run(tmp_path, ours, [ledger, *settings.pop("callbacks")], **settings, **options)
    assert stock_trainer.global_step == our_trainer.global_step == ledger.ledger.steps == EPOCHS
    assert relative_error(weights(ours) - weights(start), weights(stock) - weights(start)) < RELATIVE_UPDATE


def test_unrounded_predictions_are_neutral_too(tmp_path: Path) -> None:
    """With format fp32 h_i = g_i, so every arm trains as stock Lightning does, and the best coefficient stays 1."""
    for window in (1, WINDOW):
        stock = model()
        run(tmp_path, stock, accumulate_grad_batches=window)
        for exact in (0, 1, 2, 3):
            ours = model()
            run(tmp_path, ours, **predicted(exact=exact, format="fp32"), accumulate_grad_batches=window)
            assert relative_error(weights(ours), weights(stock)) < RELATIVE


# ----------------------------------------------------------------------------------------------------- the ledger alone


class RandomRegression(ValidatedRegression):
    """Draws from all three global generators in training and in validation."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1)  # noqa: NPY002  the global state is the point
        return super().training_step((x + noise, y), batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        super().validation_step((x + random.gauss(0, 0.1) + 0.1 * torch.rand_like(x), y), batch_idx)


def global_states() -> tuple[Any, ...]:
    """The state of every global generator, in comparable form."""
    numpy = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), [np.asarray(part).tolist() for part in numpy], random.getstate()


def equal(a: Any, b: Any) -> bool:
    """Bit-identical nested states."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": WINDOW, "gradient_clip_val": 0.3}])
def test_ledger_alone_is_bit_identical(options: dict[str, Any], tmp_path: Path) -> None:
    ends = []
    ledger = ComputeLedger()
    for callbacks in ([], [ledger]):
        pl.seed_everything(0, verbose=False)
        module = RandomRegression(dropout=0.5, optimizer="adamw", schedule=True)
        recorder = Recorder()
        pl.seed_everything(1, workers=True, verbose=False)
        fit = trainer(tmp_path, *callbacks, recorder, max_epochs=EPOCHS, val_check_interval=0.5, **options)
        loader = DataLoader(Samples(SAMPLES), batch_size=BATCH, shuffle=True)
        fit.fit(module, loader, DataLoader(Samples(6, seed=9), batch_size=4))
        optimizer = fit.optimizers[0].state_dict()
        metrics = {k: v for k, v in fit.callback_metrics.items() if not k.startswith("ledger/")}
        ends.append((module.state_dict(), optimizer, metrics, recorder.losses, recorder.batches, global_states()))
    names = ("weights", "optimizer", "metrics", "losses", "batches", "generators")
    assert [name for name, *pair in zip(names, *ends, strict=True) if not equal(*pair)] == []
    assert ends[0][1]["state"][0]["exp_avg"].norm() > 0  # the optimizer state that was compared is a real one
    totals = ledger.ledger.totals()
    assert totals["scarce/forward"].samples == SAMPLES * EPOCHS  # and the ledger was at work
    # 3.5 batches of 7: validation of 2 batches after the third and the sixth, each epoch; 2 sanity batches.
    assert totals["scarce/validation"].samples == 6 * (2 * EPOCHS + 1)


def test_bit_identity_is_not_trivial(tmp_path: Path) -> None:
    """Another seed gives another run: the comparison above sees what it should see."""
    ends = []
    for seed in (1, 2):
        pl.seed_everything(0, verbose=False)
        module = RandomRegression(dropout=0.5)
        pl.seed_everything(seed, verbose=False)
        fit = trainer(tmp_path, max_epochs=1, limit_val_batches=0)
        fit.fit(module, DataLoader(Samples(SAMPLES), batch_size=BATCH, shuffle=True), DataLoader(Samples(6)))
        ends.append((module.state_dict(), global_states()))
    assert not equal(ends[0][0], ends[1][0])
    assert not equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("exact", [0, 1, 4])
def test_pl6988_predictions_leave_global_generators_and_data_order(exact: int, tmp_path: Path) -> None:
    stock, ours = model(), model()
    _, stock_seen = run(tmp_path, stock)
    at_stock = global_states()
    _, our_seen = run(tmp_path, ours, **predicted(exact=exact, format="int8", rounding="stochastic"))
    assert equal(global_states(), at_stock)
    assert equal(our_seen.batches, stock_seen.batches)
    assert len(our_seen.batches) == 7 * EPOCHS
