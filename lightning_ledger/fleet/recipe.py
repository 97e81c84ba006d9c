"""How to make a predictor, as something that can be sent to another machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl

from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import Engine, ProgramPredictor
from lightning_ledger.program import Context


@dataclass(frozen=True)
class PredictorRecipe:
    """How to predict a module's gradients; the arguments of ``Lowering`` and ``ProgramPredictor``.

    Attributes:
        format: number format of the products.
        rounding: "nearest" or "stochastic".
        rotation: whether operands are rotated first.
        keep: globs of layers that stay in high precision.
        engine: what runs the training step's program.
        context: the Trainer's precision context.
    """

    format: str
    rounding: str = "nearest"
    rotation: bool = False
    keep: tuple[str, ...] = ()
    engine: Engine = "captured"
    context: Context = contextlib.nullcontext

    def make(
        self,
        module: pl.LightningModule,
        on_counted: Callable[[Lowering, FlopCounter], None] = lambda lowering, counter: None,
        on_checked: Callable[[StepFlops, bool], None] = lambda flops, restarted: None,
        uses: dict[int, int] | None = None,
    ) -> ProgramPredictor:
        """The predictor.

        Args:
            module: whose gradients.
            on_counted: called with the lowering, and the counter of the first prediction of each shape.
            on_checked: as of :class:`lightning_ledger.predictors.ProgramPredictor`.
            uses: as of :class:`lightning_ledger.predictors.ProgramPredictor`.
        """
        lowering = Lowering(self.format, self.rounding, self.rotation, self.keep, module)
        return ProgramPredictor(
            module,
            lowering,
            self.context,
            self.engine,
            on_counted=lambda counter: on_counted(lowering, counter),
            on_checked=on_checked,
            uses=uses,
        )
