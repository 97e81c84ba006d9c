"""One batch's gradient estimate: cut, draw, predict, run the exact passes, accumulate.

This is the method, free of Lightning's hooks; ``strategies.py`` calls it from them.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_ledger.control_variate import Layout, Observation, coefficients, estimate_loss, observe, report
from lightning_ledger.estimation.books import StepBooks
from lightning_ledger.estimation.checks import check_separable, refuse_batchnorm
from lightning_ledger.estimation.exact import merged_logs
from lightning_ledger.estimation.settings import Correction, Prediction, PredictionState
from lightning_ledger.fleet import Fleet, InProcessFleet, Job, Predictions
from lightning_ledger.flops import FlopCounter
from lightning_ledger.ledger import Ledger
from lightning_ledger.microbatches import MicroBatch, Splitter, draw_control, draw_seeds, make_microbatches
from lightning_ledger.precision import Lowering, derive_seed
from lightning_ledger.predictors import EagerPredictor
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import Context, refuse_detached, seeded, training_loss


@dataclass
class _Batch:
    """A batch between its forward and its backward pass."""

    microbatches: tuple[MicroBatch, ...]
    control: tuple[int, ...]
    corrected: bool
    lam: Tensor
    tangent: Tensor
    exact: list[tuple[int, Tensor, FlopCounter | None]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
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
        context: the Trainer's precision context.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        prediction: Prediction,
        state: PredictionState,
        correction: Correction | None = None,
        ledger: Ledger | None = None,
        unit_samples: int | None = None,
        context: Context = contextlib.nullcontext,
    ) -> None:
        self.module = module
        self.prediction = prediction
        self.state = state
        self.correction = correction
        self._books = StepBooks(module, ledger, unit_samples, context)
        self._context = context
        self._splitter = Splitter(prediction.split_fn)
        self._fleet: Fleet | None = None
        self._layout = Layout.of({})
        self._refreshed_at: int | None = None
        self._batch: _Batch | None = None
        self._last: _Batch | None = None

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
        if not self.state.checked:
            self._check(batch, microbatches, arguments)
        n = len(microbatches)
        k = n if p.exact >= p.microbatches else min(p.exact, n)
        # Always both draws, whatever they are needed for: the private stream then depends on the batches alone.
        control, seeds = draw_control(n, k, self.state.generator), draw_seeds(n, self.state.generator)
        corrected = self.correction is not None and 0 < k < n
        lam = self.correction.now(self._layout.layers) if self.correction else torch.ones(len(self._layout.layers))
        first = next(self.module.parameters())
        # Its gradient is the scale of every gradient: in double precision where the model is.
        dtype = first.dtype if first.dtype == torch.float64 else torch.float32
        tangent = torch.zeros((), dtype=dtype, device=first.device, requires_grad=True)
        step = _Batch(microbatches, control, corrected, lam, tangent)

        needed = [i for i, c in enumerate(coefficients(step.weights, control, corrected).predicted) if c]
        if needed:
            self._refresh()
            jobs = [Job(microbatches[i], seeds[i], i in control) for i in needed]
            assert self._fleet is not None
            self._fleet.submit(jobs, arguments, observe=corrected)
        output, skipped = self._exact_forward(step, seeds, arguments)
        if needed and (skipped or not control):
            step.predictions = self._gather(lost=bool(skipped))
            skipped += step.predictions.skipped
        if skipped:
            return self._skip(step, skipped, needed)
        self._batch = step
        loss = tangent + self._loss(step)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _exact_forward(self, step: _Batch, seeds: Sequence[int], arguments: Sequence[Any]) -> tuple[Any, list[int]]:
        """The user's training step on each micro-batch of C, logs merged; its last output, and what it skipped."""
        output, skipped = None, []
        with merged_logs(self.module, step.k) as logs:
            for i in step.control:
                part = step.microbatches[i]
                logs.weight = part.weight
                counter = self._books.counter(part, arguments)
                start = time.perf_counter()
                with (
                    seeded(seeds[i], step.tangent.device),
                    self._context(),
                    counter or contextlib.nullcontext(),
                ):
                    output = self.module.training_step(part.data, *arguments)
                loss = training_loss(output, self.module)
                seconds = time.perf_counter() - start
                if loss is None:
                    skipped.append(i)
                    self._books.charge_exact("waste/skipped_step", "forward", part, counter, seconds)
                    continue
                refuse_detached(loss, self.module)
                step.exact.append((i, loss, counter))
                step.losses[i] = float(loss.detach())
                self._books.charge_exact("scarce/forward", "forward", part, counter, seconds)
        return output, skipped

    def _loss(self, step: _Batch) -> float:
        """The value reported for the batch: from the exact passes where there are any, else predicted."""
        if step.exact:
            return step.n / step.k * sum(step.weights[i] * loss for i, loss in step.losses.items())
        assert step.predictions is not None
        return sum(w * step.predictions.losses[i] for i, w in enumerate(step.weights))

    def _skip(self, step: _Batch, skipped: Sequence[int], needed: Sequence[int]) -> None:
        """Drop a batch that the user's training step skipped as a whole; refuse if it skipped a part."""
        asked = set(step.control) | set(needed)
        if set(skipped) != asked:
            raise MisconfigurationException(
                f"{type(self.module).__qualname__}.training_step returned None for micro-batches {sorted(set(skipped))}"
                f" and a loss for others of the same batch ({len(asked)} were run). A batch can only be skipped whole: "
                "return a loss for each part of it (0 * loss to ignore one), or None for all."
            )
        return

    # -------------------------------------------------------------------------------------------------------- backward

    def backward(self) -> None:
        """Add the estimate to every ``.grad``, scaled as the loss that :meth:`forward` returned was.

        Raises:
            MisconfigurationException: if nobody called backward on that loss.
        """
        step, self._batch = self._batch, None
        if step is None:
            return
        if step.tangent.grad is None:
            raise MisconfigurationException(
                f"The loss that the strategy returned got no gradient: {type(self.module).__qualname__}.backward does "
                "not call loss.backward(). Call it, so that loss scale and accumulation divisor are known."
            )
        scale = float(step.tangent.grad)
        trainable = self._trainable()
        captured = self._exact_backward(step, scale, trainable)
        if step.predictions is None and any(coefficients(step.weights, step.control, step.corrected).predicted):
            step.predictions = self._gather()
        predictions = step.predictions
        if predictions is not None:
            if predictions.skipped:
                self._skip(step, predictions.skipped, range(step.n))
            if step.corrected and scale:
                self._observe(step, predictions, captured, scale)
            self._accumulate(step, predictions, scale, trainable)
        self._books.charge_equivalent(step.microbatches)
        self._last = step

    def _exact_backward(self, step: _Batch, scale: float, trainable: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Backward through each exact pass; the gradients it added, pass by pass, where statistics want them."""
        exact = coefficients(step.weights, step.control, step.corrected).exact
        captured: list[dict[str, Tensor]] = []
        for i, loss, counter in step.exact:
            part = step.microbatches[i]
            start = time.perf_counter()
            if counter:
                counter.phase = "backward"
            with (
                _capturing(trainable if step.corrected else {}, copy=step.k > 1) as gradients,
                counter or contextlib.nullcontext(),
            ):
                torch.autograd.backward(loss, torch.full_like(loss, scale * exact[i]))
            captured.append(gradients)
            if counter:
                self._books.keep(part, counter)
            self._books.charge_exact("scarce/backward", "backward", part, counter, time.perf_counter() - start)
        step.exact.clear()
        return captured

    def _observe(
        self, step: _Batch, predictions: Predictions, captured: Sequence[Mapping[str, Tensor]], scale: float
    ) -> None:
        """Fold this step into the statistics; they decide later steps' coefficients, not this one's."""
        correction, layout = self.correction, self._layout
        assert correction is not None
        assert correction.statistics is not None
        assert predictions.squared_norms is not None
        total = dict(captured[0])
        for gradients in captured[1:]:
            for name, gradient in gradients.items():
                total[name] = total[name] + gradient if name in total else gradient
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
        self, step: _Batch, predictions: Predictions, scale: float, trainable: Mapping[str, Tensor]
    ) -> None:
        """``.grad += scale * lam * (rest + (1 - n/k) control)``, in place, consuming the sums."""
        lam = dict(zip(self._layout.names, step.lam[self._layout.layer_of].tolist(), strict=True))
        sums = [(predictions.rest, 1.0)]
        if step.corrected:
            sums.append((predictions.control, 1 - step.n / step.k))
        for gradients, factor in sums:
            held, added = [], []
            for name, gradient in gradients.items():
                if gradient is None:
                    continue
                gradient.mul_(scale * factor * (lam[name] if step.corrected else 1.0))
                parameter = trainable[name]
                if parameter.grad is None:
                    parameter.grad = gradient.to(parameter.dtype)
                else:
                    held.append(parameter.grad)
                    added.append(gradient.to(parameter.dtype))
            if held:
                torch._foreach_add_(held, added)

    # ------------------------------------------------------------------------------------------------ set-up and books

    def _check(self, batch: Any, microbatches: Sequence[MicroBatch], arguments: Sequence[Any]) -> None:
        """Refuse a loss that no split leaves alone."""
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
                self.state.checked = check_separable(self.module, cuts, arguments, self._context)
            self._books.charge("setup/checks", counter.counts().work())

    def _trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _prepare(self) -> None:
        """Build the fleet, again whenever the set of trainable parameters changes."""
        trainable = self._trainable()
        if self._fleet is not None and tuple(trainable) == self._layout.names:
            return
        if not trainable:
            raise MisconfigurationException(
                f"{type(self.module).__qualname__} has no trainable parameter: there is no gradient to predict. Set "
                "requires_grad=True on what should learn."
            )
        if not self.prediction.allow_batchnorm:
            refuse_batchnorm(self.module)  # here, since only in training its mode is known
        if self._fleet is None:
            rank_zero_info(self._splitter.describe())
        self._layout = Layout.of(trainable)
        predictor = EagerPredictor(
            self.module,
            Lowering(self.prediction.format, self.prediction.rounding),
            self._context,
            self._books.warn_uncounted,
        )
        self._books.restart(predictor.work)
        self._fleet = InProcessFleet(predictor, self._layout)
        self._refreshed_at = None

    def _refresh(self) -> None:
        """Give the fleet the present weights when they are due; every micro-batch of a batch sees one version."""
        assert self._fleet is not None
        state, live = self.state, self._trainable()
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
            self._books.charge(account, work)
        self._refreshed_at = state.steps

    def _gather(self, lost: bool = False) -> Predictions:
        assert self._fleet is not None
        predictions = self._fleet.gather()
        for account, work in predictions.work.items():
            self._books.charge("waste/lost_prediction" if lost else account, work)
        return predictions

    # --------------------------------------------------------------------------------------------------------- reports

    def values(self, prices: PriceBook) -> dict[str, float]:
        """What the last batch showed: the keys ``gpcv/*``.

        Args:
            prices: for the relative cost and the break-even price.

        Returns:
            ``gpcv/loss``, ``gpcv/exact_share``, and with a control variate the keys of
            :func:`lightning_ledger.control_variate.report`.
        """
        step = self._last
        if step is None:
            return {}
        predicted = step.predictions.losses if step.predictions else {}
        loss = estimate_loss(step.weights, step.control, step.losses, predicted, step.corrected)
        values = {"gpcv/loss": loss, "gpcv/exact_share": step.k / step.n}
        statistics = self.correction.statistics if self.correction else None
        if step.corrected and statistics is not None and statistics.ready:
            ratio, unit_ratio = self._books.cost_ratios(step.microbatches[0], prices)
            values |= report(statistics, step.lam, step.n, step.k, ratio, unit_ratio)
        return values


@contextlib.contextmanager
def _capturing(parameters: Mapping[str, Tensor], copy: bool) -> Iterator[dict[str, Tensor]]:
    """Collect the gradients that a backward pass adds to these leaves, whatever ``.grad`` held before.

    A leaf's hook sees the sum over its uses, once a backward; under reentrant checkpointing, once a part of it. What
    it sees may become the leaf's ``.grad``, to which the next pass adds in place: ``copy`` where a pass follows.
    """
    captured: dict[str, Tensor] = {}

    def keep(name: str, gradient: Tensor) -> None:
        if name in captured:
            captured[name] = captured[name] + gradient
        else:
            captured[name] = gradient.clone() if copy else gradient.detach()

    handles = [
        parameter.register_hook(functools.partial(keep, name))
        for name, parameter in parameters.items()
        if parameter.requires_grad
    ]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
