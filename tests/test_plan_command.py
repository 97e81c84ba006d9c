"""`lightning-ledger plan`: through Lightning, on real modules; it leaves no trace, and its exit code is its answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning_runs import QUIET, Regression, Samples
from torch import nn
from torch.utils.data import DataLoader

from lightning_ledger import cli
from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.planning.settings import PlanSettings
from lightning_ledger.planning.trainer import planning_trainer
from lightning_ledger.prices import PriceBook
from lightning_ledger.reports.plan_tables import render_plan

ROOT = Path(__file__).resolve().parent.parent
TINY = {"layers": 1, "heads": 2, "width": 32, "context": 16, "warmup_steps": 0}


class Traced(Regression):
    """Counts its steps, keeps a running mean in a buffer, draws from every generator, and has dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2, optimizer="adamw", schedule=True)
        self.register_buffer("running", torch.zeros(8))
        self.calls = 0
        self.hooks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        self.running += batch[0].mean(0)
        np.random.rand()  # noqa: NPY002  the global generator is what must stay
        random.random()
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hooks.append("batch")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append("step")


class Data(pl.LightningDataModule):
    """Shuffled samples; says at which stage it was set up."""

    stage: str | None = None
    transferred = 0

    def setup(self, stage: str) -> None:
        self.stage = stage

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Samples(96), batch_size=16, shuffle=True)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transferred += 1
        return batch


def test_nothing_changes(tmp_path):
    torch.manual_seed(3)
    module, data = Traced(), Data()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    callbacks = [ComputeLedger(), GradientPrediction("int8", microbatches=4, engine="eager"), ControlVariate()]
    trainer = planning_trainer(
        PlanSettings("int8", batches=3), **QUIET, default_root_dir=tmp_path, callbacks=callbacks, max_steps=2
    )
    forecast = trainer.plan(module, datamodule=data)
    assert (forecast.batches, forecast.microbatches, len(forecast.formats)) == (3, 4, 2)
    assert (data.stage, data.transferred >= 3) == ("fit", True)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (module.calls, module.hooks) == (0, [])
    assert all(p.grad is None for p in module.parameters())
    assert trainer.global_step == 0
    assert trainer.optimizers[0].state == {}
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (np.random.get_state()[1] == generators[1]).all()  # noqa: NPY002
    assert random.getstate() == generators[2]
    assert list(tmp_path.iterdir()) == []


def test_callbacks_say_what_to_measure(tmp_path):
    callbacks = [
        ComputeLedger(prices=PriceBook(fleet_forward=0.3)),
        GradientPrediction("mxfp8", microbatches=8, engine="eager"),
    ]
    options = PlanSettings(roundings="nearest", batches=1)
    trainer = planning_trainer(
        options, **QUIET, default_root_dir=tmp_path, callbacks=callbacks, accumulate_grad_batches=2
    )
    forecast = trainer.plan(Regression(), datamodule=Data())
    assert [kind.prediction.format for kind in forecast.formats] == ["mxfp8", "bf16", "int8", "int4"]
    assert (forecast.microbatches, forecast.step_microbatches, forecast.fleet_price) == (8, 16, 0.3)
    # Products of 8 numbers are too short for blocks of 32.
    assert any("not a multiple" in why for why in forecast.formats[0].prediction.unlowered.values())


def test_little_time_is_spent_on_few_micro_batches_and_told(tmp_path, capsys):
    run = {**QUIET, "default_root_dir": tmp_path, "callbacks": [GradientPrediction("int8", microbatches=8)]}
    hurried = planning_trainer(PlanSettings("int8,int4", minutes=1e-6), **run).plan(Regression(), datamodule=Data())
    assert (hurried.batches, hurried.looked_at, hurried.microbatches) == (1, 3, 8)
    for kind in hurried.formats:
        assert kind.delta.low is not None
        assert kind.delta.low <= kind.delta.value == kind.delta_at_one <= kind.delta.high
    render_plan(hurried)
    assert "3 of 8 micro-batches, for lack of time" in " ".join(capsys.readouterr().out.split())
    assert {kind.prediction.engine for kind in hurried.formats} == {"eager"}
    assert "no time to capture a program" in hurried.formats[0].prediction.why_eager

    whole = planning_trainer(PlanSettings("int8,int4", batches=2), **run).plan(Regression(), datamodule=Data())
    assert (whole.batches, whole.looked_at) == (2, 16)
    # One kind's program was captured and compared; the other kinds' are alike but for the rounding.
    assert {(kind.prediction.engine, kind.prediction.why_eager) for kind in whole.formats} == {("captured", "")}
    assert whole.work["checks"] > hurried.work["checks"]


@pytest.fixture
def config(tmp_path) -> Path:
    run = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 4,
            "limit_val_batches": 0,
            "default_root_dir": str(tmp_path / "run"),
            "enable_progress_bar": False,
            "callbacks": [
                {
                    "class_path": "lightning_ledger.callbacks.GradientPrediction",
                    "init_args": {"engine": "eager", "microbatches": 8},
                }
            ],
        },
        "model": {"class_path": "examples.gpt.GPT", "init_args": TINY},
        "data": {
            "class_path": "examples.text.TextDataModule",
            "init_args": {"context": 16, "batch_size": 16, "path": str(ROOT / "lightning_ledger" / "ledger.py")},
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def plan(config: Path, *options: str) -> int:
    return cli.main(["plan", "--config", str(config), "--plan.batches=2", *options])


def test_exit_code_is_the_answer_and_fp32_is_exact(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    data, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["--plan.formats=fp32,int8", f"--plan.json={data}", f"--plan.png={picture}"]
    code = plan(config, *options, "--plan.fleet_price=0.05")
    found = json.loads(data.read_text())
    assert code == (0 if found["verdict"]["pays"] else 1)
    full, *_ = found["formats"]
    assert (full["delta"]["value"], full["rho2"], full["bias"]) == (0.0, 1.0, 0.0)
    assert full["break_even"]["value"] == pytest.approx(1.0)
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    for words in ("int8 stochastic", "noise scale", "Nothing was trained", "Take: ", "emulated"):
        assert words in shown
    assert not (tmp_path / "run").exists()
    # Dearer than the training GPU itself: nothing can pay.
    assert plan(config, "--plan.formats=int8", "--plan.roundings=nearest", "--plan.fleet_price=2") == 1
    assert "not expected to pay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--plan.formats=int9"], "int9"),
        (["--plan.batches=0"], "batches=0"),
        (["--trainer.limit_train_batches=0"], "no batch"),
        (["--data.init_args.batch_size=1"], "No batch could be measured"),
        (["--ckpt_path=none.ckpt"], "none.ckpt"),
    ],
)
def test_what_cannot_run_is_told_and_exits_with_2(config, monkeypatch, capsys, options, said):
    monkeypatch.chdir(ROOT)
    assert plan(config, *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("lightning-ledger: plan: ")
    assert said in error


def test_refusals_of_training_hold(tmp_path):
    module = Regression()
    module.layers.insert(1, nn.BatchNorm1d(16))
    trainer = planning_trainer(PlanSettings("int8"), **QUIET, default_root_dir=tmp_path)
    with pytest.raises(Exception, match="BatchNorm in training mode"):
        trainer.plan(module, datamodule=Data())


def test_plan_is_at_the_weights_of_a_checkpoint(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    fit = ["--trainer.callbacks=null", "--trainer.strategy=auto", "--trainer.logger=false"]
    assert cli.main(["fit", "--config", str(config), *fit, "--trainer.enable_model_summary=false"]) == 0
    (checkpoint,) = (tmp_path / "run").rglob("*.ckpt")

    def found(*options: str) -> dict[str, Any]:
        capsys.readouterr()
        plan(config, "--plan.formats=int4", "--plan.roundings=nearest", "--plan.json=-", *options)
        text = capsys.readouterr().out
        return json.loads(text[text.index("{") :])

    first, later = found(), found(f"--ckpt_path={checkpoint}")
    assert (first["step"], later["step"]) == (0, 4)  # the run was over: its limits do not bind a plan
    assert later["formats"][0]["delta"] != first["formats"][0]["delta"]
