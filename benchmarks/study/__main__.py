"""Run a part of the study; each is resumable, and writes its numbers under results/."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

from benchmarks.study import breakeven, fidelity, windows
from benchmarks.study.records import RESULTS, ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    add = parser.add_argument
    add("part", type=Literal["fidelity", "windows", "map"], help="`map` needs the results of `fidelity`")
    add("--quick", action="store_true", help="tiny models for seconds: whether it works, and nothing else")
    add(
        "--config",
        type=str,
        help="what to measure; by default configs/study/fidelity.yaml or configs/sweeps/windows.yaml",
    )
    add("--folder", type=str, help="for the runs; by default runs/study/PART")
    add("--results", type=str, help="for the numbers; by default results/, and with --quick the runs' folder")
    add("--jobs", type=int, default=1, help="training runs at a time")
    chosen = parser.parse_args(arguments)
    os.chdir(ROOT)  # the configurations' paths are relative to it
    suffix = "-quick" if chosen.quick else ""
    folder = Path(chosen.folder or f"runs/study/{chosen.part}{suffix}")
    results = Path(chosen.results or (folder / "results" if chosen.quick else RESULTS))
    command = f"make study-{chosen.part}" if not (chosen.quick or chosen.config) else f"{parser.prog} {chosen.part}"
    if chosen.part == "map":
        breakeven.run(results, command)
        return 0
    if chosen.part == "fidelity":
        config = Path(chosen.config or f"configs/study/fidelity{suffix}.yaml")
        fidelity.run(fidelity.FidelityStudy.read(config), folder, results, command)
        return 0
    return windows.run(
        Path(chosen.config or f"configs/sweeps/windows{suffix}.yaml"), folder, results, command, chosen.jobs
    )


if __name__ == "__main__":
    sys.exit(main())
