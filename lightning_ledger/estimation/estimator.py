"""One batch's gradient estimate: split, draw, predict, run the exact passes, accumulate.

This is the method, free of Lightning's hooks; ``strategies.py`` calls it from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_ledger.control_variate import (
    Coefficients,
    Layout,
    Observation,
    WeightedSum,
    coefficients,
    estimate_loss,
    observe,
    report,
    sum_factors,
)
from lightning_ledger.estimation.checks import check_separable, refuse_accumulation_hooks, refuse_batchnorm
from lightning_ledger.estimation.exact import ExactPasses
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.estimation.settings import Correction, PredictionSettings, PredictionState
from lightning_ledger.fleet import Fleet, InProcessFleet, Job, Predictions
from lightning_ledger.flops import FlopCounter
from lightning_ledger.ledger import Ledger
from lightning_ledger.microbatches import MicroBatch, Splitter, draw_control, draw_seeds, make_microbatches
from lightning_ledger.precision import Lowering, derive_seed
from lightning_ledger.predictors import EagerPredictor
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import Context, trainable


@dataclass
class _Batch:
    """A batch between its forward and its backward pass.

    Attributes:
        control: C, as indices.
        corrected: whether predictions on C are made and subtracted.
        coefficients: of every pass, lam aside.
        lam: [L] this step's.
        loss_leaf: a zero whose gradient will tell by how much the caller scaled the loss.
        asked: indices of the micro-batches that some pass runs on.
    """

    microbatches: tuple[MicroBatch, ...]
    control: tuple[int, ...]
    corrected: bool
    coefficients: Coefficients
    lam: Tensor
    loss_leaf: Tensor
    exact: ExactPasses
    asked: set[int]
    predictions: Predictions | None = None

    @property
    def n(self) -> int:
        return len(self.microbatches)

    @property
    def k(self) -> int:
        return len(self.control)

    @property
    def weights(self) -> list[float]:
        return [m.weight for m in self.microbatches]

    @property
    def predicts(self) -> bool:
        return any(self.coefficients.predicted)


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
        loss_values: the last batch's ``gpcv/loss`` (an estimate of the full batch's) and ``gpcv/exact_share`` (k/n).
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
        self._batch: _Batch | None = None
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
        n = len(microbatches)
        k = n if p.exact >= p.microbatches else min(p.exact, n)
        # Always both draws, whatever they are needed for: the private stream then depends on the batches alone.
        control, seeds = draw_control(n, k, self.state.generator), draw_seeds(n, self.state.generator)
        step = self._batch = self._begin(microbatches, control)
        if step.predicts:
            self._refresh()
            needed = [i for i, coefficient in enumerate(step.coefficients.predicted) if coefficient]
            assert self._fleet is not None
            self._fleet.submit(
                [Job(microbatches[i], seeds[i], i in control) for i in needed], arguments, step.corrected
            )
            step.asked.update(needed)
        step.exact.forward([microbatches[i] for i in control], [seeds[i] for i in control], arguments)
        if step.predicts and (step.exact.skipped or not control):
            self._gather(step, lost=bool(step.exact.skipped))
        if self._all_skipped(step):
            self._batch, self.loss_values, self.statistics_values = None, {}, {}
            return None
        loss, output = step.loss_leaf + self._loss(step), step.exact.output
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _begin(self, microbatches: tuple[MicroBatch, ...], control: tuple[int, ...]) -> _Batch:
        layers = self._layout.layers
        corrected = self.correction is not None and 0 < len(control) < len(microbatches)
        first = next(self.module.parameters())
        # Its gradient is the scale of every gradient: in double precision where the model is.
        dtype = first.dtype if first.dtype == torch.float64 else torch.float32
        return _Batch(
            microbatches,
            control,
            corrected,
            coefficients([m.weight for m in microbatches], control, corrected),
            lam=self.correction.now(self._layout) if corrected and self.correction else torch.ones(len(layers)),
            loss_leaf=torch.zeros((), dtype=dtype, device=first.device, requires_grad=True),
            exact=ExactPasses(self.module, self._metering, self._context),
            asked=set(control),
        )

    def _loss(self, step: _Batch) -> float:
        """The value reported for the batch: from the exact passes where there are any, else predicted."""
        if step.k:
            weights, losses = step.weights, step.exact.losses
            share = sum(weights[i] for i in losses) / sum(weights)
            return sum(weights[i] * loss for i, loss in losses.items()) / share
        assert step.predictions is not None
        return sum(w * step.predictions.losses[i] for i, w in enumerate(step.weights))

    def _all_skipped(self, step: _Batch) -> bool:
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
        captured = step.exact.backward(scales, parameters if step.corrected else {})
        if step.predicts:
            predictions = step.predictions or self._gather(step)
            self._all_skipped(step)
            if step.corrected and scale:
                self._observe(step, predictions, captured, scale)
            self._accumulate(step, predictions, scale, parameters)
        self._metering.charge_equivalent(step.microbatches)
        self._report(step)

    def _observe(
        self, step: _Batch, predictions: Predictions, captured: Sequence[Mapping[str, Tensor]], scale: float
    ) -> None:
        """Fold this step into the statistics; they decide later steps' coefficients, not this one's."""
        correction, layout = self.correction, self._layout
        assert correction is not None
        assert correction.statistics is not None
        assert predictions.squared_norms is not None
        total = captured[0]
        if len(captured) > 1:
            summed = WeightedSum()
            for gradients in captured:
                summed.add(gradients, 1.0)
            total = summed.total
        # captured_i is scale (n/k) w_i g_i, and residuals are in units of n w_i
        residuals = [
            layout.sample(gradients) * (step.k / scale) - predictions.samples[i]
            for i, gradients in zip(step.control, captured, strict=True)
        ]
        seen = Observation(
            exact=total,
            control=predictions.control,
            rest=predictions.rest,
            squared_norms=predictions.squared_norms,
            residuals=torch.stack(residuals),
            loss_scale=scale,
        )
        correction.statistics = observe(correction.statistics, layout, seen, step.lam)

    def _accumulate(
        self, step: _Batch, predictions: Predictions, scale: float, parameters: Mapping[str, Tensor]
    ) -> None:
        """``.grad += scale * lam * (factor_C * sum over C + factor_rest * sum over the rest)``, in place."""
        lam = dict(zip(self._layout.names, step.lam[self._layout.layer_of].tolist(), strict=True))
        factors = sum_factors(step.n, step.k, step.corrected)
        for gradients, factor in zip((predictions.control, predictions.rest), factors, strict=True):
            held, added = [], []
            for name, gradient in gradients.items():
                if gradient is None:
                    continue
                parameter = parameters[name]
                addend = gradient.mul_(scale * factor * lam[name]).to(parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = addend
                else:
                    held.append(parameter.grad)
                    added.append(addend)
            if held:
                torch._foreach_add_(held, added)

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
        predictor = EagerPredictor(
            self.module,
            Lowering(self.prediction.format, self.prediction.rounding),
            self._context,
            self._metering.look_at_prediction,
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

    def _gather(self, step: _Batch, lost: bool = False) -> Predictions:
        assert self._fleet is not None
        predictions = step.predictions = self._fleet.gather()
        for account, work in predictions.work.items():
            self._metering.charge("waste/lost_prediction" if lost else account, work)
        return predictions

    # --------------------------------------------------------------------------------------------------------- reports

    def _report(self, step: _Batch) -> None:
        """Keep what this batch showed, and nothing of the batch itself."""
        predicted = step.predictions.losses if step.predictions else {}
        loss = estimate_loss(step.weights, step.control, step.exact.losses, predicted, step.corrected)
        self.loss_values = {"gpcv/loss": loss, "gpcv/exact_share": step.k / step.n}
        statistics = self.correction.statistics if step.corrected and self.correction else None
        self.statistics_values = {}
        if statistics is not None and statistics.ready:
            ratios = self._metering.cost_ratios(step.microbatches[0], self._prices)
            self.statistics_values = report(statistics, step.lam, step.n, step.k, *ratios)
