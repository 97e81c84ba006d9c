"""Reports on finished runs, from their ledgers alone: no logging service, no torch."""

from __future__ import annotations

from lightning_ledger.reports.compare import Comparison, Row, compare
from lightning_ledger.reports.plots import plot
from lightning_ledger.reports.tables import render

__all__ = ["Comparison", "Row", "compare", "plot", "render"]
