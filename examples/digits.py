"""A small image classifier on scikit-learn's digits. It knows nothing of `lightning_ledger`."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

CLASSES = 10
Batch = tuple[Tensor, Tensor]


class DigitsClassifier(L.LightningModule):
    """A convolutional network on 8 x 8 grey images, with group norm, which keeps samples independent.

    Args:
        channels: of the first convolution; the second has twice as many. A multiple of 4.
        dropout: probability of dropping a feature before the last layer.
        learning_rate: AdamW's.

    Example:
        >>> DigitsClassifier(channels=4)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, channels: int = 16, dropout: float = 0.1, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * channels),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 4 * 4, CLASSES),
        )
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (samples, 10) for images of shape (samples, 1, 8, 8)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class DigitsDataModule(L.LightningDataModule):
    """The 1797 digits that scikit-learn ships, in a fixed split of 1437 for training and 360 for validation.

    Args:
        batch_size: images per batch, in training and validation.
        seed: of the split and of the shuffling.
    """

    def __init__(self, batch_size: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(digits.target, dtype=torch.long)
        order = torch.randperm(len(labels), generator=self._generator())
        train, val = order[:1437], order[1437:]
        self.train_set = TensorDataset(images[train], labels[train])
        self.val_set = TensorDataset(images[val], labels[val])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        size = self.hparams["batch_size"]
        return DataLoader(self.train_set, size, shuffle=True, generator=self._generator())

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, self.hparams["batch_size"])

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.hparams["seed"])
