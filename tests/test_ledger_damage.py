"""Torn tails are recovered; anything altered, removed or moved is found and named by line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_ledger.ledger import Ledger, read_ledger, verify_ledger
from lightning_ledger.ledger_file import LedgerFile
from tests.ledger_runs import (
    assert_file_tells,
    checkpoint_after,
    lines,
    resume,
    train,
)


def test_a_tail_torn_at_any_byte_is_recovered(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger()
    ledger.attach(tmp_path)
    train(ledger, 2)
    ledger.mark({"val_loss": 2.0})
    state, good = ledger.state_dict(), file.read_bytes()
    train(ledger, 1)
    ledger.flush()
    whole = file.read_bytes()
    for size in range(len(good) + 1, len(whole)):  # at least one byte of the last line, never its newline
        file.write_bytes(whole[:size])
        found = verify_ledger(tmp_path)
        assert (found.ok, found.lines) == (False, 3)
        assert f"line 4 is torn ({size - len(good)} bytes)" in str(found.problem)
        assert read_ledger(tmp_path).steps == 2
        resumed = resume(state, tmp_path)
        recovered = lines(file)[3]
        assert (recovered["type"], recovered["bytes"]) == ("recovered", size - len(good))
        train(resumed, 1)
        resumed.close()
        assert resumed.totals() == ledger.totals()
        assert_file_tells(tmp_path, resumed)


def test_garbage_in_the_last_line_is_recovered(tmp_path: Path) -> None:
    state = checkpoint_after(tmp_path, 2, beyond=0)
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b"\0" * 10 + b"\n")
    ledger = resume(state, tmp_path)
    assert lines(tmp_path / "ledger.jsonl")[-1]["bytes"] == 11
    assert_file_tells(tmp_path, ledger)


def test_a_file_without_a_whole_header_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b'{"type":"hea')
    with pytest.raises(ValueError, match="line 1 is no whole header"):
        read_ledger(tmp_path)
    assert not verify_ledger(tmp_path).ok
    ledger = Ledger()
    ledger.attach(tmp_path)
    assert_file_tells(tmp_path, ledger)
    assert (tmp_path / "ledger.1.jsonl").read_bytes() == b'{"type":"hea'


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A file with every kind of line."""
    state = checkpoint_after(tmp_path, 2, beyond=2)
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b"{torn")
    state["forward_flops"] = None
    ledger = resume(state, tmp_path)
    train(ledger, 1)
    ledger.close()
    return tmp_path / "ledger.jsonl"


def test_every_altered_digit_is_found(finished: Path) -> None:
    whole = finished.read_bytes()
    assert verify_ledger(finished) == (True, whole.count(b"\n"), None)
    for place, byte in enumerate(whole):
        if chr(byte).isdigit():
            other = b"1" if byte != ord("1") else b"2"
            finished.write_bytes(whole[:place] + other + whole[place + 1 :])
            line = whole[:place].count(b"\n") + 1
            found = verify_ledger(finished)
            assert not found.ok
            # An altered check sum shows in its own line, an altered line that was sealed anew in the next.
            assert f"line {line} " in str(found.problem), (place, found)
            assert found.lines == line - 1


def test_every_removed_doubled_or_moved_line_is_found(finished: Path) -> None:
    whole = finished.read_bytes().splitlines(keepends=True)
    for at in range(len(whole) - 1):
        removed = whole[:at] + whole[at + 1 :]
        doubled = whole[: at + 1] + whole[at:]
        moved = [*whole[:at], whole[at + 1], whole[at], *whole[at + 2 :]]
        for altered in (removed, doubled, moved):
            finished.write_bytes(b"".join(altered))
            found = verify_ledger(finished)
            assert not found.ok
            assert found.lines in (at, at + 1)
            with pytest.raises(ValueError, match=rf"line {found.lines + 1} "):
                read_ledger(finished)


def test_a_broken_line_in_the_middle_is_named(finished: Path) -> None:
    whole = finished.read_bytes().splitlines(keepends=True)
    finished.write_bytes(b"".join([*whole[:2], b"{oops\n", *whole[3:]]))
    with pytest.raises(ValueError, match="line 3 is broken"):
        read_ledger(finished)
    assert str(verify_ledger(finished).problem).startswith("line 3 is broken")


def reseal(path: Path, records: list[dict[str, Any]]) -> None:
    """A well-chained file of any records, as a buggy writer would leave it."""
    path.unlink()
    LedgerFile(path).append([{k: v for k, v in r.items() if k not in ("prev", "check")} for r in records])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first": 2}, "step 0 came before"),
        ({"count": 0}, "0 steps"),
        ({"type": "stops"}, "unknown type 'stops'"),
        ({"type": "header"}, "only that"),
        ({"type": "mark", "step": 3, "metrics": {}}, "marks step 3, but 0 steps"),
        ({"work": {"scarce/optimizer": {}}}, "scarce/optimizer"),
        ({"work": {"scarce/forward": {"flops": 0.5}}}, "must be an integer"),
    ],
)
def test_well_chained_nonsense_is_found(finished: Path, change: dict[str, Any], reason: str) -> None:
    records = lines(finished)
    assert records[1]["type"] == "steps"
    records[1] |= change
    reseal(finished, records)
    found = verify_ledger(finished)
    assert found.lines == 1
    assert str(found.problem).startswith("line 2 ")
    assert reason in str(found.problem)


def test_another_schema_is_refused_by_name(finished: Path) -> None:
    records = lines(finished)
    records[0]["schema"] = 2
    reseal(finished, records)
    with pytest.raises(ValueError, match="line 1 says kind 'lightning_ledger', schema 2"):
        read_ledger(finished)
