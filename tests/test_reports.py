"""Reports: hand-worked costs, targets, savings, censoring, and their rendering."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lightning_ledger.ledger import Ledger, Work
from lightning_ledger.prices import PriceBook
from lightning_ledger.reports import Comparison, Row, compare, plot, render

FORWARD = 100


def write_run(
    path: Path,
    losses: Sequence[float],
    *,
    exact: int = 0,
    predicted: int = 0,
    forward: int = FORWARD,
    metric: str = "val_loss",
    label: str | None = None,
) -> Path:
    """A run with one validation before training and one after each step."""
    ledger = Ledger()
    ledger.forward_flops = forward
    ledger.attach(path, {"label": label} if label else {})
    for step, loss in enumerate(losses):
        if step:
            ledger.charge("scarce/forward", Work(flops=FORWARD * exact, samples=2 * exact))
            ledger.charge("scarce/backward", Work(flops=2 * FORWARD * exact, samples=2 * exact))
            flops = {"int8": 3 * FORWARD * predicted}
            ledger.charge("fleet/prediction", Work(flops_by_format=flops, samples=2 * predicted, passes=predicted))
            ledger.charge("transfer/gradients", Work(bytes=10**9 * predicted))
            ledger.end_step()
        ledger.charge("scarce/validation", Work(flops=FORWARD * 7))
        ledger.mark({metric: loss})
    ledger.close()
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "exact-16", [6.0, 4.0, 3.0, 2.0], exact=16),
        write_run(tmp_path / "exact-4", [6.0, 5.0, 4.0, 3.5, 2.04, 2.5], exact=4),
        write_run(tmp_path / "gpcv", [6.0, 4.0, 3.0, 2.0], exact=1, predicted=20),
        write_run(tmp_path / "mixed", [6.0, 4.0, math.nan, math.inf], exact=1, predicted=10),
    ]


def rows(comparison: Comparison) -> dict[str, Row]:
    return {row.label: row for row in comparison.rows}


def shown(comparison: Comparison, width: int = 100) -> str:
    out = StringIO()
    render(comparison, Console(file=out, width=width))
    return out.getvalue()


def test_costs_by_hand(runs: list[Path]) -> None:
    row = rows(compare(runs, prices=PriceBook(fleet_forward=0.05, gigabyte=0.1)))["gpcv"]
    # Three steps, each one exact micro-batch, 1 + 2; twenty predictions, 20 x 3 x .05 = 3; 20 GB at .1 = 2.
    assert row.tiers == pytest.approx({"scarce": 9, "fleet": 9, "setup": 0, "transfer": 6, "waste": 0})
    assert row.total == pytest.approx(24)
    assert row.validation == pytest.approx(4 * 7)  # four validations of seven forwards, apart from the total
    assert (row.steps, row.samples) == (3, 3 * 2 * 21)
    assert [point.cost for point in row.curve] == pytest.approx([0, 8, 16, 24])
    assert [point.step for point in row.curve] == [0, 1, 2, 3]


def test_savings_are_against_the_cheapest_exact_run(runs: list[Path]) -> None:
    comparison = compare(runs)
    found = rows(comparison)
    # The exact runs' best values are 2.0 and 2.04: both reached the latter.
    assert comparison.target == 2.04
    assert "every exact run reached: the best of 'exact-4'" in comparison.target_rule
    # exact-16: 3 steps x 48. exact-4: 4 steps x 12, before it got worse. gpcv: 3 x (3 + 3).
    costs = {label: row.cost_to_target for label, row in found.items()}
    assert costs == {"exact-16": 144, "exact-4": 48, "gpcv": pytest.approx(18), "mixed": None}
    assert comparison.cheapest_exact is found["exact-4"]
    savings = {label: row.saving for label, row in found.items()}
    assert savings["mixed"] is None
    assert [savings[run] for run in ("exact-16", "exact-4", "gpcv")] == pytest.approx([-2, 0, 1 - 18 / 48])
    assert [row.exact for row in comparison.rows] == [True, True, False, False]
    assert (found["exact-4"].first, found["exact-4"].best, found["exact-4"].final) == (6.0, 2.04, 2.5)


def test_diverged_runs_are_shown_as_such(runs: list[Path]) -> None:
    comparison = compare(runs)
    row = rows(comparison)["mixed"]
    assert (row.best, row.final, row.cost_to_target, row.saving) == (4.0, math.inf, None, None)
    assert "never (best 4)" in shown(comparison)
    data = comparison.to_dict()
    assert data["rows"][3]["final"] == "inf"
    assert [point["value"] for point in data["rows"][3]["curve"]] == [6.0, 4.0, "nan", "inf"]
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["cheapest_exact"] == "exact-4"
    assert data["prices"]["fleet_forward"] == 0.05


def test_no_exact_run_reached_the_target(runs: list[Path]) -> None:
    comparison = compare(runs[1:], target=2.02)
    assert rows(comparison)["gpcv"].cost_to_target == pytest.approx(18)
    assert [row.saving for row in comparison.rows] == [None, None, None]
    assert "no exact run reached the target" in shown(comparison)


def test_without_exact_runs_all_runs_set_the_target(runs: list[Path]) -> None:
    comparison = compare(runs[2:])
    assert comparison.target == 4.0  # gpcv reached 2.0, mixed 4.0
    assert "none is exact" in comparison.target_rule


def test_higher_is_better(tmp_path: Path) -> None:
    exact = write_run(tmp_path / "exact", [0.1, 0.5, 0.9], exact=1, metric="val_acc")
    other = write_run(tmp_path / "other", [0.1, 0.91, 0.7], predicted=1, metric="val_acc")
    comparison = compare([exact, other], metric="val_acc", mode="max")
    # The exact run's best: it needs both its steps, 2 x 3; the other one step, 3 x .05.
    assert comparison.target == 0.9
    assert [row.cost_to_target for row in comparison.rows] == pytest.approx([6, 0.15])
    assert [row.best for row in comparison.rows] == [0.9, 0.91]
    assert "val_acc >= 0.9" in shown(comparison)


@pytest.mark.parametrize("billing", ["per_forward_equivalent", "per_gradient"])
def test_one_unit_for_all_runs(tmp_path: Path, billing: str) -> None:
    small = write_run(tmp_path / "small", [3.0, 2.0], exact=1, predicted=2, forward=FORWARD)
    large = write_run(tmp_path / "large", [3.0, 2.0], exact=1, predicted=2, forward=2 * FORWARD)
    prices = PriceBook(fleet_forward=0.05, gigabyte=1.0, fleet_billing=billing)
    comparison = compare([large, small], prices=prices)
    assert comparison.unit_flops == FORWARD
    assert "1 forward-equivalent = 100 FLOPs" in shown(comparison)
    row = rows(comparison)["large"]
    # The same FLOPs cost the same in the common unit, and a byte is a byte. A prediction billed as a whole
    # costs .05 of a forward of its own run, which is two of the common ones.
    assert row.tiers["scarce"] == pytest.approx(3)
    assert row.tiers["transfer"] == pytest.approx(2)
    assert row.tiers["fleet"] == pytest.approx(6 * 0.05 if billing == "per_forward_equivalent" else 2 * 0.05 * 2)


def test_lost_work_is_in_the_total_and_lost_predictions_make_no_exact_run(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.forward_flops = FORWARD
    ledger.attach(tmp_path)
    ledger.charge("waste/lost_prediction", Work(flops_by_format={"int8": 3 * FORWARD}, passes=1))
    ledger.charge("waste/lost_steps", Work(flops=2 * FORWARD))
    ledger.mark({"val_loss": 1.0})
    (row,) = compare([tmp_path]).rows
    assert row.tiers["waste"] == row.total == pytest.approx(2.15)
    assert not row.exact


def test_labels_are_told_apart(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1.0], exact=1, label="gpcv")
    b = write_run(tmp_path / "b", [1.0], exact=1, label="gpcv")
    assert [row.label for row in compare([a, b]).rows] == [f"gpcv ({a})", f"gpcv ({b})"]


def test_errors_teach(tmp_path: Path, runs: list[Path]) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        compare([])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        compare([*runs, tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"metric='val_acc'.*hold: val_loss"):
        compare(runs, metric="val_acc")
    with pytest.raises(ValueError, match="mode='lower'"):
        compare(runs, mode="lower")
    Ledger().attach(tmp_path / "empty")
    with pytest.raises(ValueError, match="No run knows forward_flops"):
        compare([tmp_path / "empty"])
    with pytest.raises(ValueError, match=r"empty has no mark.*no marks"):
        compare([tmp_path / "empty", *runs])
    with pytest.raises(ValueError, match="no target"):
        compare([write_run(tmp_path / "nan", [math.nan, math.nan], exact=1)])
    stale = PriceBook(currency="USD", date="2001-01-01", source="memory")
    with pytest.warns(UserWarning, match="2001-01-01"):
        compare(runs, prices=stale)


def test_table_fits_a_hundred_columns(runs: list[Path]) -> None:
    text = shown(compare(runs, prices=PriceBook(fleet_formats={"int8": 0.02}, gigabyte=0.1)))
    assert max(map(len, text.splitlines())) <= 100
    for word in ("scarce", "fleet", "transfer", "to target", "saving", "simulated", "int8 0.02", "every exact"):
        assert word in text
    assert re.search(r"exact-4 .* 48 .* 0\.0%", text)
    assert re.search(r"exact-16 .* 144 .* -200\.0%", text)
    assert "waste" not in text.split("Target")[0]  # nobody wasted anything: no column


def test_plot_is_readable(runs: list[Path], tmp_path: Path) -> None:
    path = plot(compare(runs), tmp_path / "new" / "compare.png")
    from matplotlib.image import imread

    height, width, _ = imread(path).shape
    assert (width, height) == (1350, 780)
    # The same runs at another price move: the picture is of these numbers.
    other = plot(compare(runs, prices=PriceBook(fleet_forward=1.0)), tmp_path / "other.png")
    assert path.read_bytes() != other.read_bytes()
    assert path.read_bytes() == plot(compare(runs), tmp_path / "again.png").read_bytes()


def test_plot_without_points_teaches(tmp_path: Path) -> None:
    run = write_run(tmp_path / "untrained", [3.0], exact=1)  # validated before training: nothing was spent
    with pytest.raises(ValueError, match="no run has a finite val_loss at a positive cost"):
        plot(compare([run]), tmp_path / "compare.png")
