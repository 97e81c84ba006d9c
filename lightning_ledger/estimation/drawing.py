"""Which micro-batches of a batch get which passes, drawn from the private generator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_ledger.estimation.correction import Correction
from lightning_ledger.estimation.settings import PredictionSettings, PredictionState
from lightning_ledger.microbatches import draw_bernoulli, draw_control, draw_seeds, draw_systematic


@dataclass(frozen=True)
class Drawn:
    """Which micro-batches of a batch get which passes.

    Attributes:
        control: C, as indices.
        seeds: one for each micro-batch.
        format: of the predictions.
        share: q, if each micro-batch was drawn with this probability.
        predicting: whether there are predictions.
        probe: two micro-batches to try other predictions on; the first of them is exact.
        probed: the format to try.
        below: a coarser format, which predicts every micro-batch; empty if ``format`` does.
        members: M, the micro-batches outside C that ``format`` predicts then.
    """

    control: tuple[int, ...]
    seeds: tuple[int, ...]
    format: str
    share: float | None = None
    predicting: bool = True
    probe: tuple[int, ...] = ()
    probed: str = ""
    below: str = ""
    members: tuple[int, ...] = ()


def draw_passes(n: int, prediction: PredictionSettings, state: PredictionState, correction: Correction | None) -> Drawn:
    """Draw C, the seeds, and what else a batch needs of the private stream, the same whatever becomes of it.

    Args:
        n: micro-batches of the batch.
        prediction: what to predict.
        state: its generator, and where systematic draws stand.
        correction: its allocation, if it has one, says how to draw.

    Returns:
        Which micro-batches get which passes.
    """
    generator = state.generator
    allocation = correction.allocation if correction is not None else None
    if allocation is None:
        k = n if prediction.exact >= prediction.microbatches else min(prediction.exact, n)
        return Drawn(draw_control(n, k, generator), draw_seeds(n, generator), prediction.format)
    share = None if allocation.draw == "uniform" else allocation.share
    if share is None:
        control = draw_control(n, allocation.count(n), generator)
    elif allocation.draw == "bernoulli":
        control = draw_bernoulli(n, share, generator)
    else:
        if state.phase is None:
            state.phase = float(torch.rand((), generator=generator, dtype=torch.float64))
        control, state.phase = draw_systematic(n, share, state.phase)
    seeds = draw_seeds(n, generator)
    assert correction is not None
    probed = correction.probed(prediction.formats, state.steps)  # the same on all processes
    probe: tuple[int, ...] = ()
    if probed is not None and n > 1 and control:
        first = control[int(torch.randint(len(control), (), generator=generator))]
        second = (first + 1 + int(torch.randint(n - 1, (), generator=generator))) % n
        probe = first, second
    apart = [i for i in range(n) if i not in control]
    m = allocation.members(n, len(control)) if allocation.predicting else 0
    members = tuple(apart[i] for i in draw_control(len(apart), m, generator)) if m else ()
    below = allocation.below if members else ""
    return Drawn(control, seeds, allocation.format, share, allocation.predicting, probe, probed or "", below, members)
