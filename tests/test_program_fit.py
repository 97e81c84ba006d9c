"""Captured programs in real training: the same weights, fleet accounts and logs as with the eager engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import Work
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import Regression, Samples, trainer, weights

LOGGER = "lightning.pytorch.utilities.rank_zero"


class Run:
    """One training with predictions: 4 micro-batches, one of them exact."""

    def __init__(self, directory: Path, engine: str, module: pl.LightningModule, **settings: Any) -> None:
        self.module = module
        self.ledger = ComputeLedger()
        self.prediction = GradientPrediction(format="int8", microbatches=4, exact=1, seed=3, engine=engine, **settings)
        self.correction = ControlVariate()
        self.directory = directory

    def fit(self, data: Any, *callbacks: pl.Callback, ckpt_path: Path | None = None, **options: Any) -> Run:
        ours = [self.ledger, self.prediction, self.correction]
        self.trainer = trainer(self.directory, *ours, *callbacks, strategy=PredictedGradientStrategy(), **options)
        self.trainer.fit(self.module, data, ckpt_path=ckpt_path)
        return self

    @property
    def totals(self) -> dict[str, Work]:
        return dict(self.ledger.ledger.totals())


class Captures(pl.Callback):
    """How many programs had been captured, and compiled, at the end of each epoch."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger=LOGGER)
        self._messages = caplog
        self.captured: list[int] = []
        self.compiled: list[int] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        messages = [record.getMessage() for record in self._messages.records]
        self.captured.append(sum(m.startswith("Captured the training step") for m in messages))
        self.compiled.append(sum(m.startswith("Compiled the captured program") for m in messages))


def regression(**settings: Any) -> Regression:
    torch.manual_seed(0)
    return Regression(**settings)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_weights_and_fleet_accounts_are_those_of_the_eager_engine(rounding: str, tmp_path: Path) -> None:
    eager, captured = (
        Run(tmp_path / engine, engine, regression(dropout=0.3, optimizer="adamw"), rounding=rounding).fit(
            DataLoader(Samples(26), batch_size=8), max_epochs=4
        )
        for engine in ("eager", "captured")
    )
    assert torch.equal(weights(eager.module), weights(captured.module))
    before, after = eager.totals, captured.totals
    assert before.keys() == after.keys()
    for account in before.keys() - {"setup/checks"}:
        assert before[account] == after[account], account
    assert before["fleet/prediction"].flops
    # Shapes of 2 samples and of 1, each captured once and compared at its uses 1, 2, 4 ... A prediction of 1 sample
    # (2 of the last batch's 2) is half the work of one of 2, of which there are 4 in each of 3 batches an epoch.
    unit = before["fleet/prediction"].flops / before["fleet/prediction"].samples
    checks = after["setup/checks"].flops - before["setup/checks"].flops
    twos = 1 + len([use for use in (1, 2, 4, 8, 16, 32) if use <= 4 * 3 * 4])
    ones = 1 + len([use for use in (1, 2, 4) if use <= 3 * 2])  # from the second epoch on
    assert checks == unit * (2 * twos + ones)


@pytest.mark.parametrize(
    "engine",
    [
        "captured",
        pytest.param(
            "compiled",
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated")],
        ),
    ],
)
def test_ezpz190_ragged_last_batch_captures_each_shape_once(
    engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    captures = Captures(caplog)
    # 26 samples in batches of 8: three of them and one of 2; 50 epochs of 4 steps.
    run = Run(tmp_path, engine, regression(dropout=0.1)).fit(
        DataLoader(Samples(26), batch_size=8), captures, max_epochs=50
    )
    assert run.trainer.global_step == 200
    assert captures.captured == [1] + [2] * 49
    assert captures.compiled == (captures.captured if engine == "compiled" else [0] * 50)


class Unfreezing(BackboneFinetuning):
    """BackboneFinetuning that notes which gradients each step applied."""

    def __init__(self, unfreeze_at: int) -> None:
        super().__init__(unfreeze_backbone_at_epoch=unfreeze_at, verbose=False, backbone_initial_lr=0.01)
        self.steps: list[tuple[int, frozenset[str]]] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        held = frozenset(n for n, p in pl_module.named_parameters() if p.grad is not None and bool(p.grad.any()))
        self.steps.append((trainer.current_epoch, held))


class Backboned(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss((self.backbone(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def test_pt139476_recaptured_when_the_trainable_set_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for engine in ("eager", "captured"):
        torch.manual_seed(0)
        captures, unfreezing = Captures(caplog), Unfreezing(unfreeze_at=2)
        run = Run(tmp_path / engine, engine, Backboned())
        run.fit(DataLoader(Samples(24), batch_size=8), unfreezing, captures, max_epochs=4)
        found.append(weights(run.module))
        heads = frozenset(name for name, _ in run.module.named_parameters() if not name.startswith("backbone"))
        backbone = frozenset(name for name, _ in run.module.named_parameters() if name.startswith("backbone"))
        assert len(unfreezing.steps) == 12
        assert {held for epoch, held in unfreezing.steps if epoch < 2} == {heads}
        assert {held for epoch, held in unfreezing.steps if epoch >= 2} == {heads | backbone}
        assert captures.captured == ([0] * 4 if engine == "eager" else [1, 1, 2, 2])
    assert torch.equal(*found)


class Talkative(Regression):
    """Logs and prints, and keeps count."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.seen: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(len(batch[0]))
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        self.log_dict({"twice": 2.0 * loss, "samples": float(len(batch[0]))})
        self.print(f"step {batch_idx}")
        return loss


def test_pl17177_logging_stays_out_of_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, printed, seen = [], [], []
    for engine in ("eager", "captured"):
        torch.manual_seed(0)
        run = Run(tmp_path / engine, engine, Talkative())
        capsys.readouterr()
        run.fit(
            DataLoader(Samples(24), batch_size=8),
            max_epochs=3,
            logger=CSVLogger(tmp_path / engine, name="", version=""),
            log_every_n_steps=1,
        )
        rows.append(run.trainer.logger.experiment.metrics if run.trainer.logger else None)
        rows[-1] = (tmp_path / engine / "metrics.csv").read_text()
        printed.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")])
        seen.append(run.module.seen)
    assert printed[0] == printed[1] == [f"step {i % 3}" for i in range(9)]
    assert seen[0] == seen[1] == [2] * 9
    header, *lines = rows[1].splitlines()
    assert {"train_loss", "twice", "samples", "gpcv/loss"} <= set(header.split(","))
    assert header == rows[0].splitlines()[0]
    users = [header.split(",").index(name) for name in ("step", "train_loss", "twice", "samples", "gpcv/loss")]
    found = [[[line.split(",")[i] for i in users] for line in text.splitlines()] for text in rows]
    assert found[0] == found[1]
    assert len(lines) == 9


class SaveAt(pl.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


# torchdata 0.11 tells torch a vital that torch 2.13 no longer wants to know.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.parametrize("refresh_every", [1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(refresh_every: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounding": "stochastic", "refresh_every": refresh_every}

    def module() -> Regression:
        return regression(dropout=0.5, optimizer="adamw", schedule=True)

    def data() -> Any:
        return StatefulDataLoader(Samples(26), batch_size=8)

    whole = Run(tmp_path / "whole", "captured", module(), **settings)
    whole.fit(data(), SaveAt(tmp_path / "saved.ckpt", step=6), max_epochs=4)
    torch.manual_seed(1)
    resumed = Run(
        tmp_path / "resumed", "captured", Regression(dropout=0.5, optimizer="adamw", schedule=True), **settings
    )
    resumed.fit(data(), ckpt_path=tmp_path / "saved.ckpt", max_epochs=4)
    assert resumed.trainer.global_step == whole.trainer.global_step == 16
    assert torch.equal(weights(whole.module), weights(resumed.module))
    for account in whole.totals.keys() - {"setup/checks"}:  # a new process captures again
        assert whole.totals[account] == resumed.totals[account], account
    assert whole.totals["fleet/control"].flops
