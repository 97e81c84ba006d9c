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
from examples.digits import DigitsClassifier, DigitsDataModule
from examples.gpt import ByteGPT
from examples.hf_gpt2 import HFGPT2
from examples.text import TextDataModule
from lightning_ledger.strategies import PredictedGradientStrategy

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "demo"


def quiet_trainer(folder: Path, **settings) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(accelerator="cpu", default_root_dir=folder, logger=False, **quiet, **settings)


def corpus(folder: Path, documents: int = 40, size: int = 300) -> Path:
    """Write documents in which every byte tells which one it is."""
    for index in range(documents):
        (folder / f"{index}.txt").write_bytes(bytes([index + 32]) * size)
    return folder


# The byte-level GPT.


def test_gpt_has_the_demos_size_and_starts_at_a_uniform_guess():
    model = ByteGPT()
    assert 2_000_000 < sum(p.numel() for p in model.parameters()) < 3_000_000
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))
    assert model._loss(tokens).item() == pytest.approx(math.log(256), abs=0.2)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_ties_its_embedding_only_if_asked(tied):
    model = ByteGPT(layers=1, heads=2, width=8, tied=tied)
    assert (model.head.weight is model.embedding.weight) == tied


def test_gpt_predicts_from_the_past_alone():
    model = ByteGPT(layers=2, heads=2, width=16, context=8)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amin(dim=-1).max() > 0


def test_gpt_drops_only_in_training():
    model = ByteGPT(layers=1, heads=2, width=16, context=8, dropout=0.5)
    tokens = torch.arange(8).unsqueeze(0)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_refuses_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match=r"heads=3 does not divide width=16"):
        ByteGPT(heads=3, width=16)


def test_gpt_decays_matrices_only_and_steps_every_parameter_once():
    model = ByteGPT(layers=1, heads=2, width=8, weight_decay=0.1)
    matrices, vectors = model.configure_optimizers()["optimizer"].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert all(p.dim() == 1 for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_gpt_learning_rate_rises_then_falls_along_half_a_cosine(tmp_path):
    model = ByteGPT(layers=1, heads=2, width=8, warmup_steps=4, schedule="cosine")
    model.trainer = quiet_trainer(tmp_path, max_steps=14, max_epochs=-1)
    assert [model._rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    # Halfway from step 4 to step 14 the cosine is zero: 0.1 + 0.45.
    assert (model._rate(4), model._rate(9), model._rate(14)) == pytest.approx((1.0, 0.55, 0.1))
    constant = ByteGPT(layers=1, heads=2, width=8, warmup_steps=4)
    assert [constant._rate(step) for step in (3, 4, 1000)] == [1.0, 1.0, 1.0]


# Text.


def test_text_windows_do_not_depend_on_the_batch_size(tmp_path):
    def windows(batch_size: int) -> torch.Tensor:
        data = TextDataModule(str(corpus(tmp_path)), context=16, batch_size=batch_size, epoch_windows=24)
        data.setup("fit")
        return torch.cat(list(data.train_dataloader()))

    small, large = windows(2), windows(12)
    assert small.shape == (24, 17)
    assert torch.equal(small, large)


def test_text_keeps_documents_whole_and_on_one_side(tmp_path):
    data = TextDataModule(str(corpus(tmp_path)), context=16, val_fraction=0.25, val_windows=50)
    data.setup("fit")
    train, val = set(data.train_text) - {ord("\n")}, set(data.val_text) - {ord("\n")}
    assert not train & val
    assert train | val == {index + 32 for index in range(40)}
    assert len(val) == 10  # a quarter of 40 equal documents


def test_text_validates_on_the_same_windows_every_time(tmp_path):
    data = TextDataModule(str(corpus(tmp_path)), context=16, val_windows=9)
    data.setup("fit")
    first, second = (torch.cat(list(data.val_dataloader())) for _ in range(2))
    assert first.shape == (9, 17)
    assert torch.equal(first, second)


def test_text_cuts_a_single_file_in_two(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(200)))
    data = TextDataModule(str(file), context=8, val_fraction=0.1)
    data.setup("fit")
    assert data.train_text + data.val_text == bytes(range(200))
    assert len(data.val_text) == 20


def test_text_reads_the_standard_library_by_default():
    data = TextDataModule(batch_size=4)
    data.setup("fit")
    assert len(data.train_text) > 5_000_000
    assert next(iter(data.train_dataloader())).shape == (4, 129)
    assert 0.05 <= len(data.val_text) / (len(data.train_text) + len(data.val_text)) < 0.1


def test_text_leaves_the_global_random_state_alone(tmp_path):
    before = torch.get_rng_state()
    data = TextDataModule(str(corpus(tmp_path)), context=16)
    data.setup("fit")
    data.train_dataloader(), data.val_dataloader()
    assert torch.equal(before, torch.get_rng_state())


def test_text_errors_teach(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="both name a text"):
        TextDataModule(path="a", dataset="b")
    with pytest.raises(ValueError, match="val_fraction=1"):
        TextDataModule(val_fraction=1.0)
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        TextDataModule(str(tmp_path / "none")).setup("fit")
    with pytest.raises(FileNotFoundError, match="holds no file"):
        TextDataModule(str(tmp_path)).setup("fit")
    with pytest.raises(ValueError, match="context=128 needs"):
        TextDataModule(str(corpus(tmp_path, documents=2, size=100))).setup("fit")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as Python marks a module that cannot be imported
    with pytest.raises(ImportError, match="pip install datasets"):
        TextDataModule(dataset="any").setup("fit")


# Training them.


def test_gpt_learns_text(tmp_path):
    L.seed_everything(0)
    data = TextDataModule(str(ROOT / "LICENSE"), context=32, batch_size=16, val_windows=16)
    model = ByteGPT(layers=1, heads=2, width=32, context=32, learning_rate=1e-2, warmup_steps=5)
    trainer = quiet_trainer(tmp_path, max_steps=200, max_epochs=-1, val_check_interval=20, check_val_every_n_epoch=None)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val_loss"] < 3.2  # ln 256 = 5.5 at the start


def test_digits_are_learned(tmp_path):
    L.seed_everything(0)
    trainer = quiet_trainer(tmp_path, max_epochs=4)
    trainer.fit(DigitsClassifier(channels=8), DigitsDataModule())
    assert trainer.callback_metrics["val_accuracy"] > 0.9
    assert trainer.callback_metrics["train_accuracy"] > 0.9


def test_hf_gpt2_learns_text(tmp_path):
    L.seed_everything(0)
    data = TextDataModule(str(ROOT / "LICENSE"), context=31, batch_size=16, val_windows=16)
    model = HFGPT2(layers=1, heads=2, width=32, context=32, learning_rate=1e-2)
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    trainer = quiet_trainer(tmp_path, max_steps=60, max_epochs=-1, val_check_interval=20, check_val_every_n_epoch=None)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val_loss"] < 3.4


def test_examples_know_nothing_of_this_package():
    for name in ("gpt", "text", "digits", "hf_gpt2", "train"):
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


def test_pl15256_fragment_before_their_config_is_refused(monkeypatch, tmp_path, own_config):
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
