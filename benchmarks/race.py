"""Interleave whole trainings, step by step, so that what disturbs one of them disturbs all alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Lap = Callable[[], bool]
"""An arm calls it after each step; it returns when the arm's next turn has come, False if there is none."""

Arm = Callable[[Lap], None]
"""Trains until its lap returns False."""


class Seconds(NamedTuple):
    """How long a lap took: by the clock, and of its own thread's CPU time, which other programs cannot lengthen."""

    wall: float
    cpu: float


class _Runner(threading.Thread):
    """One arm, on a thread that only runs while the conductor waits for it."""

    def __init__(self, arm: Arm) -> None:
        super().__init__(daemon=True)
        self._arm = arm
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._start = self._seconds = Seconds(0.0, 0.0)
        self._stopping = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._await_turn()
            self._arm(self._lap)
        except BaseException as error:  # handed to the conductor, who raises it
            self._error = error
        finally:
            self._done.release()

    def _await_turn(self) -> None:
        self._go.acquire()
        self._start = Seconds(time.perf_counter(), time.thread_time())

    def _lap(self) -> bool:
        self._seconds = Seconds(time.perf_counter() - self._start.wall, time.thread_time() - self._start.cpu)
        self._done.release()
        self._await_turn()
        return not self._stopping

    def lap(self) -> Seconds:
        """Let the arm run one lap; how long it took."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        if not self.is_alive():
            raise RuntimeError("An arm ended before the race did: give it more steps.")
        return self._seconds

    def stop(self) -> None:
        """Tell the arm that the race is over, and wait until it is gone."""
        self._stopping = True
        if self.is_alive():
            self._go.release()
            self.join()


def race(arms: Mapping[str, Arm], laps: int, warmup: int, seconds: float) -> dict[str, list[Seconds]]:
    """Run the arms in turn, one lap each, in another order every round.

    Args:
        arms: by name. An arm's first lap holds its set-up.
        laps: to measure of each arm.
        warmup: laps to run before, of each arm, and not to report.
        seconds: stop early once the measured laps took so long together, but not before five of each.

    Returns:
        The measured laps, by arm.
    """
    runners = {name: _Runner(arm) for name, arm in arms.items()}
    names = list(arms)
    times: dict[str, list[Seconds]] = {name: [] for name in names}
    try:
        for runner in runners.values():
            runner.start()
        for _ in range(warmup):
            for name in names:
                runners[name].lap()
        for turn in range(laps):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(runners[name].lap())
            if turn >= 4 and sum(lap.wall for laps in times.values() for lap in laps) > seconds:
                break
    finally:
        for runner in runners.values():
            runner.stop()
    return times
