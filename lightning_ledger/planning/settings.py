"""What a dry run is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ledger.precision import ROUNDINGS, parse_formats
from lightning_ledger.prices import PriceBook

FORMATS = ("bf16", "int8", "int4")


@dataclass(frozen=True)
class PlanSettings:
    """The options of ``lightning-ledger plan``.

    Args:
        formats: number formats to try, such as ``int8,bf16,int4``; by default these three, and first that of the
            ``GradientPrediction`` in the configuration. Products can be set apart, as there.
        roundings: ways of rounding to try. Formats of 16 bits and more round to nearest only, if that is among them.
        fleet_price: price of one forward-equivalent on the fleet, whatever its format; by default the price book's.
        prices: a price book in YAML.
        batches: batches to look at, at most.
        minutes: begin no batch that would end later than this; of the first batch, look at as many micro-batches as
            fit, three at least.
        json: write the forecast there; ``-`` prints it instead of the table.
        png: plot R against the fleet price there.

    Raises:
        ValueError: if a format, a rounding or a number is none.

    Example:
        >>> PlanSettings(formats="int8,int4:grad_weight=bf16,attention=bf16").asked("int8")
        ('int8', 'int4:grad_weight=bf16,attention=bf16')
    """

    formats: str | None = None
    roundings: str = "nearest,stochastic"
    fleet_price: float | None = None
    prices: str | None = None
    batches: int = 8
    minutes: float = 5.0
    json: str | None = None
    png: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, bool) or self.batches < 1:
            raise ValueError(f"batches={self.batches}: a plan looks at 1 batch or more.")
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes={self.minutes} must be a positive number of minutes.")
        if unknown := [rounding for rounding in self.ways_of_rounding if rounding not in ROUNDINGS]:
            raise ValueError(f"roundings={self.roundings!r}: {unknown[0]!r} is unknown; use {','.join(ROUNDINGS)}.")
        if not self.ways_of_rounding:
            raise ValueError(f"roundings={self.roundings!r} names none; use {','.join(ROUNDINGS)}.")
        self.asked("fp32")

    @property
    def ways_of_rounding(self) -> tuple[str, ...]:
        """The roundings, each once."""
        return tuple(dict.fromkeys(part.strip() for part in self.roundings.split(",") if part.strip()))

    def asked(self, configured: str | None) -> tuple[str, ...]:
        """The formats to try, each once, by their shortest names.

        Args:
            configured: the format of the user's own ``GradientPrediction``, if there is one.
        """
        if self.formats is None:
            specs: Sequence[str] = (*filter(None, [configured]), *FORMATS)
        else:
            specs = _split(self.formats)
        if not specs:
            raise ValueError(f"formats={self.formats!r} names none; write for example 'int8,int4'.")
        return tuple(dict.fromkeys(parse_formats(spec).name for spec in specs))

    def book(self, own: PriceBook | None = None) -> PriceBook:
        """The price book that these options make: a file's, or that of the user's ``ComputeLedger``, or the default."""
        book = PriceBook.from_yaml(self.prices) if self.prices is not None else own or PriceBook()
        return book if self.fleet_price is None else book.with_fleet_price(self.fleet_price)


def _split(text: str) -> list[str]:
    """Splits at commas, but for those inside a spec.

    >>> _split("int8, int4:grad_weight=bf16,attention=bf16,bf16")
    ['int8', 'int4:grad_weight=bf16,attention=bf16', 'bf16']
    """
    specs: list[str] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        if specs and "=" in part and ":" not in part:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs
