"""The eager predictor: the training step itself, run inside the lowering mode."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.microbatches import shape_key
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors.base import GradientPredictor, Prediction
from lightning_ledger.program import Context, ShadowBuffers, training_step_gradients


class EagerPredictor(GradientPredictor):
    """Runs the training step and its backward inside the lowering mode: the oracle and the fallback.

    Args:
        module: the user's module, unmodified.
        lowering: the number format of the matrix products.
        context: the Trainer's precision context.
        on_counted: called with the counter of the first prediction of each shape.

    Example:
        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> model = BoringModel()
        >>> predictor = EagerPredictor(model, Lowering("int8"))
        >>> predictor.refresh(dict(model.named_parameters()))
        >>> loss, gradients = predictor.predict(torch.ones(4, 32), 0, 0)
        >>> sorted(gradients), predictor.work(shape_key(torch.ones(4, 32))).forward
        (['layer.bias', 'layer.weight'], {'int8': 512})
    """

    def __init__(
        self,
        module: pl.LightningModule,
        lowering: Lowering,
        context: Context = contextlib.nullcontext,
        on_counted: Callable[[FlopCounter], None] = lambda counter: None,
    ) -> None:
        self.module = module
        self.lowering = lowering
        self._context = context
        self._on_counted = on_counted
        self.buffers = ShadowBuffers(module)
        self._weights: Mapping[str, Tensor] = {}
        self._work: dict[tuple[Hashable, bool], StepFlops] = {}

    def refresh(self, weights: Mapping[str, Tensor], seed: int = 0) -> None:
        if list(weights) != list(self._weights):
            self._work.clear()  # another trainable set has another backward pass
        self._weights = dict(weights)
        frozen = {n: p for n, p in self.module.named_parameters() if n not in weights and p.is_floating_point()}
        self.lowering.refresh({**weights, **frozen}, seed)

    def predict(self, microbatch: Any, seed: int, *arguments: Any, loss_scale: float = 1.0) -> Prediction | None:
        shape = shape_key(microbatch)
        counter = FlopCounter(self.lowering.formats_of) if (shape, False) not in self._work else None
        before = _sums(self.module) if counter is not None else {}
        # The counter goes inside the lowering, to see each product before it is lowered.
        with self.lowering.mode(seed), counter or contextlib.nullcontext():
            result = training_step_gradients(
                self.module,
                self._weights,
                (microbatch, *arguments),
                seed,
                self.buffers,
                self._context,
                counter,
                loss_scale,
            )
        if counter is not None:
            _refuse_written(self.module, before)
            self._work[shape, result is None] = counter.counts()
            self._on_counted(counter)
        return result

    def work(self, shape: Hashable, skipped: bool = False) -> StepFlops | None:
        whole = self._work.get((shape, False))
        if skipped and whole is not None:
            return StepFlops(whole.forward, {})
        return self._work.get((shape, skipped))


def _sums(module: pl.LightningModule) -> dict[str, float]:
    """A number for each parameter that a write to it would change."""
    return {name: float(p.detach().sum(dtype=torch.float64)) for name, p in module.named_parameters()}


def _refuse_written(module: pl.LightningModule, before: dict[str, float]) -> None:
    """Refuse a training step that writes to parameters: each prediction would write again.

    Raises:
        MisconfigurationException: naming one.
    """
    after = _sums(module)
    written = [name for name, total in before.items() if after[name] != total and not math.isnan(total)]
    if written:
        raise MisconfigurationException(
            f"{type(module).__qualname__}.training_step writes to the parameter {written[0]!r}, as a moving average of "
            "weights or an embedding with max_norm does. Every prediction would write to it once more. Move the update "
            "to on_train_batch_end, or train without GradientPrediction."
        )
