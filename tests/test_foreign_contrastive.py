"""Losses of pytorch-metric-learning compare the samples of a batch: refused, with the measured numbers."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.foreign_runs import loader, train
from tests.lightning_runs import weights

pytestmark = pytest.mark.slow


def digits() -> TensorDataset:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:800]
    return TensorDataset(torch.tensor(images).float()[order] / 16, torch.tensor(labels)[order])


class Embedding(pl.LightningModule):
    """A small network under a loss of the package, as its documentation has it.

    Args:
        loss: takes embeddings and labels.
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.loss = loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.loss(self.net(images), labels)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss", "TripletMarginLoss", "ContrastiveLoss"])
def test_simclr13_losses_over_pairs_are_refused(name: str, tmp_path: Path) -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    torch.manual_seed(0)
    module = Embedding(getattr(losses, name)())
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"not separable over samples: .* \(ratio .*in-batch negatives"):
        train(tmp_path, module, loader(digits()), {})  # type: ignore[arg-type]
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize("name", ["ArcFaceLoss", "CosFaceLoss"])
def test_losses_over_learned_proxies(name: str, tmp_path: Path) -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    torch.manual_seed(0)
    module = Embedding(getattr(losses, name)(num_classes=10, embedding_size=32))
    train(tmp_path, module, loader(digits()), {})  # type: ignore[arg-type]
