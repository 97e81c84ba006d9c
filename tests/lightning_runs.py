"""Tiny models and runs, and the plain computations they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}
IGNORED = -100
VOCABULARY = 11

Gradients = dict[str, Tensor | None]


def trainer(directory: Path, *callbacks: pl.Callback, strategy: Any = "auto", **options: Any) -> pl.Trainer:
    """A silent Trainer on the CPU."""
    settings = {**QUIET, "default_root_dir": directory, "strategy": strategy, **options}
    return pl.Trainer(callbacks=list(callbacks), **settings)


class TokenModel(pl.LightningModule):
    """Predicts a label per token: embedding, one residual block, head. It logs nothing, so it runs without a Trainer.

    Args:
        dropout: probability.
        tied: head and embedding share one parameter.
        frozen: the block's first layer is not trained.
        unused: adds a layer that no loss depends on.
        gated: adds a parameter that the loss of some micro-batches only depends on.
        reduction: of the loss, over tokens.
        shift: the model shifts its labels itself, as HF's do.
        width: of the embedding.
        hidden: of the block.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        gated: bool = False,
        reduction: str = "mean",
        shift: bool = False,
        width: int = 12,
        hidden: int = 20,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.widen = nn.Linear(width, hidden)
        self.dropout = nn.Dropout(dropout)
        self.narrow = nn.Linear(hidden, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.widen.requires_grad_(False)
        if unused:
            self.spare = nn.Linear(3, 3)
        self.gate = nn.Parameter(torch.ones(width)) if gated else None
        self.reduction, self.shift = reduction, shift

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["tokens"])
        if self.gate is not None and batch["tokens"][0, 0] % 2:
            x = x * self.gate
        x = x + self.narrow(self.dropout(torch.tanh(self.widen(x))))
        logits, labels = self.head(x), batch["labels"]
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=self.reduction
        )


def token_batch(samples: int, seed: int = 0, ignored: bool = False, length: int = 6) -> dict[str, Tensor]:
    """Random tokens and labels; ``ignored`` masks a different number of labels in each sample, never the last one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (samples, length), generator=generator)
    labels = torch.randint(VOCABULARY, (samples, length), generator=generator)
    tokens[:, 0] = torch.arange(samples)  # a micro-batch's first token opens TokenModel's gate if it is odd
    if ignored:
        for sample in range(samples):
            labels[sample, : sample % length] = IGNORED
    return {"tokens": tokens, "labels": labels}


def exact_gradient(module: TokenModel, part: Mapping[str, Tensor], seed: int) -> tuple[Tensor, Gradients]:
    """Loss and gradients of one micro-batch by plain autograd, under this global seed."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loss = module.training_step(part, 0)
    gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return loss.detach(), dict(zip(trainable, gradients, strict=True))


def flat(module: nn.Module, gradients: Mapping[str, Tensor | None]) -> Tensor:
    """Gradients as one vector in double precision; a missing one is zero."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    parts = [(p.new_zeros(p.shape) if gradients.get(n) is None else gradients[n]) for n, p in trainable.items()]
    return torch.cat([part.detach().double().flatten() for part in parts if part is not None])


def weights(module: nn.Module) -> Tensor:
    """All parameters as one vector in double precision."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return float((value - truth).norm() / truth.norm())


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points of a smooth function, the same in every process."""

    def __init__(self, count: int, features: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, features, generator=generator)
        self.y = self.x[:, :3].sin().cumsum(1) + 0.1 * torch.randn(count, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x, self.y, strict=True)


class Regression(pl.LightningModule):
    """A smooth perceptron that logs ``train_loss``; :class:`ValidatedRegression` logs ``val_loss`` too.

    Args:
        dropout: probability.
        optimizer: ``"sgd"`` or ``"adamw"``.
        schedule: halve the learning rate gradually, step by step.
    """

    def __init__(self, dropout: float = 0.0, optimizer: str = "sgd", schedule: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.optimizer, self.schedule = optimizer, schedule

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(self.layers(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ValidatedRegression(Regression):
    """The same with a validation loss."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
