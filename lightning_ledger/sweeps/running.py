"""Runs a sweep in processes of its own, a folder each; what was killed goes on where it stood."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_ledger.sweeps.definition import Run, checkpoint

STATE = "sweep.json"  # in each run's folder
NEW_STATE = f"{STATE}.new"
LOG = "log.txt"
LOCK = ".lock"  # held in the sweep's folder by who runs it, in a run's folder by its process
FOLDER = "SWEEP_RUN_DIR"  # environment variable that tells a program its run's folder
LAST_LINES = 20
POLL_SECONDS = 0.1

Status = Literal["waiting", "running", "finished", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a run stands, as the file ``sweep.json`` in its folder tells.

    Attributes:
        status: "running" also stands in the file of a run that was killed together with its sweep.
        parameters: of the run.
        words: its command.
        exit_code: of its process; that of a signal is negative.
        seconds: it took, the last time.
        attempts: how often it was started.
        started: when, the last time.
        process: its number, while it runs.
        last_lines: of its log, where it failed.
    """

    status: Status = "waiting"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()
    exit_code: int | None = None
    seconds: float = 0.0
    attempts: int = 0
    started: str = ""
    process: int | None = None
    last_lines: Sequence[str] = ()

    @classmethod
    def read(cls, folder: Path) -> Outcome:
        """As the folder's file has it; "waiting" where there is none."""
        try:
            return cls(**json.loads((folder / STATE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()

    def write(self, folder: Path) -> None:
        """Replaces the file in one step, so that no kill leaves half of it."""
        fresh = folder / NEW_STATE
        fresh.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        fresh.replace(folder / STATE)


@dataclass
class _Job:
    """A run whose process is alive."""

    run: Run
    folder: Path
    outcome: Outcome
    process: subprocess.Popen[bytes]
    lock: IO[str]
    begun: float

    @classmethod
    def start(cls, run: Run, folder: Path, before: Outcome, threads: int) -> _Job:
        """Start it, afresh unless it left a checkpoint to continue from."""
        if not checkpoint(folder).exists():
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        assert lock is not None
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        outcome = Outcome("running", run.parameters, run.words, attempts=before.attempts + 1, started=now)
        outcome.write(folder)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, FOLDER: str(folder)}
        with (folder / LOG).open("a") as log:
            # The process inherits the lock, and is known by it should this one be killed.
            process = subprocess.Popen(
                run.command(folder),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[lock.fileno()],
                start_new_session=True,
            )
        outcome = replace(outcome, process=process.pid)
        outcome.write(folder)
        return cls(run, folder, outcome, process, lock, time.monotonic())

    def end(self) -> Outcome:
        """Note how it ended."""
        code = self.process.wait()
        last: list[str] = []
        if code:
            with (self.folder / LOG).open(encoding="utf-8", errors="replace") as log:
                last = [line.rstrip("\n") for line in deque(log, LAST_LINES)]
        outcome = replace(
            self.outcome,
            status="failed" if code else "finished",
            exit_code=code,
            seconds=round(time.monotonic() - self.begun, 2),
            process=None,
            last_lines=last,
        )
        outcome.write(self.folder)
        self.lock.close()
        return outcome

    def kill(self) -> None:
        """End it and all that it started; its file goes on saying that it runs, so it will be continued."""
        _kill(self.process.pid)
        self.process.wait()
        self.lock.close()


def run_all(
    runs: Sequence[Run], folder: Path, jobs: int = 1, retry: bool = False, console: Console | None = None
) -> dict[str, Outcome]:
    """Run what is not finished yet, each run as a process in ``folder/NAME``.

    A run that fails is noted with its exit code and the end of its log, and the others go on. A run that was killed
    with its sweep is started again: from its ``checkpoints/last.ckpt`` if it kept one, else afresh.

    Args:
        runs: what to run, in this order.
        folder: of the sweep.
        jobs: runs at a time; each gets its share of the cores as ``OMP_NUM_THREADS``, unless that is set.
        retry: run those again that failed before.
        console: for the progress bar; stderr by default.

    Returns:
        How each run ended, by name, those of earlier calls included.

    Raises:
        ValueError: a folder of that name holds another run, or something else.
        BlockingIOError: another process runs this sweep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder):
        outcomes = {run.name: Outcome.read(folder / run.name) for run in runs}
        for run in runs:
            _check_same(run, outcomes[run.name], folder / run.name)
        again = ("waiting", "running", "failed") if retry else ("waiting", "running")
        waiting = deque(run for run in runs if outcomes[run.name].status in again)
        threads = max(1, _cores() // jobs)
        running: list[_Job] = []
        with _progress(console or Console(stderr=True)) as bars:
            task = bars.add_task("runs", total=len(waiting), left="", now="")
            begun, done = time.monotonic(), 0
            try:
                while waiting or running:
                    while waiting and len(running) < jobs:
                        run = waiting.popleft()
                        before = outcomes[run.name]
                        if before.status == "running":
                            _end_orphan(folder / run.name, before)
                        running.append(_Job.start(run, folder / run.name, before, threads))
                        bars.update(task, now=", ".join(job.run.name for job in running))
                    time.sleep(POLL_SECONDS)
                    for job in [job for job in running if job.process.poll() is not None]:
                        running.remove(job)
                        outcomes[job.run.name] = outcome = job.end()
                        done += 1
                        left = (time.monotonic() - begun) / done * (len(waiting) + len(running))
                        bars.update(task, completed=done, left=f"about {_duration(left)} left")
                        code = f", exit code {outcome.exit_code}" if outcome.exit_code else ""
                        bars.print(f"{outcome.status:8}  {job.run.name}, {_duration(outcome.seconds)}{code}")
            finally:
                for job in running:
                    job.kill()
    return outcomes


def _check_same(run: Run, found: Outcome, folder: Path) -> None:
    if found.status != "waiting" and list(found.words) != list(run.words):
        raise ValueError(
            f"{folder} holds a run of another command: {' '.join(found.words)}. Remove it, or choose another --folder."
        )
    if found.status == "waiting" and folder.exists() and {file.name for file in folder.iterdir()} - {LOCK, NEW_STATE}:
        raise ValueError(f"{folder} holds files that no sweep put there. Move them, or choose another --folder.")


def _progress(console: Console) -> Progress:
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[left]}  {task.fields[now]}"), console=console, transient=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """One sweep at a time in a folder; a killed one holds nothing."""
    lock = _lock(folder)
    if lock is None:
        raise BlockingIOError(f"Another process runs the sweep in {folder}. Wait for it, or choose another --folder.")
    with lock:
        yield


def _lock(folder: Path) -> IO[str] | None:
    """The folder's lock, or None where another process holds it."""
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _end_orphan(folder: Path, outcome: Outcome) -> None:
    """End the process of a run whose sweep was killed: nobody would learn how it ended."""
    while folder.exists() and (lock := _lock(folder)) is None:
        if outcome.process is not None:
            _kill(outcome.process)
        time.sleep(POLL_SECONDS)
    if folder.exists() and lock is not None:
        lock.close()


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # Lightning takes a mere SIGTERM as a wish


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _duration(seconds: float) -> str:
    """
    >>> _duration(3.2), _duration(200), _duration(9000)
    ('3.2 s', '3.3 min', '2.5 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
