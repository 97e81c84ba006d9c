"""Results as small files: CSV for the numbers, JSON for how they were made."""

from __future__ import annotations

import csv
import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


def facts(command: str) -> dict[str, Any]:
    """How a result was made: command, commit, machine and date.

    Args:
        command: what makes it again.
    """
    here = {name: value for name, value in machine().items() if name != "threads"}
    return {"command": command, "commit": commit(), "machine": here, "date": datetime.date.today().isoformat()}


def commit() -> str:
    """The commit of the tree, with "+" where tracked files differ from it; "unknown" outside of git."""
    try:
        named = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return named + "+" * bool(changed)


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of equal columns; None becomes an empty cell, and floats keep six digits."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def read_csv(file: Path) -> list[dict[str, str]]:
    """Its rows, every cell as text."""
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Data with its facts."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _cell(value: Any) -> Any:
    """
    >>> _cell(None), _cell(0.123456789), _cell(12), _cell("x")
    ('', '0.123457', 12, 'x')
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
