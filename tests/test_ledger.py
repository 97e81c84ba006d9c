"""The ledger: accounts, steps, run lengths, and a file that tells the same."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ledger.ledger import ACCOUNTS, Ledger, Work, by_tier, read_ledger, verify_ledger
from lightning_ledger.ledger_file import GENESIS
from lightning_ledger.prices import PriceBook
from tests.ledger_runs import (
    EXACT,
    PREDICTED,
    VALIDATION,
    assert_file_tells,
    lines,
    train,
    works,
)


def test_accounts_and_tiers() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match=r"scarce/optimizer.*scarce/forward.*waste/lost_steps"):
        ledger.charge("scarce/optimizer", EXACT)
    with pytest.raises(TypeError, match="work=600 must be Work"):
        ledger.charge("scarce/forward", 600)
    assert ledger.totals() == {}
    for account in ACCOUNTS:
        ledger.charge(account, PREDICTED)
    ledger.forward_flops = 200
    prices = PriceBook(fleet_forward=0.1)
    # 600 / 200 = 3 forward-equivalents each: 3 at the scarce price, 0.3 at the fleet's.
    assert by_tier(ledger.costs(prices)) == pytest.approx(
        {"scarce": 6, "validation": 3, "fleet": 1.2, "setup": 6, "transfer": 6, "waste": 6.3}
    )
    assert ledger.cost(prices) == pytest.approx(6 + 3 + 1.2 + 6 + 6 + 6.3)


def test_open_work_is_in_the_totals() -> None:
    ledger = Ledger()
    ledger.charge("scarce/forward", EXACT)
    assert (ledger.steps, ledger.totals()) == (0, {"scarce/forward": EXACT})
    ledger.charge("setup/checks", Work())  # nothing done: the account stays absent
    ledger.end_step()
    assert (ledger.steps, ledger.totals()) == (1, {"scarce/forward": EXACT})
    ledger.totals().clear()
    assert ledger.totals() == {"scarce/forward": EXACT}


def test_pl1173_one_row_per_optimizer_step(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.attach(tmp_path)
    for _ in range(5):  # three micro-batches to the optimizer step
        for _ in range(3):
            ledger.charge("scarce/forward", EXACT)
        ledger.end_step()
    ledger.charge("scarce/forward", EXACT)  # a ragged last window
    ledger.end_step()
    assert (ledger.steps, ledger.segments) == (6, 2)
    ledger.flush()
    history = read_ledger(tmp_path)
    assert history.steps == sum(segment.count for segment in history.segments) == 6
    assert [(s.first, s.count, s.work["scarce/forward"].passes) for s in history.segments] == [
        (1, 5, 3),
        (6, 1, 1),
    ]


def test_pl11386_counts_beyond_double_precision_stay_exact(tmp_path: Path) -> None:
    odd = 2**53 + 1  # the first integer that a double cannot hold
    ledger = Ledger()
    ledger.forward_flops = odd
    for _ in range(3):
        ledger.charge("scarce/forward", Work(flops=odd))
        ledger.end_step()
    ledger.attach(tmp_path)
    resumed = Ledger()
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    for totals in (ledger.totals(), read_ledger(tmp_path).totals, resumed.totals()):
        assert totals["scarce/forward"].flops == 3 * odd
    assert ledger.cost(PriceBook()) == 3.0  # logs get a double


def test_pl20235_samples_are_counted_not_assumed() -> None:
    for accumulate in (1, 2, 3):
        ledger = Ledger()
        for index, samples in enumerate([1, 2, 1], start=1):
            ledger.charge("scarce/forward", Work(samples=samples))
            if index % accumulate == 0 or index == 3:
                ledger.end_step()
        assert ledger.totals()["scarce/forward"].samples == 4


def test_unit_is_set_once() -> None:
    ledger = Ledger()
    assert ledger.forward_flops is None
    ledger.charge("scarce/forward", EXACT)
    with pytest.raises(ValueError, match="forward_flops=None is not known"):
        ledger.cost(PriceBook())
    ledger.forward_flops = 200
    ledger.forward_flops = 200
    assert ledger.cost(PriceBook()) == 3.0
    for wrong, error in ((201, ValueError), (0, ValueError), (200.0, TypeError)):
        with pytest.raises(error, match="forward_flops"):
            ledger.forward_flops = wrong
    assert ledger.forward_flops == 200


def test_file_tells_the_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    ledger = Ledger()
    assert (
        ledger.attach(run, {"label": "gpcv int8", "config": {"lr": math.inf, "path": tmp_path}}) == run / "ledger.jsonl"
    )
    train(ledger, 2)
    ledger.forward_flops = 200
    ledger.charge("scarce/validation", VALIDATION)
    ledger.mark({"val_loss": 2.5, "odd": math.nan, "up": math.inf, "down": -math.inf})
    train(ledger, 2)
    ledger.close()
    assert_file_tells(run, ledger)
    records = lines(run / "ledger.jsonl")
    assert [r["type"] for r in records] == ["header", "unit", "steps", "charges", "mark", "steps"]
    assert records[0]["forward_flops"] is None
    assert records[0]["prev"] == GENESIS
    assert records[4]["metrics"] == {"val_loss": 2.5, "odd": "nan", "up": "inf", "down": "-inf"}
    history = read_ledger(run / "ledger.jsonl")
    assert (history.label, history.header["config"]) == ("gpcv int8", {"lr": "inf", "path": str(tmp_path)})
    # Cut in the file at the mark, one segment for the reader: the steps did the same, validation is no step.
    (segment,) = history.segments
    assert (segment.first, segment.count, ledger.segments) == (1, 4, 1)
    (mark,) = history.marks
    assert (mark.step, mark.totals["scarce/forward"], mark.exact_equivalent) == (2, EXACT * 2, EXACT * 4)
    assert mark.totals["scarce/validation"] == VALIDATION
    assert [mark.metrics[name] for name in ("val_loss", "up", "down")] == [2.5, math.inf, -math.inf]
    assert math.isnan(mark.metrics["odd"])
    # 4 x 3 forwards, validation 5, predictions 4 x 3 x .05, and 32 bytes at no price
    assert history.cost(PriceBook()) == ledger.cost(PriceBook()) == pytest.approx(12 + 5 + 0.6)


def test_label_defaults_to_the_directory(tmp_path: Path) -> None:
    Ledger().attach(tmp_path / "exact-16")
    assert read_ledger(tmp_path / "exact-16").label == "exact-16"


def test_flushes_by_time(tmp_path: Path) -> None:
    for seconds, written in ((0.0, 2), (3600.0, 0)):
        ledger = Ledger(flush_seconds=seconds)
        ledger.attach(tmp_path / str(seconds))
        train(ledger, 2)
        assert read_ledger(tmp_path / str(seconds)).steps == written


def test_attach_teaches(tmp_path: Path) -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="prev"):
        ledger.attach(tmp_path, {"prev": "mine"})
    ledger.attach(tmp_path)
    with pytest.raises(RuntimeError, match=r"close\(\)"):
        ledger.attach(tmp_path)
    with pytest.raises(RuntimeError, match="before attach"):
        ledger.load_state_dict(Ledger().state_dict())
    with pytest.raises(FileNotFoundError, match=r"nowhere.*ledger\.jsonl"):
        read_ledger(tmp_path / "nowhere")


steps_done = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(sorted(ACCOUNTS)), works), max_size=2),
        st.sampled_from(["step", "step", "step", "mark", "flush", "state"]),
        st.integers(1, 3),
    ),
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps_done)
def test_run_lengths_equal_the_naive_sum(
    tmp_path: Path, history: list[tuple[list[tuple[str, Work]], str, int]]
) -> None:
    ledger, naive, exact, steps = Ledger(), dict[str, Work](), Work(), 0
    ledger.attach(tmp_path)
    for charges, then, repeats in history:
        for _ in range(repeats):
            for account, work in charges:
                ledger.charge(account, work)
                ledger.charge_exact_equivalent(work)
                exact += work
                if work:
                    naive[account] = naive.get(account, Work()) + work
            if then == "step":
                ledger.end_step()
                steps += 1
            elif then == "mark":
                ledger.mark({"loss": 1.0})
            elif then == "flush":
                ledger.flush()
            else:
                ledger.state_dict()
    ledger.close()
    read = read_ledger(tmp_path)
    assert read.totals == ledger.totals() == naive
    assert read.exact_equivalent == exact
    assert read.steps == ledger.steps == steps == sum(segment.count for segment in read.segments)
    assert len(read.segments) == ledger.segments
    for account, work in naive.items():
        assert read.totals[account].seconds == pytest.approx(work.seconds)
    assert verify_ledger(tmp_path).ok


def test_accounting_needs_no_torch() -> None:
    code = (
        "import sys, lightning_ledger.ledger, lightning_ledger.prices, lightning_ledger.reports;"
        "sys.exit(sorted({'torch', 'lightning', 'matplotlib', 'rich', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
