"""Rival ways to spend, kinds of runs, seeds of one arm, and the intervals over them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lightning_ledger.ledger import Ledger, Work, read_ledger
from lightning_ledger.reports import Comparison, Estimate, Way, compare, render
from lightning_ledger.reports.intervals import student_quantile
from lightning_ledger.reports.runs import Settings, arms_of, kind_of

FORWARD = 100


def write_run(
    path: Path,
    losses: Sequence[float],
    *,
    exact: int = 0,
    predicted: int = 0,
    control: int = 0,
    header: Mapping[str, Any] | None = None,
) -> Path:
    """A run with one validation after each step, in micro-batches of two samples that cost 3 forwards each."""
    ledger = Ledger()
    ledger.forward_flops = FORWARD
    ledger.attach(path, header)
    for loss in losses:
        ledger.charge("scarce/forward", Work(flops=FORWARD * exact, samples=2 * exact))
        ledger.charge("scarce/backward", Work(flops=2 * FORWARD * exact))
        for account, count in (("fleet/prediction", predicted), ("fleet/control", control)):
            ledger.charge(account, Work(flops_by_format={"int8": 3 * FORWARD * count}, samples=2 * count, passes=count))
        ledger.end_step()
        ledger.mark({"val_loss": loss})
    ledger.close()
    return path


def settings(rounding: str | None, lr: float = 0.001) -> dict[str, Any]:
    prediction = rounding and {"rounding": rounding}
    return {"settings": {"prediction": prediction, "optimizers": [{"class": "AdamW", "learning_rates": [lr]}]}}


def ways(comparison: Comparison) -> dict[str, Way]:
    return {way.name: way for way in comparison.ways}


def shown(comparison: Comparison) -> str:
    out = StringIO()
    render(comparison, Console(file=out, width=100))
    return out.getvalue()


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "exact-8", [3.0, 2.0], exact=8, header=settings(None)),  # 2 x 24 = 48
        write_run(tmp_path / "exact-4", [3.0, 2.5, 2.0], exact=4, header=settings(None)),  # 3 x 12 = 36
        write_run(tmp_path / "exact-1", [3.0] * 19 + [2.0], exact=1, header=settings(None, 0.01)),  # 20 x 3 = 60
        write_run(tmp_path / "int8", [3.0, 2.5, 2.0], predicted=8, header=settings("nearest")),  # 3 x 24 x .05 = 3.6
        write_run(tmp_path / "int4", [3.0, 2.5], predicted=8, header=settings("stochastic")),
        write_run(tmp_path / "gpcv", [3.0, 2.0], exact=1, predicted=7, control=1, header=settings("nearest")),  # 8.4
        write_run(tmp_path / "mixed", [3.0, 2.6], exact=1, predicted=7, header=settings("nearest")),
    ]


def test_the_four_ways_by_hand(runs: list[Path]) -> None:
    comparison = compare(runs)
    found = ways(comparison)
    assert {name: way.arm and way.arm.label for name, way in found.items()} == {
        "exact, best batch": "exact-4",
        "exact, smaller batch": "exact-1",
        "predictions only, nearest": "int8",
        "predictions only, stochastic": "int4",
        "corrected (GPCV)": "gpcv",
        "mixed, uncorrected": "mixed",
    }
    # By cost, those that never got there last.
    assert list(found)[:4] == [
        "predictions only, nearest",
        "corrected (GPCV)",
        "exact, best batch",
        "exact, smaller batch",
    ]
    gpcv = found["corrected (GPCV)"].arm
    assert gpcv is not None
    assert gpcv.cost_to_target == Estimate(pytest.approx(2 * (3 + 24 * 0.05)), None, 1)
    assert gpcv.saving == pytest.approx(1 - 8.4 / 36)
    assert gpcv.settings == Settings(16, 1 / 8, "int8", "nearest", 0.001)
    assert [found[name].tried for name in ("exact, best batch", "exact, smaller batch")] == [3, 1]
    assert found["predictions only, stochastic"].arm.cost_to_target is None
    text = shown(comparison)
    assert max(map(len, text.splitlines())) <= 100
    assert "never" in text.split("Ways to spend")[1]


def test_absent_rivals_are_shown_as_absent(runs: list[Path]) -> None:
    found = ways(compare(runs[4:]))
    assert {name for name, way in found.items() if way.arm is None} == {
        "exact, best batch",
        "exact, smaller batch",
        "predictions only, nearest",
    }
    assert "not run" in shown(compare(runs[4:]))
    assert "the best, 2 samples, is the least" in ways(compare(runs[2:]))["exact, smaller batch"].note
    assert all(arm.saving is None for arm in compare(runs[4:]).arms)


def test_what_a_ledger_does_not_record_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", [2.0], predicted=4)
    comparison = compare([run])
    way = ways(comparison)["predictions only (rounding not recorded)"]
    assert way.arm is not None
    assert way.arm.settings == Settings(8, 0, "int8", None, None)
    assert "a dash, not recorded" in shown(comparison).replace("\n", " ")


def test_among_arms_that_never_arrive_the_nearest_is_shown(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [loss], exact=1, control=1) for name, loss in (("far", 4.0), ("near", 3.0))]
    way = ways(compare(runs, target=1.0))["corrected (GPCV)"]
    assert way.arm is not None
    assert (way.arm.label, way.arm.best, way.tried) == ("near", 3.0, 2)
    way = ways(compare(runs, target=9.0, mode="max"))["corrected (GPCV)"]
    assert way.arm is not None
    assert way.arm.label == "far"


ONE = Work(flops=1)


@pytest.mark.parametrize(
    ("accounts", "kind"),
    [
        (("scarce/forward", "scarce/backward", "setup/checks", "waste/lost_steps"), "exact"),
        (("fleet/prediction", "setup/checks", "scarce/validation"), "predictions only"),
        (("scarce/forward", "fleet/prediction", "fleet/control"), "corrected"),
        (("scarce/forward", "fleet/prediction"), "mixed"),
        (("scarce/forward", "waste/lost_prediction"), "mixed"),
    ],
)
def test_kinds_come_from_the_accounts(accounts: Sequence[str], kind: str) -> None:
    assert kind_of(dict.fromkeys(accounts, ONE)) == kind


def test_arms(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "a" / "seed-1", [1.0], exact=1),
        write_run(tmp_path / "a" / "seed-2" / "ledger.jsonl", [1.0], exact=1),
        write_run(tmp_path / "a" / "seed-3", [1.0], predicted=1),  # another kind: no seed of the same arm
        write_run(tmp_path / "b.seed4", [1.0], exact=1),
        write_run(tmp_path / "x", [1.0], exact=1, header={"label": "same"}),
        write_run(tmp_path / "y", [1.0], exact=1, header={"label": "same"}),
        write_run(tmp_path / "linseed-5-oil", [1.0], exact=1),
        write_run(tmp_path / "v" / "version_0", [1.0], exact=1),
        write_run(tmp_path / "w" / "version_0", [1.0], exact=1),
    ]
    histories = [read_ledger(path) for path in paths]
    assert list(arms_of(paths, histories).values()) == [[0, 1], [2], [3], [4, 5], [6], [7], [8]]
    assert list(arms_of(paths, histories))[2:5] == ["b", "same", "linseed-5-oil"]
    assert arms_of(paths, histories, ["all=*/version_0"])["all"] == [7, 8]
    assert arms_of(paths, histories, [f"{tmp_path}/[xy]/"])[f"{tmp_path}/[xy]"] == [4, 5]
    with pytest.raises(ValueError, match="'none' matches no run"):
        arms_of(paths, histories, ["none=*/nowhere"])
    with pytest.raises(ValueError, match=r"different kinds \(exact, predictions only\)"):
        arms_of(paths, histories, ["mess=*/seed-*"])


def test_seeds_of_an_arm_agree_or_the_setting_is_unknown(tmp_path: Path) -> None:
    steps = ((1, 0.1), (2, 0.1), (3, 0.2))
    runs = [write_run(tmp_path / f"seed-{n}", [3.0] * n + [2.0], exact=1, header=settings(None, lr)) for n, lr in steps]
    (arm,) = compare(runs).arms
    # 2, 3 and 4 steps of 3: mean 9, s = 3, t = 4.3027.
    assert arm.cost_to_target == Estimate(pytest.approx(9), pytest.approx(4.3027 * 3 / 3**0.5, rel=1e-4), 3)
    assert (arm.settings.batch, arm.settings.learning_rate, arm.reached) == (2, None, 3)
    assert "9 ±7.45" in shown(compare(runs))
    # The mean of those that arrived would flatter the arm.
    runs.append(write_run(tmp_path / "seed-4", [3.0], exact=1))
    (arm,) = compare(runs, target=2.0).arms
    assert (arm.reached, arm.cost_to_target) == (3, None)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 29, 100])
def test_student_quantiles_are_scipys(freedom: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    for confidence in (0.5, 0.95, 0.99):
        assert student_quantile(freedom, confidence) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom))


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    """In 4000 draws of 4 normal values a share of .95 has a standard error of .0034."""
    draws = np.random.default_rng(0).normal(3.0, 2.0, (4000, 4))
    estimates = [Estimate.of(list(map(float, draw))) for draw in draws]
    covered = statistics.fmean(abs(e.mean - 3.0) <= (e.half_width or 0.0) for e in estimates)
    assert covered == pytest.approx(0.95, abs=4 * 0.0034)
