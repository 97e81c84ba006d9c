"""Modules that carry something from batch to batch: power iterations, hidden states, counters, two optimizers."""

from __future__ import annotations

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

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import read_ledger
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import trainer, weights
from tests.model_kinds import BATCH, IMAGE, Kind, Spectral, Trained, states

N, BATCHES = 4, 3


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def fit(directory: Path, module: pl.LightningModule, batches: Sequence[Any], *callbacks: pl.Callback) -> pl.Trainer:
    predicted = any(isinstance(c, GradientPrediction) for c in callbacks)
    strategy = PredictedGradientStrategy() if predicted else "auto"
    run = trainer(directory, *callbacks, strategy=strategy, max_epochs=1)
    run.fit(module, DataLoader(batches, batch_size=None))
    return run


def stack(exact: int = 1, **settings: Any) -> list[pl.Callback]:
    return [GradientPrediction(format="fp32", microbatches=N, exact=exact, **settings), ControlVariate()]


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("exact", [1, 2, N])
@pytest.mark.parametrize("old", [False, True], ids=["parametrization", "hook"])
def test_pt66363_spectral_norm_takes_one_power_iteration_a_batch(old: bool, exact: int, tmp_path: Path) -> None:
    kind = Kind(lambda: Spectral(old), [IMAGE, (3,)])
    stock, ours, batches = kind.make(), kind.make(), [kind.batch(seed) for seed in range(BATCHES)]
    start = states(stock)
    fit(tmp_path, stock, batches)
    fit(tmp_path, ours, batches, *stack(exact))
    # Unrounded predictions are exact gradients, so that weights and buffers move as in stock Lightning.
    for name, value in states(stock).items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-6)
        assert not torch.equal(value, start[name]), name
    assert all(layer.training for layer in ours.modules())


# ------------------------------------------------------------------------------------------ state carried in attributes


class Stateful(Trained):
    """Reads a long text piece by piece: each batch goes on from the hidden state that the last one left."""

    def __init__(self) -> None:
        super().__init__(nn.GRU(6, 3, batch_first=True))
        self.hidden: Tensor | None = None

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, wanted = batch
        y, hidden = self.net(x, self.hidden)
        self.hidden = hidden.detach()
        return functional.mse_loss(y[:, -1], wanted)


class Annealed(Trained):
    """The weight of a part of its loss rises with every call."""

    calls = 0

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx) * min(1.0, self.calls / 10)


SERIES = [[normal(BATCH, 5, 6), normal(BATCH, 3)]] * BATCHES
POINTS = [[normal(BATCH, 6), normal(BATCH, 3)]] * BATCHES


@pytest.mark.parametrize("exact", [1, N])
def test_state_carried_from_batch_to_batch_is_refused(exact: int, tmp_path: Path) -> None:
    for module, batches in ((Stateful(), SERIES), (Annealed(nn.Linear(6, 3)), POINTS)):
        before = weights(module)
        expected = rf"{type(module).__name__}\.training_step carries state in attributes .*on_train_batch_start"
        with pytest.raises(MisconfigurationException, match=expected):
            fit(tmp_path, module, batches, *stack(exact))
        assert torch.equal(weights(module), before)


def test_the_numbers_of_the_refusal_are_those_of_two_calls_in_a_row(tmp_path: Path) -> None:
    module = Annealed(nn.Linear(6, 3))
    piece = [part[: BATCH // 2] for part in POINTS[0]]
    losses = [float(module.training_step(piece, 0).detach()) for _ in range(2)]
    module.calls = 0
    with pytest.raises(MisconfigurationException, match=f"has loss {losses[0]:.6g}, and {losses[1]:.6g} when"):
        fit(tmp_path, module, POINTS, *stack())


@pytest.mark.parametrize("exact", [1, N])
def test_what_counts_batches_in_their_hook_is_as_in_stock_lightning(exact: int, tmp_path: Path) -> None:
    class Hooked(Trained):
        batches = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.batches += 1

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * min(1.0, self.batches / 10)

    torch.manual_seed(0)
    stock, ours = Hooked(nn.Linear(6, 3)), Hooked(nn.Linear(6, 3))
    ours.load_state_dict(stock.state_dict())
    fit(tmp_path, stock, POINTS)
    # A program would have the first weight baked in.
    fit(tmp_path, ours, POINTS, *stack(exact, engine="eager"))
    torch.testing.assert_close(weights(ours), weights(stock), rtol=1e-5, atol=1e-7)


def test_a_generator_kept_as_an_attribute_is_no_carried_state(tmp_path: Path) -> None:
    class Noisy(Trained):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 3))
            self.generator = torch.Generator().manual_seed(1)

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            x, wanted = batch
            noise = torch.randn(x.shape[1], generator=self.generator)  # the same for all samples of a call
            return super().training_step([x + noise, wanted], batch_idx)

    assert fit(tmp_path, Noisy(), POINTS, *stack(engine="eager")).global_step == BATCHES


# ------------------------------------------------------------------------------------------------- several optimizers


class GAN(pl.LightningModule):
    """Two optimizers, stepped by hand in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.generator, self.critic = nn.Linear(4, 6), nn.Linear(6, 1)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        noise, real = batch
        for_generator, for_critic = self.optimizers()
        fake = self.generator(noise)
        for_critic.zero_grad()
        self.manual_backward(self.critic(fake.detach()).mean() - self.critic(real).mean())
        for_critic.step()
        for_generator.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        for_generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


PAIRS = [[normal(BATCH, 4), normal(BATCH, 6)]] * BATCHES


def test_pl17958_the_ledger_counts_a_gans_batches_and_not_its_optimizers_steps(tmp_path: Path) -> None:
    stock, ours, callback = GAN(), GAN(), ComputeLedger(dirpath=str(tmp_path))
    fit(tmp_path, stock, PAIRS)
    run = fit(tmp_path, ours, PAIRS, callback)
    assert torch.equal(weights(ours), weights(stock))
    assert not torch.equal(weights(ours), weights(GAN()))
    assert run.global_step == 2 * BATCHES  # Lightning counts both
    assert callback.ledger.steps == read_ledger(tmp_path).steps == BATCHES
    # A multiply-add is two FLOPs. Forward: the generator once (4 x 6), the critic on fakes, on real ones, and on fakes
    # once more (6 x 1 each). The critic's loss has two weight gradients of 6; the generator's one of 24, the gradient
    # of the fakes, 6, and the critic's weight gradient, 6, which nobody uses.
    forward, backward = 2 * (24 + 3 * 6), 2 * (2 * 6 + 24 + 6 + 6)
    totals = callback.ledger.totals()
    samples = BATCHES * BATCH
    assert totals["scarce/forward"].samples == samples
    assert totals["scarce/forward"].flops == samples * forward
    assert totals["scarce/backward"].flops == samples * backward


def test_pl17281_a_gan_is_refused_with_the_way_out(tmp_path: Path) -> None:
    expected = "GAN uses manual optimization.*drop GradientPrediction and keep ComputeLedger"
    with pytest.raises(MisconfigurationException, match=expected):
        fit(tmp_path, GAN(), PAIRS, ComputeLedger(), *stack())
