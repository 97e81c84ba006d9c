"""What work costs: dated, sourced price books. A ledger holds none, so a finished run can be re-priced."""

from __future__ import annotations

import datetime
import difflib
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from lightning_ledger.work import UNLABELLED, Work, account_of

__all__ = ["FORWARD_EQUIVALENTS", "PriceBook"]

FORWARD_EQUIVALENTS = "forward-equivalents"
"""The default currency: 1 is the price of one exact forward pass of one micro-batch on the training GPU."""

FleetBilling = Literal["per_forward_equivalent", "per_gradient"]


@dataclass(frozen=True)
class PriceBook:
    r"""Prices, in one currency, of work on the training GPU (scarce), on the fleet, and on the wire.

    With :math:`F` the FLOPs of one forward-equivalent, work of :math:`x` FLOPs (:math:`x_f` of them in format
    :math:`f`), :math:`m` passes and :math:`b` transferred bytes costs

    .. math::
        \text{scarce} &= \tfrac{x}{F}\,\texttt{scarce\_forward} + \tfrac{b}{10^9}\,\texttt{gigabyte} \\
        \text{fleet, per\_forward\_equivalent} &= \textstyle\sum_f \tfrac{x_f}{F}\,p_f
            + \tfrac{b}{10^9}\,\texttt{gigabyte} \\
        \text{fleet, per\_gradient} &= m\,p_{f^*} + \tfrac{b}{10^9}\,\texttt{gigabyte}

    where :math:`p_f` is ``fleet_formats[f]``, or ``fleet_forward`` for a format not listed, and :math:`f^*`
    the format with most FLOPs in that work. Own definition. Prices are computed in double precision.

    Args:
        scarce_forward: Price of one forward-equivalent on the training GPU.
        fleet_forward: Price of one forward-equivalent on the fleet, or of one whole prediction: see next.
        fleet_billing: ``per_forward_equivalent`` prices the FLOPs of a prediction (about three forwards),
            ``per_gradient`` prices a whole prediction at ``fleet_forward``.
        fleet_formats: Prices that override ``fleet_forward`` by format, such as ``{"int8": 0.03}``.
        gigabyte: Price of :math:`10^9` transferred bytes.
        currency: What the prices are in. Dollars and joules change with time, so they need a ``date``.
        date: When the prices were true, as YYYY-MM-DD. Simulated prices have none and never go stale.
        source: Where the prices come from.
        forward_flops: FLOPs of the forward-equivalent that these prices are for. By default that of the run they are
            applied to; prices in dollars or joules should name it.
        max_age_days: Age beyond which the book is stale.

    Raises:
        ValueError: A price is negative or not finite, the billing rule is unknown, or the date is malformed
            or missing.
        TypeError: A price is not a number.

    Example:
        >>> book = PriceBook(fleet_forward=0.05)
        >>> prediction = Work(flops_by_format={"int8": 300}, passes=1)
        >>> round(book.cost("fleet/prediction", prediction, forward_flops=100), 12)
        0.15
        >>> book.cost("scarce/forward", Work(flops=100), forward_flops=100)
        1.0
    """

    scarce_forward: float = 1.0
    fleet_forward: float = 0.05
    fleet_billing: FleetBilling = "per_forward_equivalent"
    fleet_formats: Mapping[str, float] = field(default_factory=dict, hash=False)
    gigabyte: float = 0.0
    currency: str = FORWARD_EQUIVALENTS
    date: str | None = None
    source: str = ""
    forward_flops: int | None = None
    max_age_days: int = 180

    def __post_init__(self) -> None:
        for name in ("scarce_forward", "fleet_forward", "gigabyte"):
            _check_price(name, getattr(self, name))
        for format_name, price in self.fleet_formats.items():
            _check_price(f"fleet_formats[{format_name!r}]", price)
        object.__setattr__(self, "fleet_formats", dict(self.fleet_formats))
        if self.fleet_billing not in get_args(FleetBilling):
            raise ValueError(
                f"fleet_billing={self.fleet_billing!r} is unknown; use {' or '.join(get_args(FleetBilling))}."
            )
        if isinstance(self.max_age_days, bool) or not isinstance(self.max_age_days, int) or self.max_age_days < 1:
            raise ValueError(f"max_age_days={self.max_age_days!r} must be a whole number of days, at least 1.")
        if isinstance(self.date, datetime.date):  # what YAML makes of an unquoted date
            object.__setattr__(self, "date", self.date.isoformat()[:10])
        if self.date is not None:
            _parse_date(self.date)
        elif self.currency != FORWARD_EQUIVALENTS:
            raise ValueError(
                f"currency={self.currency!r} needs a date: prices in it change with time. Pass "
                f"date='YYYY-MM-DD', when you read them, or keep currency={FORWARD_EQUIVALENTS!r}."
            )
        if not self.source:
            simulated = self.currency == FORWARD_EQUIVALENTS and self.date is None
            object.__setattr__(self, "source", "simulated" if simulated else "unstated")

    def cost(self, account: str, work: Work, forward_flops: int | None) -> float:
        """The price of ``work`` booked under ``account``, in :attr:`currency`.

        Args:
            account: One of :data:`~lightning_ledger.work.ACCOUNTS`; it says which hardware did the work.
            work: The work.
            forward_flops: FLOPs of one forward-equivalent. None is allowed for work without FLOPs.

        Raises:
            ValueError: The account is unknown, ``forward_flops`` is missing, or work on the fleet counts no
                passes and is billed per gradient.
        """
        forward_flops = self.forward_flops or forward_flops
        transfer = work.bytes / 1e9 * self.gigabyte
        if not work.flops:
            return transfer
        if account_of(account).hardware == "scarce":
            return _ratio(work.flops, forward_flops) * self.scarce_forward + transfer
        formats = work.flops_by_format or {UNLABELLED: work.flops}
        if self.fleet_billing == "per_forward_equivalent":
            parts = [_ratio(n, forward_flops) * self._fleet_price(name) for name, n in formats.items()]
            return math.fsum((*parts, transfer))
        if not work.passes:
            raise ValueError(
                f"work under {account!r} has {work.flops} FLOPs but passes=0, so "
                "fleet_billing='per_gradient' would bill nothing. Charge it with passes, or use "
                "fleet_billing='per_forward_equivalent'."
            )
        return work.passes * self._fleet_price(max(formats, key=lambda name: formats[name])) + transfer

    def costs(self, totals: Mapping[str, Work], forward_flops: int | None) -> dict[str, float]:
        """The price of each account of ``totals``; see :meth:`cost`."""
        return {account: self.cost(account, work, forward_flops) for account, work in totals.items()}

    def with_fleet_price(self, price: float) -> PriceBook:
        """The same book with one price for all fleet work, whatever its format.

        Example:
            >>> PriceBook(fleet_formats={"int8": 0.02}).with_fleet_price(0.1).fleet_forward
            0.1
        """
        return replace(self, fleet_forward=price, fleet_formats={})

    def stale(self, today: datetime.date | None = None) -> bool:
        """Whether the prices are older than :attr:`max_age_days`. A book without a date never is.

        Example:
            >>> book = PriceBook(currency="USD", date="2026-01-01", source="invoice")
            >>> book.stale(datetime.date(2026, 6, 30)), book.stale(datetime.date(2026, 7, 1))
            (False, True)
        """
        return self._age(today) > self.max_age_days

    def warn_if_stale(self, today: datetime.date | None = None) -> None:
        """Emits a ``UserWarning`` with date, source and age if the book is stale."""
        if self.stale(today):
            warnings.warn(
                f"The price book of {self.date} (source: {self.source}) is {self._age(today)} days old, more "
                f"than max_age_days={self.max_age_days}. Read the prices again and update its date.",
                stacklevel=2,
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, every field; ``PriceBook(**book.to_dict()) == book``."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "fleet_formats": dict(self.fleet_formats)}

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> PriceBook:
        """Reads a book from a YAML mapping whose keys are this class's arguments.

        Raises:
            ValueError: The file is no mapping, has an unknown key (the nearest valid one is named), or a bad
                value.
        """
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"{path} must hold a mapping such as 'fleet_forward: 0.05', not {type(data).__name__}.")
        known = [entry.name for entry in fields(cls)]
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0)[0]
                raise ValueError(f"{path}: unknown key {key!r}; did you mean {near!r}? Keys are: {', '.join(known)}.")
        return cls(**data)

    def _fleet_price(self, format_name: str) -> float:
        return self.fleet_formats.get(format_name, self.fleet_forward)

    def _age(self, today: datetime.date | None) -> int:
        if self.date is None:
            return 0
        return ((today or datetime.date.today()) - _parse_date(self.date)).days


def _ratio(flops: int, forward_flops: int | None) -> float:
    if not forward_flops:
        raise ValueError(
            f"forward_flops={forward_flops} is not known, so {flops} FLOPs cannot be priced. "
            "It is the FLOPs of one forward pass of one micro-batch: set Ledger.forward_flops first."
        )
    return flops / forward_flops  # exact integers, one correctly rounded double


def _check_price(name: str, price: Any) -> None:
    if isinstance(price, bool) or not isinstance(price, int | float):
        raise TypeError(f"{name}={price!r} must be a number.")
    if not 0 <= price < math.inf:
        raise ValueError(f"{name}={price!r} must be a price: finite and not negative.")


def _parse_date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(f"date={text!r} is no date; write it as YYYY-MM-DD, such as 2026-01-31.") from None
