"""The file ``ledger.jsonl``: an append-only, hash-chained history of a run, and how to read it back.

One JSON object a line. Every line ends in ``prev``, the SHA-256 of the line before it (newline left out),
and ``check``, the start of the SHA-256 of its own text up to there, which guards the last line too.

    header      kind, schema, run, forward_flops, and what the run says of itself (label, versions, ...)
    unit        forward_flops, when it became known after the header was written
    steps       first, count, work per account and per step, exact_equivalent per step, seconds per account
    charges     work booked outside any finished step, such as validation
    mark        step, metrics
    resume      step, totals, exact_equivalent: what counts from here on; later marks written before it do not
    recovered   bytes of a torn last line that were dropped

The chain proves order and content. Lines cut off at the very end cannot be told from lines never written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "GENESIS",
    "KIND",
    "RESERVED",
    "SCHEMA",
    "LedgerFile",
    "ledger_path",
    "open_line",
    "plain",
    "run_of",
]

KIND = "lightning_ledger"
SCHEMA = 1
GENESIS = "0" * 64
"""What the first line gives as the hash of the line before it."""

RESERVED = frozenset({"type", "kind", "schema", "run", "forward_flops", "prev", "check"})
"""Keys of the header line that a caller's own fields may not use."""

_TAIL = re.compile(rb'(,"prev":"(?P<prev>[0-9a-f]{64})"),"check":"(?P<check>[0-9a-f]{16})"\}\Z')


def ledger_path(path: str | os.PathLike[str]) -> Path:
    """The ledger file of a run directory; a path that ends in ``.jsonl`` is the file itself.

    Example:
        >>> ledger_path("runs/demo").as_posix(), ledger_path("runs/ledger.1.jsonl").as_posix()
        ('runs/demo/ledger.jsonl', 'runs/ledger.1.jsonl')
    """
    path = Path(path)
    return path if path.suffix == ".jsonl" else path / "ledger.jsonl"


class LedgerFile:
    """The writing end: appends whole lines, each chained to the one before."""

    def __init__(self, path: Path, prev: str = GENESIS) -> None:
        self.path = path
        self._prev = prev

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes the records in one go, so that a kill tears at most the end of the file."""
        prev, lines = self._prev, []
        for record in records:
            line, prev = _seal(record, prev)
            lines.append(line)
        if lines:
            with open(self.path, "ab", buffering=0) as file:
                unwritten = memoryview(b"".join(lines))
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
            self._prev = prev

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> LedgerFile:
        """Starts a file. Another run's file already there is first moved to ``ledger.N.jsonl``."""
        _make_way(path)
        file = cls(path)
        file.append([header])
        return file

    @staticmethod
    def copy(source: Path, path: Path) -> None:
        """Copies a run's file to where the run goes on. Another run's file already there is moved as above."""
        _make_way(path)
        shutil.copyfile(source, path)

    @classmethod
    def reopen(cls, path: Path, prev: str, torn: int) -> LedgerFile:
        """Continues a file whose last good line has the hash ``prev``, dropping ``torn`` bytes after it."""
        file = cls(path, prev)
        if torn:
            os.truncate(path, path.stat().st_size - torn)
            file.append([{"type": "recovered", "bytes": torn}])
        return file


def _make_way(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        free = 1
        while (old := path.with_name(f"{path.stem}.{free}{path.suffix}")).exists():
            free += 1
        path.rename(old)


def run_of(path: Path) -> str | None:
    """The identity of the run that a file belongs to; None if there is no file or no readable header."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        line = file.readline()
    try:
        header, _ = open_line(line.removesuffix(b"\n"), GENESIS)
    except ValueError:
        return None
    return header.get("run")


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: containers kept, non-finite floats and unknown objects as strings.

    Example:
        >>> plain({"loss": float("inf"), "path": Path("runs"), 1: (2.5, None)})
        {'loss': 'inf', 'path': 'runs', '1': [2.5, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


class Unparsable(ValueError):
    """A line that is no JSON object: the only damage that an unfinished write does."""


def _seal(record: Mapping[str, Any], prev: str) -> tuple[bytes, str]:
    body = json.dumps({**record, "prev": prev}, separators=(",", ":"), allow_nan=False).encode()
    line = body[:-1] + b',"check":"%s"}' % _check(body[:-1])
    return line + b"\n", hashlib.sha256(line).hexdigest()


def open_line(line: bytes, prev: str) -> tuple[dict[str, Any], str]:
    """The record in ``line`` and the line's digest, after checking its sum and its place in the chain."""
    try:
        record = json.loads(line)
    except ValueError:
        raise Unparsable("is broken: it is no JSON") from None
    tail = _TAIL.search(line)
    if tail is None or not isinstance(record, dict):
        raise ValueError("is altered: it does not end in a hash and a check sum")
    if _check(line[: tail.end(1)]) != tail["check"]:
        raise ValueError("is altered: its check sum does not match its content")
    if tail["prev"].decode() != prev:
        raise ValueError("does not follow the line before it: a line was altered, removed, added or moved")
    return record, hashlib.sha256(line).hexdigest()


def _check(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()
