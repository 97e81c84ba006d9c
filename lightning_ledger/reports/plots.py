"""Comparisons and re-pricings as pictures."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ledger.reports.compare import Comparison, Row
from lightning_ledger.reports.reprice import RepricedArm, Repricing
from lightning_ledger.reports.tables import amount, describe_prices, price_of, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["plot", "plot_repricing"]

# Okabe and Ito's palette, told apart with every common colour blindness; its yellow is too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
EXACT_LINES = ("-", (0, (8, 1.5)), (0, (8, 1.5, 2, 1.5)))
FLEET_LINES = ((0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.5, 1, 1.5)), (0, (2, 1)))


def plot(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Draws the metric against training cost, one line a run, and writes it as an image.

    Marks without a finite value, or before anything was spent, are left out: the cost axis is logarithmic.
    The metric's axis ends at the worst first value, so that a diverged run does not flatten the rest.

    Args:
        comparison: What :func:`~lightning_ledger.reports.compare` returned.
        path: Where to write; the suffix says the format.

    Returns:
        The path written.

    Raises:
        ValueError: No run has a finite value at a positive cost.
    """
    lines = [_drawable(row) for row in comparison.rows]
    if not any(lines):
        raise ValueError(f"Nothing to draw: no run has a finite {comparison.metric} at a positive cost.")
    figure, axes = _figure()
    styles = _styles([row.exact for row in comparison.rows])
    for row, line, style in zip(comparison.rows, lines, styles, strict=True):
        axes.plot(*zip(*line, strict=True) if line else ([], []), label=_label(row), **style)
    _frame(axes, comparison, [value for line in lines for _, value in line])
    target = f"target {comparison.target:.4g}"
    axes.axhline(comparison.target, color="0.35", linewidth=1, linestyle=(0, (6, 3)), zorder=1, label=target)
    title = f"{comparison.metric} against training cost\n{describe_prices(comparison)}"
    return _save(figure, title, path)


def plot_repricing(repricing: Repricing, path: str | os.PathLike[str]) -> Path:
    """Draws the cost to the target over the fleet price, both logarithmic, one line an arm, and writes it as an image.

    Rings mark where an arm costs as much as the cheapest exact one. Bands are 95% intervals over seeds. Arms that
    never reached the target are thin, without markers: what they spent, a lower bound. A price of 0 is left out.

    Args:
        repricing: What :func:`~lightning_ledger.reports.reprice` returned.
        path: Where to write; the suffix says the format.

    Returns:
        The path written.

    Raises:
        ValueError: No fleet price is positive.
    """
    prices = _grid([price for price in repricing.fleet_prices if price > 0])
    figure, axes = _figure()
    lines = [(arm, [arm.cost(price) for price in prices]) for arm in repricing.arms]
    for (arm, costs), style in zip(lines, _styles([arm.kind == "exact" for arm in repricing.arms]), strict=True):
        means = [cost.mean if cost.mean > 0 else math.nan for cost in costs]
        if arm.censored:
            style |= {"marker": "", "linewidth": 1.0, "alpha": 0.7}
        axes.plot(prices, means, label=_repriced_label(arm), markevery=len(prices) // 6, **style)
        widths = [cost.half_width or 0.0 for cost in costs]
        if any(widths):
            low = [max(mean - width, mean / 100) for mean, width in zip(means, widths, strict=True)]
            high = [mean + width for mean, width in zip(means, widths, strict=True)]
            axes.fill_between(prices, low, high, color=style["color"], alpha=0.15, linewidth=0)
        if arm.break_even is not None and prices[0] <= arm.break_even <= prices[-1]:
            there = arm.cost(arm.break_even).mean
            axes.plot(arm.break_even, there, "o", markersize=13, markerfacecolor="none", markeredgecolor="black")
    axes.set_xscale("log")
    axes.set_yscale("log")
    _decorate(axes)
    _label_costs(axes.yaxis)
    axes.xaxis.set_major_formatter(lambda price, _: f"{price:g}")
    axes.set_ylabel(f"training cost in {repricing.prices.currency}", fontsize=11)
    axes.set_xlabel(f"fleet price in {price_of(repricing.prices)}", fontsize=11)
    sign = "\u2264" if repricing.mode == "min" else "\u2265"
    title = f"Training cost to {repricing.metric} {sign} {repricing.target:.4g}, by fleet price"
    return _save(figure, title + "\nvalidation not counted; rings: as dear as the cheapest exact run", path)


def _grid(prices: Sequence[float]) -> list[float]:
    """Prices from the least to the greatest, evenly spaced in their logarithm; a decade around a single one."""
    if not prices:
        raise ValueError("Nothing to draw: the price axis is logarithmic, and no fleet price is above 0.")
    low, high = min(prices), max(prices)
    if low == high:
        low, high = low / math.sqrt(10), high * math.sqrt(10)
    return [low * (high / low) ** (index / 60) for index in range(61)]


def _repriced_label(arm: RepricedArm) -> str:
    runs = f" (n={len(arm.runs)})" if len(arm.runs) > 1 else ""
    lower = "; spent so far" if arm.censored else ""
    return f"{arm.label}{runs}\n  {verdict(arm)}{lower}"


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Figure, title: str, path: str | os.PathLike[str]) -> Path:
    figure.suptitle(title, fontsize=12, x=0.01, horizontalalignment="left")
    figure.legend(loc="outside right upper", fontsize=10, frameon=False, handlelength=3.2, labelspacing=0.9)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _styles(exact: Sequence[bool]) -> list[dict[str, Any]]:
    """A style a line: exact ones solid or long-dashed and hollow, others short-dashed and filled."""
    styles, seen = [], {True: 0, False: 0}
    for index, is_exact in enumerate(exact):
        lines = EXACT_LINES if is_exact else FLEET_LINES
        colour = COLOURS[index % len(COLOURS)]
        styles.append(
            {
                "color": colour,
                "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
                "linestyle": lines[seen[is_exact] % len(lines)],
                "markerfacecolor": "white" if is_exact else colour,
                "markersize": 6,
                "linewidth": 1.8,
            }
        )
        seen[is_exact] += 1
    return styles


def _label(row: Row) -> str:
    if row.cost_to_target is None:
        return f"{row.label}\n  never (best {row.best:.4g})"
    text = f"{row.label}\n  target at {amount(row.cost_to_target)}"
    if row.saving:  # neither unknown nor the yardstick's own zero
        text += f", saves {row.saving:.0%}" if row.saving > 0 else f", {-row.saving:.0%} dearer"
    return text


def _drawable(row: Row) -> list[tuple[float, float]]:
    return [(p.cost, p.value) for p in row.curve if p.cost > 0 and math.isfinite(p.value)]


def _decorate(axes: Axes) -> None:
    axes.tick_params(labelsize=10)
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _label_costs(axis: Axis) -> None:
    from matplotlib.ticker import LogFormatter

    axis.set_minor_formatter(LogFormatter())  # labels only where the axis spans about a decade
    axis.set_major_formatter(lambda cost, _: f"{cost:,.10g}")


def _frame(axes: Axes, comparison: Comparison, values: Sequence[float]) -> None:
    better = "lower" if comparison.mode == "min" else "higher"
    axes.set_xscale("log")
    _decorate(axes)
    _label_costs(axes.xaxis)
    axes.set_xlabel(f"training cost in {comparison.prices.currency} (validation not counted)", fontsize=11)
    axes.set_ylabel(f"{comparison.metric} ({better} is better)", fontsize=11)
    starts = [row.first for row in comparison.rows if math.isfinite(row.first)] or list(values)
    ends = [*values, comparison.target]
    low, high = (min(ends), max(starts)) if comparison.mode == "min" else (min(starts), max(ends))
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)
