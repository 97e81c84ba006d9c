"""Re-pricing: break-even prices worked out by hand, censored runs, seeds of one arm, table and picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lightning_ledger.ledger import Ledger, Work
from lightning_ledger.prices import PriceBook
from lightning_ledger.reports import RepricedArm, Repricing, compare, plot_repricing, render_repricing, reprice

FORWARD = 100


def write_run(
    path: Path, losses: Sequence[float], *, exact: int = 0, predicted: int = 0, forward: int = FORWARD
) -> Path:
    """A run with a validation after each step. A step costs 3 scarce and 3 fleet forwards a micro-batch, and a
    gigabyte for each predicted one."""
    ledger = Ledger()
    ledger.forward_flops = forward
    ledger.attach(path)
    for loss in losses:
        ledger.charge("scarce/forward", Work(flops=FORWARD * exact, samples=exact))
        ledger.charge("scarce/backward", Work(flops=2 * FORWARD * exact))
        flops = {"int8": 3 * FORWARD * predicted}
        ledger.charge("fleet/prediction", Work(flops_by_format=flops, samples=predicted, passes=predicted))
        ledger.charge("transfer/gradients", Work(bytes=10**9 * predicted))
        ledger.end_step()
        ledger.charge("scarce/validation", Work(flops=FORWARD * 7))
        ledger.mark({"val_loss": loss})
    ledger.close()
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "exact", [4.0, 3.0, 2.0], exact=4),
        write_run(tmp_path / "gpcv", [4.0, 2.0, 1.9], exact=1, predicted=4),
    ]


def arms(repricing: Repricing) -> dict[str, RepricedArm]:
    return {arm.label: arm for arm in repricing.arms}


def shown(repricing: Repricing) -> str:
    out = StringIO()
    render_repricing(repricing, Console(file=out, width=100))
    return out.getvalue()


def test_two_ledgers_by_hand(runs: list[Path]) -> None:
    repricing = reprice(runs, [0.05, 0.0, 1.0, 2.0], target=2.0)
    exact, gpcv = arms(repricing)["exact"], arms(repricing)["gpcv"]
    assert repricing.fleet_prices == [0.0, 0.05, 1.0, 2.0]
    # exact: 3 steps x 4 x 3 = 36 at any price. gpcv: 2 steps x (3 + 4 x 3 p) = 6 + 24 p, the third step is beyond.
    assert [exact.cost(p).mean for p in repricing.fleet_prices] == pytest.approx([36] * 4)
    assert [gpcv.cost(p).mean for p in repricing.fleet_prices] == pytest.approx([6, 7.2, 30, 54])
    assert (exact.verdict, exact.break_even) == ("yardstick", None)
    assert (gpcv.verdict, gpcv.break_even) == ("below", pytest.approx(30 / 24))
    assert gpcv.cost(gpcv.break_even).mean == pytest.approx(36)
    assert repricing.cheapest_exact is exact


@pytest.mark.parametrize("billing", ["per_forward_equivalent", "per_gradient"])
@pytest.mark.parametrize("forward", [FORWARD, 2 * FORWARD])
def test_agrees_with_a_comparison_at_every_price(runs: list[Path], tmp_path: Path, billing: str, forward: int) -> None:
    runs.append(write_run(tmp_path / "other unit", [3.0, 2.0], exact=2, predicted=3, forward=forward))
    book = PriceBook(fleet_billing=billing, gigabyte=0.3, scarce_forward=1.5, fleet_formats={"int8": 9.0})
    repricing = reprice(runs, [0.0, 0.01, 0.7], prices=book)
    for price in repricing.fleet_prices:
        rows = compare(runs, prices=book.with_fleet_price(price)).rows
        costs = [arm.cost(price).mean for arm in repricing.arms]
        assert costs == pytest.approx([row.cost_to_target for row in rows], rel=1e-12)


def test_never_and_always(runs: list[Path], tmp_path: Path) -> None:
    dear = write_run(tmp_path / "dear", [3.0, 3.0, 3.0, 2.0], exact=3, predicted=1)  # its scarce part alone is 36
    small = write_run(tmp_path / "small", [2.0], exact=1)
    found = arms(reprice([*runs, dear], target=2.0))
    assert (found["dear"].verdict, found["dear"].break_even) == ("never", None)
    assert arms(reprice([runs[0], small], target=2.0))["exact"].verdict == "never"  # dearer than the cheapest exact run
    # Predictions that arrived too late are fleet work, and here there is no other: free of FLOPs, any price pays.
    ledger = Ledger()
    ledger.forward_flops = FORWARD
    ledger.attach(tmp_path / "late")
    ledger.charge("scarce/forward", Work(flops=FORWARD))
    ledger.charge("waste/lost_prediction", Work(passes=1))
    ledger.end_step()
    ledger.mark({"val_loss": 2.0})
    late = arms(reprice([*runs, tmp_path / "late"], target=2.0))["late"]
    assert (late.kind, late.verdict, late.break_even) == ("mixed", "always", None)


def test_a_run_that_never_reached_the_target_is_censored(runs: list[Path], tmp_path: Path) -> None:
    short = write_run(tmp_path / "short", [4.0, math.nan, 2.5], predicted=2)
    repricing = reprice([*runs, short], [0.5])
    arm = arms(repricing)["short"]
    assert (arm.censored, arm.verdict, arm.break_even) == (True, "censored", None)
    assert arm.cost(0.5).mean == pytest.approx(3 * 2 * 3 * 0.5)  # all it spent: a lower bound
    text = shown(repricing)
    assert "> 9" in text
    assert "never reached" in text
    assert "short 2.5" in text
    data = json.loads(json.dumps(repricing.to_dict(), allow_nan=False))
    assert [entry["censored"] for entry in data["arms"]] == [False, False, True]
    assert data["cheapest_exact"] == "exact"
    assert data["arms"][1]["costs"] == [{"fleet_price": 0.5, "mean": pytest.approx(18), "half_width": None, "count": 1}]


def test_without_an_exact_run_nothing_breaks_even(runs: list[Path]) -> None:
    repricing = reprice(runs[1:])
    assert (repricing.arms[0].verdict, repricing.cheapest_exact) == ("no exact run", None)
    assert "nothing to break even with" in shown(repricing)


def test_seeds_are_one_arm_with_an_interval(tmp_path: Path) -> None:
    exact = [write_run(tmp_path / "exact" / f"seed-{s}", [3.0] * (2 + s) + [2.0], exact=4) for s in range(3)]
    gpcv = [write_run(tmp_path / f"gpcv-seed{s}", [3.0] * (1 + s) + [2.0], exact=1, predicted=4) for s in range(3)]
    found = arms(reprice([*exact, *gpcv], [0.0, 1.0]))
    assert list(found) == ["exact", "gpcv"]
    # exact: 36, 48, 60, s = 12. gpcv: 2, 3, 4 steps of 3 + 12 p. t for two degrees of freedom is 4.3027.
    cost = found["exact"].cost(0.0)
    assert (cost.mean, cost.half_width, cost.count) == (
        pytest.approx(48),
        pytest.approx(4.3027 * 12 / 3**0.5, rel=1e-4),
        3,
    )
    cost = found["gpcv"].cost(1.0)
    assert (cost.mean, cost.half_width) == (pytest.approx(45), pytest.approx(4.3027 * 15 / 3**0.5, rel=1e-4))
    assert found["gpcv"].break_even == pytest.approx((48 - 9) / 36)
    # One seed that never arrives makes the arm's mean a lower bound.
    gpcv.append(write_run(tmp_path / "gpcv-seed9", [3.0, 3.0], exact=1, predicted=4))
    arm = arms(reprice([*exact, *gpcv], [0.0]))["gpcv"]
    assert (arm.censored, arm.verdict, arm.cost(0.0).half_width) == (True, "censored", None)


def test_errors_teach(runs: list[Path]) -> None:
    with pytest.raises(ValueError, match="fleet_prices is empty"):
        reprice(runs, [])
    with pytest.raises(ValueError, match=r"fleet_forward=-0\.1"):
        reprice(runs, [0.1, -0.1])
    with pytest.raises(ValueError, match="hold: val_loss"):
        reprice(runs, metric="accuracy")


def test_table_fits_a_hundred_columns(runs: list[Path]) -> None:
    text = shown(reprice(runs, target=2.0))
    assert max(map(len, text.splitlines())) <= 100
    for word in (
        "pays below 1.25",
        "cheapest exact",
        "0.001",
        "6.02",
        "1 forward-equivalent = 100 FLOPs",
        "val_loss <= 2",
    ):
        assert word in text


def test_plot_is_of_these_numbers(runs: list[Path], tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = plot_repricing(reprice(runs), tmp_path / "new" / "reprice.png")
    assert imread(path).shape[:2] == (780, 1350)
    assert path.read_bytes() == plot_repricing(reprice(runs), tmp_path / "again.png").read_bytes()
    assert path.read_bytes() != plot_repricing(reprice(runs, target=3.0), tmp_path / "other.png").read_bytes()
    assert plot_repricing(reprice(runs, [0.05]), tmp_path / "one.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no fleet price is above 0"):
        plot_repricing(reprice(runs, [0.0]), tmp_path / "none.png")
