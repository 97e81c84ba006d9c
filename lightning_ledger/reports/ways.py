"""The rival ways to spend, side by side: no result is shown without the ones it has to beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_ledger.reports.intervals import Estimate
from lightning_ledger.reports.runs import Kind, Mode, Settings

__all__ = ["Arm", "Way", "with_rivals"]


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone.

    Args:
        label: The arm's name.
        kind: What its runs did.
        settings: What they were all set to; None where they differ, or where it is not recorded.
        runs: Their labels.
        best: The best value that each run reached, averaged over the runs.
        reached: How many of them reached the target.
        cost_to_target: Mean training cost to the target, with its 95% interval; None unless all reached it: the
            mean of those that did would flatter the arm.
        saving: ``1 - cost_to_target / (that of the cheapest exact arm)``, of the means.
    """

    label: str
    kind: Kind
    settings: Settings
    runs: Sequence[str]
    best: float
    reached: int
    cost_to_target: Estimate | None
    saving: float | None


@dataclass(frozen=True)
class Way:
    """One way to spend, told by the cheapest arm that spent so.

    Args:
        name: The way.
        arm: Its cheapest arm to the target; if none reached it, the one that came nearest; None if nobody ran it.
        tried: How many arms spent this way. The cheapest of many flatters.
        note: Why there is none, in words.
    """

    name: str
    arm: Arm | None
    tried: int
    note: str = ""


def with_rivals(arms: Sequence[Arm], mode: Mode) -> tuple[list[Arm], list[Way]]:
    """The arms with their savings, and the ways to spend, the cheapest to the target first.

    "Exact, best batch" is the cheapest exact arm. "Exact, smaller batch" is the cheapest of the exact arms with fewer
    samples a step than that one. Ways that nobody ran come last, so that their absence shows; the uncorrected mix, and
    predictions whose rounding is not recorded, are listed only if there are any.

    Args:
        arms: Runs, seeds of one arm together.
        mode: Which way the metric is better.
    """
    ranked = sorted(arms, key=lambda arm: (_cost(arm), _shortfall(arm, mode)))
    exact = [arm for arm in ranked if arm.kind == "exact"]
    yardstick = _cost(exact[0]) if exact else math.inf
    arms, ranked, exact = ([_with_saving(arm, yardstick) for arm in some] for some in (arms, ranked, exact))
    predicted = [arm for arm in ranked if arm.kind == "predictions only"]
    rivals = [
        _way("exact, best batch", exact),
        _smaller_batch(exact),
        *(
            _way(f"predictions only, {rounding}", [arm for arm in predicted if arm.settings.rounding == rounding])
            for rounding in ("nearest", "stochastic")
        ),
        _way("corrected (GPCV)", [arm for arm in ranked if arm.kind == "corrected"]),
    ]
    others = [
        _way("predictions only (rounding not recorded)", [arm for arm in predicted if arm.settings.rounding is None]),
        _way("mixed, uncorrected", [arm for arm in ranked if arm.kind == "mixed"]),
    ]
    ways = [*rivals, *(way for way in others if way.arm)]
    return arms, sorted(ways, key=lambda way: (way.arm is None, _cost(way.arm)))


def _way(name: str, ranked: Sequence[Arm]) -> Way:
    return Way(name, ranked[0], len(ranked)) if ranked else Way(name, None, 0, "not run")


def _smaller_batch(exact: Sequence[Arm]) -> Way:
    name = "exact, smaller batch"
    batches = [arm.settings.batch for arm in exact]
    if not batches:
        return _way(name, [])
    best = batches[0]
    if best is None or None in batches:
        return Way(name, None, 0, "the ledgers do not tell the batch size")
    smaller = [arm for arm, batch in zip(exact, batches, strict=True) if batch is not None and batch < best]
    return _way(name, smaller) if smaller else Way(name, None, 0, f"not run: the best, {best:g} samples, is the least")


def _cost(arm: Arm | None) -> float:
    return math.inf if arm is None or arm.cost_to_target is None else arm.cost_to_target.mean


def _shortfall(arm: Arm, mode: Mode) -> float:
    """Lower is better, whichever way the metric is."""
    return math.inf if not math.isfinite(arm.best) else arm.best if mode == "min" else -arm.best


def _with_saving(arm: Arm, yardstick: float) -> Arm:
    if arm.cost_to_target is None or not 0 < yardstick < math.inf:
        return arm
    return replace(arm, saving=1 - arm.cost_to_target.mean / yardstick)
