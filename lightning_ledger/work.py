"""What was done, in exact integers, and the accounts it is booked under. Prices live elsewhere."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

__all__ = [
    "ACCOUNTS",
    "SKIPPED",
    "TIERS",
    "TUNING",
    "UNLABELLED",
    "Account",
    "Work",
    "account_of",
    "add_to",
    "by_tier",
    "exact_count",
]

UNLABELLED = "unlabelled"
"""The format of FLOPs whose number format nobody stated, once they are mixed with FLOPs that have one."""

_COUNTS = ("bytes", "samples", "tokens", "passes")


@dataclass(frozen=True)
class Work:
    """An amount of work: a unit type that adds to nothing but itself.

    ``flops`` is the sum of ``flops_by_format``. Give either, or both if they agree. With ``flops`` alone the
    mapping stays empty; when such work is added to work that names its formats, the unnamed part is kept
    under ``"unlabelled"``, so that the two always agree.

    Args:
        flops: Floating-point (or integer) operations, a multiply-add counted as two.
        flops_by_format: The same FLOPs by number format, such as ``{"int8": 600}``. Read-only.
        bytes: Bytes transferred between machines.
        samples: Samples processed.
        tokens: Tokens processed.
        passes: Micro-batch passes: what ``per_gradient`` billing counts.
        seconds: Wall-clock time, of several processes together. Information only: it takes no part in equality, hashes
            or prices.

    Raises:
        TypeError: A count is a float, a bool, or anything else that is not an integer.
        ValueError: A count is negative, or ``flops`` and ``flops_by_format`` disagree.

    Example:
        >>> exact = Work(flops=600, samples=4, passes=1)
        >>> (exact * 3).flops
        1800
        >>> exact + Work(flops_by_format={"int8": 200}) - exact
        Work(flops=200, flops_by_format={'int8': 200}, bytes=0, samples=0, tokens=0, passes=0, seconds=0.0)
        >>> exact + 1
        Traceback (most recent call last):
        ...
        TypeError: unsupported operand type(s) for +: 'Work' and 'int'
    """

    flops: int = 0
    flops_by_format: Mapping[str, int] = field(default_factory=dict, hash=False)
    bytes: int = 0
    samples: int = 0
    tokens: int = 0
    passes: int = 0
    seconds: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        own = vars(self)  # this runs several times a step: no detour through object.__setattr__
        for name in ("flops", *_COUNTS):
            own[name] = exact_count(name, own[name])
        own["flops_by_format"], total = _formats(self.flops_by_format)
        if total and self.flops not in (0, total):
            raise ValueError(
                f"flops={self.flops} disagrees with flops_by_format={dict(self.flops_by_format)}, which sums "
                f"to {total}. Leave flops out (it is that sum), or correct one of them."
            )
        own["flops"] = total or self.flops
        own["seconds"] = float(self.seconds)
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds} must be finite and not negative.")

    def __bool__(self) -> bool:
        return bool(self.flops or self.bytes or self.samples or self.tokens or self.passes or self.seconds)

    def __add__(self, other: Work) -> Work:
        if not isinstance(other, Work):
            return NotImplemented
        return self._combine(other, operator.add, self.seconds + other.seconds)

    def __sub__(self, other: Work) -> Work:
        if not isinstance(other, Work):
            return NotImplemented
        return self._combine(other, operator.sub, max(0.0, self.seconds - other.seconds))

    def __mul__(self, times: int) -> Work:
        if isinstance(times, bool) or not isinstance(times, int):
            return NotImplemented
        formats = {name: n * times for name, n in self.flops_by_format.items()}
        counts = {name: getattr(self, name) * times for name in _COUNTS}
        return Work(self.flops * times, formats, seconds=self.seconds * times, **counts)

    __rmul__ = __mul__

    def excess(self, other: Work) -> Work:
        """What this work holds beyond ``other``, count by count: like subtraction, stopping at zero.

        Example:
            >>> Work(flops=5, bytes=1).excess(Work(flops=2, bytes=9)) == Work(flops=3)
            True
        """
        return self._combine(other, lambda a, b: max(0, a - b), max(0.0, self.seconds - other.seconds))

    def without_seconds(self) -> Work:
        """The same work without its wall-clock time."""
        return replace(self, seconds=0.0) if self.seconds else self

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, zero fields left out.

        Example:
            >>> Work(flops_by_format={"int8": 2}, bytes=8).to_dict()
            {'flops': 2, 'flops_by_format': {'int8': 2}, 'bytes': 8}
        """
        named = {"flops": self.flops, "flops_by_format": dict(self.flops_by_format)}
        named.update({name: getattr(self, name) for name in (*_COUNTS, "seconds")})
        return {name: value for name, value in named.items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Work:
        """The work that :meth:`to_dict` wrote.

        Raises:
            ValueError: ``data`` has a key that is no field of ``Work``.
        """
        if unknown := sorted(set(data) - set(cls.__dataclass_fields__)):
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"data has the unknown fields {unknown}; Work has {known}.")
        return cls(**data)

    def _combine(self, other: Work, combine: Any, seconds: float) -> Work:
        counts = {name: combine(getattr(self, name), getattr(other, name)) for name in _COUNTS}
        if self.flops_by_format or other.flops_by_format:
            mine, theirs = self._labelled(), other._labelled()
            formats = {name: combine(mine.get(name, 0), theirs.get(name, 0)) for name in {*mine, *theirs}}
            return Work(0, formats, seconds=seconds, **counts)
        return Work(combine(self.flops, other.flops), seconds=seconds, **counts)

    def _labelled(self) -> Mapping[str, int]:
        return self.flops_by_format or {UNLABELLED: self.flops}


def _formats(given: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """A checked copy of ``given`` without zeros, and its sum. FLOPs that are all unlabelled have no copy."""
    if not given:
        return {}, 0
    counts = {name: exact_count(f"flops_by_format[{name!r}]", n) for name, n in sorted(given.items())}
    counts = {name: n for name, n in counts.items() if n}
    return ({} if counts.keys() == {UNLABELLED} else counts), sum(counts.values())


def exact_count(name: str, value: Any) -> int:
    """``value`` as a non-negative ``int``; ``name`` is what messages call it."""
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(
                f"Work counts exactly: {name} must be an integer, not {value!r}. Floats lose counts above "
                "2**53; round on purpose with int(...), and keep durations in seconds."
            )
        value = operator.index(value)
    if value < 0:
        raise ValueError(f"Work cannot be negative: {name} would be {value}.")
    return int(value)


class Account(NamedTuple):
    """Where work is booked: the tier it is shown under, the hardware that did it, and what it is."""

    tier: str
    hardware: Literal["scarce", "fleet"]
    description: str


ACCOUNTS: Mapping[str, Account] = {
    "scarce/forward": Account("scarce", "scarce", "exact forward passes of training"),
    "scarce/backward": Account("scarce", "scarce", "exact backward passes of training"),
    "scarce/validation": Account("validation", "scarce", "validation passes: they measure the experiment"),
    "fleet/prediction": Account("fleet", "fleet", "predicted gradients of micro-batches not computed exactly"),
    "fleet/control": Account("fleet", "fleet", "predicted gradients of micro-batches also computed exactly"),
    "fleet/probe": Account("fleet", "fleet", "predictions made for statistics alone"),
    "fleet/tuning": Account("fleet", "fleet", "predictions of a learning-rate or batch-size finder"),
    "setup/checks": Account("setup", "scarce", "one-off checks: separability, capture"),
    "setup/tuning": Account("setup", "scarce", "exact work of a learning-rate or batch-size finder"),
    "transfer/weights": Account("transfer", "scarce", "weights and micro-batches sent to the fleet"),
    "transfer/gradients": Account("transfer", "scarce", "gradients sent back by the fleet"),
    "waste/skipped_step": Account(
        "waste", "scarce", "exact work of skipped steps: training_step returned None, or scaled gradients overflowed"
    ),
    "waste/lost_prediction": Account("waste", "fleet", "predictions of skipped or lost steps"),
    "waste/lost_steps": Account("waste", "scarce", "steps computed after the checkpoint that a run resumed from"),
}
"""Every account, by name. The tier is where its cost is shown, the hardware what its FLOPs are priced as."""

SKIPPED: Mapping[str, str] = {
    "scarce/forward": "waste/skipped_step",
    "scarce/backward": "waste/skipped_step",
    "fleet/prediction": "waste/lost_prediction",
    "fleet/control": "waste/lost_prediction",
    "fleet/probe": "waste/lost_prediction",
}
"""Where the work of an optimizer step goes that was skipped after all: see :meth:`Ledger.rebook`."""

TUNING: Mapping[str, str] = {
    "scarce/forward": "setup/tuning",
    "scarce/backward": "setup/tuning",
    "scarce/validation": "setup/tuning",
    "fleet/prediction": "fleet/tuning",
    "fleet/control": "fleet/tuning",
    "fleet/probe": "fleet/tuning",
}
"""Where the work of a finder's steps goes, which train nothing."""

TIERS: tuple[str, ...] = tuple(dict.fromkeys(account.tier for account in ACCOUNTS.values()))
"""The tiers, in the order they are shown."""


def account_of(name: str) -> Account:
    """The account called ``name``.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    try:
        return ACCOUNTS[name]
    except KeyError:
        raise ValueError(f"account={name!r} is unknown. The accounts are: {', '.join(ACCOUNTS)}.") from None


def by_tier(costs: Mapping[str, float]) -> dict[str, float]:
    """Costs by account, summed into tiers. Every tier is present.

    Example:
        >>> tiers = by_tier({"scarce/forward": 1.0, "scarce/backward": 2.0, "waste/lost_prediction": 0.25})
        >>> tiers["scarce"], tiers["waste"], tiers["fleet"]
        (3.0, 0.25, 0.0)
    """
    tiers: dict[str, list[float]] = {tier: [] for tier in TIERS}
    for name, cost in costs.items():
        tiers[account_of(name).tier].append(cost)
    return {tier: math.fsum(parts) for tier, parts in tiers.items()}


def add_to(totals: dict[str, Work], works: Iterable[tuple[str, Work]]) -> None:
    """Adds each ``(account, work)`` to ``totals``, in place."""
    for name, work in works:
        held = totals.get(name)
        totals[name] = work if held is None else held + work
