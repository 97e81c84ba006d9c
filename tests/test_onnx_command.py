"""`lightning-ledger export`, and the exported program run by hand with NumPy and ONNX Runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from examples.gpt import GPT
from lightning_ledger import cli
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import ProgramPredictor
from tests.lightning_runs import QUIET
from tests.onnx_graphs import session_by_hand

MODEL = {"layers": 1, "heads": 2, "width": 32, "context": 16, "warmup_steps": 0}
DATA = {"context": 16, "batch_size": 8, "val_windows": 4}


def config(directory: Path, **prediction: Any) -> Path:
    settings = {
        "seed_everything": 3,
        "trainer": {
            **QUIET,
            "callbacks": [
                {"class_path": "lightning_ledger.callbacks.GradientPrediction", "init_args": prediction},
            ],
        },
        "model": {"class_path": "examples.gpt.GPT", "init_args": MODEL},
        "data": {"class_path": "examples.text.TextDataModule", "init_args": DATA},
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_an_exported_program_runs_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = config(tmp_path, format="fp32", microbatches=4), tmp_path / "out" / "program.onnx"
    assert cli.main(["export", "--config", str(run), "-o", str(output)]) == 0
    told = capsys.readouterr().out
    assert f"session = onnxruntime.InferenceSession({str(output)!r})" in told
    assert "  batch.0: int64[2, 17]\n" in told
    assert "  embedding.weight.grad: float[256, 32]\n" in told

    engine = session_by_hand(output.read_bytes())
    feed = dict(np.load(output.with_suffix(".npz")))
    names = [value.name for value in engine.get_outputs()]
    loss, *gradients = engine.run(None, feed)

    module = GPT(**MODEL)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(feed[name]))
    batch = torch.from_numpy(feed["batch.0"])
    truth = cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    truth.backward()
    torch.testing.assert_close(torch.from_numpy(loss), truth.detach(), rtol=1e-5, atol=0)
    expected = {f"{name}.grad": p.grad for name, p in module.named_parameters()}
    assert names == ["loss", *expected]
    for name, gradient in zip(names[1:], gradients, strict=True):
        torch.testing.assert_close(torch.from_numpy(gradient), expected[name], rtol=1e-4, atol=1e-6)

    feed["embedding.weight"] *= np.float32(1.1)  # new weights need no new export
    assert abs(float(engine.run(None, feed)[0]) - float(loss)) > 1e-4


def test_the_batch_is_the_first_micro_batch_of_the_training_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "program.onnx"
    assert cli.main(["export", "--config", str(config(tmp_path, microbatches=2)), "--output", str(output)]) == 0
    capsys.readouterr()
    feed = np.load(output.with_suffix(".npz"))
    assert feed["batch.0"].shape == (4, 17)


def test_a_mistake_is_told_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config(tmp_path, microbatches=2)
    settings = yaml.safe_load(run.read_text())
    settings["model"] = {"class_path": "tests.test_onnx.Odd"}  # it takes images, not tokens
    run.write_text(yaml.safe_dump(settings))
    assert cli.main(["export", "--config", str(run), "-o", str(tmp_path / "p.onnx")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("lightning-ledger: export: ")
    assert not (tmp_path / "p.onnx").exists()


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_is_told_with_the_command_that_installs_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["export", "--config", str(config(tmp_path))]) == 2
    told = capsys.readouterr().err
    assert f"need {package}, which cannot be found" in told
    assert "pip install 'lightning-ledger[onnx]'" in told
    with pytest.raises(ModuleNotFoundError, match=r"lightning-ledger\[onnx\]"):
        ProgramPredictor(GPT(**MODEL), Lowering("int8"), engine="onnxruntime")


def test_help_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--help"]) == 0
    assert "-o FILE" in capsys.readouterr().out
