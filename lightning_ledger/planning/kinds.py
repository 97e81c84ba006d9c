"""One kind of prediction under measurement: a format, a way of rounding, and the predictor that makes it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
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
from lightning_ledger.precision import Lowering, parse_formats
from lightning_ledger.predictors import Engine, ProgramPredictor
from lightning_ledger.predictors import Prediction as Gradients
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import Context, trainable
from lightning_ledger.work import Work


class Kind:
    """A kind of prediction, its predictor, and what that has taken so far.

    A captured program gives the eager predictor's numbers bit for bit, and capturing takes as long as several passes:
    predictions are made eagerly, unless an engine is asked for that gives others, and ``try_program`` captures one.

    Args:
        module: the user's module.
        settings: of predictions; format and rounding are replaced.
        format: number formats of the products.
        rounding: "nearest" or "stochastic".
        context: the Trainer's precision context.

    Attributes:
        checks: FLOPs of capturing programs and comparing them.
        uncounted: heavy operations without a FLOP formula.
        tried: the engine that predictions would run in, and why it is not the one asked for; None until tried.
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
        self._asked: Engine = settings.engine
        self._predictor = self._of("eager" if self._asked == "captured" else self._asked)
        self.tried: tuple[str, str] | None = None
        self._seconds: list[float] = []
        self._shapes: Counter[Hashable] = Counter()
        self._weight_bytes = 0

    def _of(self, engine: Engine) -> ProgramPredictor:
        return ProgramPredictor(
            self._module, self._lowering, self._context, engine, self._look_at, on_checked=self._charge_check
        )

    @property
    def label(self) -> str:
        """Format and rounding."""
        return f"{self.format} {self.rounding}"

    def refresh(self, seed: int) -> None:
        """Round the module's present weights."""
        self._predictor.refresh(trainable(self._module), seed)

    def release(self) -> None:
        """Let go of the rounded weights."""
        self._weight_bytes = max(self._weight_bytes, self._lowering.weight_bytes())
        self._lowering.refresh({}, 0)
        give_back()

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
    def seconds(self) -> float:
        """Of one prediction, the median."""
        return median(self._seconds)

    def try_program(self, part: MicroBatch, seed: int, arguments: Sequence[Any]) -> None:
        """Capture the training step as a program, if asked for, and compare it with the eager predictor."""
        if self._asked != "captured":
            return
        program = self._of("captured")
        program.refresh(trainable(self._module), seed)
        program.predict(part.data, seed, *arguments)
        if (eager := program.work(shape_key(part.data))) is not None:
            self.checks += eager.total
        self.tried = program.engine, program.why_eager
        self._lowering.refresh({}, 0)
        del program
        gc.collect()  # a graph's nodes refer to one another
        give_back()

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
            self.seconds,
            *(self.tried or (self._predictor.engine, self._predictor.why_eager)),
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


def is_worth_trying(format: str, rounding: str, roundings: Sequence[str]) -> bool:
    """Whether this way of rounding tells more than rounding to nearest does: not where all products keep 16 bits.

    >>> [is_worth_trying(f, "stochastic", ("nearest", "stochastic")) for f in ("fp32", "bf16", "bf16:output=int4")]
    [False, False, True]
    """
    bits = min(fmt.bits for fmt in parse_formats(format).distinct)
    return bits < 16 or rounding == "nearest" or ("nearest" not in roundings and bits < 32)


def give_back() -> None:
    """Hand freed memory back to the system. glibc keeps it, in pieces too small for the next kind's weights."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock tells."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of these tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
