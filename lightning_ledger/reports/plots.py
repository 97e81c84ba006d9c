"""The comparison as a picture: the metric against what it cost to get there."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ledger.reports.compare import Comparison, Row
from lightning_ledger.reports.tables import amount, describe_prices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [_drawable(row) for row in comparison.rows]
    if not any(lines):
        raise ValueError(f"Nothing to draw: no run has a finite {comparison.metric} at a positive cost.")
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles = _styles(comparison.rows)
    for row, line, style in zip(comparison.rows, lines, styles, strict=True):
        axes.plot(*zip(*line, strict=True) if line else ([], []), label=_label(row), **style)
    _frame(axes, comparison, [value for line in lines for _, value in line])
    target = f"target {comparison.target:.4g}"
    axes.axhline(comparison.target, color="0.35", linewidth=1, linestyle=(0, (6, 3)), zorder=1, label=target)
    title = f"{comparison.metric} against training cost\n{describe_prices(comparison)}"
    figure.suptitle(title, fontsize=12, x=0.01, horizontalalignment="left")
    figure.legend(loc="outside right upper", fontsize=10, frameon=False, handlelength=3.2, labelspacing=0.9)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _styles(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A style a row: exact runs solid or long-dashed and hollow, others short-dashed and filled."""
    styles, seen = [], {True: 0, False: 0}
    for index, row in enumerate(rows):
        lines = EXACT_LINES if row.exact else FLEET_LINES
        colour = COLOURS[index % len(COLOURS)]
        styles.append(
            {
                "color": colour,
                "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
                "linestyle": lines[seen[row.exact] % len(lines)],
                "markerfacecolor": "white" if row.exact else colour,
                "markersize": 6,
                "linewidth": 1.8,
            }
        )
        seen[row.exact] += 1
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


def _frame(axes: Axes, comparison: Comparison, values: Sequence[float]) -> None:
    from matplotlib.ticker import LogFormatter

    better = "lower" if comparison.mode == "min" else "higher"
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(LogFormatter())  # labels only where the axis spans about a decade
    axes.xaxis.set_major_formatter(lambda cost, _: f"{cost:,.10g}")
    axes.set_xlabel(f"training cost in {comparison.prices.currency} (validation not counted)", fontsize=11)
    axes.set_ylabel(f"{comparison.metric} ({better} is better)", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    starts = [row.first for row in comparison.rows if math.isfinite(row.first)] or list(values)
    ends = [*values, comparison.target]
    low, high = (min(ends), max(starts)) if comparison.mode == "min" else (min(starts), max(ends))
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)
