"""A residual network that takes noise out of photographs. It knows nothing of `lightning_ledger`."""

from __future__ import annotations

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

GREY_LEVELS = 64.0  # per unit of the network's input: 256 of them span -2 to 2
GROUPS = 8
CELL = 2  # pixels along the side of a cell; a cell's pixels are channels, so convolutions cost a quarter
Batch = tuple[Tensor, Tensor]


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, each after a group norm, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(GROUPS, width)
        self.conv_in = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.norm_out = nn.GroupNorm(GROUPS, width)
        self.conv_out = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map features of shape (samples, width, rows, columns) to the same shape."""
        update = self.conv_in(F.relu(self.norm_in(x)))
        updated: Tensor = x + self.conv_out(F.relu(self.norm_out(update)))
        return updated


class Denoiser(L.LightningModule):
    """A residual network that predicts the noise in a colour image, with group norm, which keeps samples independent.

    A batch is a pair (noisy images, their noise), both of shape (samples, 3, height, width). The loss is

        mean of (prediction - noise)^2 / (noise level)^2,

    the share of the noise's variance that is left: 1 for a prediction of zero. With 6 blocks a width of 96 makes 1.0M
    parameters; with 16 blocks 128 makes 4.8M, and 184 makes 9.8M.

    Args:
        width: channels of every block; a multiple of 8.
        blocks: residual blocks, of two convolutions each.
        noise: standard deviation of the noise, in grey levels of 0 to 255.
        learning_rate: AdamW's.

    Raises:
        ValueError: if 8 does not divide `width`.

    Example:
        >>> Denoiser(width=8, blocks=1)(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 3, 32, 32])

    Predicting the noise, not the image, is from Zhang et al., "Beyond a Gaussian Denoiser", 2017, arXiv 1608.03981;
    working on cells of 2 x 2 pixels is from Zhang, Zuo and Zhang, "FFDNet", 2018, arXiv 1710.04026.
    """

    def __init__(self, width: int = 96, blocks: int = 6, noise: float = 25.0, learning_rate: float = 1e-3) -> None:
        super().__init__()
        if width % GROUPS:
            raise ValueError(f"width={width} cannot be cut into {GROUPS} groups. Choose a multiple of {GROUPS}.")
        self.save_hyperparameters()
        channels = 3 * CELL**2
        head = nn.Conv2d(width, channels, kernel_size=3, padding=1)
        # Begin close to a prediction of zero: a large wrong guess takes many steps to unlearn.
        nn.init.normal_(head.weight, std=1e-3)
        self.network = nn.Sequential(
            nn.PixelUnshuffle(CELL),
            nn.Conv2d(channels, width, kernel_size=3, padding=1),
            *(ResidualBlock(width) for _ in range(blocks)),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            head,
            nn.PixelShuffle(CELL),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the predicted noise of images of shape (samples, 3, height, width), both sides even."""
        predicted: Tensor = self.network(images)
        return predicted

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def _loss(self, batch: Batch) -> Tensor:
        images, noise = batch
        left: Tensor = F.mse_loss(self(images), noise) * (GREY_LEVELS / self.hparams["noise"]) ** 2
        return left

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class NoisyCrops(Dataset[Batch]):
    """Random square crops of photographs with Gaussian noise: a fixed, seeded sequence of (noisy crop, noise) pairs."""

    def __init__(self, photographs: list[Tensor], size: int, count: int, noise: float, seed: int) -> None:
        self.photographs = photographs
        self.size = size
        self.count = count
        self.noise = noise / GREY_LEVELS
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        random = np.random.default_rng((self.seed, index))
        photograph = self.photographs[random.integers(len(self.photographs))]
        top, left = (random.integers(length - self.size + 1) for length in photograph.shape[1:])
        crop = photograph[:, top : top + self.size, left : left + self.size]
        noise = self.noise * torch.from_numpy(random.standard_normal(tuple(crop.shape), dtype=np.float32))
        return crop + noise, noise


class NoisyCropsDataModule(L.LightningDataModule):
    """Crops of the two photographs that scikit-learn ships: the left of each for training, the rest for validation.

    A batch is a pair (noisy images, their noise), both of shape (batch_size, 3, size, size). Every epoch reads the same
    sequence, which does not depend on `batch_size`.

    Args:
        size: height and width of a crop in pixels; even.
        batch_size: crops per batch, in training and validation.
        epoch_crops: training crops per epoch.
        val_crops: validation crops.
        val_fraction: share of each photograph's width that is kept for validation.
        noise: standard deviation of the noise, in grey levels of 0 to 255: the model's.
        seed: of crops and noise.

    Raises:
        ValueError: if `size` is odd, or a crop does not fit into a part of a photograph.

    Example:
        >>> data = NoisyCropsDataModule(batch_size=4)
        >>> data.setup("fit")
        >>> [tuple(tensor.shape) for tensor in next(iter(data.train_dataloader()))]
        [(4, 3, 32, 32), (4, 3, 32, 32)]
    """

    def __init__(
        self,
        size: int = 32,
        batch_size: int = 32,
        epoch_crops: int = 8192,
        val_crops: int = 256,
        val_fraction: float = 0.2,
        noise: float = 25.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if size % CELL:
            raise ValueError(
                f"size={size} is odd, but the network reads cells of {CELL} x {CELL} pixels. Make it even."
            )
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        chosen = self.hparams
        size, noise, seed = chosen["size"], chosen["noise"], chosen["seed"]
        training, validation = [], []
        for pixels in load_sample_images().images:
            photograph = (torch.tensor(pixels).permute(2, 0, 1) - 127.5) / GREY_LEVELS
            cut = round(photograph.shape[2] * (1.0 - chosen["val_fraction"]))
            training.append(photograph[:, :, :cut])
            validation.append(photograph[:, :, cut:])
        shortest = min(length for part in training + validation for length in part.shape[1:])
        if size > shortest:
            raise ValueError(
                f"size={size} does not fit into a part of a photograph that is {shortest} pixels wide or high. "
                f"Choose smaller crops, or another val_fraction than {chosen['val_fraction']}."
            )
        self.train_set = NoisyCrops(training, size, chosen["epoch_crops"], noise, seed)
        self.val_set = NoisyCrops(validation, size, chosen["val_crops"], noise, seed + 1)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train_set, self.hparams["batch_size"])

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val_set, self.hparams["batch_size"])
