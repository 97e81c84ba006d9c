"""One batch's gradient estimate: split, draw, predict, run the exact passes, accumulate.

This is the method, free of Lightning's hooks; the strategies call it from them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_ledger.control_variate import bias_z, coefficients, estimate_loss
from lightning_ledger.estimation.accumulation import accumulate
from lightning_ledger.estimation.batch import Batch
from lightning_ledger.estimation.checks import check_separable, refuse_batchnorm
from lightning_ledger.estimation.correction import Correction
from lightning_ledger.estimation.drawing import Drawn, draw_passes
from lightning_ledger.estimation.exact import ExactPasses
from lightning_ledger.estimation.fallback import all_exact, make_up
from lightning_ledger.estimation.fleets import Fleets
from lightning_ledger.estimation.learning import Learning
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.estimation.ranks import Ranks
from lightning_ledger.estimation.settings import PredictionSettings, PredictionState
from lightning_ledger.fleet import Fleet, FleetLost, Job, Predictions, TwoLevelFleet
from lightning_ledger.flops import FlopCounter
from lightning_ledger.ledger import Ledger
from lightning_ledger.microbatches import (
    MicroBatch,
    Splitter,
    make_microbatches,
    total_amount,
)
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import Context, trainable


class GradientEstimator:
    """Estimates the full-batch gradient from k exact and n predicted micro-batch gradients.

    ``forward`` returns a loss that carries no graph of the model, only a leaf whose gradient will say by how much the
    caller scaled the loss; ``backward`` then adds the estimate, so scaled, to every ``.grad``.

    Args:
        module: the user's module.
        prediction: what to predict.
        state: generator and step count.
        correction: the control variate, or None for the uncorrected mix.
        ledger: charged for everything that runs, if given.
        unit_samples: samples in one forward-equivalent; by default those of the first micro-batch.
        prices: for the relative cost and the break-even price; simulated ones by default.
        context: the Trainer's precision context.
        loss_scale: of the backward passes of predictions, as it is now: a power of two.
        ranks: the processes that train together.
        weigh_ranks: weigh each process's batch by its share of what the loss averages over, not all alike.
        before_last: given the last loss of a batch, before its backward pass; returns the loss whose backward pass
            averages ``.grad`` over the processes, or the loss as it is. Everything else is in ``.grad`` by then.
        apart: no other backward pass may run autograd's own accumulation into ``.grad``.

    Attributes:
        loss_values: the last batch's ``gpcv/loss`` (an estimate of the full batch's) and ``gpcv/exact_share`` (k/n);
            without a correction ``gpcv/bias_z`` of the mix too, once there is any.
        statistics_values: the keys of :func:`lightning_ledger.control_variate.report`, once there are any.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        prediction: PredictionSettings,
        state: PredictionState,
        correction: Correction | None = None,
        ledger: Ledger | None = None,
        unit_samples: int | None = None,
        prices: PriceBook | None = None,
        context: Context = contextlib.nullcontext,
        loss_scale: Callable[[], float] = lambda: 1.0,
        ranks: Ranks | None = None,
        weigh_ranks: bool = False,
        before_last: Callable[[Tensor], Tensor] | None = None,
        apart: bool = False,
    ) -> None:
        self.module = module
        self.prediction = prediction
        self.state = state
        self.correction = correction
        metering = self._metering = StepMetering(module, ledger, unit_samples, context)
        self._context = context
        self._loss_scale = loss_scale
        self._ranks = ranks or Ranks()
        self._learning = Learning(module, state, correction, metering, prices or PriceBook(), self._ranks)
        self._weigh_ranks = weigh_ranks
        self._before_last = before_last
        self._apart = apart
        self._splitter = Splitter(prediction.split_fn)
        self._told_splits = False
        self._fleets = Fleets(module, prediction, state, self._metering, context)
        self._batch: Batch | None = None
        self.loss_values: dict[str, float] = {}
        self.statistics_values: dict[str, float] = {}

    # --------------------------------------------------------------------------------------------------------- forward

    def forward(self, batch: Any, *arguments: Any) -> Any:
        """Submit the predictions and run the exact forward passes of one batch.

        Args:
            batch: the user's batch.
            *arguments: the rest of what ``training_step`` takes.

        Returns:
            What ``training_step`` would return for the whole batch: the loss, or a dict with it, or None.
        """
        p = self.prediction
        microbatches = make_microbatches(batch, p.microbatches, self._splitter, p.weights)
        self._fleets.prepare()
        if not self._told_splits:
            self._told_splits = True
            rank_zero_info(self._splitter.describe())
        if not p.allow_batchnorm:
            refuse_batchnorm(self.module)  # at every batch: a layer's mode may change, and is known only now
        if not self.state.checked:
            self._check(batch, microbatches, arguments)
        draw = draw_passes(len(microbatches), p, self.state, self.correction)
        step = self._batch = self._begin(microbatches, draw if self._fleets.available() else all_exact(draw), arguments)
        try:
            self._run(step, arguments)
        except FleetLost as lost:
            self._lost(lost)
            step = self._batch = self._begin(microbatches, all_exact(draw), arguments)
            self._run(step, arguments)
        nothing = self._all_skipped(step)
        amount = total_amount(microbatches, p.weights)
        step.factor = self._ranks.compare(self.module, nothing, amount, p.weights, self._weigh_ranks)
        if nothing:
            if step.draw.probe:
                self._gather_probe(step, lost=True)
            self._batch, self.loss_values, self.statistics_values = None, {}, {}
            return None
        loss, output = step.loss_leaf + self._loss(step), step.exact.output
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _run(self, step: Batch, arguments: Sequence[Any]) -> None:
        """Submit the predictions, run the exact forward passes; wait for predictions only where they decide."""
        microbatches, control, seeds = step.microbatches, step.draw.control, step.draw.seeds
        fleet = step.fleet = self._fleet(step) if step.predicts else None
        if step.draw.probe:
            self._submit_probe(step, arguments)
        if fleet is not None:
            needed = [i for i, coefficient in enumerate(step.coefficients.predicted) if coefficient]
            scale = self._loss_scale()
            jobs = [Job(microbatches[i], seeds[i], i in control, scale) for i in needed]
            fleet.submit(jobs, arguments, step.corrected and step.observing)
            step.asked.update(needed)
        step.exact.forward([microbatches[i] for i in control], [seeds[i] for i in control], arguments)
        if fleet is not None and (step.exact.skipped or not control):
            self._gather(step, lost=bool(step.exact.skipped))
            # A program cannot skip: ask the training step itself.
            skipped = step.exact.skipped or (step.predictions and step.predictions.skipped)
            if skipped and fleet.run_eagerly("the training step returned None, which no program can"):
                fleet.submit(jobs, arguments, step.corrected and step.observing)
                self._gather(step, lost=True)

    def _begin(self, microbatches: tuple[MicroBatch, ...], draw: Drawn, arguments: Sequence[Any]) -> Batch:
        n, k, correction, layout = len(microbatches), len(draw.control), self.correction, self._fleets.layout
        corrected = correction is not None and draw.predicting and (draw.share is not None or 0 < k < n)
        uses_lam = correction is not None and (corrected or not draw.predicting)
        lam = correction.now(layout) if uses_lam and correction else torch.ones(len(layout.layers))
        allocation = correction.allocation if correction is not None else None
        every = 1 if correction is None or (allocation and allocation.draw != "uniform") else correction.observe_every
        p = self.prediction
        learning = allocation.predicting if allocation is not None else 0 < p.exact < p.microbatches
        due = learning and self.state.steps % every == 0  # the same on all processes
        first = next(self.module.parameters())
        # Its gradient is the scale of every gradient: in double precision where the model is.
        dtype = first.dtype if first.dtype == torch.float64 else torch.float32
        return Batch(
            microbatches,
            draw,
            corrected,
            observing=due and 0 < k < n,
            # Without predictions: the correction of nothing, the mean over C.
            coefficients=coefficients(
                [m.weight for m in microbatches],
                draw.control,
                corrected or not draw.predicting,
                float(draw.predicting),
                draw.share,
            ),
            lam=lam,
            centre=correction.centre if correction is not None else None,
            loss_leaf=torch.zeros((), dtype=dtype, device=first.device, requires_grad=True),
            exact=ExactPasses(self.module, self._metering, self._context),
            asked=set(draw.control),
            arguments=arguments,
            due=due,
        )

    def _loss(self, step: Batch) -> float:
        """The value reported for the batch: from the exact passes where there are any, else predicted."""
        if step.k:
            weights, losses = step.weights, step.exact.losses
            share = sum(weights[i] for i in losses) / sum(weights)
            return sum(weights[i] * loss for i, loss in losses.items()) / share
        assert step.predictions is not None
        return sum(w * step.predictions.losses[i] for i, w in enumerate(step.weights))

    def _all_skipped(self, step: Batch) -> bool:
        """Whether the user's training step returned None for the whole batch; for a part of it, refuse.

        Raises:
            MisconfigurationException: if it returned None for some micro-batches only.
        """
        skipped = {*step.exact.skipped, *(step.predictions.skipped if step.predictions else ())}
        if skipped and skipped != step.asked:
            raise MisconfigurationException(
                f"{type(self.module).__qualname__}.training_step returned None for micro-batches {sorted(skipped)} and "
                f"a loss for others of the same batch ({len(step.asked)} were run). A batch can only be skipped whole: "
                "return a loss for each part of it (0 * loss to ignore one), or None for all."
            )
        return bool(skipped)

    # -------------------------------------------------------------------------------------------------------- backward

    def backward(self) -> None:
        """Add the estimate to every ``.grad``, scaled as the loss that :meth:`forward` returned was.

        Raises:
            MisconfigurationException: if nobody called backward on that loss.
        """
        step, self._batch = self._batch, None
        if step is None:
            return
        if step.loss_leaf.grad is None:
            raise MisconfigurationException(
                f"The loss that the strategy returned got no gradient: {type(self.module).__qualname__}.backward does "
                "not call loss.backward(). Call it, so that loss scale and accumulation divisor are known."
            )
        scale = step.factor * float(step.loss_leaf.grad)
        scales = [scale * coefficient for coefficient in step.coefficients.exact]
        wanted = step.control if step.observing else step.draw.probe[:1]
        capture = trainable(self.module) if wanted else {}
        if self._before_last is None:
            captured = step.exact.backward(scales, capture, wanted)
            self._observe(step, dict(zip(wanted, captured, strict=True)), scale)
            self._accumulate(step, scale)
        else:
            before_last = functools.partial(self._average, step, scale)
            captured = step.exact.backward(scales, capture, wanted, before_last, self._apart)
            self._observe(step, dict(zip(wanted, captured, strict=True)), scale)
        self._metering.charge_equivalent(step.microbatches)
        self._report(step)

    def _average(self, step: Batch, scale: float, loss: Tensor) -> Tensor:
        assert self._before_last is not None
        self._accumulate(step, scale, keep=step.observing)
        return self._before_last(loss)

    def _accumulate(self, step: Batch, scale: float, keep: bool = False) -> None:
        predictions = self._predictions(step)
        if predictions is not None:
            accumulate(step, predictions, self._fleets.layout, scale, trainable(self.module), keep)
        elif step.lost:
            make_up(step, self.module, self._metering, self._context, scale, self._loss_scale())
            self._all_skipped(step)

    def _observe(self, step: Batch, captured: Mapping[int, Mapping[str, Tensor]], scale: float) -> None:
        """Fold this step into the statistics, in the optimizer's metric as it is before it steps."""
        probed = self._gather_probe(step) if step.draw.probe else None
        self._learning.observe(step, self._fleets.layout, captured, self._predictions(step), probed, scale)

    # -------------------------------------------------------------------------------------------------------- the fleet

    def _check(self, batch: Any, microbatches: Sequence[MicroBatch], arguments: Sequence[Any]) -> None:
        """Refuse a loss that depends on how the batch is split."""
        p = self.prediction
        if not p.check_separable or p.microbatches == 1:
            self.state.checked = True
        elif len(microbatches) > 1:
            # Two pieces, of two micro-batches each and far apart, tell as much as all of them, at a bounded cost.
            pieces = make_microbatches(batch, len(microbatches) // 2, self._splitter, p.weights)
            cuts = [
                (piece.data, make_microbatches(piece.data, 2, self._splitter, p.weights))
                for piece in (pieces[:1] + pieces[1:][-1:])
            ]
            with FlopCounter() as counter:
                self.state.checked = check_separable(
                    self.module, cuts, arguments, self._context, p.allow_batchnorm, self._loss_scale()
                )
            self._metering.charge("setup/checks", counter.counts().work())

    def _fleet(self, step: Batch) -> Fleet:
        """The one that predicts this batch."""
        fleet = self._fleets.ready(step.draw.format)
        if not step.draw.below:
            return fleet
        return TwoLevelFleet(self._fleets.ready(step.draw.below), fleet, step.draw.members)

    def _submit_probe(self, step: Batch, arguments: Sequence[Any]) -> None:
        """Predict on two micro-batches, as if they were the batch: one of them has an exact gradient."""
        share = step.n / len(step.draw.probe)
        parts = [step.microbatches[i] for i in step.draw.probe]
        seeds, scale = step.draw.seeds, self._loss_scale()
        jobs = [Job(replace(m, weight=m.weight * share), seeds[m.index], m is parts[0], scale) for m in parts]
        fleet = self._fleets.ready(step.draw.probed)
        fleet.submit(jobs, arguments, observe=True)
        if step.draw.probed == step.draw.below:  # it will be asked for the batch as well
            step.probed = fleet.gather()

    def _gather_probe(self, step: Batch, lost: bool = False) -> Predictions | None:
        try:
            predictions = step.probed or self._fleets.ready(step.draw.probed).gather()
        except FleetLost as error:
            self._lost(error)
            return None
        for account, work in predictions.work.items():
            probed = account in ("fleet/prediction", "fleet/control")
            self._metering.charge("waste/lost_prediction" if lost else "fleet/probe" if probed else account, work)
        return predictions

    def _predictions(self, step: Batch) -> Predictions | None:
        """Those of the batch, waited for if they are not here yet; None if there are none."""
        if step.predicts and step.predictions is None and not step.lost:
            try:
                self._gather(step)
            except FleetLost as lost:
                self._lost(lost)
                step.lost = True
                return None
            self._all_skipped(step)
        return step.predictions

    def _gather(self, step: Batch, lost: bool = False) -> Predictions:
        assert step.fleet is not None
        predictions = step.predictions = step.fleet.gather()
        for account, work in predictions.work.items():
            self._metering.charge("waste/lost_prediction" if lost else account, work)
        return predictions

    def _lost(self, lost: FleetLost) -> None:
        for work in lost.work.values():
            self._metering.charge("waste/lost_prediction", work)
        self._fleets.forget_weights()

    def close(self) -> None:
        """Let the machines go that predict."""
        self._fleets.close()

    # --------------------------------------------------------------------------------------------------------- reports

    def _report(self, step: Batch) -> None:
        """Keep what this batch showed, and nothing of the batch itself."""
        predicted = step.predictions.losses if step.predictions else {}
        loss = self._loss(step)
        if step.draw.predicting:
            loss = estimate_loss(step.weights, step.control, step.exact.losses, predicted, step.corrected, step.share)
        shown = torch.tensor([step.factor * loss, step.k / step.n], dtype=torch.float64)
        loss, exact_share = self._ranks.mean({"shown": shown}, {"shown": 2})["shown"].tolist()
        passes = [flops.total for i in step.control if (flops := self._metering.exact(step.microbatches[i]))]
        fleet = self._fleets.end_step(sum(passes))
        self.loss_values = {"gpcv/loss": loss, "gpcv/exact_share": exact_share, **fleet}
        self.statistics_values, mixed, correction = {}, self.state.mixed, self.correction
        if correction is None:
            if mixed is not None and step.predicts:
                self.loss_values["gpcv/bias_z"] = bias_z(mixed)
            return
        self._learning.keep_ratios(step, correction, step.draw.format)
        if step.corrected or not step.draw.predicting:
            k, samples = (step.k if step.corrected else 0), sum(m.samples for m in step.microbatches) / step.n
            self.statistics_values = correction.report(step.lam, step.n, k, step.share, samples or None)
