"""What one step shows of the gradients, gathered from its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_ledger.control_variate import Average, Gradients, Layout, Observation, Statistics, WeightedSum
from lightning_ledger.estimation.ranks import Ranks
from lightning_ledger.fleet import Predictions


def total(captured: Sequence[Gradients]) -> Gradients:
    """The sum of the passes' gradients."""
    if len(captured) == 1:
        return captured[0]
    summed = WeightedSum()
    for gradients in captured:
        summed.add(gradients, 1.0)
    return summed.total


def observation(
    layout: Layout,
    control: Sequence[int],
    captured: Sequence[Gradients],
    predictions: Predictions,
    gain: float,
) -> Observation:
    """One step's gradients, in the units of the statistics.

    Args:
        layout: names, layers and sampled coordinates.
        control: C, as indices.
        captured: the exact gradients on C, each ``gain * n w_i g_i``.
        predictions: with norms and samples.
        gain: loss scale times the draw's factor over n.
    """
    assert predictions.squared_norms is not None
    residuals = [
        layout.sample(gradients) / gain - predictions.samples[i] for i, gradients in zip(control, captured, strict=True)
    ]
    return Observation(
        exact=total(captured),
        control=predictions.control,
        rest=predictions.rest,
        squared_norms=predictions.squared_norms,
        residuals=torch.stack(residuals),
        loss_scale=gain * len(control),
    )


def mixed_drift(layout: Layout, captured: Sequence[Gradients], rest: Gradients, n: int, scale: float) -> Tensor | None:
    """How far one uncorrected step is from its exact gradients: it needs no prediction on C.

        mixed - mean over C of the exact gradients = (n-k)/n (mean of the predictions outside C - that mean)

    has mean zero exactly if the predictions are unbiased.

    Args:
        layout: names, layers and sampled coordinates.
        captured: the exact gradients on C, each ``scale * w_i g_i``.
        rest: sum outside C of w_i h_i.
        n: micro-batches in the batch.
        scale: of the loss.

    Returns:
        [J] its projections; None if a gradient was not finite.
    """
    k = len(captured)
    difference = layout.sample(rest) - (n - k) / k / scale * layout.sample(total(captured))
    drift = (layout.signs @ difference).cpu().double()
    return drift if bool(drift.isfinite().all()) else None


def observe_mixed(statistics: Statistics | None, layout: Layout, drift: Tensor | None, ranks: Ranks) -> Statistics:
    """Fold one uncorrected step into the drift behind ``bias_z``. Nothing else in these statistics is kept.

    Args:
        statistics: the state before this step, or None.
        layout: names, layers and sampled coordinates.
        drift: [J] of this process, if it has one.
        ranks: the processes, whose mean is folded in.

    Returns:
        The state after it; unchanged if there was no drift to see.
    """
    if statistics is None or statistics.layers != layout.layers:
        statistics = Statistics.start(layout.layers)
    seen = ranks.mean({} if drift is None else {"drift": drift}, {"drift": len(layout.signs)}).get("drift")
    if seen is None:
        return statistics
    slow = 1 - (1 - statistics.decay) / 5  # as for corrected steps
    mean, products = statistics.drift
    pair: tuple[Average, Average] = mean.add(seen, slow), products.add(torch.outer(seen, seen), slow)
    return replace(statistics, steps=statistics.steps + 1, drift=pair)
