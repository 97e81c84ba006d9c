"""The ledger: exact totals of the work a run did, step by step, in memory and in an append-only file."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_ledger.history import (
    LedgerHistory,
    Mark,
    Scan,
    Segment,
    Verification,
    read_ledger,
    verify_ledger,
)
from lightning_ledger.ledger_file import KIND, RESERVED, SCHEMA, LedgerFile, ledger_path, plain, run_of
from lightning_ledger.work import ACCOUNTS, Account, Work, account_of, add_to, by_tier, exact_count

if TYPE_CHECKING:
    from lightning_ledger.prices import PriceBook

__all__ = [
    "ACCOUNTS",
    "Account",
    "Ledger",
    "LedgerHistory",
    "Mark",
    "OpenWork",
    "Segment",
    "Verification",
    "Work",
    "by_tier",
    "ledger_path",
    "read_ledger",
    "verify_ledger",
]


class _Base(NamedTuple):
    """Everything the file already tells: the records still to be written start from here."""

    steps: int = 0
    totals: Mapping[str, Work] = {}
    exact_equivalent: Work = Work()


class OpenWork(NamedTuple):
    """What one of several processes charged since the last step, mark or checkpoint.

    Attributes:
        work: by account. Over processes: the sum, seconds too, as machine hours are added up.
        exact_equivalent: what its samples would have cost exactly. Over processes: the sum.
        forward_flops: its forward-equivalent, if it has one. Over processes: that of the first that has one.
    """

    work: Mapping[str, Work]
    exact_equivalent: Work
    forward_flops: int | None


class Ledger:
    """Books work under accounts, closes optimizer steps, and keeps the history in ``ledger.jsonl``.

    Work is booked in the open step with :meth:`charge` and :meth:`charge_exact_equivalent`, and
    :meth:`end_step` closes it. What is open at a mark, a checkpoint or a flush (validation, as a rule) is
    recorded by itself, so that a step's record holds only what that step did. Totals count everything, open
    work included. Until a file is attached the records wait in memory.

    Args:
        flush_seconds: With a file attached, records are written at marks and checkpoints, and at the end of a
            step when this much time has passed.

    Example:
        >>> from lightning_ledger.prices import PriceBook
        >>> ledger = Ledger()
        >>> ledger.forward_flops = 100
        >>> for _ in range(3):
        ...     ledger.charge("scarce/forward", Work(flops=100))
        ...     ledger.charge("fleet/prediction", Work(flops_by_format={"int8": 600}))
        ...     ledger.end_step()
        >>> ledger.steps, ledger.segments, ledger.totals()["scarce/forward"].flops
        (3, 1, 300)
        >>> round(ledger.cost(PriceBook(fleet_forward=0.05)), 9)  # 3 x (1 + 6 x 0.05)
        3.9
    """

    def __init__(self, *, flush_seconds: float = 30.0) -> None:
        self.run = uuid.uuid4().hex
        """Identity of the run: it ties a checkpoint to the file it continues."""
        self.flush_seconds = flush_seconds
        self._forward_flops: int | None = None
        self._steps = 0
        self._segments = 0
        self._totals: dict[str, Work] = {}
        self._exact = Work()
        self._open: dict[str, Work] = {}
        self._open_exact = Work()
        self._last: tuple[dict[str, Work], Work] | None = None  # what the latest step did, to tell a new segment
        self._tail: Segment | None = None  # the latest steps, still growing
        self._pending: list[dict[str, Any]] = []
        self._base = _Base()
        self._file: LedgerFile | None = None
        self._origin: str | None = None  # the file that a loaded checkpoint's run was writing
        self._flushed_at = time.monotonic()

    def charge(self, account: str, work: Work) -> None:
        """Books ``work`` under ``account`` in the open step.

        Raises:
            ValueError: The account is unknown.
            TypeError: ``work`` is not :class:`Work`.
        """
        account_of(account)
        if not isinstance(work, Work):
            raise TypeError(f"work={work!r} must be Work, such as Work(flops=600), not {type(work).__name__}.")
        if work:
            add_to(self._open, [(account, work)])
            add_to(self._totals, [(account, work)])

    def charge_exact_equivalent(self, work: Work) -> None:
        """Adds what the open step's samples would have cost exactly. It is kept apart from all accounts."""
        self._open_exact += work
        self._exact += work

    def rebook(self, accounts: Mapping[str, str]) -> None:
        """Books the open step's work under other accounts: it turned out to train nothing.

        None of it counts as an exact equivalent any more. What a mark or a checkpoint has recorded stays as it is.

        Args:
            accounts: From an account to the one that its open work moves to; others keep theirs.

        Example:
            >>> ledger = Ledger()
            >>> ledger.charge("scarce/forward", Work(flops=100))
            >>> ledger.rebook({"scarce/forward": "waste/skipped_step"})
            >>> {account: work.flops for account, work in ledger.totals().items()}
            {'waste/skipped_step': 100}
        """
        moved = {account: self._open.pop(account) for account in accounts if account in self._open}
        for account, work in moved.items():
            rest = self._totals[account] - work
            if replace(rest, seconds=0.0):
                self._totals[account] = rest
            else:
                del self._totals[account]  # seconds are rounded
            self.charge(accounts[account], work)
        self._exact -= self._open_exact
        self._open_exact = Work()

    def forget_unit(self) -> None:
        """Leaves the unit open again, if the file does not tell it yet: it was set by what was no training."""
        self._forward_flops = None
        self._pending = [record for record in self._pending if record["type"] != "unit"]

    def open_work(self) -> OpenWork:
        """What is open: all that the other processes do not know of yet."""
        return OpenWork(dict(self._open), self._open_exact, self._forward_flops)

    def add_open(self, shares: Sequence[OpenWork], own: int) -> None:
        """Makes the open work, and with it the totals, that of all processes.

        Args:
            shares: the open work of every process.
            own: which of them is this one's.

        Example:
            >>> ledgers = Ledger(), Ledger()
            >>> for ledger in ledgers:
            ...     ledger.charge("scarce/forward", Work(flops=100))
            >>> shares = [ledger.open_work() for ledger in ledgers]
            >>> for own, ledger in enumerate(ledgers):
            ...     ledger.add_open(shares, own)
            ...     print(ledger.totals()["scarce/forward"].flops)
            200
            200
        """
        for share in (*shares[:own], *shares[own + 1 :]):
            add_to(self._open, share.work.items())
            add_to(self._totals, share.work.items())
            self.charge_exact_equivalent(share.exact_equivalent)
        unit = next((share.forward_flops for share in shares if share.forward_flops), None)
        if unit is not None:
            if self._file is None:  # no record has stated another one
                self._forward_flops = unit
            self.forward_flops = unit

    def end_step(self) -> None:
        """Closes one optimizer step."""
        self._steps += 1
        seconds = {account: work.seconds for account, work in self._open.items() if work.seconds}
        work = {account: work.without_seconds() for account, work in sorted(self._open.items())}
        step = Segment(self._steps, 1, work, self._open_exact.without_seconds(), seconds)
        self._open, self._open_exact = {}, Work()
        if (step.work, step.exact_equivalent) != self._last:
            self._segments += 1
            self._last = work, step.exact_equivalent
        joined = self._tail.joined(step) if self._tail else None
        if joined is None:
            self._cut()
        self._tail = joined or step
        if self._file and time.monotonic() - self._flushed_at >= self.flush_seconds:
            self.flush()

    @property
    def steps(self) -> int:
        """Optimizer steps finished."""
        return self._steps

    @property
    def segments(self) -> int:
        """Runs of consecutive steps with equal work. Not a number of steps."""
        return self._segments

    @property
    def forward_flops(self) -> int | None:
        """FLOPs of one forward-equivalent; None until it is known. It is set once and then stays."""
        return self._forward_flops

    @forward_flops.setter
    def forward_flops(self, flops: int) -> None:
        flops = exact_count("forward_flops", flops)
        if not flops:
            raise ValueError("forward_flops=0 is no unit: it must be the FLOPs of one forward pass, at least 1.")
        if self._forward_flops == flops:
            return
        if self._forward_flops is not None:
            raise ValueError(
                f"forward_flops={flops}, but this ledger already counts in forward-equivalents of "
                f"{self._forward_flops} FLOPs. A unit cannot change within a run: start a new ledger."
            )
        self._forward_flops = flops
        if self._file:
            self._pending.append({"type": "unit", "forward_flops": flops})

    @property
    def exact_equivalent(self) -> Work:
        """What the samples so far would have cost exactly, the open step included."""
        return self._exact

    def totals(self) -> dict[str, Work]:
        """Work by account, the open step included. Accounts never charged are absent."""
        return dict(self._totals)

    def cost(self, prices: PriceBook) -> float:
        """Price of everything so far, validation and waste included."""
        return math.fsum(self.costs(prices).values())

    def costs(self, prices: PriceBook) -> dict[str, float]:
        """Price of each account; :func:`by_tier` sums it into tiers."""
        return prices.costs(self._totals, self._forward_flops)

    def mark(self, metrics: Mapping[str, float]) -> None:
        """Records metrics, such as a validation loss, at the current step and cost."""
        values = {name: float(value) for name, value in metrics.items()}
        self._settle()
        self._pending.append({"type": "mark", "step": self._steps, "metrics": plain(values)})
        self._write()

    def attach(self, path: str | os.PathLike[str], header: Mapping[str, Any] | None = None) -> Path:
        """Starts or continues the run's file.

        A file of this very run (its checkpoint was loaded, or it was attached before) is continued: a torn
        last line is dropped, and work that the file holds beyond the ledger's own becomes waste, under
        ``waste/lost_prediction`` if the fleet did it, else under ``waste/lost_steps``. In a new directory, a
        copy of the file that the checkpoint's run was writing is continued, if it is still there. A file of
        any other run is moved to ``ledger.N.jsonl``: two runs are never mixed.

        Args:
            path: The run's directory, or a file name ending in ``.jsonl``.
            header: What a new file says of the run: label, created, versions, configuration.

        Returns:
            The path of the file.

        Raises:
            ValueError: A header field has a reserved name, the file is damaged, or it counts in another unit.
            RuntimeError: A file is attached already.
        """
        if self._file:
            raise RuntimeError(f"The ledger already writes to {self._file.path}: close() it before attach({path!r}).")
        header = dict(header or {})
        if taken := sorted(RESERVED & set(header)):
            raise ValueError(f"header has the reserved fields {taken}: rename them.")
        path = ledger_path(path)
        self._settle()
        if run_of(path) != self.run and self._origin and run_of(Path(self._origin)) == self.run:
            LedgerFile.copy(Path(self._origin), path)
        if run_of(path) == self.run:
            self._continue(Scan.of(path))
        else:
            own = {"type": "header", "kind": KIND, "schema": SCHEMA, "run": self.run}
            own["forward_flops"] = self._forward_flops
            self._file = LedgerFile.create(path, {**own, **plain(header)})
            if self._base != _Base():
                self._file.append([self._resume_line()])
        self._write()
        return path

    def flush(self) -> None:
        """Writes everything so far to the file, if one is attached."""
        self._settle()
        self._write()

    def close(self) -> None:
        """Flushes, and lets go of the file. The ledger goes on counting, and may be attached again."""
        self.flush()
        self._file = None

    def state_dict(self) -> dict[str, Any]:
        """The ledger for a checkpoint, in plain containers. Flushes first: the file is never behind it."""
        self.flush()
        last = None
        if self._last:
            last = {"work": _dicts(self._last[0].items()), "exact_equivalent": self._last[1].to_dict()}
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "run": self.run,
            "path": str(self._file.path.resolve()) if self._file else self._origin,
            "steps": self._steps,
            "segments": self._segments,
            "forward_flops": self._forward_flops,
            "totals": _dicts(self._totals.items()),
            "exact_equivalent": self._exact.to_dict(),
            "last_step": last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces this ledger by the one a checkpoint holds. Call it before :meth:`attach`.

        Raises:
            ValueError: The state is of another kind or schema. Nothing has changed then.
            RuntimeError: A file is attached already.
        """
        if self._file:
            raise RuntimeError(f"The ledger already writes to {self._file.path}: load_state_dict comes before attach.")
        for key, expected in (("kind", KIND), ("schema", SCHEMA)):
            if state.get(key) != expected:
                raise ValueError(
                    f"state has {key}={state.get(key)!r}, but this version of lightning-ledger loads "
                    f"{expected!r}: it is not a ledger's state, or another version wrote it."
                )
        fresh = Ledger(flush_seconds=self.flush_seconds)
        fresh.run, fresh._origin = str(state["run"]), state.get("path")
        fresh._steps, fresh._segments = int(state["steps"]), int(state["segments"])
        fresh._forward_flops = state["forward_flops"]
        fresh._totals = {account: Work.from_dict(work) for account, work in state["totals"].items()}
        fresh._exact = Work.from_dict(state["exact_equivalent"])
        if last := state["last_step"]:
            work = {account: Work.from_dict(work) for account, work in last["work"].items()}
            fresh._last = work, Work.from_dict(last["exact_equivalent"])
        for account in fresh._totals:
            account_of(account)
        fresh._base = _Base(fresh._steps, dict(fresh._totals), fresh._exact)
        self.__dict__.update(fresh.__dict__)

    def _continue(self, scan: Scan) -> None:
        """Goes on in this run's own file, booking what it holds beyond ``_base`` as waste."""
        history = scan.history
        if history.forward_flops and self._forward_flops not in (None, history.forward_flops):
            raise ValueError(
                f"{scan.path} counts in forward-equivalents of {history.forward_flops} FLOPs, but this "
                f"ledger has forward_flops={self._forward_flops}: the model or micro-batch changed. Resume "
                "with those it was trained with, or start a new run."
            )
        lost: dict[str, Work] = {}
        for account, work in history.totals.items():
            # Lost work keeps the price of the hardware that did it.
            waste = "waste/lost_prediction" if account_of(account).hardware == "fleet" else "waste/lost_steps"
            if excess := work.excess(self._base.totals.get(account, Work())):
                add_to(lost, [(waste, excess)])
        add_to(self._totals, lost.items())
        told = _Base(history.steps, history.totals, history.exact_equivalent)
        self._file = LedgerFile.reopen(scan.path, scan.prev, scan.torn)
        if told != self._base:
            totals = dict(self._base.totals)
            add_to(totals, lost.items())
            self._base = self._base._replace(totals=totals)
            self._file.append([self._resume_line()])
        self._forward_flops = self._forward_flops or history.forward_flops
        if history.forward_flops is None and self._forward_flops:
            self._file.append([{"type": "unit", "forward_flops": self._forward_flops}])

    def _resume_line(self) -> dict[str, Any]:
        steps, totals, exact = self._base
        return {
            "type": "resume",
            "step": steps,
            "totals": _dicts(totals.items()),
            "exact_equivalent": exact.to_dict(),
        }

    def _cut(self) -> None:
        """Ends the growing segment: it becomes a record."""
        if segment := self._tail:
            self._pending.append(
                {
                    "type": "steps",
                    "first": segment.first,
                    "count": segment.count,
                    "work": _dicts(segment.work.items()),
                    "exact_equivalent": segment.exact_equivalent.to_dict(),
                    "seconds": dict(segment.seconds),
                }
            )
            self._tail = None

    def _settle(self) -> None:
        """Turns everything so far into records, open work included."""
        self._cut()
        if self._open or self._open_exact:
            self._pending.append(
                {
                    "type": "charges",
                    "work": _dicts((account, work.without_seconds()) for account, work in self._open.items()),
                    "exact_equivalent": self._open_exact.without_seconds().to_dict(),
                    "seconds": {account: work.seconds for account, work in self._open.items() if work.seconds},
                }
            )
            self._open, self._open_exact = {}, Work()

    def _write(self) -> None:
        """Writes the records, if a file is attached; call it settled."""
        if self._file:
            self._file.append(self._pending)
            self._pending.clear()
            self._base = _Base(self._steps, dict(self._totals), self._exact)
            self._flushed_at = time.monotonic()


def _dicts(works: Iterable[tuple[str, Work]]) -> dict[str, dict[str, Any]]:
    return {account: work.to_dict() for account, work in works}
