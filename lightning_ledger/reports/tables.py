"""Comparisons and re-pricings as tables for the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lightning_ledger.prices import FORWARD_EQUIVALENTS, PriceBook
from lightning_ledger.reports.compare import Comparison
from lightning_ledger.reports.intervals import Estimate
from lightning_ledger.reports.pricing import TRAINING_TIERS
from lightning_ledger.reports.reprice import RepricedArm, Repricing
from lightning_ledger.reports.ways import Way

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["amount", "describe_prices", "estimate", "price_of", "render", "render_repricing", "verdict"]


def render(comparison: Comparison, console: Console | None = None) -> None:
    """Prints the comparison. It is made to read well at 100 columns.

    Args:
        comparison: What :func:`~lightning_ledger.reports.compare` returned.
        console: Where to print; by default the terminal.
    """
    console = console or _terminal()
    rows = comparison.rows
    tiers = [tier for tier in TRAINING_TIERS if any(row.tiers[tier] for row in rows)]
    table = _table(f"Cost of training to {comparison.metric} {_target(comparison)}")
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
    console.print(_ways(comparison))
    _print_notes(console, _notes(comparison))


def render_repricing(repricing: Repricing, console: Console | None = None) -> None:
    """Prints the cost to the target over fleet prices. It is made to read well at 100 columns with seven prices.

    Args:
        repricing: What :func:`~lightning_ledger.reports.reprice` returned.
        console: Where to print; by default the terminal.
    """
    console = console or _terminal()
    table = _table(f"Cost of training to {repricing.metric} {_target(repricing)}, by fleet price")
    table.add_column("run", overflow="fold", min_width=12)
    for price in repricing.fleet_prices:
        table.add_column(f"{price:g}", justify="right", no_wrap=True)
    table.add_column("against exact", justify="right", max_width=16)
    cheapest = repricing.cheapest_exact
    for arm in repricing.arms:
        costs = [arm.cost(price) for price in repricing.fleet_prices]
        name = arm.label if len(arm.runs) == 1 else f"{arm.label} (n={len(arm.runs)})"
        table.add_row(
            name,
            *(f"> {amount(cost.mean)}" if arm.censored else estimate(cost, "\n") for cost in costs),
            verdict(arm),
            style="bold" if arm is cheapest else None,
        )
    console.print(table)
    _print_notes(console, _repricing_notes(repricing))


def verdict(arm: RepricedArm) -> str:
    """What the cheapest exact arm has to do with this one, in a few words."""
    if arm.verdict == "below":
        return f"pays below {arm.break_even:.3g}"
    if arm.verdict == "censored":
        reached = sum(run.reached for run in arm.runs)
        return "never reached" if not reached else f"reached by {reached}/{len(arm.runs)}"
    words = {"yardstick": "cheapest exact", "always": "always pays", "never": "never pays", "no exact run": "-"}
    return words[arm.verdict]


def estimate(cost: Estimate, separator: str = " ") -> str:
    """A mean, with its 95% interval if there is one.

    Example:
        >>> estimate(Estimate(1260.0, 90.0, 3)), estimate(Estimate(1260.0, None, 1))
        ('1,260 ±90', '1,260')
    """
    return amount(cost.mean) + (f"{separator}±{amount(cost.half_width)}" if cost.half_width is not None else "")


def amount(value: float) -> str:
    """A cost with three significant digits or all its whole ones.

    Example:
        >>> amount(0), amount(0.01234), amount(12.345), amount(7200.4)
        ('0', '0.0123', '12.3', '7,200')
    """
    if not value:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def price_of(book: PriceBook) -> str:
    """What the fleet price buys, and in what currency."""
    bought = "a prediction" if book.fleet_billing == "per_gradient" else "a forward-equivalent"
    if book.currency == FORWARD_EQUIVALENTS:
        return f"{'scarce forwards' if book.scarce_forward == 1 else book.currency} for {bought}"
    return f"{book.currency} for {bought}"


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


def _ways(comparison: Comparison) -> Table:
    table = _table("Ways to spend, each by its cheapest arm")
    table.add_column("way", overflow="fold", min_width=16)
    table.add_column("arm", overflow="fold", min_width=12)
    for name in ("batch", "exact", "format", "lr", "reached", "to target", "saving"):
        table.add_column(name, justify="right", no_wrap=name != "to target")
    for way in comparison.ways:
        table.add_row(*_way_cells(way))
    return table


def _way_cells(way: Way) -> list[str]:
    if way.arm is None:
        return [way.name, way.note, *"-------"]
    arm, settings = way.arm, way.arm.settings
    others = f" (best of {way.tried})" if way.tried > 1 else ""
    return [
        way.name,
        arm.label + others,
        "-" if settings.batch is None else f"{settings.batch:,.4g}",
        "-" if settings.exact_share is None else f"{settings.exact_share:.3g}",
        settings.format or "-",
        "-" if settings.learning_rate is None else f"{settings.learning_rate:g}",
        f"{arm.reached}/{len(arm.runs)}",
        f"never (best {arm.best:.4g})" if arm.cost_to_target is None else estimate(arm.cost_to_target),
        "-" if arm.saving is None else f"{arm.saving:.1%}",
    ]


def _notes(comparison: Comparison) -> list[str]:
    book, cheapest = comparison.prices, comparison.cheapest_exact
    dated = f", {book.date}" if book.date else ""
    validation = [amount(row.validation) for row in comparison.rows]
    apart = validation[0] if len(set(validation)) == 1 else f"{', '.join(validation)} in this order"
    target = f"Target: {comparison.target:.4g}, {comparison.target_rule}; "
    target += "cost is taken at the first validation at or beyond it."
    ways = "Ways: batch in samples a step; exact, the share of them with an exact gradient; ± is Student's 95% "
    ways += "interval over seeds; a dash, not recorded in the ledger or not the same in all runs of the arm."
    return [
        target,
        f"Saving: against the cheapest exact run that reached the target, {cheapest.label!r}."
        if cheapest
        else "Saving: no exact run reached the target, so there is nothing to save against.",
        f"Unit: {book.currency}; 1 forward-equivalent = {comparison.unit_flops:,} FLOPs.",
        f"Prices: {describe_prices(comparison)} (source: {book.source}{dated}).",
        f"Validation measures the experiment and is not in the total: {apart}.",
        ways,
    ]


def _repricing_notes(repricing: Repricing) -> list[str]:
    book, cheapest = repricing.prices, repricing.cheapest_exact
    target = f"Target: {repricing.target:.4g}, {repricing.target_rule}; "
    target += "cost is taken at the first validation at or beyond it, and validation is not counted."
    columns = f"Columns: the fleet price, in {price_of(book)}. Costs in {book.currency}; "
    columns += f"1 forward-equivalent = {repricing.unit_flops:,} FLOPs."
    notes = [
        target,
        f"Against the cheapest exact run that reached the target, {cheapest.label!r}, which no fleet price changes."
        if cheapest
        else "No exact run reached the target, so there is nothing to break even with.",
        columns,
    ]
    if any(arm.censored for arm in repricing.arms):
        notes.append(f"> is a lower bound: what was spent without reaching the target. {_best_values(repricing)}")
    if any(len(arm.runs) > 1 for arm in repricing.arms):
        notes.append("± is Student's 95% interval of the mean over an arm's runs.")
    if book.fleet_formats:
        notes.append("The price book's own prices by format are replaced by the column's.")
    return notes


def _best_values(repricing: Repricing) -> str:
    short = [run for arm in repricing.arms for run in arm.runs if not run.reached]
    return f"Best reached: {', '.join(f'{run.label} {run.best:.4g}' for run in short)}."


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _terminal() -> Console:
    from rich.console import Console

    # A pipe has no width of its own, and 80 columns would fold the cells.
    return Console() if sys.stdout.isatty() else Console(width=110)


def _print_notes(console: Console, notes: list[str]) -> None:
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=False)


def _target(report: Comparison | Repricing) -> str:
    return f"{'<=' if report.mode == 'min' else '>='} {report.target:.4g}"
