"""Forecasts against what training measures, and a model of real size."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning_runs import QUIET

from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_ledger import cli
from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.planning.settings import PlanSettings
from lightning_ledger.planning.trainer import planning_trainer
from lightning_ledger.strategies import PredictedGradientStrategy

ROOT = Path(__file__).resolve().parent.parent
MIDDLE = 100  # steps before the forecast


class Deltas(pl.Callback):
    """Keeps the running delta of every step, from the strategy's own values."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if "gpcv/delta" in trainer.strategy.statistics_values:
            self.values.append(trainer.strategy.statistics_values["gpcv/delta"])


def run(folder: Path, steps: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings = {**QUIET, "default_root_dir": folder, "max_steps": steps, "limit_val_batches": 0, **options}
    return pl.Trainer(callbacks=list(callbacks), **settings)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_forecast_agrees_with_the_next_50_steps(tmp_path, capsys):
    pl.seed_everything(0)
    size = {"layers": 2, "width": 128, "context": 64, "warmup_steps": 10, "learning_rate": 2e-3}
    data = TextDataModule(context=64, batch_size=16)
    start = run(tmp_path, MIDDLE)
    start.fit(GPT(**size), datamodule=data)
    start.save_checkpoint(tmp_path / "middle.ckpt")
    exact = GradientPrediction("int8", microbatches=8, engine="eager")
    options = PlanSettings("int8,int4", "nearest", batches=8, minutes=60)
    trainer = planning_trainer(options, **QUIET, default_root_dir=tmp_path, callbacks=[exact])
    forecast = trainer.plan(GPT(**size), datamodule=data, ckpt_path=tmp_path / "middle.ckpt")
    said = []
    for kind in forecast.formats:
        deltas = Deltas()
        # Two exact micro-batches a step show their residuals' spread within it.
        predictions = GradientPrediction(kind.prediction.format, microbatches=8, exact=2, engine="eager")
        strategy = PredictedGradientStrategy()
        arm = run(tmp_path, MIDDLE + 50, predictions, ControlVariate(decay=0.98), deltas, strategy=strategy)
        arm.fit(GPT(**size), datamodule=data, ckpt_path=tmp_path / "middle.ckpt")
        seen = deltas.values[-1]
        said.append((kind.prediction.format, round(kind.delta.value, 5), round(seen, 5)))
        assert 1 - kind.delta.value == pytest.approx(1 - seen, rel=0.2)
    with capsys.disabled():
        print("\nformat, delta forecast, delta in training:", said)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gpt2_124m_plans_within_minutes_and_12_gigabytes(tmp_path, monkeypatch, capsys):
    """At 128 positions: 1024 take minutes a micro-batch on a CPU."""
    monkeypatch.chdir(ROOT)
    options = {
        "trainer.precision": "32-true",
        "trainer.accelerator": "cpu",
        "model.init_args.context": 128,
        "data.init_args.context": 128,
        "data.init_args.batch_size": 4,
        "data.init_args.epoch_windows": 16,
        "trainer.accumulate_grad_batches": 1,
        "plan.formats": "int8,int4",
        "plan.roundings": "nearest",
        "plan.batches": 2,
        "plan.json": tmp_path / "plan.json",
    }
    configs = ["--config=configs/gpt2-124m.yaml", "--config=configs/gpt2-124m-hf.yaml"]
    started = time.perf_counter()
    assert cli.main(["plan", *configs, *(f"--{key}={value}" for key, value in options.items())]) in (0, 1)
    minutes = (time.perf_counter() - started) / 60
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    found = json.loads((tmp_path / "plan.json").read_text())
    with capsys.disabled():
        print(f"\n{minutes:.1f} minutes, {gigabytes:.1f} GB, dry run {found['seconds']:.0f} s")
    assert found["memory"]["parameters"] > 4 * 120e6
    assert 0 < found["formats"][0]["delta"]["value"] < found["formats"][1]["delta"]["value"] < 1
    assert gigabytes < 12
    assert minutes < 6
