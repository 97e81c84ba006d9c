"""The examples are ordinary Lightning code, do what they say, and train."""

from __future__ import annotations

import ast
import math
import runpy
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import WandbLogger

from examples import demo
from examples.convnet import Denoiser, NoisyCropsDataModule
from examples.digits import DigitsClassifier, DigitsDataModule
from examples.gpt import GPT
from examples.hf_gpt2 import HFGPT2
from examples.text import TextDataModule
from lightning_ledger.strategies import PredictedGradientStrategy

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "demo"


def quiet_trainer(folder: Path, **settings) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(accelerator="cpu", default_root_dir=folder, logger=False, **quiet, **settings)


# The GPT.


def test_gpt_has_the_demos_size_and_starts_at_a_uniform_guess():
    model = GPT()
    assert 2_000_000 < sum(p.numel() for p in model.parameters()) < 3_000_000
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))
    assert model._loss(tokens).item() == pytest.approx(math.log(256), abs=0.2)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_ties_its_embedding_only_if_asked(tied):
    model = GPT(layers=1, heads=2, width=8, tied=tied)
    assert (model.head.weight is model.embedding.weight) == tied


def test_gpt_predicts_from_the_past_alone():
    model = GPT(layers=2, heads=2, width=16, context=8)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amin(dim=-1).max() > 0


def test_gpt_drops_only_in_training():
    model = GPT(layers=1, heads=2, width=16, context=8, dropout=0.5)
    tokens = torch.arange(8).unsqueeze(0)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_refuses_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match=r"heads=3 does not divide width=16"):
        GPT(heads=3, width=16)


def test_gpt_decays_matrices_only_and_steps_every_parameter_once():
    model = GPT(layers=1, heads=2, width=8, weight_decay=0.1)
    matrices, vectors = model.configure_optimizers()["optimizer"].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert all(p.dim() == 1 for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_gpt_learning_rate_rises_then_falls_along_half_a_cosine(tmp_path):
    model = GPT(layers=1, heads=2, width=8, warmup_steps=4, schedule="cosine")
    model.trainer = quiet_trainer(tmp_path, max_steps=14, max_epochs=-1)
    assert [model._rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    # Halfway from step 4 to step 14 the cosine is zero: 0.1 + 0.45.
    assert (model._rate(4), model._rate(9), model._rate(14)) == pytest.approx((1.0, 0.55, 0.1))
    constant = GPT(layers=1, heads=2, width=8, warmup_steps=4)
    assert [constant._rate(step) for step in (3, 4, 1000)] == [1.0, 1.0, 1.0]


def test_gpt_takes_adamws_betas():
    model = GPT(layers=1, heads=2, width=8, betas=(0.8, 0.9))
    assert model.configure_optimizers()["optimizer"].defaults["betas"] == (0.8, 0.9)


def test_gpt_is_gpt2_124m_at_its_size():
    with torch.device("meta"):
        model = GPT(layers=12, heads=12, width=768, context=1024, vocabulary=50257)
    # 768 (50257 + 1024) embeddings, 12 blocks of 12 * 768^2 + 13 * 768, and 2 * 768 in the last norm.
    assert sum(p.numel() for p in model.parameters()) == 768 * 51281 + 12 * (12 * 768**2 + 13 * 768) + 1536
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_hf_gpt2_has_as_many_parameters_as_ours():
    with torch.device("meta"):
        model = HFGPT2(layers=12, heads=12, width=768, context=1024, vocabulary=50257)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_hf_gpt2_reads_no_further_than_its_context():
    model = HFGPT2(layers=1, heads=2, width=16, context=8, dropout=0.0)
    tokens = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model._loss(tokens), model._loss(tokens[:, :8]))


def test_hf_gpt2_learning_rate_is_constant_or_rises_then_falls_along_half_a_cosine(tmp_path):
    assert isinstance(HFGPT2(layers=1, heads=2, width=8).configure_optimizers(), torch.optim.AdamW)
    model = HFGPT2(layers=1, heads=2, width=8, learning_rate=1.0, warmup_steps=4, schedule="cosine")
    model.trainer = quiet_trainer(tmp_path, max_steps=14, max_epochs=-1)
    chosen = model.configure_optimizers()
    rates = []
    for _ in range(15):
        rates += chosen["lr_scheduler"]["scheduler"].get_last_lr()
        chosen["optimizer"].step()
        chosen["lr_scheduler"]["scheduler"].step()
    # From zero; halfway from step 4 to step 14 the cosine is zero: 0.1 + 0.45.
    assert rates[:5] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert (rates[9], rates[14]) == pytest.approx((0.55, 0.1))


# Photographs.


def test_denoiser_reads_real_noise_from_the_crops_it_is_given():
    data = NoisyCropsDataModule(batch_size=64, noise=25.0)
    data.setup("fit")
    images, noise = next(iter(data.train_dataloader()))
    assert noise.std().item() * 64 == pytest.approx(25.0, rel=0.01)  # of 196,608 values
    clean = (images - noise) * 64 + 127.5
    torch.testing.assert_close(clean, clean.round().clamp(0, 255), atol=1e-3, rtol=0)
    # A prediction of zero leaves all of the noise.
    model = Denoiser(width=8, blocks=1, noise=25.0)
    torch.nn.init.zeros_(model.network[-2].weight)
    torch.nn.init.zeros_(model.network[-2].bias)
    assert model._loss((images, noise)).item() == pytest.approx(1.0, rel=0.02)


def test_denoiser_sizes_are_the_documented_ones():
    sizes = {(96, 6): 1.0, (128, 16): 4.8, (184, 16): 9.8}
    with torch.device("meta"):
        counted = {size: sum(p.numel() for p in Denoiser(*size).parameters()) / 1e6 for size in sizes}
    assert counted == pytest.approx(sizes, abs=0.05)


def test_crops_do_not_depend_on_the_batch_size():
    def crops(batch_size: int) -> torch.Tensor:
        data = NoisyCropsDataModule(size=8, batch_size=batch_size, epoch_crops=12)
        data.setup("fit")
        return torch.cat([images for images, _ in data.train_dataloader()])

    assert torch.equal(crops(2), crops(6))


def test_crops_for_validation_come_from_the_right_of_each_photograph():
    data = NoisyCropsDataModule(size=8, val_fraction=0.25)
    data.setup("fit")
    assert [part.shape for part in data.train_set.photographs] == [(3, 427, 480)] * 2
    assert [part.shape for part in data.val_set.photographs] == [(3, 427, 160)] * 2


def test_denoiser_errors_teach():
    with pytest.raises(ValueError, match=r"width=12 cannot be cut into 8 groups"):
        Denoiser(width=12)
    with pytest.raises(ValueError, match=r"size=33 is odd"):
        NoisyCropsDataModule(size=33)
    with pytest.raises(ValueError, match=r"size=130 does not fit .* 128 pixels"):
        NoisyCropsDataModule(size=130).setup("fit")


# Training them.


def test_gpt_learns_text(tmp_path):
    L.seed_everything(0)
    data = TextDataModule(str(ROOT / "LICENSE"), context=32, batch_size=16, val_windows=16)
    model = GPT(layers=1, heads=2, width=32, context=32, learning_rate=1e-2, warmup_steps=5)
    trainer = quiet_trainer(tmp_path, max_steps=200, max_epochs=-1, val_check_interval=20, check_val_every_n_epoch=None)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val_loss"] < 3.2  # ln 256 = 5.5 at the start


def test_digits_are_learned(tmp_path):
    L.seed_everything(0)
    trainer = quiet_trainer(tmp_path, max_epochs=4)
    trainer.fit(DigitsClassifier(channels=8), DigitsDataModule())
    assert trainer.callback_metrics["val_accuracy"] > 0.9
    assert trainer.callback_metrics["train_accuracy"] > 0.9


def test_denoiser_learns_photographs(tmp_path):
    L.seed_everything(0)
    trainer = quiet_trainer(tmp_path, max_steps=60, max_epochs=-1, val_check_interval=60, check_val_every_n_epoch=None)
    trainer.fit(Denoiser(width=16, blocks=2, learning_rate=3e-3), NoisyCropsDataModule(batch_size=16, val_crops=64))
    assert trainer.callback_metrics["val_loss"] < 0.6  # 1 for a prediction of zero


def test_hf_gpt2_learns_text(tmp_path):
    L.seed_everything(0)
    data = TextDataModule(str(ROOT / "LICENSE"), context=31, batch_size=16, val_windows=16)
    model = HFGPT2(layers=1, heads=2, width=32, context=32, learning_rate=1e-2)
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    trainer = quiet_trainer(tmp_path, max_steps=60, max_epochs=-1, val_check_interval=20, check_val_every_n_epoch=None)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val_loss"] < 3.4


def test_examples_know_nothing_of_this_package():
    for name in ("gpt", "text", "digits", "convnet", "hf_gpt2", "train"):
        tree = ast.parse((ROOT / "examples" / f"{name}.py").read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        assert any("lightning" in str(module) for module in imported)
        assert not any("lightning_ledger" in str(module) for module in imported)


# A user's own script, with and without the fragments.


def run_train_script(monkeypatch, tmp_path, *configs: Path) -> Path:
    """Run examples/train.py as a user does; return the folder of its run."""
    folder = tmp_path / "run"
    arguments = [f"--config={config}" for config in configs]
    settings = {
        "default_root_dir": folder,
        "max_epochs": 1,
        "limit_train_batches": 3,
        "limit_val_batches": 1,
        "enable_progress_bar": "false",
        "accelerator": "cpu",
        "logger": "false",
        "log_every_n_steps": 1,
    }
    arguments += [f"--trainer.{key}={value}" for key, value in settings.items()]
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / "train.py"), run_name="__main__")
    return folder


@pytest.fixture
def own_config(tmp_path) -> Path:
    """A stranger's configuration, with a callback of its own."""
    config = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    config["trainer"]["callbacks"] = config["trainer"]["callbacks"][1:]  # no logger here, so no LearningRateMonitor
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


FRAGMENTS = {
    "ledger": ["ComputeLedger"],
    "predicted": ["ComputeLedger", "GradientPrediction"],
    "gpcv": ["ComputeLedger", "GradientPrediction", "ControlVariate"],
}


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_fragments_add_to_a_strangers_callbacks(monkeypatch, tmp_path, own_config, fragment):
    folder = run_train_script(monkeypatch, tmp_path, own_config, ROOT / "callbacks" / f"{fragment}.yaml")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    names = [callback["class_path"].rpartition(".")[2] for callback in saved["trainer"]["callbacks"]]
    assert names == ["EarlyStopping", *FRAGMENTS[fragment]]
    assert (folder / "ledger.jsonl").exists()


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_fragments_work_where_a_stranger_has_no_callbacks(monkeypatch, fragment):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    settings = ["--seed_everything=0", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = LightningCLI(
        DigitsClassifier,
        DigitsDataModule,
        run=False,
        args=["--config", str(ROOT / "callbacks" / f"{fragment}.yaml"), *settings],
    )
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert [name for name in names if name in FRAGMENTS["gpcv"]] == FRAGMENTS[fragment]


def test_wandb_fragment_makes_an_offline_logger(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config, save_dir = ROOT / "configs" / "wandb.yaml", f"--trainer.logger.init_args.save_dir={tmp_path}"
    args = ["--seed_everything=0", f"--config={config}", save_dir]
    cli = LightningCLI(DigitsClassifier, DigitsDataModule, run=False, args=args)
    assert isinstance(cli.trainer.logger, WandbLogger)
    assert cli.trainer.logger._offline


def test_pl15256_ja478_fragment_before_their_config_is_refused(monkeypatch, tmp_path, own_config):
    with pytest.raises(Exception, match="GradientPrediction"):
        run_train_script(monkeypatch, tmp_path, ROOT / "callbacks" / "gpcv.yaml", own_config)


# The demo.


def test_demo_arms_do_what_their_names_say(monkeypatch):
    monkeypatch.chdir(ROOT)
    efforts = {name: demo.Arm.read(name).step_effort for name in demo.ARMS}
    # In exact micro-batch passes; a prediction counts 1.75: 16 of them make 28.
    assert efforts == {
        "exact-1": 1.0,
        "exact-4": 4.0,
        "exact-16": 16.0,
        "predicted-int4": 28.0,
        "mixed-int4": 29.0,
        "gpcv-int8": 29.0,
        "gpcv-int4": 29.0,
    }
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= set(demo.ARMS)


@pytest.mark.parametrize("name", demo.ARMS)
def test_demo_configurations_build_the_trainer_they_describe(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-ledger"])
    configs = ["--config", str(ROOT / "configs" / "demo.yaml"), "--config", str(CONFIGS / f"{name}.yaml")]
    cli = LightningCLI(subclass_mode_model=True, subclass_mode_data=True, run=False, args=configs)
    stack = [type(callback).__name__ for callback in cli.trainer.callbacks]
    expected = {"exact": "ledger", "gpcv": "gpcv"}.get(name.partition("-")[0], "predicted")
    assert [callback for callback in stack if callback in FRAGMENTS["gpcv"]] == FRAGMENTS[expected]
    assert isinstance(cli.trainer.strategy, PredictedGradientStrategy) == (expected != "ledger")


def test_demo_arms_of_16_take_equally_many_steps_and_validate_at_their_end(monkeypatch):
    monkeypatch.chdir(ROOT)
    arms = [demo.Arm.read(name) for name in demo.ARMS]
    assert len({arm.steps for arm in arms if arm.step_effort >= 16}) == 1
    for arm in arms:
        assert arm.steps % arm.validate_every == 0
        assert 20 <= arm.steps // arm.validate_every <= 36


@pytest.mark.parametrize("name", demo.ARMS)
@pytest.mark.parametrize("scale", [0.5, 0.1, 0.001])
def test_demo_scale_shortens_and_still_ends_with_a_validation(monkeypatch, name, scale):
    monkeypatch.chdir(ROOT)
    whole, part = demo.Arm.read(name), demo.Arm.read(name, scale)
    assert part.steps == pytest.approx(whole.steps * scale, abs=part.validate_every)
    assert part.steps % part.validate_every == 0
    assert part.steps >= part.validate_every >= 1


def test_demo_prefers_any_number_to_a_diverged_run_and_widens_past_an_edge():
    assert demo.best_rate({1e-3: math.nan, 2e-3: 9.0}) == 2e-3
    assert demo.next_rates({1e-3: 2.0, 2e-3: 3.0}) == [5e-4]
    row = demo.summary({4e-3: 2.5, 1e-3: 2.2, 2e-3: 2.1}, steps=7)
    assert row == {
        "learning_rate": 2e-3,
        "at_edge": False,
        "steps": 7,
        "losses": {1e-3: 2.2, 2e-3: 2.1, 4e-3: 2.5},
    }
    assert demo.summary({1e-3: 2.0, 2e-3: 2.1}, steps=7)["at_edge"]


def test_demo_says_how_to_make_a_missing_table(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(demo, "RATES", tmp_path / "none.yaml")
    assert demo.run(["exact-1"], 0.05, tmp_path, 1.0, 1) == 2
    assert "make tune" in capsys.readouterr().err


def test_demo_table_covers_every_arm_at_its_present_length(monkeypatch):
    monkeypatch.chdir(ROOT)
    table = demo.read_table()
    assert list(table) == list(demo.ARMS)
    for name, row in table.items():
        assert row == demo.summary(row["losses"], demo.Arm.read(name).steps)


@pytest.mark.slow
def test_demo_runs_end_to_end(tmp_path):
    command = [sys.executable, "examples/demo.py", "run", "--scale=0.01", f"--folder={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert all(name in done.stdout for name in demo.ARMS)
