"""Sweeps run real processes, survive a kill, and leave folders that `compare` takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ledger import cli
from lightning_ledger.ledger import read_ledger, verify_ledger
from lightning_ledger.reports import compare
from lightning_ledger.sweeps import Outcome, Sweep, run_all
from lightning_ledger.sweeps.running import STATE

ROOT = Path(__file__).resolve().parent.parent
# A program of the user's: it spends, marks a loss that depends on its arguments, and may fail or take its time.
PROGRAM = """
import argparse, os, sys, time
from lightning_ledger.ledger import Ledger, Work
add = (parser := argparse.ArgumentParser()).add_argument
add("--loss", type=float), add("--seed", type=int, default=0), add("--steps", type=int, default=2)
add("--seconds", type=float, default=0.0), add("--fail", default="never")
chosen = parser.parse_args()
ledger = Ledger()
ledger.forward_flops = 10
ledger.attach(os.environ["SWEEP_RUN_DIR"] + "/ledger.jsonl", {})
for step in range(chosen.steps):
    ledger.charge("scarce/forward", Work(flops=10, samples=1, passes=1))
    ledger.end_step()
    ledger.mark({"val_loss": chosen.loss + chosen.seed / 100})
    time.sleep(chosen.seconds)
ledger.close()
if str(chosen.loss) == chosen.fail:
    sys.exit("out of luck")
"""
TINY = {
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 1,
    "trainer.limit_val_batches": 1,
    "trainer.enable_progress_bar": False,
    "data.init_args.path": "LICENSE",
    "data.init_args.batch_size": 4,
    "model.init_args.layers": 1,
    "model.init_args.width": 16,
}


def write(folder: Path, parameters: dict[str, Any], **keys: Any) -> Path:
    (folder / "program.py").write_text(PROGRAM)
    file = folder / "sweep.yaml"
    defaults = {"method": "grid", "program": str(folder / "program.py")}
    file.write_text(yaml.safe_dump({**defaults, "parameters": parameters, **keys}))
    return file


def values(**named: Any) -> dict[str, Any]:
    return {name: {"values": given} if isinstance(given, list) else {"value": given} for name, given in named.items()}


def wait_for(told: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not told():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_sweep_leaves_a_folder_for_each_run_and_compare_takes_them_all(tmp_path, capsys):
    file = write(tmp_path, values(loss=[2.5, 2.0], seed=[0, 1]))
    assert cli.main(["sweep", str(file), f"--folder={tmp_path / 'runs'}", "--jobs=2"]) == 0
    folders = sorted(folder for folder in (tmp_path / "runs").iterdir() if folder.is_dir())
    names = ["loss-2-seed-0", "loss-2-seed-1", "loss-2.5-seed-0", "loss-2.5-seed-1"]
    assert [folder.name for folder in folders] == names
    comparison = compare(folders)
    assert [row.best for row in comparison.rows] == [2.0, 2.01, 2.5, 2.51]
    assert {arm.label: len(arm.runs) for arm in comparison.arms} == {"loss-2": 2, "loss-2.5": 2}
    outcome = Outcome.read(folders[0])
    assert (outcome.status, outcome.exit_code, outcome.attempts) == ("finished", 0, 1)
    assert outcome.parameters == {"loss": 2.0, "seed": 0}
    assert f"4 finished. Compare them: lightning-ledger compare {tmp_path / 'runs'}/*/" in capsys.readouterr().out


def test_a_failed_run_is_recorded_and_not_fatal_and_is_retried_when_asked(tmp_path, capsys):
    file = write(tmp_path, values(loss=[3.0, 2.0], fail="3.0"))
    command = ["sweep", str(file), f"--folder={tmp_path / 'runs'}"]
    assert cli.main(command) == 1
    failed, fine = (Outcome.read(tmp_path / "runs" / f"loss-{loss}") for loss in (3, 2))
    assert (failed.status, failed.exit_code, failed.last_lines) == ("failed", 1, ["out of luck"])
    assert fine.status == "finished"
    shown = capsys.readouterr().out
    assert "out of luck" in shown
    assert "1 failed, 1 finished" in shown
    assert cli.main(command) == 1  # nothing runs again, and it still says so
    assert Outcome.read(tmp_path / "runs" / "loss-3") == failed
    assert cli.main([*command, "--retry"]) == 1
    assert Outcome.read(tmp_path / "runs" / "loss-3").attempts == 2
    assert Outcome.read(tmp_path / "runs" / "loss-2") == fine


def test_a_killed_sweep_goes_on_and_loses_nothing(tmp_path):
    """SIGKILL while the second of three runs is under way: its process outlives the sweep, and is ended."""
    file = write(tmp_path, values(loss=[3.0, 2.0, 1.0], steps=4, seconds=0.25))
    runs, folder = Sweep.read(file).runs(), tmp_path / "runs"
    names = [run.name for run in runs]
    command = [sys.executable, "-m", "lightning_ledger.cli", "sweep", str(file), f"--folder={folder}"]
    sweep = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    second = folder / names[1]
    wait_for(lambda: (second / "ledger.jsonl").exists() and Outcome.read(second).process)
    sweep.send_signal(signal.SIGKILL)
    assert sweep.wait() == -signal.SIGKILL
    first, orphan = Outcome.read(folder / names[0]), Outcome.read(second)
    assert (first.status, orphan.status) == ("finished", "running")
    assert not (folder / names[2]).exists()
    os.kill(orphan.process, 0)  # it lives

    outcomes = run_all(runs, folder)
    assert [outcomes[name].status for name in names] == ["finished"] * 3
    assert [outcomes[name].attempts for name in names] == [1, 2, 1]
    assert outcomes[names[0]] == first
    for name in names:
        assert verify_ledger(folder / name).ok
        assert read_ledger(folder / name).steps == 4


def test_an_interrupted_sweep_takes_its_runs_along(tmp_path):
    file = write(tmp_path, values(loss=[3.0], seconds=60))
    folder = tmp_path / "runs"
    command = [sys.executable, "-m", "lightning_ledger.cli", "sweep", str(file), f"--folder={folder}"]
    sweep = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: (folder / "run" / STATE).exists() and Outcome.read(folder / "run").process)
    process = Outcome.read(folder / "run").process
    assert process is not None
    sweep.terminate()
    assert sweep.wait() == 143
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_one_sweep_at_a_time_in_a_folder(tmp_path):
    runs = Sweep.read(write(tmp_path, values(loss=[3.0], seconds=1))).runs()
    code = "import sys; from lightning_ledger.sweeps import Sweep, run_all; from pathlib import Path\n"
    code += "run_all(Sweep.read(sys.argv[1]).runs(), Path(sys.argv[2]))"
    arguments = [str(tmp_path / "sweep.yaml"), str(tmp_path / "runs")]
    other = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "runs" / "run" / STATE).exists)
    with pytest.raises(BlockingIOError, match="Another process runs the sweep"):
        run_all(runs, tmp_path / "runs")
    assert other.wait() == 0
    assert run_all(runs, tmp_path / "runs")["run"].attempts == 1


def test_a_folder_of_another_command_is_left_alone(tmp_path, capsys):
    folder = f"--folder={tmp_path / 'runs'}"
    assert cli.main(["sweep", str(write(tmp_path, values(loss=[3.0], steps=1))), folder]) == 0
    before = (tmp_path / "runs" / "run" / "ledger.jsonl").read_text()
    assert cli.main(["sweep", str(write(tmp_path, values(loss=[3.0], steps=2))), folder]) == 2
    assert "holds a run of another command" in capsys.readouterr().err
    assert (tmp_path / "runs" / "run" / "ledger.jsonl").read_text() == before


def test_a_folder_that_no_sweep_made_is_left_alone(tmp_path, capsys):
    (notes := tmp_path / "runs" / "run" / "notes.txt").parent.mkdir(parents=True)
    notes.write_text("mine")
    assert cli.main(["sweep", str(write(tmp_path, values(loss=[3.0]))), f"--folder={tmp_path / 'runs'}"]) == 2
    assert "holds files that no sweep put there" in capsys.readouterr().err
    assert notes.read_text() == "mine"


def test_sweeping_needs_no_torch():
    code = "import sys; from lightning_ledger import cli; code = cli.main(['sweep', 'configs/sweeps/demo.yaml', "
    code += "'--dry-run']); assert code == 0; assert not {'torch', 'lightning'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_a_dry_run_prints_the_commands_of_the_demos_sweep(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(["sweep", "configs/sweeps/demo.yaml", f"--folder={tmp_path / 'runs'}", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[0].startswith("/usr/bin/env ")
    assert " -m lightning_ledger.cli fit --config=configs/demo.yaml " in lines[0]
    assert " --config=configs/demo/exact-4.yaml --model.init_args.learning_rate=0.0005 " in lines[0]
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_told_on_one_line(tmp_path, capsys):
    file = str(write(tmp_path, {"loss": {"min": 1.0, "max": 2.0}}))
    for options, message in (
        ([file], "no end of values"),
        ([str(tmp_path / "none.yaml")], "No such file"),
        ([file, "--jobs=0"], "must be at least 1"),
        ([file, "--jops=1"], "jops"),
    ):
        assert cli.main(["sweep", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


@pytest.mark.slow
def test_a_sweep_over_the_tiny_demo_trains_and_compares(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    demo = yaml.safe_load((ROOT / "configs" / "sweeps" / "demo.yaml").read_text())
    demo["parameters"]["model.init_args.learning_rate"] = {"values": [0.001]}
    demo["parameters"] |= {name: {"value": value} for name, value in TINY.items()}
    (file := tmp_path / "demo.yaml").write_text(yaml.safe_dump(demo))
    assert cli.main(["sweep", str(file), f"--folder={tmp_path / 'runs'}", "--jobs=2"]) == 0
    rows = {row.label: row for row in compare(sorted((tmp_path / "runs").glob("*/"))).rows}
    assert {label: row.kind for label, row in rows.items()} == {
        "exact-4": "exact",
        "predicted-int4": "predictions only",
        "gpcv-int8": "corrected",
    }
    assert all(row.steps == 2 for row in rows.values())


@pytest.mark.slow
def test_a_run_that_was_killed_continues_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    demo = yaml.safe_load((ROOT / "configs" / "sweeps" / "demo.yaml").read_text())
    saving = ["--trainer.enable_checkpointing=true", "--trainer.callbacks+=ModelCheckpoint"]
    saving += ["--trainer.callbacks.save_last=true", "--trainer.callbacks.every_n_train_steps=1"]
    demo["command"] = [*demo["command"][:-1], *saving, "${args}"]
    given = {**TINY, "config": "configs/demo/exact-4.yaml", "trainer.max_steps": 400, "trainer.val_check_interval": 100}
    demo["parameters"] = {name: {"value": value} for name, value in given.items()}
    (file := tmp_path / "demo.yaml").write_text(yaml.safe_dump(demo))
    folder, runs = tmp_path / "runs", Sweep.read(file).runs()
    sweep = subprocess.Popen([sys.executable, "-m", "lightning_ledger.cli", "sweep", str(file), f"--folder={folder}"])
    wait_for((folder / "run" / "checkpoints" / "last.ckpt").exists)
    sweep.kill()
    sweep.wait()
    outcome = run_all(runs, folder)["run"]
    assert (outcome.status, outcome.attempts) == ("finished", 2)
    assert "Restored all states" in (folder / "run" / "log.txt").read_text()
    assert verify_ledger(folder / "run").ok
    history = read_ledger(folder / "run")
    assert history.steps == 400
    assert [mark.step for mark in history.marks if not mark.relogged][-1] == 400
    assert json.loads((folder / "run" / STATE).read_text())["exit_code"] == 0
