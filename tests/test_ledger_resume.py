"""Resuming a run: totals equal uninterrupted ones, and what was lost is kept as waste."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_ledger.ledger import Ledger, Work, read_ledger
from tests.ledger_runs import (
    EXACT,
    PREDICTED,
    VALIDATION,
    assert_file_tells,
    checkpoint_after,
    lines,
    resume,
    train,
    uninterrupted,
)


def test_tango152_wb6717_resume_equals_uninterrupted_and_marks_relogged_steps(tmp_path: Path) -> None:
    state = checkpoint_after(tmp_path, 5, beyond=3)
    ledger = resume(state, tmp_path)
    train(ledger, 3)
    ledger.mark({"val_loss": 1.9})
    train(ledger, 2)
    ledger.mark({"val_loss": 1.8})
    # Lost: three steps' exact passes and bytes, and one validation. Lost predictions keep the fleet's price.
    waste = {
        "waste/lost_steps": EXACT * 3 + Work(bytes=24) + VALIDATION,
        "waste/lost_prediction": PREDICTED * 3,
    }
    whole = uninterrupted(10)
    assert ledger.totals() == whole.totals() | waste
    assert ledger.exact_equivalent == whole.exact_equivalent
    assert (ledger.steps, ledger.segments) == (10, 1)
    assert_file_tells(tmp_path, ledger)
    history = read_ledger(tmp_path)
    # The mark at the lost step 8 is gone; the one at the same step after the resume says so.
    assert [(m.step, m.metrics["val_loss"]) for m in history.marks] == [(5, 3.0), (8, 1.9), (10, 1.8)]
    assert [m.relogged for m in history.marks] == [False, True, False]
    assert [(s.first, s.count) for s in history.segments] == [(1, 10)]


def test_resuming_twice_from_one_checkpoint_loses_both_attempts(tmp_path: Path) -> None:
    state = checkpoint_after(tmp_path, 5, beyond=3)
    second = resume(state, tmp_path)
    train(second, 1)
    second.flush()
    third = resume(state, tmp_path)
    train(third, 5)
    third.close()
    assert third.totals() == uninterrupted(10).totals() | {
        "waste/lost_steps": EXACT * 4 + Work(bytes=32) + VALIDATION,
        "waste/lost_prediction": PREDICTED * 4,
    }
    assert_file_tells(tmp_path, third)


def test_resume_in_a_new_directory(tmp_path: Path) -> None:
    state = checkpoint_after(tmp_path / "old", 5, beyond=3)
    (tmp_path / "old" / "ledger.jsonl").unlink()
    ledger = resume(state, tmp_path / "new")
    train(ledger, 5)
    ledger.close()
    assert ledger.totals() == uninterrupted(10).totals()  # nothing here tells what the old run lost
    assert_file_tells(tmp_path / "new", ledger)
    assert [r["type"] for r in lines(tmp_path / "new" / "ledger.jsonl")] == ["header", "resume", "steps"]
    assert [(s.first, s.count) for s in read_ledger(tmp_path / "new").segments] == [(6, 5)]


def test_resume_in_a_new_directory_takes_the_old_file_along(tmp_path: Path) -> None:
    state = checkpoint_after(tmp_path / "old", 5, beyond=3)
    before = (tmp_path / "old" / "ledger.jsonl").read_bytes()
    moved, beside = resume(state, tmp_path / "new"), resume(state, tmp_path / "old")
    for ledger, folder in ((moved, "new"), (beside, "old")):
        train(ledger, 5)
        ledger.close()
        assert_file_tells(tmp_path / folder, ledger)
    # Both tell the same: the three steps beyond the checkpoint as waste, and the marks before it.
    assert moved.totals() == beside.totals()
    assert {account for account in moved.totals() if account.startswith("waste/")}
    new = (tmp_path / "new" / "ledger.jsonl").read_bytes()
    assert new.startswith(before)


def test_resume_from_the_end_adds_no_line(tmp_path: Path) -> None:
    state = checkpoint_after(tmp_path, 5, beyond=0)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    ledger = resume(state, tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    assert ledger.totals() == uninterrupted(5).totals()


def test_checkpoint_within_a_step(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.attach(tmp_path)
    ledger.charge("scarce/forward", EXACT)  # half an accumulation window
    state = ledger.state_dict()
    ledger.charge("scarce/backward", EXACT * 2)
    ledger.end_step()
    ledger.flush()
    resumed = resume(state, tmp_path)
    assert resumed.totals() == {"scarce/forward": EXACT, "waste/lost_steps": EXACT * 2}
    resumed.charge("scarce/backward", EXACT * 2)
    resumed.end_step()
    resumed.flush()
    assert resumed.steps == 1
    assert_file_tells(tmp_path, resumed)


def test_reattaching_a_live_ledger_goes_on(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.attach(tmp_path / "a")
    train(ledger, 2)
    ledger.close()
    train(ledger, 1)
    ledger.forward_flops = 200
    ledger.attach(tmp_path / "a")
    train(ledger, 1)
    ledger.close()
    assert_file_tells(tmp_path / "a", ledger)
    assert "resume" not in [r["type"] for r in lines(tmp_path / "a" / "ledger.jsonl")]
    ledger.attach(tmp_path / "b")
    assert_file_tells(tmp_path / "b", ledger)
    assert ledger.totals() == uninterrupted(4).totals()


def test_two_runs_are_never_mixed(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        ledger = Ledger()
        ledger.attach(tmp_path)
        train(ledger, steps)
        ledger.close()
        assert_file_tells(tmp_path, ledger)
    assert [read_ledger(tmp_path / name).steps for name in ("ledger.1.jsonl", "ledger.2.jsonl")] == [1, 2]


def test_resume_with_another_unit_is_refused(tmp_path: Path) -> None:
    state = checkpoint_after(tmp_path, 1, beyond=1)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"200 FLOPs.*forward_flops=100"):
        resume(state | {"forward_flops": 100}, tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize(("key", "value"), [("kind", "accountant"), ("schema", 2), ("schema", None)])
def test_foreign_state_is_refused_before_anything_changes(key: str, value: object) -> None:
    ledger = Ledger()
    train(ledger, 2)
    before = ledger.state_dict()
    with pytest.raises(ValueError, match=f"state has {key}={value!r}"):
        ledger.load_state_dict({**Ledger().state_dict(), key: value})
    broken: dict[str, Any] = {**Ledger().state_dict(), "totals": {"scarce/forward": {"flops": 1.5}}}
    with pytest.raises(TypeError, match="flops must be an integer"):
        ledger.load_state_dict(broken)
    assert ledger.state_dict() == before


def test_state_is_plain_containers(tmp_path: Path) -> None:
    state = checkpoint_after(tmp_path, 2, beyond=0)
    assert json.loads(json.dumps(state)) == state
