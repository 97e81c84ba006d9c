"""The study's numbers are what runs and dry runs measured, and its page shows them and no others."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from benchmarks.study import breakeven, fidelity, windows
from benchmarks.study.__main__ import main
from benchmarks.study.records import RESULTS, facts, read_csv, write_csv
from docs.update_results import PAGE, page
from lightning_ledger.control_variate import best_share, relative_cost
from lightning_ledger.estimation import PredictionSettings
from lightning_ledger.ledger import Ledger, Work
from lightning_ledger.planning import PlanSettings
from lightning_ledger.planning.measure import DryRun
from lightning_ledger.sweeps import Outcome, Sweep

ROOT = Path(__file__).resolve().parent.parent
ARMS = ROOT / "configs" / "study" / "arms"
FORWARD = 100


def test_the_page_shows_the_results_and_no_others():
    text = page(RESULTS)
    assert PAGE.exists() == bool(text)
    if text:
        assert PAGE.read_text(encoding="utf-8") == text


def test_without_results_there_is_no_page(tmp_path):
    assert page(tmp_path) == ""


def test_facts_name_command_commit_machine_and_date():
    told = facts("make study-windows")
    assert told["command"] == "make study-windows"
    assert {"cpu", "cores", "torch"} <= told["machine"].keys()
    assert told["date"][:2] == "20"


# The fidelity ladder.


@pytest.fixture(scope="module")
def plan() -> dict:
    """A real dry run's forecast of a tiny model."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 32, generator=generator) + 1, (0,)) for _ in range(3)]
    options = PlanSettings(formats="int8,int4", roundings="nearest", fleet_price=0.1)
    return DryRun(BoringModel(), PredictionSettings(microbatches=4), options).run(batches).to_dict()


def test_a_row_holds_what_the_plan_measured(plan):
    rows = list(fidelity.rows_of("11m", 20, plan))
    assert [(row["format"], row["rounding"]) for row in rows] == [("int8", "nearest"), ("int4", "nearest")]
    for row, kind in zip(rows, plan["formats"], strict=True):
        w = kind["prediction"]["w"]
        assert row["parameters"] == 32 * 2 + 2
        assert row["delta_low"] <= row["delta"] <= row["delta_high"]
        assert row["best_share"] == best_share(row["delta"], w)
        assert row["relative_cost"] == pytest.approx(relative_cost(row["delta"], w))
        assert row["noise_scale"] == plan["noise_scale"]
    assert rows[0]["delta"] < rows[1]["delta"]
    assert rows[0]["break_even"] > rows[1]["break_even"]


def test_a_point_that_was_measured_is_not_measured_again(plan, tmp_path):
    study = fidelity.FidelityStudy(["11m"], [0], "int8,int4", "nearest", 3, 5.0, ["--trainer.max_time=no"])
    kept = {
        "options": [
            "--config=configs/gpt2-124m.yaml",
            "--config=configs/ladder/11m.yaml",
            "--config=configs/study/short_window.yaml",
            "--trainer.max_time=no",
            "--plan.formats=int8,int4",
            "--plan.roundings=nearest",
            "--plan.batches=3",
            "--plan.minutes=5.0",
        ],
        "plan": plan,
    }
    (tmp_path / "11m-0.json").write_text(json.dumps(kept))
    fidelity.run(study, tmp_path, tmp_path / "results", "make study-fidelity")
    rows = read_csv(tmp_path / "results" / "fidelity.csv")
    assert [float(row["delta"]) for row in rows] == pytest.approx(
        [kind["delta"]["value"] for kind in plan["formats"]], rel=1e-5
    )


def test_the_map_and_the_page_show_the_ladders_numbers(plan, tmp_path):
    rows = [row for rung in ("11m", "30m") for steps in (0, 20) for row in fidelity.rows_of(rung, steps, plan)]
    for row in rows:
        row["parameters"] *= 3 if row["rung"] == "30m" else 1
    write_csv(tmp_path / "fidelity.csv", rows)
    points = [fidelity.summary("11m", 0, plan)]
    (tmp_path / "fidelity.json").write_text(json.dumps({**facts("make study-fidelity"), "points": points}))
    breakeven.run(tmp_path, "make study-map")
    prices = read_csv(tmp_path / "breakeven.csv")
    assert [float(row["break_even"]) for row in prices] == pytest.approx([row["break_even"] for row in rows], rel=1e-5)
    assert (tmp_path / "breakeven.png").read_bytes().startswith(b"\x89PNG")
    text = page(tmp_path)
    low, high = rows[0]["relative_cost_low"], rows[0]["relative_cost_high"]
    assert f"| {rows[0]['relative_cost']:.2f} [{low:.2f}, {high:.2f}] |" in text
    assert f"`int4`, to nearest, breaks even at fleet prices of {rows[1]['break_even']:.2f} over" in text
    assert f"rests on {plan['looked_at']} micro-batches" in text
    assert "Made by `make study-map` on 20" in text


# The training windows.


def run_folder(folder: Path, losses: list[float], predicted: int = 0) -> None:
    """A finished run: each step costs 3 forward-equivalents, and 3 for each prediction at the fleet's price."""
    ledger = Ledger()
    ledger.forward_flops = FORWARD
    ledger.attach(folder / "ledger.jsonl", {"settings": {"optimizers": []}})
    for loss in losses:
        ledger.charge("scarce/forward", Work(flops=FORWARD, samples=2, passes=1))
        ledger.charge("scarce/backward", Work(flops=2 * FORWARD))
        if predicted:
            work = Work(flops_by_format={"int8": 3 * FORWARD * predicted}, samples=2 * predicted, passes=predicted)
            ledger.charge("fleet/prediction", work)
            ledger.charge("fleet/control", Work(flops_by_format={"int8": 3 * FORWARD}, passes=1))
        ledger.end_step()
        ledger.mark({"val_loss": loss})
    ledger.close()
    with (folder / "metrics.csv").open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerows([["step", "gpcv/relative_cost"], *([i, 0.25 if predicted else ""] for i in range(3))])


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    file = tmp_path / "sweep.yaml"
    parameters = {
        windows.ARM: {"values": ["arms/exact-2.yaml", "arms/gpcv-int8.yaml", "arms/lost.yaml"]},
        windows.RATE: {"values": [0.1, 0.2, 0.4]},
        windows.SEED: {"values": [0, 1]},
    }
    file.write_text(yaml.safe_dump({"method": "grid", "program": "train.py", "parameters": parameters}))
    return Sweep.read(file)


def finish(sweep: Sweep, folder: Path) -> None:
    """Every run as if it had been trained: all but the lost ones get to 2.0, exact ones a step later at seed 1.

    A rate of 0.2 is the best; 0.4 ends in NaN after the lowest loss of all.
    """
    for run in sweep.runs():
        arm, rate, seed = (run.parameters[name] for name in (windows.ARM, windows.RATE, windows.SEED))
        losses = [3.0, 2.6, 2.4, 2.0 if rate == 0.2 else 2.2, 2.0 if rate == 0.2 else 2.1]
        if "lost" in arm:
            losses = [3.0, 2.9, 2.8, 2.8, 2.8 + rate]
        if rate == 0.4:
            losses = [3.0, 1.0, math.nan, math.nan, math.nan]
        if seed == 1 and arm == "arms/exact-2.yaml":
            losses = [*losses[:3], 2.3, *losses[3:]]  # a step later
        run_folder(folder / run.name, losses, predicted=7 if "gpcv" in arm else 0)
        Outcome("finished", run.parameters, run.words, 0, attempts=1).write(folder / run.name)


def test_the_study_tunes_on_the_first_seed_and_compares_all(sweep, tmp_path):
    folder, results = tmp_path / "runs", tmp_path / "results"
    finish(sweep, folder)
    assert windows.run(tmp_path / "sweep.yaml", folder, results, "make study-windows", jobs=1) == 0
    rows = {row["arm"]: row for row in read_csv(results / "windows.csv")}
    assert {arm: row["learning_rate"] for arm, row in rows.items()} == {
        "exact-2": "0.2",
        "gpcv-int8": "0.2",
        "lost": "0.1",
    }
    assert [row["at_edge"] for row in rows.values()] == ["False", "False", "True"]
    # The target is what every exact run reached, and `lost` is one: its best. All reach it sooner or later.
    told = json.loads((results / "windows.json").read_text())
    assert told["target"] == pytest.approx(2.8)
    assert (told["runs"], told["tuned"]) == (6, 9)
    assert rows["gpcv-int8"]["relative_cost"] == "0.25"
    assert rows["exact-2"]["relative_cost"] == ""
    # Two steps of 3 for exact-2; for gpcv two steps of 3 + 8 predictions of 3 at 0.05.
    assert float(rows["exact-2"]["cost_to_target"]) == pytest.approx(6.0)
    assert float(rows["gpcv-int8"]["cost_to_target"]) == pytest.approx(2 * (3 + 8 * 3 * 0.05))
    assert float(rows["gpcv-int8"]["saving"]) == pytest.approx(1 - 8.4 / 6.0)
    prices = {row["arm"]: row for row in read_csv(results / "windows_prices.csv")}
    assert float(prices["gpcv-int8"]["cost at 0.3"]) == pytest.approx(2 * (3 + 8 * 3 * 0.3), rel=1e-5)
    text = page(results)
    assert "| gpcv-int8 | 16 | 0.2 | 2 | 2.000 | 8 ± 0 | -40% | 0.25 | 75% |" in text
    assert "at 0.01 exact-2 (0%); at 0.03 exact-2 (0%)" in text
    assert (results / "windows.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_that_misses_the_target_heads_the_page(sweep, tmp_path):
    folder, results = tmp_path / "runs", tmp_path / "results"
    finish(sweep, folder)
    for run in sweep.runs():
        if "lost" in run.parameters[windows.ARM]:  # a biased arm that stalls, not an exact one
            (folder / run.name / "ledger.jsonl").unlink()
            run_folder(folder / run.name, [3.0, 2.9, 2.9 + run.parameters[windows.RATE]], predicted=7)
    crashed = next(
        run for run in sweep.runs() if run.parameters[windows.SEED] == 1 and "lost-learning_rate-0.1" in run.name
    )
    Outcome("failed", crashed.parameters, crashed.words, 1, attempts=1).write(folder / crashed.name)
    assert windows.run(tmp_path / "sweep.yaml", folder, results, "make study-windows", jobs=1) == 1
    text = page(results)
    assert text.splitlines()[3] == f"- Ended with an error: {crashed.name}."
    assert text.splitlines()[2] == "- Failed to reach the target in at least one seed: lost."
    assert "never (0 seeds)" in text
    # 4 steps and 5 for the two exact seeds, of 3 each: their mean is 13.5, and half the 95% interval 12.706 * 1.5.
    exact = next(row for row in read_csv(results / "windows.csv") if row["arm"] == "exact-2")
    assert float(exact["cost_to_target"]) == pytest.approx(13.5)
    assert float(exact["half_width"]) == pytest.approx(12.706 * 1.5, rel=1e-3)


# Its configuration.


def test_the_sweep_runs_every_arm_and_each_arm_is_what_its_name_says():
    runs = Sweep.read(ROOT / "configs" / "sweeps" / "windows.yaml").runs()
    arms = {Path(run.parameters[windows.ARM]).stem for run in runs}
    assert arms == {file.stem for file in ARMS.glob("*.yaml")}
    assert len(runs) == 28 * 4 * 3
    base = yaml.safe_load((ROOT / "configs" / "study" / "windows.yaml").read_text())
    for arm in arms:
        own = yaml.safe_load((ARMS / f"{arm}.yaml").read_text())
        kind, *words = arm.split("-")
        callbacks = {
            c["class_path"].rpartition(".")[2]: c.get("init_args") for c in own["trainer"].get("callbacks+", [])
        }
        batch = own.get("data", base["data"])["init_args"]["batch_size"]
        if kind == "exact":
            assert (batch, callbacks) == (2 * int(words[0]), {})
            continue
        given = callbacks["GradientPrediction"]
        assert batch == 2 * given["microbatches"]
        assert given["format"] == words[0]
        assert given["exact"] == (0 if kind == "predicted" else 1)
        assert given["rounding"] == ("stochastic" if "stochastic" in words else "nearest")
        assert given.get("refresh_every", 1) == (int(words[2]) + 1 if "stale" in words else 1)
        assert ("ControlVariate" in callbacks) == (kind in ("gpcv", "adaptive"))
        assert ("AdaptiveAllocation" in callbacks) == (kind == "adaptive")


@pytest.mark.slow
def test_the_quick_windows_train_tune_and_compare(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["windows", "--quick", f"--folder={tmp_path}", "--jobs=2"]) == 0
    rows = {row["arm"]: row for row in read_csv(tmp_path / "results" / "windows.csv")}
    assert rows.keys() == {"exact-8", "gpcv-int8-nearest"}
    assert all(row["seeds"] == "2" for row in rows.values())
    assert 0 < float(rows["gpcv-int8-nearest"]["relative_cost"]) < 2
    assert page(tmp_path / "results").startswith("# Does it pay")


@pytest.mark.slow
def test_the_quick_ladder_measures_before_and_after_training_and_only_once(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    quick = yaml.safe_load((ROOT / "configs" / "study" / "fidelity-quick.yaml").read_text())
    config = tmp_path / "one.yaml"
    arguments = ["fidelity", f"--config={config}", f"--folder={tmp_path}", f"--results={tmp_path}"]

    def measure(**changed: object) -> list[dict[str, str]]:
        config.write_text(yaml.safe_dump({**quick, "rungs": ["11m"], "formats": "int8", **changed}))
        assert main(arguments) == 0
        return read_csv(tmp_path / "fidelity.csv")

    first, second = measure()
    assert (first["steps"], second["steps"]) == ("0", "2")
    assert all(0 < float(row["delta"]) < 0.05 for row in (first, second))
    assert first["delta"] != second["delta"]
    files = tmp_path / "11m-0.json", tmp_path / "11m-2" / "trained.ckpt"
    before = [file.stat().st_mtime_ns for file in files]
    assert measure() == [first, second]
    assert [file.stat().st_mtime_ns for file in files] == before
    (other,) = measure(steps=[0], formats="mxfp4")
    assert float(other["delta"]) > 2 * float(first["delta"])
