"""The GPT-2 124M configurations train as they stand: in default tests with a tiny model, in slow ones at full size."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_ledger.callbacks import ComputeLedger
from lightning_ledger.cli import train
from lightning_ledger.ledger import verify_ledger

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = {
    "gpt": ["configs/gpt2-124m.yaml"],
    "hf_gpt2": ["configs/gpt2-124m.yaml", "configs/gpt2-124m-hf.yaml"],
}
TINY = {"layers": 1, "heads": 2, "width": 16, "context": 16, "vocabulary": 300, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def fit(name: str, folder: Path, cache: Path, model: dict[str, float], data: dict[str, object]) -> LightningCLI:
    """Take two steps on one and the same batch of two micro-batches, then validate on one window."""
    settings = {
        "trainer.max_steps": 2,
        "trainer.accumulate_grad_batches": 1,
        "trainer.val_check_interval": 2,
        "trainer.limit_val_batches": 1,
        "trainer.log_every_n_steps": 1,
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.default_root_dir": folder,
        "trainer.logger.init_args.save_dir": folder,
        "data.init_args.batch_size": 2,
        "data.init_args.epoch_windows": 2,
        "data.init_args.cache": cache,
        "model.init_args.warmup_steps": 0,
        **{f"model.init_args.{key}": value for key, value in model.items()},
        **{f"data.init_args.{key}": value for key, value in data.items()},
    }
    configs = [f"--config={config}" for config in CONFIGS[name]]
    return train(["fit", *configs, *(f"--{key}={value}" for key, value in settings.items())])


def check(cli: LightningCLI, folder: Path) -> None:
    """The loss fell, everything was charged, and the recipe is nanoGPT's."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["gpcv/loss"]) for row in rows if row["gpcv/loss"]]
    first, second = losses
    assert abs(first - math.log(cli.model.hparams["vocabulary"])) < 0.5
    assert second < first
    (ledger,) = (callback.ledger for callback in cli.trainer.callbacks if isinstance(callback, ComputeLedger))
    totals = ledger.totals()
    charged = ("scarce/forward", "scarce/backward", "scarce/validation", "fleet/prediction", "fleet/control")
    assert all(totals[account].flops > 0 for account in charged)
    assert verify_ledger(folder).ok
    (optimizer,) = cli.trainer.optimizers
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert cli.trainer.gradient_clip_val == 1.0


@pytest.mark.parametrize("name", CONFIGS)
def test_gpt2_configurations_train_a_tiny_model(monkeypatch, tmp_path, cache, name):
    monkeypatch.chdir(ROOT)
    cli = fit(name, tmp_path, cache, TINY, {"context": 16, "vocabulary": 300, "path": ROOT / "LICENSE"})
    assert type(cli.model).__module__ == f"examples.{name}"
    check(cli, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_gpt2_configurations_train_124m_parameters(monkeypatch, tmp_path, cache, name):
    monkeypatch.chdir(ROOT)
    cli = fit(name, tmp_path, cache, {"context": 128}, {"context": 128})  # 1024 takes minutes a step on a CPU
    # 768 less for each of the 896 positions left out.
    assert sum(p.numel() for p in cli.model.parameters()) == 124_439_808 - 768 * 896
    assert cli.trainer.optimizers[0].defaults["lr"] == 6e-4
    check(cli, tmp_path)
