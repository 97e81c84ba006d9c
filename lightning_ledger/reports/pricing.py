"""What finished runs cost, in one common unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_ledger.history import LedgerHistory
from lightning_ledger.prices import FORWARD_EQUIVALENTS, PriceBook
from lightning_ledger.work import TIERS, Work, by_tier

__all__ = ["TRAINING_TIERS", "common_unit", "costs_in", "training_cost", "training_line"]

TRAINING_TIERS = tuple(tier for tier in TIERS if tier != "validation")
"""The tiers that make up a run's total. Validation measures the experiment; it is shown apart."""


def common_unit(histories: Sequence[LedgerHistory], prices: PriceBook) -> int:
    """FLOPs of the forward-equivalent that all runs are priced in: the smallest among them.

    Raises:
        ValueError: No run counted any, or the prices are for one of several different ones.
    """
    units = [history.forward_flops for history in histories if history.forward_flops]
    if not units:
        raise ValueError(
            "No run knows forward_flops, the FLOPs of one forward pass: no work was counted. Train at least one step."
        )
    if prices.currency != FORWARD_EQUIVALENTS and prices.forward_flops is None and len(set(units)) > 1:
        raise ValueError(
            f"The runs count in forward-equivalents of {', '.join(f'{unit:,}' for unit in sorted(set(units)))} FLOPs, "
            f"and a price in {prices.currency} is for one of them only. Say which: forward_flops in the price book."
        )
    return min(units)


def costs_in(unit: int, totals: Mapping[str, Work], history: LedgerHistory, prices: PriceBook) -> dict[str, float]:
    """Costs by account in the common unit: a forward here is ``own / unit`` of it, a byte is a byte."""
    if prices.forward_flops:
        return prices.costs(totals, prices.forward_flops)
    own = history.forward_flops or unit
    return {
        account: own / unit * prices.cost(account, replace(work, bytes=0), own)
        + prices.cost(account, Work(bytes=work.bytes), own)
        for account, work in totals.items()
    }


def training_cost(unit: int, totals: Mapping[str, Work], history: LedgerHistory, prices: PriceBook) -> float:
    """The price of ``totals`` without validation."""
    tiers = by_tier(costs_in(unit, totals, history, prices))
    return math.fsum(tiers[tier] for tier in TRAINING_TIERS)


def training_line(
    unit: int, totals: Mapping[str, Work], history: LedgerHistory, prices: PriceBook
) -> tuple[float, float]:
    """The price of ``totals`` without validation as a line over the fleet price: its value at 0, and its slope."""
    fleet_alone = replace(prices.with_fleet_price(1.0), scarce_forward=0.0, gigabyte=0.0)
    fixed = training_cost(unit, totals, history, prices.with_fleet_price(0.0))
    return fixed, training_cost(unit, totals, history, fleet_alone)
