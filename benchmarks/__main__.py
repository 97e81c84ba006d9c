"""Measure, print and keep as JSON: the plug-in's own overhead, and training steps as programs in each number format."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser
from rich.console import Console

from benchmarks import overhead, programs
from benchmarks.machine import machine, physical_cores
from benchmarks.steps import MODELS, ROWS

# A second thread waits, in each of an overhead step's many small operations, for whatever else the machine does.
OVERHEAD_THREADS = 1
SMALLEST = "gpt 10M"


def parse(arguments: list[str] | None = None) -> Any:
    """The command line."""
    parser = ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="?", type=Literal["all", "overhead", "programs"], default="all")
    parser.add_argument("--quick", action="store_true", help="of the programs, the smallest model only")
    parser.add_argument("--models", type=list[str], default=list(MODELS), help="of the programs")
    parser.add_argument(
        "--rows",
        type=list[str],
        default=list(ROWS),
        help="of the programs: further ones are 'captured FORMAT' and 'compiled FORMAT'",
    )
    parser.add_argument("--rounds", type=int | None, help="at most; 30 of each race, 7 of each model's programs")
    parser.add_argument("--seconds", type=float | None, help="about; 35 for each race, 240 for each model's programs")
    parser.add_argument("--threads", type=int | None, help="1 for the overhead, all physical cores for programs")
    parser.add_argument("--json", type=str, default="runs/bench.json", help="where the numbers go")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.models = [SMALLEST]
    if unknown := sorted(set(chosen.models) - set(MODELS)):
        parser.error(f"--models: {', '.join(unknown)} is not one of {', '.join(MODELS)}")
    return chosen


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    chosen = parse(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell of its start and stop
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for advice in ("does not have many workers", "no `val_dataloader`", "treespec"):
        warnings.filterwarnings("ignore", f".*{advice}")
    console, report = Console(), dict[str, Any]()
    if chosen.what != "programs":
        torch.set_num_threads(chosen.threads or OVERHEAD_THREADS)
        facts = machine()
        rows = overhead.measure(chosen.rounds or 30, chosen.seconds or 35.0)
        console.print(overhead.table(rows, facts))
        report |= {"machine": facts, "rows": [row.to_dict() for row in rows]}
        write(chosen.json, report)
    if chosen.what != "overhead":
        torch.set_num_threads(chosen.threads or physical_cores())
        models = {name: MODELS[name] for name in chosen.models}
        with programs.progress_bar() as progress:
            for found in programs.measure(models, chosen.rows, chosen.rounds or 7, chosen.seconds or 240.0, progress):
                progress.console.print(programs.table(found["models"][-1]))
                report["programs"] = found
                write(chosen.json, report)
    print(f"wrote {chosen.json}")


def write(file: str, report: dict[str, Any]) -> None:
    """Keep what is known so far."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
