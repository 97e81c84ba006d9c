"""The trainings that are compared: one small GPT on real text, stock, by hand, and under the plug-in."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.race import Arm, Lap
from examples.gpt import ByteGPT
from examples.text import TextDataModule
from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.predictors import EagerPredictor
from lightning_ledger.strategies import PredictedGradientStrategy

MICROBATCHES, SAMPLES = 16, 2  # of the demo: 16 micro-batches of 2 x 128 bytes
ENDLESS = 100_000


@dataclass
class Bench:
    """What the arms share, and what they leave behind.

    Attributes:
        folder: for the ledgers' files.
        data: the text, read once.
        inside: seconds of each lap that an arm spent in predictions and exact passes, by arm.
    """

    folder: Path
    data: TextDataModule = field(default_factory=lambda: TextDataModule(batch_size=MICROBATCHES * SAMPLES))
    inside: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.data.setup("fit")

    def loader(self) -> DataLoader[Tensor]:
        """The same batches for every arm."""
        return self.data.train_dataloader()

    def stock(self) -> Arm:
        """Plain Lightning on whole batches."""
        return functools.partial(self._fit, "stock", "auto", [])

    def ledger(self) -> Arm:
        """The same with a ledger, written to disk."""
        return functools.partial(self._fit, "ledger", "auto", [ComputeLedger()])

    def exact(self) -> Arm:
        """The strategy with every micro-batch exact."""
        callbacks = [GradientPrediction(microbatches=MICROBATCHES, exact=MICROBATCHES)]
        return functools.partial(self._fit, "exact", PredictedGradientStrategy(), callbacks)

    def predicted(self, format: str) -> Arm:
        """The whole method, one exact micro-batch among sixteen."""
        callbacks = [
            ComputeLedger(),
            GradientPrediction(format=format, microbatches=MICROBATCHES, exact=1),
            ControlVariate(),
        ]
        return functools.partial(self._fit, format, PredictedGradientStrategy(), callbacks)

    def by_hand(self, lap: Lap) -> None:
        """Micro-batches accumulated in a plain loop, no Lightning."""
        model = _model()
        configured = model.configure_optimizers()
        optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        for batch in self.loader():
            optimizer.zero_grad()
            for part in batch.split(SAMPLES):
                (model._loss(part) / MICROBATCHES).backward()
            optimizer.step()
            scheduler.step()
            if not lap():
                return

    def _fit(self, name: str, strategy: Any, callbacks: Sequence[pl.Callback], lap: Lap) -> None:
        ledger = next((c for c in callbacks if isinstance(c, ComputeLedger)), None)
        trainer = pl.Trainer(
            strategy=strategy,
            callbacks=[*callbacks, _Laps(lap, self.inside[name], ledger)],
            accelerator="cpu",
            max_steps=ENDLESS,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder / name,
        )
        trainer.fit(_model(), self.loader())


class _Laps(pl.Callback):
    """Ends a lap with each batch; last in the list, so that what other callbacks do is inside the lap."""

    def __init__(self, lap: Lap, inside: list[float], ledger: ComputeLedger | None) -> None:
        self._lap = lap
        self._inside = inside
        self._ledger = ledger
        self._before = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._ledger is not None:
            totals = self._ledger.ledger.totals()
            exact = sum(totals[name].seconds for name in ("scarce/forward", "scarce/backward"))
            total = exact + _predicting[threading.get_ident()]
            self._inside.append(total - self._before)
            self._before = total
        trainer.should_stop = not self._lap()


_predicting: dict[int, float] = defaultdict(float)


@contextlib.contextmanager
def timed_predictions() -> Iterator[None]:
    """Add up, thread by thread, the seconds spent in ``EagerPredictor.predict``."""
    predict = EagerPredictor.predict

    @functools.wraps(predict)
    def timed(self: EagerPredictor, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return predict(self, *args)
        finally:
            _predicting[threading.get_ident()] += time.perf_counter() - start

    EagerPredictor.predict = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        EagerPredictor.predict = predict  # type: ignore[method-assign]


def _model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT()
