"""A Ray cluster that was started for a run: where it listens, what is left of it, and what happens if it dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@contextlib.contextmanager
def driver(mode: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "ray_driver.py"), mode]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> Any:
    """What the driver prints: processes, or exact shares. Ray may print lines of its own."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith(("{", "[")):
            return json.loads(line)
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


def without_agents(processes: dict[str, str]) -> list[int]:
    """All but two helpers of Ray's, which take a minute or two to notice that their node was killed."""
    return [int(pid) for pid, command in processes.items() if "Agent" not in command]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "zombie" not in status(pid)]


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "zombie"


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.2)
    return not alive(pids)


def listening(pids: list[int]) -> set[str]:
    """Addresses, in hexadecimal, on which these processes accept connections."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(entry))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.slow
def test_a_started_cluster_listens_on_the_loopback_alone_and_nothing_of_it_is_left() -> None:
    with driver("watch") as process:
        pids = [int(pid) for pid in answer(process)]
        addresses = listening(pids)
        assert addresses
        assert addresses <= LOOPBACK, addresses
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1  # as Lightning leaves after Ctrl-C
        assert gone_within(pids, 15), alive(pids)


@pytest.mark.slow
def test_a_run_ends_its_own_cluster() -> None:
    with driver("finish") as process:
        pids = [int(pid) for pid in answer(process)]
        assert answer(process) == [0.25] * 3
        assert answer(process) == {}  # while the driver still runs
        assert gone_within(pids, 1), alive(pids)


@pytest.mark.slow
def test_workers_die_with_a_driver_that_is_killed() -> None:
    with driver("watch") as process:
        pids = without_agents(answer(process))
        assert len(alive(pids)) == len(pids) > 2
        process.kill()
        assert gone_within(pids, 30), alive(pids)


@pytest.mark.slow
def test_a_run_outlives_its_cluster_and_predicts_again_on_another() -> None:
    with driver("lose") as process:
        first = without_agents(answer(process))
        shares = answer(process)
        assert shares[:3] == [0.25] * 3
        assert set(shares[3:-1]) == {1.0}
        assert shares[-1] == 0.25
        assert process.wait(30) == 0
        assert gone_within(first, 15), alive(first)
        assert process.stderr is not None
        said = process.stderr.read()
        assert said.count("The fleet is lost") == said.count("The fleet is back") == 1
