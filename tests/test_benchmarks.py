"""The benchmark's own parts: its arms take turns, and its table says what the noise allows."""

from __future__ import annotations

import pytest

from benchmarks.overhead import Row
from benchmarks.race import Arm, Lap, race


def arm(name: str, order: list[str], laps: int = 1000) -> Arm:
    def run(lap: Lap) -> None:
        for _ in range(laps):
            order.append(name)
            if not lap():
                order.append(f"{name} ends")
                return

    return run


def test_arms_take_turns_in_an_order_that_rotates() -> None:
    order: list[str] = []
    times = race({name: arm(name, order) for name in "abc"}, laps=3, warmup=1, seconds=60.0)
    assert "".join(order[:12]) == "abc" + "abc" + "bca" + "cab"
    assert order[12:] == ["a ends", "b ends", "c ends"]
    assert {name: len(laps) for name, laps in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_race_stops_when_its_time_is_up_but_not_before_five_laps() -> None:
    order: list[str] = []
    assert len(race({"a": arm("a", order)}, laps=50, warmup=0, seconds=0.0)["a"]) == 5


def test_an_arm_that_fails_or_ends_early_is_reported_and_the_others_end() -> None:
    def broken(lap: Lap) -> None:
        lap()
        raise ValueError("broken on purpose")

    for bad, error in ((broken, "broken on purpose"), (arm("short", [], laps=1), "ended before the race")):
        order: list[str] = []
        with pytest.raises((ValueError, RuntimeError), match=error):
            race({"a": arm("a", order), "bad": bad}, laps=5, warmup=0, seconds=60.0)
        assert order[-1] == "a ends"


def test_an_aim_is_met_only_beyond_the_noise() -> None:
    quiet, noisy = [0.010, 0.011, 0.012, 0.013, 0.014], [-0.2, -0.1, 0.012, 0.1, 0.2]
    assert Row("", 0.05, quiet, 1.0).met == "yes"
    assert Row("", 0.001, quiet, 1.0).met == "no"
    assert Row("", 0.05, noisy, 1.0).met == "unclear"
    assert Row("", None, quiet, 1.0).met == ""
    # Quartiles 0.0105 and 0.0135: 1.25 * 0.003 / 1.35 / sqrt(5).
    assert Row("", 0.05, quiet, 1.0).error == pytest.approx(1.25 * 0.003 / 1.35 / 5**0.5)
