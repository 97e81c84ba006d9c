"""Losses that couple the samples of a batch: refused, with the numbers that show it, and the ways out that hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import relative_error, trainer, weights
from tests.model_kinds import BATCH, Trained, gradient, states

N, BATCHES = 2, 3


def pairs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, 6, generator=generator) for _ in range(2)]


def fit(directory: Path, module: pl.LightningModule, *callbacks: pl.Callback, batches: int = BATCHES) -> pl.Trainer:
    predicted = any(isinstance(c, GradientPrediction) for c in callbacks)
    strategy = PredictedGradientStrategy() if predicted else "auto"
    run = trainer(directory, *callbacks, strategy=strategy, max_epochs=1)
    run.fit(module, DataLoader([pairs(seed) for seed in range(batches)], batch_size=None))
    return run


def stack(exact: int = 1, **settings: Any) -> list[pl.Callback]:
    return [GradientPrediction(**{"format": "fp32", "microbatches": N, "exact": exact, **settings}), ControlVariate()]


def refused(directory: Path, module: pl.LightningModule, **settings: Any) -> str:
    """The message; nothing was trained by then."""
    before = states(module)
    with pytest.raises(MisconfigurationException) as error:
        fit(directory, module, *stack(**settings))
    assert all(torch.equal(before[name], value) for name, value in states(module).items())
    return str(error.value)


# --------------------------------------------------------------------------------------------------------------- losses


class Contrast(Trained):
    """A batch of two views; subclasses say how they are compared."""

    def __init__(self) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            super().__init__(nn.Linear(6, 5))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss(*map(self.net, batch))

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError


class CLIP(Contrast):
    """Each a is told from the b of other samples, and the other way round."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        logits, truth = a @ b.T, torch.arange(len(a))
        return (functional.cross_entropy(logits, truth) + functional.cross_entropy(logits.T, truth)) / 2


class BarlowTwins(Contrast):
    """The features' correlation over the batch ought to be the identity."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = ((x - x.mean(0)) / (1e-3 + x.std(0)) for x in (a, b))
        return (a.T @ b / len(a) - torch.eye(a.shape[1])).square().sum()


class HardTriplets(Contrast):
    """Each a against its b, and against the nearest b of another sample."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        distances = torch.cdist(a, b)
        others = distances.masked_fill(torch.eye(len(a), dtype=torch.bool), torch.inf)
        return functional.relu(1 + distances.diagonal() - others.min(1).values).mean()


class Balanced(Contrast):
    """A mixture of experts' auxiliary loss: over the batch, all experts ought to be asked alike."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        asked = a.softmax(1).mean(0)
        return (a - b).square().mean() + asked.square().sum() * len(asked)


@pytest.mark.parametrize("kind", [CLIP, BarlowTwins, HardTriplets, Balanced])
def test_simclr13_losses_that_compare_samples_are_refused_with_their_numbers(
    kind: type[Contrast], tmp_path: Path
) -> None:
    message = refused(tmp_path, kind())
    assert f"The loss of {kind.__name__}.training_step is not separable over samples" in message
    assert "train it without GradientPrediction" in message
    number = r"([\d.e+-]+)"
    found = re.search(
        rf"has loss {number} in one, and {number} as .* \(ratio {number}\); the two gradients differ by {number} of",
        message,
    )
    assert found is not None
    # With two micro-batches the pieces are one: the batch, in two halves.
    module, batch = kind(), pairs(0)
    halves = [[part[rows] for part in batch] for rows in (slice(0, BATCH // 2), slice(BATCH // 2, None))]
    losses, gradients = [], []
    for part in (batch, *halves):
        module.zero_grad()
        loss = module.training_step(part, 0)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(gradient(module))
    apart, sizes = sum(losses[1:]) / 2, [float(g.norm()) for g in gradients]
    difference = float((gradients[0] - sum(gradients[1:]) / 2).norm()) / (sizes[0] + sum(sizes[1:]) / 2)
    expected = [losses[0], apart, losses[0] / apart, difference]
    assert [float(x) for x in found.groups()] == pytest.approx(expected, rel=0.03)  # the last has two digits
    assert difference > 1e-3


def test_negatives_that_come_with_each_sample_are_separable(tmp_path: Path) -> None:
    class Own(Contrast):
        """The negatives of a sample are features of its own."""

        def loss(self, a: Tensor, b: Tensor) -> Tensor:
            return functional.cross_entropy(a * b, torch.zeros(len(a), dtype=torch.long))

    stock, ours = Own(), Own()
    fit(tmp_path, stock)
    fit(tmp_path, ours, *stack())
    torch.testing.assert_close(weights(ours), weights(stock), rtol=1e-5, atol=1e-7)


def test_complex_parameters_are_refused_by_name(tmp_path: Path) -> None:
    class Fourier(Contrast):
        def __init__(self) -> None:
            super().__init__()
            self.modes = nn.Parameter(torch.ones(5, dtype=torch.cfloat))

    message = refused(tmp_path, Fourier())
    assert "The parameter 'modes' is complex (torch.complex64)" in message
    assert "torch.view_as_complex" in message


# ----------------------------------------------------------------------------------------------------------- batch norm


class Normalised(Contrast):
    """A regression through a normalising layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), nn.Linear(6, 5))
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            for parameter in self.net.parameters():
                nn.init.normal_(parameter, std=0.5)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1][:, :5]).square().mean()


@pytest.mark.parametrize("exact", [0, 1, N])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_opacus319_batchnorm_is_refused_with_its_path_and_three_ways_out(
    kind: type[nn.Module], exact: int, tmp_path: Path
) -> None:
    module = Normalised(kind(6))
    with pytest.raises(MisconfigurationException) as error:
        fit(tmp_path, module, *stack(exact)[: 1 if exact == 0 else 2])
    for part in ("'net.1'", "BatchNorm2d(c) -> GroupNorm(32, c)", "eval()", "allow_batchnorm=True", "ghost batch"):
        assert part in str(error.value)


def frozen() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    norm.running_mean.fill_(0.3)  # type: ignore[union-attr]
    norm.running_var.fill_(2.0)  # type: ignore[union-attr]
    return norm.eval()


@pytest.mark.filterwarnings(r"ignore:Found 1 module\(s\) in eval mode")
@pytest.mark.parametrize("exact", [1, N])
@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 6), frozen], ids=["GroupNorm", "frozen statistics"])
def test_opacus319_the_ways_out_are_stock_lightning(norm: Any, exact: int, tmp_path: Path) -> None:
    stock, ours = Normalised(norm()), Normalised(norm())
    fit(tmp_path, stock)
    fit(tmp_path, ours, *stack(exact))
    for name, value in states(stock).items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_opacus319_allowed_batchnorm_normalises_each_micro_batch_by_itself(tmp_path: Path) -> None:
    """What ``allow_batchnorm=True`` changes: it trains on the mean of the micro-batches' own gradients."""
    ghost, stock, ours = (Normalised(nn.BatchNorm1d(6)) for _ in range(3))
    fit(tmp_path, stock, batches=1)
    fit(tmp_path, ours, *stack(N, allow_batchnorm=True), batches=1)
    for half in zip(*(part.chunk(N) for part in pairs(0)), strict=True):
        (ghost.training_step(half, 0) / N).backward()
    optimizer = ghost.configure_optimizers()
    optimizer.step()
    for name, value in states(ghost).items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-7)
    assert int(ours.net[1].num_batches_tracked) == N  # type: ignore[index, arg-type]
    assert relative_error(weights(ours), weights(stock)) > 1e-3
