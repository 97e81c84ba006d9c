"""Work: an exact unit of its own."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given

from lightning_ledger.ledger import Work
from tests.ledger_runs import (
    EXACT,
    PREDICTED,
    works,
)


def test_work_is_a_unit_of_its_own() -> None:
    assert Work(flops_by_format={"unlabelled": 600, "int8": 600}, samples=8, tokens=80, passes=2) == EXACT + PREDICTED
    assert (EXACT + PREDICTED).flops == 1200
    assert 3 * EXACT == EXACT * 3 == EXACT + EXACT + EXACT
    assert EXACT + PREDICTED - PREDICTED == EXACT  # flops_by_format is empty again
    for act in (
        lambda: EXACT + 1,
        lambda: 1 + EXACT,
        lambda: EXACT - 1,
        lambda: EXACT * 2.0,
        lambda: EXACT * True,
    ):
        with pytest.raises(TypeError, match="unsupported operand"):
            act()


def test_flops_and_formats_agree() -> None:
    assert Work(flops_by_format={"int8": 2, "bf16": 3}).flops == 5
    assert Work(flops=5, flops_by_format={"int8": 2, "bf16": 3}).flops == 5
    assert Work(flops=5).flops_by_format == {}
    with pytest.raises(ValueError, match="flops=6 disagrees"):
        Work(flops=6, flops_by_format={"int8": 5})


@pytest.mark.parametrize("value", [1.0, True, "1", None, math.nan])
@pytest.mark.parametrize("name", ["flops", "bytes", "samples", "tokens", "passes"])
def test_counts_are_integers(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, not {value!r}"):
        Work(**{name: value})
    with pytest.raises(TypeError, match=r"flops_by_format\['int8'\] must be"):
        Work(flops_by_format={"int8": value})


def test_work_never_goes_below_zero() -> None:
    with pytest.raises(ValueError, match="flops would be -1"):
        Work(flops=1) - Work(flops=2)
    with pytest.raises(ValueError, match="int4"):  # enough FLOPs in all, but not in this format
        PREDICTED - Work(flops_by_format={"int4": 1})
    with pytest.raises(ValueError, match="samples"):
        Work(samples=1) * -1
    assert Work(flops=5, bytes=1).excess(Work(flops=2, bytes=9)) == Work(flops=3)


def test_seconds_inform_but_do_not_count() -> None:
    assert Work(flops=1, seconds=2.0) == Work(flops=1)
    assert hash(Work(flops=1, seconds=2.0)) == hash(Work(flops=1))
    assert (Work(seconds=2.0) + Work(seconds=0.5)).seconds == 2.5
    assert (Work(seconds=2.0) * 3).seconds == 6.0


@given(works, works)
def test_work_round_trips_and_adds_exactly(a: Work, b: Work) -> None:
    assert Work.from_dict(json.loads(json.dumps(a.to_dict()))) == a
    assert (a + b).flops == a.flops + b.flops
    assert a + b - b == a
    assert a + b == b + a
    assert a.excess(b) + b == b.excess(a) + a  # the larger of the two, count by count


def test_from_dict_refuses_unknown_fields() -> None:
    with pytest.raises(ValueError, match="joules"):
        Work.from_dict({"joules": 1})
