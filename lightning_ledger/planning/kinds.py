"""One kind of prediction under measurement: a format, a way of rounding, and the predictor that makes it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ledger.estimation import PredictionSettings
from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.microbatches import MicroBatch, shape_key
from lightning_ledger.planning.forecast import Prediction
from lightning_ledger.precision import Lowering, Tape, get_format
from lightning_ledger.predictors import Prediction as Gradients
from lightning_ledger.predictors import ProgramPredictor
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import Context, ShadowBuffers, trainable, training_step_gradients
from lightning_ledger.work import Work


class Kind:
    """A kind of prediction, its predictor, and what that has taken so far.

    Args:
        module: the user's module.
        settings: of predictions; format and rounding are replaced.
        format: number formats of the products.
        rounding: "nearest" or "stochastic".
        context: the Trainer's precision context.

    Attributes:
        checks: FLOPs of capturing programs and comparing them.
        uncounted: heavy operations without a FLOP formula.
    """

    def __init__(
        self, module: pl.LightningModule, settings: PredictionSettings, format: str, rounding: str, context: Context
    ) -> None:
        self.format, self.rounding = format, rounding
        self._module = module
        self._context = context
        self._lowering = Lowering(format, rounding, settings.rotation, settings.keep, module)
        self.checks = 0
        self.uncounted: set[str] = set()
        self._predictor = ProgramPredictor(
            module, self._lowering, context, settings.engine, self._look_at, on_checked=self._charge_check
        )
        self._seconds: list[float] = []
        self._shapes: Counter[Hashable] = Counter()
        self._weight_bytes = 0

    @property
    def label(self) -> str:
        """Format and rounding."""
        return f"{self.format} {self.rounding}"

    def refresh(self, seed: int) -> None:
        """Round the module's present weights."""
        self._predictor.refresh(trainable(self._module), seed)

    def weigh(self, sample: Any, arguments: Sequence[Any]) -> None:
        """Measure the rounded weights, by a pass on a small piece of a batch; they stay rounded for the next one."""
        tape = Tape()
        weights = trainable(self._module)
        with self._lowering.mode(0, tape):
            training_step_gradients(
                self._module, weights, (sample, *arguments), 0, ShadowBuffers(self._module), self._context
            )
        bits = [(use.format.bits * operand.values.numel(), operand.scale) for use, operand in tape.weights]
        self._weight_bytes = sum(n // 8 + (0 if s is None else s.numel() * s.element_size()) for n, s in bits)

    def predict(self, part: MicroBatch, seed: int, arguments: Sequence[Any]) -> Gradients | None:
        """Predict a micro-batch's gradients, and time it."""
        synchronize(next(self._module.parameters()).device)
        start = time.perf_counter()
        result = self._predictor.predict(part.data, seed, *arguments)
        synchronize(next(self._module.parameters()).device)
        self._seconds.append(time.perf_counter() - start)
        self._shapes[shape_key(part.data)] += 1
        return result

    @property
    def work(self) -> Work:
        """Of all predictions so far."""
        counted = [(self._predictor.work(shape), count) for shape, count in self._shapes.items()]
        parts = [flops.work(passes=1) for flops, count in counted for _ in range(count) if flops is not None]
        return sum(parts, Work())

    def measured(self, exact: Work, forward_flops: int, prices: PriceBook) -> Prediction:
        """What one prediction took, and its price beside that of an exact gradient.

        Args:
            exact: work of the exact gradients of the same micro-batches.
            forward_flops: of one forward-equivalent.
            prices: the price book.
        """
        work = self.work
        scarce = prices.cost("scarce/forward", exact, forward_flops)
        now, at_one = (
            book.cost("fleet/prediction", work, forward_flops) / scarce
            for book in (prices, prices.with_fleet_price(1.0))
        )
        device = next(self._module.parameters()).device
        return Prediction(
            self.format,
            self.rounding,
            {name: n // work.passes for name, n in work.flops_by_format.items()},
            median(self._seconds),
            self._predictor.engine,
            self._predictor.why_eager,
            "; ".join(fmt.describe(device) for fmt in self._lowering.formats.distinct),
            {
                f"{layer or 'training_step'} {product}": why
                for (layer, product), why in self._lowering.unlowered.items()
            },
            self._weight_bytes,
            now,
            at_one,
        )

    def _look_at(self, counter: FlopCounter) -> None:
        self.uncounted |= counter.uncounted

    def _charge_check(self, flops: StepFlops, restarted: bool) -> None:
        self.checks += flops.total


def has_noise(format: str, rounding: str) -> bool:
    """Whether this rounding differs from rounding to nearest: full precision rounds nothing."""
    return rounding == "nearest" or format != get_format("fp32").name


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock tells."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of these tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
