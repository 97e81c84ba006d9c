"""The command `lightning-ledger sweep`."""

from __future__ import annotations

import shlex
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.table import Table

from lightning_ledger.sweeps.definition import Sweep
from lightning_ledger.sweeps.running import LOG, Outcome, run_all

DESCRIPTION = (
    "Run a W&B sweep file (grid or random) on this machine, each run as a process in a folder of its own. Finished "
    "runs are skipped, so that a sweep that was killed goes on where it stood."
)
EXAMPLE = "configs/sweeps/demo.yaml --jobs 2"


def add_options(parser: ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add("file", help="a W&B sweep file; `wandb sweep` and an agent run the same one")
    add("--folder", type=str, help="where the runs' folders go; by default runs/sweeps/NAME")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--count", type=int, help="at most so many runs; a random sweep needs it, or the file's run_cap")
    add("--seed", type=int, default=0, help="of a random sweep's draws")
    add("--retry", action="store_true", help="run those again that failed")
    add("--dry-run", action="store_true", help="print the commands, and run nothing")


def sweep(chosen: Namespace) -> int:
    """Run a sweep file here.

    Args:
        chosen: the options.

    Returns:
        0 if every run succeeded, else 1.

    Raises:
        OSError: the file cannot be read, or the sweep runs already.
        ValueError: an option or the file makes no sense.
    """
    if chosen.jobs < 1 or (chosen.count is not None and chosen.count < 1):
        raise ValueError(f"--jobs={chosen.jobs} and --count={chosen.count} must be at least 1.")
    definition = Sweep.read(chosen.file)
    runs = definition.runs(chosen.count, chosen.seed)
    folder = Path(chosen.folder or f"runs/sweeps/{definition.name}")
    if chosen.dry_run:
        for run in runs:
            print(shlex.join(run.command(folder / run.name)))
        return 0
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too
    try:
        outcomes = run_all(runs, folder, chosen.jobs, chosen.retry)
    finally:
        signal.signal(signal.SIGTERM, before)
    render_outcomes(outcomes, folder)
    return 0 if all(outcome.status == "finished" for outcome in outcomes.values()) else 1


def render_outcomes(outcomes: Mapping[str, Outcome], folder: Path, console: Console | None = None) -> None:
    """Prints how many runs finished, and of each that failed its exit code and the end of its log.

    Args:
        outcomes: by the run's name.
        folder: of the sweep.
        console: where to print; by default the terminal.
    """
    console = console or Console()
    counts = Counter(outcome.status for outcome in outcomes.values())
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.status == "failed"}
    if failed:
        table = Table("run", "exit code", "last line", title="These runs failed")
        for name, outcome in failed.items():
            last = next((line for line in reversed(outcome.last_lines) if line.strip()), "")
            table.add_row(name, str(outcome.exit_code), last)
        console.print(table)
        console.print(f"Their logs: {folder}/NAME/{LOG}. --retry runs them again.", soft_wrap=True)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.print(f"{told}. Compare them: lightning-ledger compare {folder}/*/", soft_wrap=True)
