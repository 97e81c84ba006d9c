"""One batch's gradient estimate: split, draw, predict, run the exact passes, accumulate.

This is the method, free of Lightning's hooks; ``strategies.py`` calls it from them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_ledger.control_variate import (
    Layout,
    bias_z,
    coefficients,
    estimate_loss,
)
from lightning_ledger.estimation.accumulation import accumulate
from lightning_ledger.estimation.batch import Batch, Drawn
from lightning_ledger.estimation.checks import check_separable, refuse_accumulation_hooks, refuse_batchnorm
from lightning_ledger.estimation.correction import Correction
from lightning_ledger.estimation.exact import ExactPasses
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.estimation.observing import observation, observe_mixed
from lightning_ledger.estimation.settings import PredictionSettings, PredictionState
from lightning_ledger.fleet import Fleet, InProcessFleet, Job, Predictions
from lightning_ledger.flops import FlopCounter
from lightning_ledger.ledger import Ledger
from lightning_ledger.microbatches import (
    MicroBatch,
    Splitter,
    draw_bernoulli,
    draw_control,
    draw_seeds,
    draw_systematic,
    make_microbatches,
)
from lightning_ledger.precision import Lowering, derive_seed
from lightning_ledger.predictors import ProgramPredictor
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
    ) -> None:
        self.module = module
        self.prediction = prediction
        self.state = state
        self.correction = correction
        self._metering = StepMetering(module, ledger, unit_samples, prediction.format, context)
        self._prices = prices or PriceBook()
        self._context = context
        self._splitter = Splitter(prediction.split_fn)
        self._fleet: Fleet | None = None
        self._layout = Layout.of({})
        self._refreshed_at: int | None = None
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
        self._prepare()
        if not p.allow_batchnorm:
            refuse_batchnorm(self.module)  # at every batch: a layer's mode may change, and is known only now
        if not self.state.checked:
            self._check(batch, microbatches, arguments)
        step = self._batch = self._begin(microbatches, self._draw(len(microbatches)))
        control, seeds = step.draw.control, step.draw.seeds
        if step.predicts:
            self._refresh()
            needed = [i for i, coefficient in enumerate(step.coefficients.predicted) if coefficient]
            assert self._fleet is not None
            jobs = [Job(microbatches[i], seeds[i], i in control) for i in needed]
            self._fleet.submit(jobs, arguments, step.corrected and step.observing)
            step.asked.update(needed)
        elif step.draw.probe:
            self._submit_probe(step, arguments)
        step.exact.forward([microbatches[i] for i in control], [seeds[i] for i in control], arguments)
        if step.predicts and (step.exact.skipped or not control):
            self._gather(step, lost=bool(step.exact.skipped))
            # A program cannot skip: ask the training step itself.
            assert self._fleet is not None
            skipped = step.exact.skipped or (step.predictions and step.predictions.skipped)
            if skipped and self._fleet.run_eagerly("the training step returned None, which no program can"):
                self._fleet.submit(jobs, arguments, step.corrected and step.observing)
                self._gather(step, lost=True)
        if self._all_skipped(step):
            if step.draw.probe:
                self._gather_probe(lost=True)
            self._batch, self.loss_values, self.statistics_values = None, {}, {}
            return None
        loss, output = step.loss_leaf + self._loss(step), step.exact.output
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _draw(self, n: int) -> Drawn:
        """Draw C and the seeds: whatever they are needed for, so that the private stream depends on the batches."""
        p, state, generator = self.prediction, self.state, self.state.generator
        allocation = self.correction.allocation if self.correction is not None else None
        if allocation is None:
            k = n if p.exact >= p.microbatches else min(p.exact, n)
            return Drawn(draw_control(n, k, generator), draw_seeds(n, generator))
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
        probe: tuple[int, ...] = ()
        if not allocation.predicting and n > 1 and state.steps % allocation.probe_every == 0:
            first = control[int(torch.randint(len(control), (), generator=generator))]
            second = (first + 1 + int(torch.randint(n - 1, (), generator=generator))) % n
            probe = first, second
        return Drawn(control, seeds, share, allocation.predicting, probe)

    def _begin(self, microbatches: tuple[MicroBatch, ...], draw: Drawn) -> Batch:
        n, k, correction = len(microbatches), len(draw.control), self.correction
        corrected = correction is not None and draw.predicting and (draw.share is not None or 0 < k < n)
        uses_lam = correction is not None and (corrected or not draw.predicting)
        lam = correction.now(self._layout) if uses_lam and correction else torch.ones(len(self._layout.layers))
        every = 1 if correction is None or draw.share is not None else correction.observe_every
        first = next(self.module.parameters())
        # Its gradient is the scale of every gradient: in double precision where the model is.
        dtype = first.dtype if first.dtype == torch.float64 else torch.float32
        return Batch(
            microbatches,
            draw,
            corrected,
            observing=draw.predicting and 0 < k < n and self.state.steps % every == 0,
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
        scale = float(step.loss_leaf.grad)
        parameters = trainable(self.module)
        scales = [scale * coefficient for coefficient in step.coefficients.exact]
        probe = step.draw.probe
        captured = step.exact.backward(scales, parameters if step.observing or probe else {}, probe[:1] or None)
        if step.predicts:
            predictions = step.predictions or self._gather(step)
            self._all_skipped(step)
            if step.observing and scale:
                self._observe(step, predictions, captured, scale)
            accumulate(step, predictions, self._layout, scale, parameters)
        elif probe:
            predictions = self._gather_probe()
            if scale and not predictions.skipped:
                self._observe(step, predictions, captured, scale)
        self._metering.charge_equivalent(step.microbatches)
        self._report(step)

    def _observe(
        self, step: Batch, predictions: Predictions, captured: Sequence[Mapping[str, Tensor]], scale: float
    ) -> None:
        """Fold this step into the statistics, in the optimizer's metric as it is before it steps."""
        layout, correction, probe = self._layout, self.correction, step.draw.probe
        if correction is None:
            self.state.mixed = observe_mixed(self.state.mixed, layout, captured, predictions.rest, step.n, scale)
            return
        seen = observation(layout, probe[:1] or step.control, captured, predictions, scale * step.gain)
        correction.observe(layout, seen, step.lam, trainable(self.module), probe=bool(probe))

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
                self.state.checked = check_separable(self.module, cuts, arguments, self._context, p.allow_batchnorm)
            self._metering.charge("setup/checks", counter.counts().work())

    def _prepare(self) -> None:
        """Build the fleet, again whenever the set of trainable parameters changes."""
        parameters = trainable(self.module)
        if self._fleet is not None and tuple(parameters) == self._layout.names:
            return
        if not parameters:
            raise MisconfigurationException(
                f"{type(self.module).__qualname__} has no trainable parameter: there is no gradient to predict. Set "
                "requires_grad=True on what should learn."
            )
        refuse_accumulation_hooks(parameters)
        if self._fleet is None:
            rank_zero_info(self._splitter.describe())
        self._layout = Layout.of(parameters)
        p = self.prediction
        lowering = Lowering(p.format, p.rounding, p.rotation, p.keep, self.module)
        predictor = ProgramPredictor(
            self.module,
            lowering,
            self._context,
            p.engine,
            on_counted=functools.partial(self._metering.look_at_prediction, unlowered=lowering.unlowered),
            on_checked=self._metering.charge_check,
            uses=self.state.uses,
        )
        self._metering.restart(predictor.work)
        self._fleet = InProcessFleet(predictor, self._layout)
        self._refreshed_at = None

    def _refresh(self) -> None:
        """Give the fleet the present weights when they are due; every micro-batch of a batch sees one version."""
        assert self._fleet is not None
        state, live = self.state, trainable(self.module)
        age = state.steps % self.prediction.refresh_every
        due = age == 0
        if self._refreshed_at == state.steps or (self._refreshed_at is not None and not due):
            return
        if self.prediction.refresh_every == 1:
            state.weights, weights = None, live
        else:
            if due or state.weights is None or list(state.weights) != list(live):
                state.weights = {name: p.detach().clone().requires_grad_() for name, p in live.items()}
            weights = {name: w.to(live[name].device) for name, w in state.weights.items()}
        # Of the step they date from: a resumed run rounds stale weights as the uninterrupted one did.
        seed = derive_seed(self.prediction.seed, state.steps - age)
        for account, work in self._fleet.refresh(weights, seed).items():
            self._metering.charge(account, work)
        self._refreshed_at = state.steps

    def _submit_probe(self, step: Batch, arguments: Sequence[Any]) -> None:
        """Predict on two micro-batches, as if they were the batch: one of them has an exact gradient."""
        self._refresh()
        assert self._fleet is not None
        share = step.n / len(step.draw.probe)
        parts = [step.microbatches[i] for i in step.draw.probe]
        jobs = [Job(replace(m, weight=m.weight * share), step.draw.seeds[m.index], m is parts[0]) for m in parts]
        self._fleet.submit(jobs, arguments, observe=True)

    def _gather_probe(self, lost: bool = False) -> Predictions:
        assert self._fleet is not None
        predictions = self._fleet.gather()
        for account, work in predictions.work.items():
            probed = account in ("fleet/prediction", "fleet/control")
            self._metering.charge("waste/lost_prediction" if lost else "fleet/probe" if probed else account, work)
        return predictions

    def _gather(self, step: Batch, lost: bool = False) -> Predictions:
        assert self._fleet is not None
        predictions = step.predictions = self._fleet.gather()
        for account, work in predictions.work.items():
            self._metering.charge("waste/lost_prediction" if lost else account, work)
        return predictions

    # --------------------------------------------------------------------------------------------------------- reports

    def _report(self, step: Batch) -> None:
        """Keep what this batch showed, and nothing of the batch itself."""
        predicted = step.predictions.losses if step.predictions else {}
        loss = self._loss(step)
        if step.draw.predicting:
            loss = estimate_loss(step.weights, step.control, step.exact.losses, predicted, step.corrected, step.share)
        self.loss_values = {"gpcv/loss": loss, "gpcv/exact_share": step.k / step.n}
        self.statistics_values, mixed, correction = {}, self.state.mixed, self.correction
        if correction is None:
            if mixed is not None and step.predicts:
                self.loss_values["gpcv/bias_z"] = bias_z(mixed)
            return
        ratios = self._metering.cost_ratios(step.microbatches[0], self._prices)
        if ratios[1] > 0:
            correction.cost_ratios = ratios
        if step.corrected or not step.draw.predicting:
            k, samples = (step.k if step.corrected else 0), sum(m.samples for m in step.microbatches) / step.n
            self.statistics_values = correction.report(step.lam, step.n, k, step.share, samples or None)
