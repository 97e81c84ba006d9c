"""Ways to name strategy and callbacks on Lightning's command line, in YAML, in the environment, and in W&B sweeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ledger import cli
from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import read_ledger, verify_ledger
from lightning_ledger.strategies import PredictedGradientStrategy

STRATEGY = "lightning_ledger.strategies.PredictedGradientStrategy"
PREDICTION = "lightning_ledger.callbacks.GradientPrediction"
ROOT = Path(__file__).parents[1]


class Model(L.LightningModule):
    """A perceptron that a configuration names by its path."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(24, 5, generator=generator), torch.randn(24, 1, generator=generator))
        return DataLoader(data, batch_size=8)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(tmp_path),
    }


class Runs:
    """Runs a user's own script, and ours, with configurations written on the spot."""

    def __init__(self, path: Path, base: dict[str, Any]) -> None:
        self.path, self.base, self.written = path, base, 0

    def config(self, **trainer: Any) -> list[str]:
        """``--config FILE`` with these settings of the Trainer."""
        self.written += 1
        file = self.path / f"{self.written}.yaml"
        file.write_text(yaml.safe_dump({"seed_everything": 0, "trainer": trainer}))
        return ["--config", str(file)]

    def script(self, *arguments: str, **options: Any) -> LightningCLI:
        """``python their_train.py fit ...``, where that file says ``LightningCLI(Model)``."""
        arguments = ("fit", *self.config(**self.base), *arguments)
        return LightningCLI(Model, args=list(arguments), save_config_kwargs={"overwrite": True}, **options)

    def command(self, *arguments: str) -> LightningCLI:
        """``lightning-ledger fit --model tests.test_cli_settings.Model ...``."""
        model = f"--model={__name__}.Model"
        return cli.train(["fit", model, *self.config(**self.base), *arguments])


@pytest.fixture
def runs(tmp_path: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["their_train.py"])
    return Runs(tmp_path, base)


def one(trainer: L.Trainer, kind: type[Any]) -> Any:
    (callback,) = (c for c in trainer.callbacks if isinstance(c, kind))
    return callback


def trained(done: LightningCLI) -> Tensor:
    assert done.trainer.global_step == 6
    return torch.cat([p.detach().flatten() for p in done.model.parameters()])


APPENDED = ("--trainer.callbacks+=GradientPrediction", "--trainer.callbacks.microbatches=4")


# ------------------------------------------------------------------------------------------------------- the strategy


@pytest.mark.parametrize("way", ["script", "command"])
@pytest.mark.parametrize(
    "argument",
    [
        "--trainer.strategy=predicted_gradients",
        f"--trainer.strategy.class_path={STRATEGY}",
        f'--trainer.strategy={{"class_path": "{STRATEGY}"}}',
        f"--trainer.strategy={STRATEGY}",
        "--trainer.strategy=PredictedGradientStrategy",
    ],
)
def test_a_strategy_on_the_command_line(argument: str, way: str, runs: Runs) -> None:
    done = getattr(runs, way)(argument, *APPENDED)
    assert type(done.trainer.strategy) is PredictedGradientStrategy
    assert one(done.trainer, GradientPrediction).state.steps == done.trainer.global_step == 6


@pytest.mark.parametrize("strategy", ["predicted_gradients", {"class_path": STRATEGY}, STRATEGY])
def test_a_strategy_in_yaml_trains_as_stock_where_all_is_exact(strategy: Any, runs: Runs) -> None:
    exact = {"class_path": PREDICTION, "init_args": {"microbatches": 4, "exact": 4}}
    done = runs.script(*runs.config(strategy=strategy, callbacks=[exact]))
    assert type(done.trainer.strategy) is PredictedGradientStrategy
    torch.testing.assert_close(trained(done), trained(runs.script()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "first",
    [
        "ddp",
        {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"find_unused_parameters": True}},
    ],
)
def test_a_later_file_overrides_the_strategy(first: Any, runs: Runs) -> None:
    """Of another class's ``init_args`` nothing is left over."""
    ours = runs.config(strategy={"class_path": STRATEGY})
    done = runs.script(*runs.config(strategy=first), *ours, *APPENDED)
    assert type(done.trainer.strategy) is PredictedGradientStrategy
    stock = runs.script(*ours, *runs.config(strategy="auto"))
    assert not isinstance(stock.trainer.strategy, PredictedGradientStrategy)


@pytest.mark.parametrize("strategy", [["predicted_gradients"], [{"class_path": STRATEGY}]])
def test_a_list_of_strategies_is_refused_with_a_fix_on_one_line(strategy: Any, runs: Runs, capsys: Any) -> None:
    arguments = ["fit", f"--model={__name__}.Model", *runs.config(**runs.base, strategy=strategy)]
    assert cli.main(arguments) == 2
    (fix,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("Fix:"))
    assert "strategy: predicted_gradients" in fix
    assert f"class_path: {STRATEGY}" in fix


# ------------------------------------------------------------------------------------------------------ the callbacks


def item(format: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": PREDICTION, "init_args": {"format": format, "microbatches": 4, **arguments}}


def test_ja478_a_fragment_appends_to_the_users_callbacks(runs: Runs) -> None:
    mine: dict[str, Any] = {"class_path": "lightning.pytorch.callbacks.GradientAccumulationScheduler"}
    mine["init_args"] = {"scheduling": {1: 3}}
    done = runs.script(*runs.config(callbacks=[mine]), "--config", "callbacks/gpcv.yaml")
    names = [type(c).__name__ for c in done.trainer.callbacks]
    assert {"GradientAccumulationScheduler", "ComputeLedger", "GradientPrediction", "ControlVariate"} <= set(names)
    assert one(done.trainer, ComputeLedger).ledger.steps == 3 + 1


def test_a_later_list_replaces_the_earlier_callbacks_whole(runs: Runs) -> None:
    first = runs.config(strategy="predicted_gradients", callbacks=[item("int8"), {"class_path": "ControlVariate"}])
    done = runs.script(*first, *runs.config(callbacks=[item("int4", exact=0)]))
    assert one(done.trainer, GradientPrediction).prediction.format == "int4"
    assert not [c for c in done.trainer.callbacks if isinstance(c, ControlVariate)]


@pytest.mark.parametrize(
    "arguments",
    [
        # A sweep whose command ends in ${args}, and whose parameter is trainer.callbacks.format.
        ("--trainer.callbacks+=GradientPrediction", "--trainer.callbacks.format=int4"),
        ("--trainer.callbacks+=GradientPrediction", "--trainer.callbacks.init_args.format=int4"),
        # A sweep over whole callbacks, as JSON or as the agent prints a Python dict.
        (f"--trainer.callbacks+={json.dumps(item('int4'))}",),
        (f"--trainer.callbacks+={item('int4')}",),
        (f"--trainer.callbacks+={json.dumps([item('int4')])}",),
        (f"--trainer.callbacks={json.dumps([item('int4')])}",),
        (f"--trainer.callbacks={[item('int4')]}",),
        (f"--trainer={json.dumps({'callbacks': [item('int4')]})}",),
    ],
)
def test_a_sweep_agent_passes_callbacks(arguments: Sequence[str], runs: Runs) -> None:
    done = runs.script("--trainer.strategy=predicted_gradients", *arguments)
    prediction = one(done.trainer, GradientPrediction)
    assert prediction.prediction.format == "int4"
    assert prediction.state.steps == 6


def test_arguments_of_a_callback_that_is_not_the_last_are_refused_with_the_fix(runs: Runs, capsys: Any) -> None:
    arguments = ["--config", "callbacks/gpcv.yaml", "--trainer.callbacks.format=int4"]  # which ends in ControlVariate
    assert cli.main(["fit", f"--model={__name__}.Model", *runs.config(**runs.base), *arguments]) == 2
    said = capsys.readouterr().err
    assert "Option 'format' is not accepted" in said
    assert "`--trainer.callbacks+=NAME` right before" in said


def test_a_misspelt_argument_is_named(runs: Runs, capsys: Any) -> None:
    arguments = ["--trainer.callbacks+=GradientPrediction", "--trainer.callbacks.microbatch=4"]
    assert cli.main(["fit", f"--model={__name__}.Model", *runs.config(**runs.base), *arguments]) == 2
    assert "'microbatch' is not accepted" in capsys.readouterr().err


# --------------------------------------------------------------------------- the saved configuration, and checkpoints


def test_the_saved_configuration_repeats_the_run(runs: Runs, tmp_path: Path) -> None:
    runs.base["logger"] = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "X"}}
    runs.base["logger"]["init_args"]["save_dir"] = str(tmp_path / "first")
    done = runs.command("--config", "callbacks/gpcv.yaml")
    (saved,) = (tmp_path / "first").rglob("config.yaml")
    parsed = yaml.safe_load(saved.read_text())["trainer"]
    assert parsed["strategy"] == {"class_path": STRATEGY, "init_args": parsed["strategy"]["init_args"]}
    assert [c["class_path"].rsplit(".")[-1] for c in parsed["callbacks"]] == [
        "ComputeLedger",
        "GradientPrediction",
        "ControlVariate",
    ]
    again = cli.train(
        ["fit", "--config", str(saved), f"--trainer.logger.init_args.save_dir={tmp_path / 'second'}"],
    )
    assert torch.equal(trained(again), trained(done))
    first, second = (read_ledger(next((tmp_path / name).rglob("ledger.jsonl"))) for name in ("first", "second"))
    assert first.totals == second.totals


def test_ckpt_path_resumes(runs: Runs, tmp_path: Path) -> None:
    seeded = ("--config", "callbacks/gpcv.yaml")
    whole = trained(runs.command(*seeded, f"--trainer.default_root_dir={tmp_path / 'whole'}"))
    here = (*seeded, f"--trainer.default_root_dir={tmp_path / 'parts'}")
    first = runs.command(*here, "--trainer.max_epochs=1")
    assert first.trainer.global_step == 3
    first.trainer.save_checkpoint(path := tmp_path / "half.ckpt")
    done = runs.command(*here, f"--ckpt_path={path}")
    assert torch.equal(trained(done), whole)
    ledger = one(done.trainer, ComputeLedger).ledger
    assert ledger.steps == 6
    assert verify_ledger(tmp_path / "parts").ok


# ---------------------------------------------------------------------------------------------------- the environment


def test_environment_variables(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a script that says ``LightningCLI(..., parser_kwargs={"default_env": True})``."""
    monkeypatch.setenv("PL_FIT__TRAINER__STRATEGY", "predicted_gradients")
    monkeypatch.setenv("PL_FIT__TRAINER__CALLBACKS", json.dumps([item("int4")]))
    done = runs.script(parser_kwargs={"default_env": True, "fit": {"default_env": True}})
    assert one(done.trainer, GradientPrediction).prediction.format == "int4"
    assert one(done.trainer, GradientPrediction).state.steps == 6


def test_a_configuration_in_the_environment(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_FIT__CONFIG", str(ROOT / "callbacks" / "gpcv.yaml"))
    done = runs.script(parser_kwargs={"default_env": True, "fit": {"default_env": True}})
    assert one(done.trainer, ComputeLedger).ledger.steps == 6
