"""The estimate on a sharded module (FSDP2): a sum of backward passes, exact ones and lowered ones.

No process holds a whole gradient, so nothing is measured on it: lam is a number, the same for all layers. What a pass
adds to the sharded ``.grad`` is already the mean over the processes, and the estimate is linear in the passes:

    .grad += scale * sum_i [exact_i dl_i + lam predicted_i dl^_i]        (coefficients.py)

Every pass gathers parameters and scatters gradients, so all processes run as many passes, in the same order; which
micro-batches are exact is each one's own draw.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_ledger.control_variate import Coefficients, coefficients, estimate_loss
from lightning_ledger.estimation.checks import refuse_batchnorm
from lightning_ledger.estimation.correction import Correction
from lightning_ledger.estimation.exact import ExactPasses
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.estimation.ranks import Ranks
from lightning_ledger.estimation.settings import PredictionSettings, PredictionState
from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.ledger import Ledger
from lightning_ledger.microbatches import (
    MicroBatch,
    Splitter,
    draw_control,
    draw_seeds,
    make_microbatches,
    private_copy,
    shape_key,
    total_amount,
)
from lightning_ledger.precision import Lowering, parse_formats
from lightning_ledger.program import (
    Context,
    ShadowBuffers,
    refuse_detached,
    seeded,
    trainable,
    training_loss,
    without_side_effects,
)


class ShardedEstimator:
    """Estimates the gradient of a sharded module; used like :class:`GradientEstimator`.

    Args:
        module: the user's module, sharded.
        prediction: what to predict.
        state: generator and step count.
        correction: the control variate, or None for the uncorrected mix.
        ledger: charged for everything that runs, if given.
        unit_samples: samples in one forward-equivalent; by default those of the first micro-batch.
        context: the Trainer's precision context.
        ranks: the processes that train together.
        weigh_ranks: weigh each process's batch by its share of what the loss averages over, not all alike.

    Raises:
        MisconfigurationException: if what is asked needs whole gradients.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        prediction: PredictionSettings,
        state: PredictionState,
        correction: Correction | None,
        ledger: Ledger | None,
        unit_samples: int | None,
        context: Context,
        ranks: Ranks,
        weigh_ranks: bool,
    ) -> None:
        _refuse(prediction, correction)
        self.module = module
        self.prediction = prediction
        self.state = state
        self.correction = correction
        self._context = context
        self._ranks = ranks
        self._weigh_ranks = weigh_ranks
        self._metering = StepMetering(module, ledger, unit_samples, context)
        self._counted: dict[Hashable, StepFlops] = {}
        self._metering.predicted[prediction.format] = self._counted.get
        self._splitter = Splitter(prediction.split_fn)
        p = prediction
        self._lowering = Lowering(p.format, p.rounding, p.rotation, p.keep, module)
        self._pass = _Pass(module)
        self._buffers = ShadowBuffers(module)
        self._exact: ExactPasses | None = None
        self._leaf: Tensor | None = None
        self._coefficients = Coefficients((), ())
        self._predicted: dict[str, Tensor] = {}
        self._microbatches: tuple[MicroBatch, ...] = ()
        self._factor = 1.0
        self.loss_values: dict[str, float] = {}
        self.statistics_values: dict[str, float] = {}

    def close(self) -> None:
        """Nothing is held elsewhere."""

    def forward(self, batch: Any, *arguments: Any) -> Any:
        """Run the predicted passes and the exact forward passes of one batch.

        Args:
            batch: the user's batch.
            *arguments: the rest of what ``training_step`` takes.

        Returns:
            What ``training_step`` would return for the whole batch: the loss, or a dict with it.
        """
        p, generator = self.prediction, self.state.generator
        if self.correction is not None and self.correction.allocation is not None:
            raise MisconfigurationException(_NO_STATISTICS.format("AdaptiveAllocation", "Drop it, and fix exact=..."))
        if not p.allow_batchnorm:
            refuse_batchnorm(self.module)
        parts = self._microbatches = make_microbatches(batch, p.microbatches, self._splitter, p.weights)
        self._agree(parts)
        n = len(parts)
        control = draw_control(n, n if p.exact >= p.microbatches else min(p.exact, n), generator)
        seeds = draw_seeds(n, generator)
        weights = [part.weight for part in parts]
        corrected = self.correction is not None and 0 < len(control) < n
        lam = float(self.correction.coefficient or 0.0) if corrected and self.correction is not None else 1.0
        self._coefficients = coefficients(weights, control, corrected, lam)
        predicted = self._predict(control, seeds, arguments)
        self._exact = ExactPasses(self.module, self._metering, self._context)
        self._exact.forward([parts[i] for i in control], [seeds[i] for i in control], arguments)
        if self._exact.skipped:
            raise MisconfigurationException(_none(self.module))
        losses = self._exact.losses
        estimate = estimate_loss(weights, control, losses, predicted, corrected)
        self._keep_values(estimate, len(control) / n)
        shown = sum(weights[i] * x for i, x in losses.items()) / sum(weights[i] for i in losses) if losses else estimate
        device = next(self.module.parameters()).device
        self._leaf = torch.zeros((), device=device, requires_grad=True)
        loss, output = self._leaf + shown, self._exact.output
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def backward(self) -> None:
        """Add the estimate to every ``.grad``, scaled as the loss that :meth:`forward` returned was."""
        exact, leaf, self._exact, self._leaf = self._exact, self._leaf, None, None
        if exact is None or leaf is None or leaf.grad is None:
            raise MisconfigurationException(
                f"{type(self.module).__qualname__}.backward does not call loss.backward() on the loss it gets. Call "
                "it, so that loss scale and accumulation divisor are known."
            )
        scale = float(leaf.grad)
        exact.backward([self._factor * scale * c for c in self._coefficients.exact], {})
        with torch.no_grad():
            for name, parameter in trainable(self.module).items():
                gradient = self._predicted.pop(name, None)
                if gradient is not None:
                    gradient = gradient.mul_(scale)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._metering.charge_equivalent(self._microbatches)
        self._microbatches = ()

    def _agree(self, parts: Sequence[MicroBatch]) -> None:
        n, size = len(parts), self._ranks.size
        total, squares = self._ranks.sum(torch.tensor([n, n * n], dtype=torch.float64)).tolist()
        if total**2 != size * squares:
            raise MisconfigurationException(
                f"Rank {self._ranks.rank} has {n} micro-batches, and others have another number; under FSDP all run as "
                "many passes. Pass batches of as many samples on every rank (drop_last=True)."
            )
        weights = self.prediction.weights
        amount = total_amount(parts, weights)
        self._factor = self._ranks.compare(self.module, False, amount, weights, self._weigh_ranks)

    def _predict(self, control: Sequence[int], seeds: Sequence[int], arguments: Sequence[Any]) -> dict[int, float]:
        """Run the lowered passes into a gradient of their own; the losses, by micro-batch."""
        parameters = trainable(self.module)
        held = {name: p.grad for name, p in parameters.items()}
        losses: dict[int, float] = {}
        try:
            for p in parameters.values():
                p.grad = None
            for i, coefficient in enumerate(self._coefficients.predicted):
                if coefficient:
                    losses[i] = self._predict_one(i, self._factor * coefficient, seeds[i], i in control, arguments)
            self._predicted = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        finally:
            for name, p in parameters.items():
                p.grad = held[name]
        return losses

    def _predict_one(self, index: int, coefficient: float, seed: int, control: bool, arguments: Sequence[Any]) -> float:
        part, module, start = self._microbatches[index], self.module, time.perf_counter()
        shape, device = shape_key(part.data), next(self.module.parameters()).device
        counter = None if shape in self._counted else FlopCounter(self._lowering.formats_of)
        buffers = {f"module.{name}": buffer for name, buffer in self._buffers.fresh().items()}
        inputs = ((private_copy(part.data), *arguments), self._context, coefficient, counter)
        silent, counting = without_side_effects(module), counter or contextlib.nullcontext()
        # The counter goes inside the lowering, to see each product before it is lowered.
        with self._lowering.mode(seed), counting, torch.enable_grad(), silent, seeded(seed, device):
            loss = torch.func.functional_call(self._pass, buffers, inputs) if buffers else self._pass(*inputs)
        if counter is not None:
            self._counted[shape] = counter.counts()
            self._metering.look_at_prediction(self.prediction.format, counter, self._lowering.unlowered)
        seconds = time.perf_counter() - start
        work = self._counted[shape].work(passes=1, samples=part.samples, tokens=part.tokens, seconds=seconds)
        self._metering.charge("fleet/control" if control else "fleet/prediction", work)
        return float(loss)

    def _keep_values(self, loss: float, share: float) -> None:
        shown = {"shown": torch.tensor([self._factor * loss, share], dtype=torch.float64)}
        value, exact_share = self._ranks.mean(shown, {"shown": 2})["shown"].tolist()
        self.loss_values = {"gpcv/loss": value, "gpcv/exact_share": exact_share}


class _Pass(nn.Module):
    """Gives ``torch.func.functional_call`` a forward: the training step and its backward pass, into ``.grad``."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, arguments: Sequence[Any], context: Context, coefficient: float, counter: FlopCounter | None
    ) -> Tensor:
        with context():
            loss = training_loss(self.module.training_step(*arguments), self.module)
        if loss is None:
            raise MisconfigurationException(_none(self.module))
        refuse_detached(loss, self.module)
        if counter is not None:
            counter.phase = "backward"
        loss.backward(torch.full_like(loss, coefficient))
        return loss.detach()


_NO_STATISTICS = (
    "{} needs statistics of the gradients, and under FSDP no process holds a whole gradient to measure. {}; or train "
    "with PredictedGradientDDPStrategy."
)


def _none(module: pl.LightningModule) -> str:
    return (
        f"{type(module).__qualname__}.training_step returned None. Under FSDP every rank waits for the others' passes: "
        "return a loss (0 * loss to ignore a batch)."
    )


def _refuse(prediction: PredictionSettings, correction: Correction | None) -> None:
    """Refuse what needs whole gradients or weights on one process."""
    if correction is not None and correction.coefficient is None:
        fix = "Pass ControlVariate(coefficient=1.0), or another number"
        raise MisconfigurationException(_NO_STATISTICS.format("ControlVariate(coefficient='optimal')", fix))
    if prediction.others:
        fix = "Pass one format"
        raise MisconfigurationException(_NO_STATISTICS.format(f"format={list(prediction.formats)}", fix))
    if prediction.engine != "eager":
        raise MisconfigurationException(
            f"engine={prediction.engine!r} captures a program of whole weights, and under FSDP they are sharded. Pass "
            "GradientPrediction(engine='eager')."
        )
    if any(f.rounds_weights_once for f in parse_formats(prediction.format).distinct):
        raise MisconfigurationException(
            f"format={prediction.format!r} rounds weights alone, and under FSDP a gathered weight cannot be told from "
            "an activation. Pass a format that rounds both, such as 'int8'."
        )
    if prediction.refresh_every > 1:
        raise MisconfigurationException(
            f"refresh_every={prediction.refresh_every} keeps a copy of whole weights, and under FSDP they are sharded. "
            "Pass refresh_every=1."
        )
    if prediction.check_separable and prediction.microbatches > 1:
        raise MisconfigurationException(
            "check_separable=True compares whole gradients, and under FSDP they are sharded. Train one step on one "
            "device, of a smaller model if need be, to have the loss checked; then pass check_separable=False."
        )
