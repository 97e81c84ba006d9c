"""The dry run itself: exact gradients and predictions of some batches, nothing trained and nothing changed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_ledger.control_variate import Layout
from lightning_ledger.estimation import PredictionSettings
from lightning_ledger.estimation.checks import check_separable, refuse_accumulation_hooks, refuse_batchnorm
from lightning_ledger.flops import FlopCounter, UncountedWarning
from lightning_ledger.microbatches import MicroBatch, Splitter, draw_seeds, make_microbatches, shape_key
from lightning_ledger.planning.forecast import Forecast, forecast_format, noise_scale
from lightning_ledger.planning.kinds import Kind, is_worth_trying, nbytes, synchronize
from lightning_ledger.planning.moments import BatchMoments, ExactMoments, Sketches
from lightning_ledger.planning.settings import PlanSettings
from lightning_ledger.planning.ways import judge
from lightning_ledger.precision import derive_seed
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import Context, ShadowBuffers, trainable, training_step_gradients
from lightning_ledger.work import Work

Batches = Iterable[tuple[Any, Sequence[Any]]]
# However little time there is: two micro-batches have a spread, and three tell how sure that is.
LEAST = 3
# What capturing a program and comparing it takes, in eager predictions: 9 for a GPT-2 of 124M parameters.
PROGRAM = 12


class DryRun:
    """Measures, at the module's present weights, what predictions of each kind would be worth.

    Every pass is one without side effects (``training_step_gradients``). Besides the model it holds one gradient set,
    the rounded weights of one kind of prediction, and sketches of one batch's gradients.

    What the first micro-batch takes says how many fit into the time: of the first batch ``LEAST`` at least, and no
    further batch is begun that would end late.

    Args:
        module: the user's module, on its device and in the mode it trains in.
        prediction: micro-batches, weights, split function, engine and so on.
        options: what to try.
        format: of the user's own predictions, if configured: tried first.
        prices: the price book.
        accumulated: batches that one optimizer step adds up.
        context: the Trainer's precision context.
        advance: called after every pass, with the share of the dry run that is done.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> module, generator = BoringModel(), torch.Generator().manual_seed(0)
        >>> batches = [(torch.randn(8, 32, generator=generator), (0,)) for _ in range(2)]
        >>> settings = PredictionSettings(microbatches=4)
        >>> forecast = DryRun(module, settings, PlanSettings(formats="int8", roundings="nearest")).run(batches)
        >>> forecast.batches, forecast.microbatches, forecast.formats[0].delta.value < 0.01
        (2, 4, True)
    """

    def __init__(
        self,
        module: pl.LightningModule,
        prediction: PredictionSettings,
        options: PlanSettings,
        format: str | None = None,
        prices: PriceBook | None = None,
        accumulated: int = 1,
        context: Context = contextlib.nullcontext,
        advance: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.module = module
        self._settings = prediction
        self._options = options
        self._prices = options.book(prices)
        self._accumulated = accumulated
        self._context = context
        self._advance = advance
        self._parameters = trainable(module)
        self._layout = Layout.of(self._parameters)
        self._splitter = Splitter(prediction.split_fn)
        self._sketch = Sketches(self._parameters, self._layout)
        self._buffers = ShadowBuffers(module)
        ways = options.ways_of_rounding
        asked = [(f, r) for f in options.asked(format) for r in ways if is_worth_trying(f, r, ways)]
        self._kinds = [Kind(module, prediction, f, rounding, context) for f, rounding in asked]
        self._flops: dict[Any, FlopCounter] = {}
        self._exact_work = Work()
        self._exact_seconds: list[float] = []
        self._checks = 0
        self._checked = not prediction.check_separable
        self._passes = self._planned = self._microbatches = 0
        self._started = time.perf_counter()

    def run(self, batches: Batches, step: int = 0) -> Forecast:
        """Measure, and say what it means.

        Args:
            batches: each batch, on the module's device, with the rest of what ``training_step`` takes.
            step: optimizer steps that the weights have seen, for the record.

        Returns:
            The forecast.

        Raises:
            MisconfigurationException: the module cannot be trained on predictions, or nothing could be measured.
        """
        if not self._parameters:
            raise MisconfigurationException(
                f"{type(self.module).__qualname__} has no trainable parameter: there is no gradient to predict. Set "
                "requires_grad=True on what should learn."
            )
        refuse_accumulation_hooks(self._parameters)
        generator = torch.Generator().manual_seed(self._settings.seed)
        exact: list[ExactMoments] = []
        kinds: list[list[BatchMoments]] = [[] for _ in self._kinds]
        sizes: list[MicroBatch] = []
        for number, (batch, arguments) in enumerate(batches):
            parts = make_microbatches(batch, self._settings.microbatches, self._splitter, self._settings.weights)
            if not self._settings.allow_batchnorm:
                refuse_batchnorm(self.module)
            self._check(batch, parts, arguments)
            if len(parts) < 2:
                continue  # one micro-batch has no spread
            self._microbatches = max(self._microbatches, len(parts))
            begun = time.perf_counter()
            found = self._measure(number, parts, draw_seeds(len(parts), generator), arguments)
            if found is None:
                continue
            sizes.extend(parts[: found[0].n])
            exact.append(found[0])
            for held, moments in zip(kinds, found[1], strict=True):
                held.append(moments)
            if len(exact) >= self._options.batches or time.perf_counter() - begun > self._seconds_left:
                break
        if not exact:
            raise MisconfigurationException(
                "No batch could be measured: each had fewer than two micro-batches with a loss. A plan needs the "
                "differences between micro-batches: raise the batch size, GradientPrediction(microbatches=...), or "
                "Trainer(limit_train_batches=...)."
            )
        return self._forecast(exact, kinds, sizes, step)

    @property
    def _seconds_left(self) -> float:
        return 60 * self._options.minutes - (time.perf_counter() - self._started)

    def _measure(
        self, number: int, parts: Sequence[MicroBatch], seeds: Sequence[int], arguments: Sequence[Any]
    ) -> tuple[ExactMoments, list[BatchMoments]] | None:
        """The moments of one batch; None if its training step skipped a part of it."""
        n, jobs = len(parts), list(zip(parts, seeds, strict=True))
        exact: list[Tensor] = []
        predicted: list[list[Tensor]] = [[] for _ in self._kinds]

        def look(jobs: Sequence[tuple[MicroBatch, int]]) -> bool:
            """Adds sketches of n w_i g_i and n w_i h_i; False if one was skipped."""
            for part, seed in jobs:
                gradients = self._exact(part, seed, arguments)
                if gradients is None:
                    return False
                exact.append(self._sketch(gradients, n * part.weight))
                self._tell()
            for kind, rows in zip(self._kinds, predicted, strict=True):
                kind.refresh(derive_seed(self._settings.seed, number))
                for part, seed in jobs:
                    result = kind.predict(part, seed, arguments)
                    if result is None:
                        return False
                    rows.append(self._sketch(result[1], n * part.weight))
                    self._tell()
                kind.release()
            return True

        first = not self._planned
        if first:
            # If there is no time for all, those at hand are not the first of a batch that may be sorted.
            generator = torch.Generator().manual_seed(self._settings.seed)
            jobs = [jobs[i] for i in torch.randperm(len(jobs), generator=generator).tolist()]
            self._planned = self._options.batches * n * (1 + len(self._kinds))
            begun = time.perf_counter()
            if not look(jobs[:1]):
                return None
            each = time.perf_counter() - begun
            affordable = int(self._seconds_left / each)
            jobs = jobs[: max(LEAST, 1 + affordable)]
            self._planned = min(self._options.batches * n, max(len(jobs), 1 + affordable)) * (1 + len(self._kinds))
        if not look(jobs[first:]):
            return None
        if first and self._kinds:
            self._try_program(parts[0], seeds[0], arguments)
        moments = ExactMoments.of(exact)
        if not math.isfinite(moments.variance) or moments.variance <= 0:
            raise MisconfigurationException(
                f"The gradients of batch {number} have a variance of {moments.variance:g} across its micro-batches: "
                "the loss is not finite there, or depends on no sample. Look at the loss, or plan from another "
                "checkpoint."
            )
        return moments, [BatchMoments.of(exact, rows) for rows in predicted]

    def _try_program(self, part: MicroBatch, seed: int, arguments: Sequence[Any]) -> None:
        """Capture one kind's program, if there is time: the others differ from it in how they round."""
        kind, *others = self._kinds
        if self._settings.engine == "captured" and PROGRAM * kind.seconds > self._seconds_left:
            kind.tried = "eager", "there was no time to capture a program (--plan.minutes)"
        else:
            kind.try_program(part, seed, arguments)
        if kind.tried is not None:
            for other in others:
                other.tried = kind.tried[0], ""

    def _tell(self) -> None:
        self._passes += 1
        self._advance(min(1.0, self._passes / self._planned))

    def _exact(self, part: MicroBatch, seed: int, arguments: Sequence[Any]) -> dict[str, Tensor | None] | None:
        """The exact gradients of a micro-batch, timed, and counted on the first of each shape."""
        shape, device = shape_key(part.data), next(iter(self._parameters.values())).device
        counter = None if shape in self._flops else FlopCounter()
        synchronize(device)
        start = time.perf_counter()
        with counter or contextlib.nullcontext():
            result = training_step_gradients(
                self.module, self._parameters, (part.data, *arguments), seed, self._buffers, self._context, counter
            )
        synchronize(device)
        seconds = time.perf_counter() - start
        if result is None:
            return None
        if counter is not None:
            self._flops[shape] = counter
            UncountedWarning()(counter.uncounted)
        else:
            self._exact_seconds.append(seconds)
        self._exact_work += self._flops[shape].counts().work(passes=1)
        return result[1]

    def _check(self, batch: Any, parts: Sequence[MicroBatch], arguments: Sequence[Any]) -> None:
        """Refuse a loss that depends on how the batch is split, as training does."""
        if self._checked or len(parts) < 2:
            return
        # One piece, of two micro-batches: training compares another, far from it.
        (piece, *_) = make_microbatches(batch, len(parts) // 2, self._splitter, self._settings.weights)
        cuts = [(piece.data, make_microbatches(piece.data, 2, self._splitter, self._settings.weights))]
        with FlopCounter() as counter:
            self._checked = check_separable(self.module, cuts, arguments, self._context, self._settings.allow_batchnorm)
        self._checks += counter.counts().total

    def _forecast(
        self,
        exact: Sequence[ExactMoments],
        kinds: Sequence[Sequence[BatchMoments]],
        parts: Sequence[MicroBatch],
        step: int,
    ) -> Forecast:
        first = next(iter(self._flops.values())).counts()
        forward = sum(first.forward.values())
        if not forward:
            raise MisconfigurationException(
                "No FLOPs were counted in a forward pass, so nothing can be priced: the model's operations have no "
                "FLOP formula. Register them with torch.utils.flop_counter.register_flop_formula."
            )
        formats = [
            forecast_format(kind.measured(self._exact_work, forward, self._prices), moments, exact)
            for kind, moments in zip(self._kinds, kinds, strict=True)
        ]
        n, scale = self._microbatches, noise_scale(exact)
        samples = [part.samples for part in parts]
        gradients = sum(4 * p.numel() for p in self._parameters.values())
        rounded = max((kind.prediction.weight_bytes for kind in formats), default=0)
        checks = self._checks + sum(kind.checks for kind in self._kinds)
        return Forecast(
            module=type(self.module).__qualname__,
            step=step,
            batches=len(exact),
            looked_at=len(parts),
            microbatches=n,
            accumulated=self._accumulated,
            samples=sum(samples) / len(samples) if all(samples) else 0.0,
            exact_flops={name: f // self._exact_work.passes for name, f in self._exact_work.flops_by_format.items()},
            exact_seconds=median(self._exact_seconds) if self._exact_seconds else 0.0,
            forward_flops=forward,
            fleet_price=self._prices.fleet_forward,
            prices=self._prices.to_dict(),
            noise_scale=scale,
            formats=formats,
            verdict=judge(formats, n * self._accumulated, scale),
            memory={
                "parameters": nbytes(list(self.module.parameters())),
                "gradient_set": gradients,
                "rounded_weights": rounded,
                "sketches": 4 * 2 * n * math.prod(self._sketch.shape),
            },
            work={
                "exact": self._exact_work.flops,
                **{kind.label: kind.work.flops for kind in self._kinds},
                "checks": checks,
            },
            seconds=time.perf_counter() - self._started,
        )
