"""Part 6: the fleet price at which predictions break even, by format and model size, from the fidelity ladder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.study.records import facts, read_csv, write_csv, write_json

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def run(results: Path, command: str) -> None:
    """Read ``fidelity.csv``, write ``breakeven.csv``, ``breakeven.json`` and ``breakeven.png``.

    Args:
        results: where they are.
        command: that makes them again.

    Raises:
        FileNotFoundError: the fidelity ladder was not run.
    """
    rows = read_csv(results / "fidelity.csv")
    kept = ("rung", "parameters", "steps", "format", "rounding", "break_even", "break_even_low", "break_even_high")
    prices = [{name: row[name] for name in kept} for row in rows]
    write_csv(results / "breakeven.csv", prices)
    write_json(results / "breakeven.json", facts(command))
    plot(prices, results / "breakeven.png")


def plot(prices: Sequence[Mapping[str, str]], file: Path) -> None:
    """Draws the break-even price over the number of parameters, one panel a number of steps, one line a format.

    Above a line exact training is cheaper. Rounding to nearest alone is drawn; bars are the 95% intervals.

    Args:
        prices: rows of ``breakeven.csv``.
        file: where to write.
    """
    from matplotlib.figure import Figure

    drawn = [row for row in prices if row["rounding"] == "nearest"]
    steps = sorted({int(row["steps"]) for row in drawn})
    formats = list(dict.fromkeys(row["format"] for row in drawn))
    figure = Figure(figsize=(4.2 * len(steps) + 1, 4), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    for panel, step in zip(panels, steps, strict=True):
        for index, name in enumerate(formats):
            line = [row for row in drawn if row["format"] == name and int(row["steps"]) == step]
            sizes = [int(row["parameters"]) / 1e6 for row in line]
            values = [float(row["break_even"]) for row in line]
            ends = [_ends(row) for row in line]
            below = [value - low for value, (low, _) in zip(values, ends, strict=True)]
            above = [high - value for value, (_, high) in zip(values, ends, strict=True)]
            style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            panel.errorbar(sizes, values, (below, above), label=name, capsize=3, linewidth=1.5, **style)
        panel.set_title("at initialisation" if step == 0 else f"after {step} steps")
        panel.set_xscale("log")
        sizes = sorted({int(row["parameters"]) / 1e6 for row in drawn})
        panel.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
        panel.minorticks_off()
        panel.set_xlabel("parameters (millions)")
        panel.grid(alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("break-even fleet price\n(of a forward-equivalent; scarce = 1)")
    panels[-1].legend(title="format, to nearest", fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _ends(row: Mapping[str, str]) -> tuple[float, float]:
    """The interval, or the value twice where there is none."""
    value = float(row["break_even"])
    low, high = (float(row[name] or value) for name in ("break_even_low", "break_even_high"))
    return min(low, value), max(value, high if math.isfinite(high) else value)
