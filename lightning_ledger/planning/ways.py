"""The four ways to spend, each at its expected cost, and which of them to take. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ledger.control_variate import Candidate, plans, predictions_only_error
from lightning_ledger.planning.forecast import FormatForecast

Kind = Literal["exact", "predictions only", "GPCV", "exact, smaller batch"]

# A bias does not average out over steps as noise does. Predictions whose bias was up to a fifth of the mean gradient
# trained nearly as exact gradients do, those at half of it and above stalled: the limit lies between.
BIAS_LIMIT = 0.3


@dataclass(frozen=True)
class Way:
    """One way to spend on a step that has the sampling noise of ``m`` exact micro-batches.

    Attributes:
        kind: exact; predictions only; GPCV, corrected predictions; or exact on a batch that costs as much as GPCV's.
        label: format and rounding; empty for exact.
        microbatches: of a step.
        exact: how many of them get an exact gradient.
        cost: expected, to reach a gradient estimate of equal mean square error, relative to the exact way; None where
            that cannot be reached.
        steps: how many steps are averaged to reach it.
        note: what speaks against it, if anything.
    """

    kind: Kind
    label: str
    microbatches: int
    exact: int
    cost: float | None
    steps: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The way to take, and why.

    Attributes:
        pays: whether predictions, corrected or not, are expected to be cheaper than exact training.
        best: the way to take.
        ways: all of them.
        target: m, the exact micro-batches whose mean gradient has the variance that all ways are held to.
        reasons: in words.
    """

    pays: bool
    best: Way
    ways: Sequence[Way]
    target: int
    reasons: Sequence[str]


def corrected(kind: FormatForecast, target: int) -> Way | None:
    """The cheapest GPCV step with the variance of ``target`` exact micro-batches.

        V/n + D (1/k - 1/n) <= V/m        cost = (n w + k) / m

    Args:
        kind: of prediction.
        target: m.

    Returns:
        The way, or None if no n up to four times m gets there: k has to be at least one.
    """
    candidate = Candidate(kind.prediction.label, residual=kind.delta.value, cost=kind.prediction.w)
    found = [
        plan
        for plan in plans(1.0, 1.0, [candidate], range(1, 4 * target + 1), draws=("uniform",))
        if plan.name != "exact" and plan.variance <= (1 + 1e-9) / target
    ]
    if not found:
        return None
    plan = min(found, key=lambda plan: plan.cost)
    exact = round(plan.n * plan.share)
    return Way("GPCV", kind.prediction.label, plan.n, exact, plan.cost / target)


def predicted(kind: FormatForecast, target: int, noise_scale: float | None) -> Way:
    """Predictions alone with the mean square error of ``target`` exact micro-batches.

        H/n + ||mean e||^2 <= V/m         cost = n w / m

    Args:
        kind: of prediction; its bias in one step counts, weights rounded once.
        target: m.
        noise_scale: V / ||mean gradient||^2.

    Returns:
        The way; without a cost where the bias is larger than the noise allowed, or not known.
    """
    label = kind.prediction.label
    if noise_scale is None or kind.step_bias is None or kind.bias is None:
        return Way("predictions only", label, target, 0, None, note="their bias cannot be told from the noise")
    bias_square = kind.step_bias**2 / noise_scale
    room = 1 / target - bias_square
    if room <= 0:
        note = f"a bias of {kind.step_bias:.2g} of the mean gradient is more than the noise of {target} micro-batches"
        return Way("predictions only", label, target, 0, None, note=note)
    n = max(1, math.ceil(kind.h_variance / room - 1e-9))
    assert predictions_only_error(kind.h_variance, bias_square, n) <= (1 + 1e-6) / target
    note = f"biased by {kind.bias:.2g} of the mean gradient" if kind.bias > BIAS_LIMIT else ""
    return Way("predictions only", label, n, 0, n * kind.prediction.w / target, note=note)


def judge(kinds: Sequence[FormatForecast], microbatches: int, noise_scale: float | None) -> Verdict:
    """Weigh the ways against one another, at the variance that the present batch has and can use.

    That is the variance of ``m = min(present batch, noise scale)`` exact micro-batches: above the noise scale more
    variance reduction buys little (McCandlish et al., arXiv 1812.06162). Predictions alone are not advised above
    ``BIAS_LIMIT``, and nothing that predicts where the interval of R reaches 1.

    Args:
        kinds: of prediction.
        microbatches: of the present optimizer step.
        noise_scale: in micro-batches, None if unknown.

    Returns:
        The verdict.
    """
    target = microbatches if noise_scale is None else min(microbatches, max(1, round(noise_scale)))
    exact = Way("exact", "", target, target, 1.0)
    ways, alone, mended = [exact], [], []
    for kind in kinds:
        way = predicted(kind, target, noise_scale)
        alone.append(way)
        with_correction = corrected(kind, target)
        if with_correction is not None and (kind.relative_cost.high or kind.relative_cost.value) < 1:
            mended.append(with_correction)
    for rounding in dict.fromkeys(kind.prediction.rounding for kind in kinds):
        of_rounding = [way for way in alone if way.label.endswith(rounding)]
        ways.append(min(of_rounding, key=lambda way: (way.cost is None, bool(way.note), way.cost or 0.0)))
    gpcv = min(mended, key=lambda way: way.cost or math.inf, default=None)
    if gpcv is not None:
        ways.append(gpcv)
        size = max(1, round((gpcv.cost or 0.0) * target))
        note = "the same variance for the same money, in more and smaller steps"
        ways.append(Way("exact, smaller batch", "", size, size, 1.0, target / size, note))
    usable = [way for way in ways if way.kind == "predictions only" and way.cost is not None and not way.note]
    rivals = [*usable, *([gpcv] if gpcv is not None else [])]
    best = min(rivals, key=lambda way: way.cost or math.inf, default=exact)
    if best.cost is not None and best.cost >= 1:
        best = exact
    return Verdict(
        best is not exact, best, ways, target, _reasons(kinds, microbatches, noise_scale, target, best, gpcv)
    )


def _reasons(
    kinds: Sequence[FormatForecast],
    microbatches: int,
    noise_scale: float | None,
    target: int,
    best: Way,
    gpcv: Way | None,
) -> list[str]:
    said = [_on_batch(microbatches, noise_scale, target)]
    by_label = {kind.prediction.label: kind for kind in kinds}
    if best.kind == "predictions only":
        chosen = by_label[best.label]
        said.append(
            f"{best.label}: the bias of predictions alone is {chosen.bias:.2g} of the mean gradient, which is small. "
            "Over many steps a bias adds up where noise averages out: compare both in training."
        )
        if best.label.endswith("stochastic"):
            said.append("Stochastic rounding needs hardware that has it.")
        if gpcv is not None and (gpcv.cost or 1.0) < 1:
            said.append(
                f"Correction ({gpcv.label}, {gpcv.exact} exact of {gpcv.microbatches}) would make a step cost "
                f"{gpcv.cost:.2f} instead of {best.cost:.2f} of an exact one, and buys a certificate of unbiasedness."
            )
    elif best.kind == "GPCV":
        biased = [kind for kind in kinds if kind.prediction.label == best.label]
        alone = "unknown" if biased[0].bias is None else f"{biased[0].bias:.2g} of the mean gradient"
        said.append(
            f"{best.label}: the bias of predictions alone is {alone}, which does not average out; {best.exact} exact "
            f"of {best.microbatches} micro-batches remove it, so correction earns its price."
        )
    else:
        said.append(_why_exact(kinds, target))
    return said


def _on_batch(microbatches: int, noise_scale: float | None, target: int) -> str:
    if noise_scale is None:
        return (
            "No mean gradient can be told from the noise, so the noise scale is unknown, and so is the bias: look at "
            "more batches (--plan.batches). Ways are compared at the present batch."
        )
    if microbatches > 1.5 * noise_scale:
        saved = (target + noise_scale) / (microbatches + noise_scale)
        return (
            f"The present batch of {microbatches} micro-batches is above the noise scale of {noise_scale:.1f}: there "
            f"more variance reduction buys little. An exact batch of {target} is expected to reach the same loss at "
            f"{saved:.2f} of the cost, in more steps; ways are compared at that size."
        )
    times = microbatches / noise_scale
    return (
        f"The present batch of {microbatches} micro-batches is {times:.2g} times the noise scale of {noise_scale:.1f}, "
        f"so variance reduction is worth its price. Ways are compared at the variance of {target}."
    )


def _why_exact(kinds: Sequence[FormatForecast], target: int) -> str:
    least = min(kinds, key=lambda kind: kind.relative_cost.value)
    cost = least.relative_cost
    if (cost.high or cost.value) < 1:
        return (
            "Corrected predictions would pay in large batches "
            f"({least.prediction.label} has R = {cost.value:.2f}), but a step takes one exact micro-batch at least, "
            f"and {target} of them have all the variance that is of use."
        )
    between = f", and its interval reaches {cost.high:.2f}" if cost.high is not None and cost.value < 1 else ""
    return (
        f"Exact training is the cheapest: of the predictions, {least.prediction.label} comes nearest, with "
        f"R = {cost.value:.2f}{between}; it breaks even at a fleet price of {least.break_even.value:.2g}."
    )
