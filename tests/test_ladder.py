"""The ladder's rungs are GPT-2 shapes of the sizes they say, under one rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from examples.gpt import GPT
from lightning_ledger.cli import train

ROOT = Path(__file__).resolve().parent.parent
RUNGS = {  # layers, heads, width, and the parameters worked out below
    "11m": (4, 3, 192, 11_625_792),
    "30m": (6, 6, 384, 30_339_456),
    "51m": (8, 8, 512, 51_475_968),
    "124m": (12, 12, 768, 124_439_808),
    "354m": (24, 16, 1024, 354_823_168),
    "774m": (36, 20, 1280, 774_030_080),
}


def settings(rung: str) -> dict[str, dict[str, float]]:
    """The model's and the data's arguments, of the shared file with the rung's on top."""
    files = [ROOT / "configs" / name for name in ("gpt2-124m.yaml", f"ladder/{rung}.yaml")]
    shared, own = (yaml.safe_load(file.read_text()) for file in files)
    return {
        "model": {**shared["model"]["init_args"], **own["model"]["init_args"]},
        "data": {**shared["data"]["init_args"], **own.get("data", {}).get("init_args", {})},
    }


def test_every_rung_has_a_file():
    assert {file.stem for file in (ROOT / "configs" / "ladder").glob("*.yaml")} == RUNGS.keys()


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_has_the_parameters_of_its_shape(rung):
    layers, heads, width, parameters = RUNGS[rung]
    model = settings(rung)["model"]
    assert (model["layers"], model["heads"], model["width"]) == (layers, heads, width)
    assert width == 64 * heads
    with torch.device("meta"):
        found = sum(p.numel() for p in GPT(**model).parameters())
    # Embeddings of 50257 tokens and 1024 positions, of which the first are the output layer too; blocks with
    # 12 width^2 weights and 13 width biases and norms; a last norm.
    assert found == width * (50257 + 1024) + layers * (12 * width**2 + 13 * width) + 2 * width
    assert found == parameters


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_follows_the_rule(rung):
    model, data = settings(rung)["model"], settings(rung)["data"]
    assert model["learning_rate"] == pytest.approx(6e-4 * 768 / RUNGS[rung][2])
    assert (model["betas"], model["weight_decay"], model["schedule"]) == ([0.9, 0.95], 0.1, "cosine")
    assert model["context"] == data["context"] == 1024
    assert model["vocabulary"] == data["vocabulary"] == 50257


def test_the_smallest_rung_trains(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    tiny = {
        "trainer.max_steps": 1,
        "trainer.accumulate_grad_batches": 1,
        "trainer.val_check_interval": 1,
        "trainer.limit_val_batches": 1,
        "trainer.precision": "32-true",
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.default_root_dir": tmp_path / "run",
        "trainer.logger.init_args.save_dir": tmp_path / "run",
        "model.init_args.context": 16,
        "model.init_args.vocabulary": 300,
        "data.init_args.context": 16,
        "data.init_args.vocabulary": 300,
        "data.init_args.batch_size": 2,
        "data.init_args.epoch_windows": 2,
        "data.init_args.path": ROOT / "LICENSE",
        "data.init_args.cache": tmp_path / "cache",
    }
    files = ["--config=configs/gpt2-124m.yaml", "--config=configs/ladder/11m.yaml"]
    cli = train(["fit", *files, *(f"--{name}={value}" for name, value in tiny.items())])
    assert cli.trainer.global_step == 1
    assert cli.model.hparams["width"] == 192
    assert (tmp_path / "run" / "ledger.jsonl").exists()
