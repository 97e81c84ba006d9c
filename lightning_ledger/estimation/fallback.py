"""A batch without predictions, because no machine is left to make them: all of its micro-batches are exact then.

The estimate is the full-batch gradient itself, whatever was drawn and whenever the fleet went, so that a loss cannot
bias it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import lightning.pytorch as pl

from lightning_ledger.estimation.accumulation import add
from lightning_ledger.estimation.batch import Batch
from lightning_ledger.estimation.drawing import Drawn
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.program import Context, ShadowBuffers, trainable, training_step_gradients


def all_exact(draw: Drawn) -> Drawn:
    """The draw without anything that has to be predicted."""
    draw = replace(draw, probe=(), below="", members=())
    if not draw.predicting:
        return draw
    return replace(draw, control=tuple(range(len(draw.seeds))), share=None)


def make_up(
    step: Batch, module: pl.LightningModule, metering: StepMetering, context: Context, scale: float, loss_scale: float
) -> None:
    """Add to ``.grad`` what a batch lacks to ``sum_i w_i g_i``, whose predictions were lost on the way.

    Its exact passes on C added, or will add, their own coefficients; here every micro-batch gets an exact gradient
    times what is missing from its weight, which for those of C is negative. Nothing is logged again.

    Args:
        step: the batch; afterwards all of it is exact.
        module: the user's module.
        metering: charged for each pass.
        context: the Trainer's precision context.
        scale: of the loss.
        loss_scale: of the backward passes, divided out again.
    """
    parameters, buffers = trainable(module), ShadowBuffers(module)
    for part, seed, given in zip(step.microbatches, step.draw.seeds, step.coefficients.exact, strict=True):
        missing = part.weight - given
        if not missing:
            continue
        counter, start = metering.counter(part, step.arguments), time.perf_counter()
        inputs = (part.data, *step.arguments)
        with counter or contextlib.nullcontext():
            result = training_step_gradients(module, parameters, inputs, seed, buffers, context, counter, loss_scale)
        metering.charge_exact("scarce/forward", "forward", part, counter, time.perf_counter() - start)
        step.asked.add(part.index)
        if result is None:
            step.exact.skipped.append(part.index)
            continue
        metering.charge_exact("scarce/backward", "backward", part, counter, 0.0)
        if counter is not None:
            metering.keep(part, counter)
        loss, gradients = result
        step.exact.losses[part.index] = float(loss)
        add({name: g * (scale * missing) for name, g in gradients.items() if g is not None}, parameters)
    step.draw, step.corrected = all_exact(step.draw), False
