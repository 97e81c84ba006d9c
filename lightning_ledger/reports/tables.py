"""The comparison as a table for the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lightning_ledger.prices import FORWARD_EQUIVALENTS
from lightning_ledger.reports.compare import TRAINING_TIERS, Comparison

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["amount", "describe_prices", "render"]


def render(comparison: Comparison, console: Console | None = None) -> None:
    """Prints the comparison. It is made to read well at 100 columns.

    Args:
        comparison: What :func:`~lightning_ledger.reports.compare` returned.
        console: Where to print; by default the terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width of its own, and 80 columns would fold the cells.
    console = console or (Console() if sys.stdout.isatty() else Console(width=110))
    rows = comparison.rows
    tiers = [tier for tier in TRAINING_TIERS if any(row.tiers[tier] for row in rows)]
    table = Table(
        title=f"Cost of training to {comparison.metric} {_target(comparison)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("run", overflow="fold", min_width=12)
    for name in ("steps", "best", "final", *tiers, "total", "to target", "saving"):
        table.add_column(name, justify="right", no_wrap=name != "to target")
    cheapest = comparison.cheapest_exact
    for row in rows:
        table.add_row(
            row.label,
            f"{row.steps:,}",
            f"{row.best:.4g}",
            f"{row.final:.4g}",
            *(amount(row.tiers[tier]) for tier in tiers),
            amount(row.total),
            f"never (best {row.best:.4g})" if row.cost_to_target is None else amount(row.cost_to_target),
            "-" if row.saving is None else f"{row.saving:.1%}",
            style="bold" if row is cheapest else None,
        )
    console.print(table)
    for note in _notes(comparison):
        console.print(note, highlight=False, markup=False, soft_wrap=False)


def amount(value: float) -> str:
    """A cost with three significant digits or all its whole ones.

    Example:
        >>> amount(0), amount(0.01234), amount(12.345), amount(7200.4)
        ('0', '0.0123', '12.3', '7,200')
    """
    if not value:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def describe_prices(comparison: Comparison) -> str:
    """The prices in one line."""
    book = comparison.prices
    fleet = "a prediction" if book.fleet_billing == "per_gradient" else "a forward-equivalent"
    text = f"fleet {book.fleet_forward:g} and scarce {book.scarce_forward:g} {book.currency}"
    if book.currency == FORWARD_EQUIVALENTS:
        text = f"fleet price {book.fleet_forward:g} of a scarce forward for {fleet}"
        text += f", scarce {book.scarce_forward:g}" if book.scarce_forward != 1 else ""
    else:
        text += f" for {fleet}"
    for name, price in sorted(book.fleet_formats.items()):
        text += f", {name} {price:g}"
    if book.gigabyte:
        text += f", {book.gigabyte:g} a gigabyte"
    return text


def _notes(comparison: Comparison) -> list[str]:
    book, cheapest = comparison.prices, comparison.cheapest_exact
    dated = f", {book.date}" if book.date else ""
    validation = [amount(row.validation) for row in comparison.rows]
    apart = validation[0] if len(set(validation)) == 1 else f"{', '.join(validation)} in this order"
    target = f"Target: {comparison.target:.4g}, {comparison.target_rule}; "
    target += "cost is taken at the first validation at or beyond it."
    return [
        target,
        f"Saving: against the cheapest exact run that reached the target, {cheapest.label!r}."
        if cheapest
        else "Saving: no exact run reached the target, so there is nothing to save against.",
        f"Unit: {book.currency}; 1 forward-equivalent = {comparison.unit_flops:,} FLOPs.",
        f"Prices: {describe_prices(comparison)} (source: {book.source}{dated}).",
        f"Validation measures the experiment and is not in the total: {apart}.",
    ]


def _target(comparison: Comparison) -> str:
    return f"{'<=' if comparison.mode == 'min' else '>='} {comparison.target:.4g}"
