"""A dry run's forecast as a picture: R against the fleet price."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ledger.control_variate import relative_cost_interval
from lightning_ledger.reports.plots import COLOURS, FLEET_LINES, MARKERS, _decorate, _figure, _save

if TYPE_CHECKING:
    from lightning_ledger.planning.forecast import Forecast, FormatForecast

__all__ = ["plot_plan"]


def plot_plan(forecast: Forecast, path: str | os.PathLike[str]) -> Path:
    """Draws R over the fleet price, logarithmic, one line a kind of prediction, and writes it as an image.

    Bands are the 95% intervals; rings mark where a kind breaks even with exact training, which is at R = 1.

    Args:
        forecast: What the dry run found.
        path: Where to write; the suffix says the format.

    Returns:
        The path written.
    """
    own = forecast.fleet_price or 0.05
    ends = [kind.break_even.value for kind in forecast.formats if 0 < kind.break_even.value < float("inf")]
    low, high = min(0.001, own / 3), max(1.0, own * 3, *(1.5 * end for end in ends))
    prices = [low * (high / low) ** (index / 80) for index in range(81)]
    figure, axes = _figure()
    for index, kind in enumerate(forecast.formats):
        colour = COLOURS[index % len(COLOURS)]
        costs = [_cost(kind, price, kind.delta.value) for price in prices]
        axes.plot(
            prices,
            costs,
            label=f"{kind.prediction.label}\n  {_verdict(kind)}",
            color=colour,
            linestyle=FLEET_LINES[index % len(FLEET_LINES)],
            marker=MARKERS[index % len(MARKERS)],
            markevery=(2 * index, 16),
            markersize=6,
            linewidth=1.8,
        )
        if kind.delta.low is not None and kind.delta.high is not None:
            least, greatest = (
                [_cost(kind, price, delta) for price in prices] for delta in (kind.delta.low, kind.delta.high)
            )
            axes.fill_between(prices, least, greatest, color=colour, alpha=0.15, linewidth=0)
        if low <= kind.break_even.value <= high:
            axes.plot(kind.break_even.value, 1.0, "o", markersize=12, markerfacecolor="none", markeredgecolor=colour)
    axes.axhline(1.0, color="0.35", linewidth=1, linestyle=(0, (6, 3)), zorder=1, label="exact training, R = 1")
    axes.axvline(own, color="black", linewidth=1, linestyle=(0, (1, 2)), zorder=1, label=f"your price, {own:g}")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.6)
    _decorate(axes)
    axes.xaxis.set_major_formatter(lambda price, _: f"{price:g}")
    axes.set_xlabel("fleet price of a forward-equivalent, in scarce forwards", fontsize=11)
    axes.set_ylabel("R: variance x cost, exact training = 1", fontsize=11)
    where = f"step {forecast.step:,}" if forecast.step else "first weights"
    return _save(figure, f"{forecast.module}, {where}: what corrected predictions would cost (expected)", path)


def _cost(kind: FormatForecast, price: float, delta: float) -> float:
    return relative_cost_interval(0.0, delta, kind.prediction.w_at_one * price)[1]


def _verdict(kind: FormatForecast) -> str:
    return f"pays below {kind.break_even.value:.3g}" if kind.break_even.value > 0 else "never pays"
