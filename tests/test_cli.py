"""The command line: what it prints, what it returns, and what it must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_ledger import cli
from lightning_ledger.ledger import Ledger, Work

ROOT = Path(__file__).resolve().parent.parent
FORWARD = 1000  # FLOPs of the forward-equivalent of the ledgers here


def write_run(folder: Path, losses: list[float], *, predicted: bool = False) -> Path:
    """Write the ledger of a run that marks a validation loss after each step.

    A step costs 1 + 2 forward-equivalents on the scarce GPU and, with predictions, 12 on the fleet.
    """
    ledger = Ledger()
    ledger.forward_flops = FORWARD
    ledger.attach(folder / "ledger.jsonl", {"label": folder.name})
    for loss in losses:
        ledger.charge("scarce/forward", Work(flops=FORWARD, samples=2, passes=1))
        ledger.charge("scarce/backward", Work(flops=2 * FORWARD))
        if predicted:
            ledger.charge("fleet/prediction", Work(flops_by_format={"int8": 12 * FORWARD}, passes=4))
        ledger.end_step()
        ledger.mark({"val_loss": loss})
    ledger.close()
    return folder


@pytest.fixture
def runs(tmp_path) -> list[str]:
    exact = write_run(tmp_path / "exact", [3.0, 2.5, 2.0])
    predicted = write_run(tmp_path / "predicted", [2.5, 1.9], predicted=True)
    return [str(exact), str(predicted)]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


# Help and mistakes.


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_teaches_every_command_with_examples(capsys, arguments):
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for command in (*cli.TRAINING, cli.PLANNING, cli.SWEEPING, *cli.READING):
        assert f"\n  {command} " in shown
    assert "lightning-ledger compare runs/" in shown


def test_help_fits_100_columns():
    assert max(map(len, cli.HELP.splitlines())) <= 100


@pytest.mark.parametrize("command", cli.READING)
def test_each_reading_command_has_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"example: lightning-ledger {command} runs/" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lightning-ledger ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compar"], "Did you mean 'compare'?"),
        (["vrify"], "Did you mean 'verify'?"),
        (["zzz"], "Known are fit, validate, test, predict, plan, export, sweep, compare, reprice, verify."),
        (["compare"], "runs"),
        (["compare", "no/such/run"], "no/such/run"),
        (["compare", "x", "--mode", "middle"], "middle"),
        (["compare", "x", "--target", "low"], "target"),
        (["compare", "x", "--traget", "1"], "--traget"),
        (["compare", "x", "--prices", "none.yaml"], "none.yaml"),
        (["compare", "x", "--fleet-price", "-1"], "fleet_forward"),
        (["compare", "x", "--fleet-price", "0.1,0.2"], "fleet_price"),
        (["reprice"], "runs"),
        (["reprice", "no/such/run"], "no/such/run"),
        (["reprice", "x", "--fleet-price", "0.1;0.2"], "0.01,0.05,0.2"),
        (["reprice", "x", "--fleet-price", "0.1,-1"], "fleet_forward"),
        (["reprice", "x", "--fleet-price", ","], "at least one"),
        (["verify"], "runs"),
    ],
)
def test_mistakes_are_told_on_one_line(capsys, arguments, said):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lightning-ledger: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_reading_commands_import_neither_torch_nor_lightning(runs):
    code = f"""
import contextlib, io, sys
from lightning_ledger.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    codes = [main(["--help"]), main(["compare", *{runs!r}]), main(["reprice", *{runs!r}]), main(["verify", *{runs!r}]),
        main(["compar"])]
print(codes, sorted(sys.modules.keys() & {{"torch", "lightning", "pytorch_lightning"}}))
"""
    assert python(code) == "[0, 0, 0, 0, 2] []\n"


# compare


def test_compare_prints_every_run(capsys, runs):
    assert cli.main(["compare", *runs, "--fleet-price", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert "exact" in shown
    assert "predicted" in shown


def test_compare_json_holds_hand_worked_costs(capsys, runs):
    assert cli.main(["compare", *runs, "--fleet-price", "0.05", "--json", "-"]) == 0
    rows = {row["label"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["exact"]["total"] == pytest.approx(9.0)  # 3 steps of 1 + 2
    assert rows["predicted"]["total"] == pytest.approx(7.2)  # 2 steps of 3 + 12 x 0.05


def test_compare_prices_again_without_a_new_run(capsys, runs, tmp_path):
    def predicted_total(*options: str) -> float:
        assert cli.main(["compare", *runs, "--json", "-", *options]) == 0
        rows = {row["label"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        return rows["predicted"]["total"]

    book = tmp_path / "prices.yaml"
    book.write_text(yaml.safe_dump({"fleet_forward": 0.5}))
    assert predicted_total("--prices", str(book)) == pytest.approx(18.0)  # 2 steps of 3 + 12 x 0.5
    assert predicted_total("--prices", str(book), "--fleet-price", "0.25") == pytest.approx(12.0)
    # 4 predictions a step, each at one price, whatever their FLOPs: 2 steps of 3 + 4 x 0.25.
    by_gradient = ("--fleet-price", "0.25", "--fleet-billing", "per_gradient")
    assert predicted_total(*by_gradient) == pytest.approx(8.0)


def test_compare_writes_json_and_png(capsys, runs, tmp_path):
    data, picture = tmp_path / "c.json", tmp_path / "c.png"
    assert cli.main(["compare", *runs, "--json", str(data), "--png", str(picture)]) == 0
    assert len(json.loads(data.read_text())["rows"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "exact" in capsys.readouterr().out


def test_compare_names_the_metrics_there_are(capsys, runs):
    assert cli.main(["compare", *runs, "--metric", "accuracy"]) == 2
    assert "val_loss" in capsys.readouterr().err


def test_compare_groups_runs(capsys, runs, tmp_path):
    other = write_run(tmp_path / "exact again", [3.0, 2.0])
    assert cli.main(["compare", *runs, str(other), "--group", "stock=*/exact*", "--json", "-"]) == 0
    arms = {arm["label"]: arm for arm in json.loads(capsys.readouterr().out)["arms"]}
    # Labels differ, so only the group makes them one arm: 3 and 2 steps of 3 to reach 2.0.
    assert arms["stock"]["runs"] == ["exact", "exact again"]
    assert arms["stock"]["cost_to_target"]["mean"] == pytest.approx(7.5)


# reprice


def test_reprice_prints_hand_worked_costs_and_break_even(capsys, runs):
    options = ["--target", "2.0", "--fleet-price", "0.05, 0.25,1", "--json", "-"]
    assert cli.main(["reprice", *runs, *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fleet_prices"] == [0.05, 0.25, 1.0]
    arms = {arm["label"]: arm for arm in data["arms"]}
    # exact: 3 steps of 3. predicted: 2 steps of 3 + 12 p, so 6 + 24 p = 9 at p = 1/8.
    assert [cost["mean"] for cost in arms["exact"]["costs"]] == pytest.approx([9, 9, 9])
    assert [cost["mean"] for cost in arms["predicted"]["costs"]] == pytest.approx([7.2, 12, 30])
    assert arms["predicted"]["break_even"] == pytest.approx(0.125)
    # A prediction billed as a whole: 2 steps of 3 + 4 p.
    assert cli.main(["reprice", *runs, *options, "--fleet-billing", "per_gradient"]) == 0
    arms = {arm["label"]: arm for arm in json.loads(capsys.readouterr().out)["arms"]}
    assert arms["predicted"]["break_even"] == pytest.approx(3 / 8)


def test_reprice_writes_json_and_png_and_prints_a_table(capsys, runs, tmp_path):
    data, picture = tmp_path / "new" / "r.json", tmp_path / "r.png"
    assert cli.main(["reprice", *runs, "--json", str(data), "--png", str(picture)]) == 0
    assert len(json.loads(data.read_text())["arms"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "pays below 0.125" in capsys.readouterr().out


# verify


def test_verify_accepts_whole_ledgers(capsys, runs):
    assert cli.main(["verify", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok"]


def test_verify_finds_a_changed_number(capsys, runs):
    ledger = Path(runs[1]) / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("12000", "11000", 1))
    assert cli.main(["verify", *runs]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ok ")
    assert second.startswith("broken ")
    assert "line" in second


# Training. The configuration is of classes by path, from modules in the current folder.


@pytest.fixture
def config(tmp_path) -> Path:
    run = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "limit_train_batches": 3,
            "limit_val_batches": 1,
            "log_every_n_steps": 1,
            "logger": False,
            "enable_progress_bar": False,
            "default_root_dir": str(tmp_path / "run"),
        },
        "model": {"class_path": "examples.digits.DigitsClassifier", "init_args": {"channels": 4}},
        "data": {"class_path": "examples.digits.DigitsDataModule"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def test_fit_trains_classes_named_by_path_and_leaves_a_valid_ledger(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(["fit", "--config", str(config), "--config", "callbacks/gpcv.yaml"]) == 0
    assert cli.main(["verify", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path / "run"), "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["kind"], row["settings"]["format"], row["settings"]["rounding"]) == ("corrected", "int8", "nearest")
    assert row["settings"]["exact_share"] == pytest.approx(1 / 8)


def test_fit_stops_at_the_budget_of_the_fragment(config, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    budget = yaml.safe_load((ROOT / "callbacks" / "budget.yaml").read_text())
    budget["trainer"]["callbacks+"][0]["init_args"]["max_cost"] = 0.5
    (tmp_path / "budget.yaml").write_text(yaml.safe_dump(budget))
    fragments = ["callbacks/ledger.yaml", str(tmp_path / "budget.yaml")]
    arguments = ["fit", "--config", str(config), *(part for file in fragments for part in ("--config", file))]
    assert cli.train(arguments).trainer.global_step == 1
    assert [path.name for path in tmp_path.glob("run/**/budget-*")] == ["budget-step=1.ckpt"]


def test_fit_knows_strategy_and_callbacks_by_name(config, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = cli.train(
        [
            "fit",
            "--config",
            str(config),
            "--trainer.strategy=predicted_gradients",
            "--trainer.callbacks+=GradientPrediction",
            "--trainer.callbacks.microbatches=4",
        ]
    )
    assert type(done.trainer.strategy).__name__ == "PredictedGradientStrategy"
    assert done.trainer.global_step == 3


def test_train_restores_the_process_arguments(config, monkeypatch):
    monkeypatch.chdir(ROOT)
    before = list(sys.argv)
    assert cli.train(["fit", "--config", str(config)]).trainer.global_step == 3
    assert sys.argv == before


def test_validate_runs_too(config, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["validate", "--config", str(config)]) == 0


def test_console_script_prints_help():
    script = Path(sys.executable).with_name("lightning-ledger")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == cli.HELP
