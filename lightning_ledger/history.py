"""A run's history, read back from its ledger file and checked line by line."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_ledger.ledger_file import GENESIS, KIND, RESERVED, SCHEMA, Unparsable, ledger_path, open_line
from lightning_ledger.work import Work, account_of, add_to

if TYPE_CHECKING:
    from lightning_ledger.prices import PriceBook

__all__ = ["LedgerHistory", "Mark", "Scan", "Segment", "Verification", "read_ledger", "verify_ledger"]


@dataclass(frozen=True)
class Segment:
    """Consecutive optimizer steps that did equal work.

    Args:
        first: Number of the first step; steps count from 1.
        count: How many steps.
        work: Work per account in *each* step.
        exact_equivalent: What each step's samples would have cost exactly.
        seconds: Wall-clock seconds per account over *all* the steps.
    """

    first: int
    count: int
    work: Mapping[str, Work]
    exact_equivalent: Work
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.first + self.count - 1

    def totals(self) -> Iterator[tuple[str, Work]]:
        """Work per account over all the steps."""
        for account, work in self.work.items():
            yield account, replace(work * self.count, seconds=self.seconds.get(account, 0.0))

    def joined(self, later: Segment) -> Segment | None:
        """This segment and the one after it as one, or None if they differ in work."""
        did, does = (self.work, self.exact_equivalent), (later.work, later.exact_equivalent)
        if later.first != self.last + 1 or did != does:
            return None
        seconds = {a: self.seconds.get(a, 0.0) + later.seconds.get(a, 0.0) for a in self.work}
        return replace(self, count=self.count + later.count, seconds=seconds)

    def until(self, step: int) -> Segment:
        """The part of this segment up to and including ``step``, its seconds in proportion."""
        count = min(self.count, step - self.first + 1)
        seconds = {account: s * count / self.count for account, s in self.seconds.items()}
        return replace(self, count=count, seconds=seconds)


@dataclass(frozen=True)
class Mark:
    """Metrics at a step, and the ledger's totals there; ``relogged`` if a resume ran that step again."""

    step: int
    metrics: Mapping[str, float]
    totals: Mapping[str, Work]
    exact_equivalent: Work
    relogged: bool = False


@dataclass(frozen=True)
class LedgerHistory:
    """A run as its file tells it.

    Args:
        header: The header line's own fields (label, versions, configuration, ...).
        label: The header's ``label``, or the name of the run's directory.
        run: Identity of the run, shared by its checkpoints.
        forward_flops: FLOPs of one forward-equivalent, or None if never known.
        steps: Optimizer steps finished.
        segments: The steps, run-length encoded. After a resume into a new directory, those since the resume.
        totals: Work per account.
        exact_equivalent: What the same samples would have cost exactly.
        marks: In order of step.
    """

    header: Mapping[str, Any]
    label: str
    run: str
    forward_flops: int | None
    steps: int
    segments: Sequence[Segment]
    totals: Mapping[str, Work]
    exact_equivalent: Work
    marks: Sequence[Mark]

    def cost(self, prices: PriceBook) -> float:
        """Total price of everything in the ledger, validation and waste included."""
        return math.fsum(self.costs(prices).values())

    def costs(self, prices: PriceBook) -> dict[str, float]:
        """Price of each account."""
        return prices.costs(self.totals, self.forward_flops)


class Verification(NamedTuple):
    """Whether a file is whole and untouched, how many lines are good, and what is wrong with the next one."""

    ok: bool
    lines: int
    problem: str | None


def read_ledger(path: str | os.PathLike[str]) -> LedgerHistory:
    """Reads a run's history from its directory or file. A torn last line, as a killed run leaves, is ignored.

    Raises:
        FileNotFoundError: There is no ledger.
        ValueError: A line is broken or altered (the message has its number), or of another kind or schema.
    """
    return Scan.of(ledger_path(path)).history


def verify_ledger(path: str | os.PathLike[str]) -> Verification:
    """Checks every line's hash and check sum, the order of steps, and the end of the file.

    Raises:
        FileNotFoundError: There is no ledger.
    """
    scan = Scan.of(ledger_path(path), strict=False)
    problem = scan.problem
    if problem is None and scan.torn:
        problem = f"line {scan.lines + 1} is torn ({scan.torn} bytes): the run was killed while writing it. "
        problem += "Resuming the run recovers the file."
    return Verification(problem is None, scan.lines, problem)


class Scan:
    """One pass over a ledger file: its history, its torn bytes, and the first problem, if any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        self.torn = 0
        self.prev = GENESIS
        self.problem: str | None = None
        self._header: dict[str, Any] = {}
        self._forward_flops: int | None = None
        self._steps = 0
        self._redone = 0  # steps up to this one were run before a resume, too
        self._segments: list[Segment] = []
        self._totals: dict[str, Work] = {}
        self._exact = Work()
        self._marks: list[Mark] = []

    @classmethod
    def of(cls, path: Path, *, strict: bool = True) -> Scan:
        """Scans ``path``; ``strict`` raises on the first problem instead of noting it."""
        if not path.is_file():
            raise FileNotFoundError(
                f"No ledger at {path}. Pass a run's directory, which holds ledger.jsonl, or that file itself."
            )
        scan = cls(path)
        raw, good_bytes = path.read_bytes(), 0
        lines = raw.split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                record, digest = open_line(line, scan.prev)
                scan._take(record)
            except Unparsable as error:
                # An unfinished write can leave garbage at the very end; anywhere else it is damage.
                if number < len(lines) - 1 or lines[-1]:
                    scan.problem = f"line {number} {error}"
                break
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                reason = f"lacks the field {error}" if isinstance(error, KeyError) else str(error)
                scan.problem = f"line {number} {reason}"
                break
            scan.prev, scan.lines = digest, number
            good_bytes += len(line) + 1
        if scan.problem is None:
            scan.torn = len(raw) - good_bytes
            if not scan.lines:
                scan.problem = "line 1 is no whole header: nothing can be read"
        if strict and scan.problem:
            raise ValueError(f"{path}: {scan.problem}. Restore the file from a copy, or leave this run out.")
        return scan

    @property
    def history(self) -> LedgerHistory:
        """What the good lines tell."""
        header = self._header
        return LedgerHistory(
            header={k: v for k, v in header.items() if k not in RESERVED},
            label=str(header.get("label") or self.path.resolve().parent.name),
            run=header.get("run", ""),
            forward_flops=self._forward_flops,
            steps=self._steps,
            segments=tuple(self._segments),
            totals=dict(self._totals),
            exact_equivalent=self._exact,
            marks=tuple(self._marks),
        )

    def _take(self, record: dict[str, Any]) -> None:
        kind = record["type"]
        if (kind == "header") != (not self._header):
            raise ValueError(f"has type {kind!r}: a header is the first line and only that")
        take = getattr(self, f"_take_{kind}", None)
        if take is None:
            raise ValueError(f"has the unknown type {kind!r}")
        take(record)

    def _take_header(self, record: dict[str, Any]) -> None:
        if (record["kind"], record["schema"]) != (KIND, SCHEMA):
            raise ValueError(
                f"says kind {record['kind']!r}, schema {record['schema']!r}; this version reads {KIND!r}, {SCHEMA!r}"
            )
        self._header = record
        self._forward_flops = record["forward_flops"]

    def _take_unit(self, record: dict[str, Any]) -> None:
        self._forward_flops = record["forward_flops"]

    def _take_steps(self, record: dict[str, Any]) -> None:
        segment = Segment(
            record["first"],
            record["count"],
            _works(record["work"]),
            Work.from_dict(record["exact_equivalent"]),
            record["seconds"],
        )
        if segment.first != self._steps + 1 or segment.count < 1:
            raise ValueError(
                f"tells {segment.count} steps from step {segment.first}, but step {self._steps} came before"
            )
        self._steps = segment.last
        add_to(self._totals, segment.totals())
        self._exact += segment.exact_equivalent * segment.count
        joined = self._segments[-1].joined(segment) if self._segments else None
        if joined is None:
            self._segments.append(segment)
        else:
            self._segments[-1] = joined

    def _take_charges(self, record: dict[str, Any]) -> None:
        seconds = record["seconds"]
        works = _works(record["work"])
        add_to(self._totals, ((a, replace(w, seconds=seconds.get(a, 0.0))) for a, w in works.items()))
        self._exact += Work.from_dict(record["exact_equivalent"])

    def _take_mark(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if step != self._steps:
            raise ValueError(f"marks step {step}, but {self._steps} steps came before")
        metrics = {name: float(value) for name, value in record["metrics"].items()}
        self._marks.append(Mark(step, metrics, dict(self._totals), self._exact, step <= self._redone))

    def _take_resume(self, record: dict[str, Any]) -> None:
        self._redone = max(self._redone, self._steps)
        self._steps = step = record["step"]
        self._totals = _works(record["totals"])
        self._exact = Work.from_dict(record["exact_equivalent"])
        self._segments = [s.until(step) for s in self._segments if s.first <= step]
        self._marks = [mark for mark in self._marks if mark.step <= step]

    def _take_recovered(self, record: dict[str, Any]) -> None:
        if record["bytes"] < 1:
            raise ValueError(f"says that {record['bytes']} bytes were lost")


def _works(data: Mapping[str, Mapping[str, Any]]) -> dict[str, Work]:
    for account in data:
        account_of(account)
    return {account: Work.from_dict(work) for account, work in data.items()}
