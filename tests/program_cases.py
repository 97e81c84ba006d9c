"""Small modules, and a program predictor beside the eager predictor that it must equal."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from examples.convnet import Denoiser
from examples.digits import DigitsClassifier
from examples.gpt import GPT
from examples.hf_gpt2 import HFGPT2
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import EagerPredictor, Engine, Prediction, ProgramPredictor
from lightning_ledger.program import Context, trainable


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def digits(seed: int = 0) -> pl.LightningModule:
    torch.manual_seed(seed)
    return DigitsClassifier(channels=32)


def denoiser(seed: int = 0) -> pl.LightningModule:
    torch.manual_seed(seed)
    return Denoiser(width=32, blocks=1)


def gpt(seed: int = 0, layers: int = 2, dropout: float = 0.1) -> pl.LightningModule:
    torch.manual_seed(seed)
    return GPT(layers=layers, heads=2, width=64, context=32, dropout=dropout)


def hf_gpt2(seed: int = 0, layers: int = 2) -> pl.LightningModule:
    torch.manual_seed(seed)
    return HFGPT2(layers=layers, heads=2, width=64, context=32, dropout=0.1)


def batch_of(module: pl.LightningModule, seed: int) -> Any:
    """Four samples for an example's module."""
    if isinstance(module, DigitsClassifier):
        return normal(4, 1, 8, 8, seed=seed), integers(10, 4, seed=seed)
    if isinstance(module, Denoiser):
        return normal(4, 3, 8, 8, seed=seed), normal(4, 3, 8, 8, seed=seed + 100)
    return integers(256, 4, 33 if isinstance(module, GPT) else 32, seed=seed)


def move(module: nn.Module, seed: int = 0) -> None:
    """Change the weights in place, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter)


def same(a: Prediction | None, b: Prediction | None) -> bool:
    """Bit for bit, and each a prediction."""
    if a is None or b is None or list(a[1]) != list(b[1]):
        return False
    pairs = [(a[0], b[0]), *((g, b[1][name]) for name, g in a[1].items())]
    return all(x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


class Pair:
    """A program predictor, and an eager predictor with caches of its own, of one module at its present weights.

    Args:
        module: shared by both.
        format: of the products.
        rounding: of both.
        engine: of the program predictor.
        context: of both.

    Attributes:
        ran: for each prediction of the program predictor, whether it ran the training step; a program does not.
        checked: how many passes it charged as checks.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        format: str = "int8",
        rounding: str = "nearest",
        engine: Engine = "captured",
        context: Context = contextlib.nullcontext,
    ) -> None:
        self.module = module
        self.ran: list[bool] = []
        self.checked = self._steps = 0
        step = module.training_step

        def counted(*arguments: Any) -> Any:
            self._steps += 1
            return step(*arguments)

        module.training_step = counted  # type: ignore[method-assign]
        self.program = ProgramPredictor(
            module, Lowering(format, rounding), context, engine, on_checked=lambda flops, restarted: self._count()
        )
        self.eager = EagerPredictor(module, Lowering(format, rounding), context)
        self.refresh()

    def _count(self) -> None:
        self.checked += 1

    def refresh(self, seed: int = 0) -> None:
        """Take the module's present weights."""
        for predictor in (self.program, self.eager):
            predictor.refresh(trainable(self.module), seed)

    def predict(self, batch: Any, seed: int = 1, *arguments: Any) -> Prediction | None:
        """The program predictor's prediction; what it ran is noted."""
        steps = self._steps
        try:
            return self.program.predict(batch, seed, *(arguments or (0,)))
        finally:
            self.ran.append(self._steps > steps)

    def agree(self, batch: Any, seed: int = 1, *arguments: Any) -> bool:
        """Whether both predict the same, bit for bit."""
        return same(self.predict(batch, seed, *arguments), self.eager.predict(batch, seed, *(arguments or (0,))))

    def warm_up(self, batch: Any, seed: int = 0) -> None:
        """The first two uses of a program, which are compared with the training step and return its result."""
        assert self.agree(batch, seed)
        assert self.agree(batch, seed + 1)
        assert self.ran == [True, True]
        self.ran.clear()
