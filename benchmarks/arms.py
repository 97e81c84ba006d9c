"""The trainings that are compared: one small GPT on real text, stock, by hand, and under the plug-in."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.race import Arm, Lap
from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.strategies import PredictedGradientStrategy

MICROBATCHES, SAMPLES = 16, 2  # of the demo: 16 micro-batches of 2 x 128 bytes
ENDLESS = 100_000
HOOKS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end")


@dataclass
class Bench:
    """What the arms share, and what they leave behind.

    Attributes:
        folder: for the ledgers' files.
        data: the text, read once.
        inside: seconds of each lap spent in predictions and exact passes, by arm; in the ledger's hooks for "ledger".
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

    def predicted(self, name: str, format: str, microbatches: int = MICROBATCHES, **size: int) -> Arm:
        """The whole method with one exact micro-batch, on the same batches; `size`: of another GPT."""
        prediction = GradientPrediction(format=format, microbatches=microbatches, exact=1)
        callbacks = [ComputeLedger(), prediction, ControlVariate()]
        return functools.partial(self._fit, name, PredictedGradientStrategy(), callbacks, size=size)

    def by_hand(self, lap: Lap) -> None:
        """Micro-batches accumulated in a plain loop, no Lightning."""
        model = _model()
        configured = model.configure_optimizers()
        optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        for batch in self.loader():
            optimizer.zero_grad()
            for part in batch.split(SAMPLES):
                torch.autograd.backward(model._loss(part) / MICROBATCHES)
            optimizer.step()
            scheduler.step()
            if not lap():
                return

    def _fit(
        self,
        name: str,
        strategy: Any,
        callbacks: Sequence[pl.Callback],
        lap: Lap,
        size: Mapping[str, int] | None = None,
    ) -> None:
        ledger = next((c for c in callbacks if isinstance(c, ComputeLedger)), None)
        inside = functools.partial(_inside, ledger, predicting=strategy != "auto")
        trainer = pl.Trainer(
            strategy=strategy,
            callbacks=[*callbacks, _Laps(lap, self.inside[name], inside)],
            accelerator="cpu",
            max_steps=ENDLESS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder / name,
        )
        trainer.fit(_model(**(size or {})), self.loader())


class _Laps(pl.Callback):
    """Ends a lap with each batch; last in the list, so that what other callbacks do is inside the lap."""

    def __init__(self, lap: Lap, inside: list[float], total: Callable[[], float]) -> None:
        self._lap = lap
        self._inside = inside
        self._total = total
        self._before = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        total = self._total()
        self._inside.append(total - self._before)
        self._before = total
        trainer.should_stop = not self._lap()


def _inside(ledger: ComputeLedger | None, predicting: bool) -> float:
    """Seconds up to now, in this thread, in what is watched."""
    watched = ("predict_into",) if predicting else HOOKS
    seconds = sum(_seconds[threading.get_ident(), name] for name in watched)
    if predicting and ledger is not None:
        totals = ledger.ledger.totals()
        seconds += sum(totals[name].seconds for name in ("scarce/forward", "scarce/backward"))
    return seconds


_seconds: dict[tuple[int, str], float] = defaultdict(float)


@contextlib.contextmanager
def watched(owner: type, *names: str) -> Iterator[None]:
    """Add up, thread by thread, the seconds spent in these methods."""
    methods = {name: getattr(owner, name) for name in names}

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                _seconds[threading.get_ident(), name] += time.perf_counter() - start

        return run

    for name, method in methods.items():
        setattr(owner, name, timed(name, method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(owner, name, method)


def _model(**size: int) -> GPT:
    torch.manual_seed(0)
    return GPT(**size)  # type: ignore[arg-type]
