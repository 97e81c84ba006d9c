"""Reports on finished runs, from their ledgers alone: no logging service, no torch."""

from __future__ import annotations

from lightning_ledger.reports.compare import Comparison, Row, compare
from lightning_ledger.reports.intervals import Estimate
from lightning_ledger.reports.plots import plot, plot_repricing
from lightning_ledger.reports.reprice import FLEET_PRICES, RepricedArm, Repricing, reprice
from lightning_ledger.reports.tables import render, render_repricing
from lightning_ledger.reports.ways import Arm, Way

__all__ = [
    "FLEET_PRICES",
    "Arm",
    "Comparison",
    "Estimate",
    "RepricedArm",
    "Repricing",
    "Row",
    "Way",
    "compare",
    "plot",
    "plot_repricing",
    "render",
    "render_repricing",
    "reprice",
]
