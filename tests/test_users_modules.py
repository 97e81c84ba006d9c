"""Modules as users write them: batches written to, state in submodules, hooks, tied weights, hidden coupling."""

from __future__ import annotations

import pickle
from collections.abc import Callable
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
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import trainer, weights

STEPS, N, BATCH = 3, 4, 8


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Dict samples, the same in every run."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(STEPS * BATCH, 6, generator=generator)
        self.y = torch.randn(STEPS * BATCH, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Model(pl.LightningModule):
    """A perceptron on dict batches; subclasses do what users do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self.layers(batch["x"]), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: pl.LightningModule, tmp_path: Path, *callbacks: pl.Callback, predicted: bool = True) -> pl.Trainer:
    strategy = PredictedGradientStrategy() if predicted else "auto"
    run = trainer(tmp_path, *callbacks, strategy=strategy, max_epochs=1)
    run.fit(module, DataLoader(Samples(), batch_size=BATCH))
    return run


def stack(**settings: Any) -> list[pl.Callback]:
    return [
        GradientPrediction(**{"engine": "eager", "format": "fp32", "microbatches": N, "exact": 1, **settings}),
        ControlVariate(),
    ]


def scales_in_place(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return batch["x"].mul_(0.5), batch["y"]


def pops(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return batch["x"], batch.pop("y")


@pytest.mark.parametrize("exact", [0, 1, 2, N])
@pytest.mark.parametrize("use", [scales_in_place, pops])
def test_a_step_may_write_to_its_batch(use: Callable[..., tuple[Tensor, Tensor]], exact: int, tmp_path: Path) -> None:
    class Writes(Model):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            x, y = use(batch)
            return functional.mse_loss(self.layers(x), y)

    stock, ours = Writes(), Writes()
    fit(stock, tmp_path, predicted=False)
    callbacks = stack(exact=exact) if exact else stack(exact=exact)[:1]
    fit(ours, tmp_path, *callbacks)
    # fp32 predictions are exact gradients, so that every arm takes stock Lightning's steps
    torch.testing.assert_close(weights(ours), weights(stock), rtol=1e-5, atol=1e-7)


def test_state_kept_in_submodules_is_that_of_the_exact_passes(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        calls = 0

        def __init__(self) -> None:
            super().__init__(6, 6)
            self.seen: list[int] = []
            self.noise = torch.Generator().manual_seed(5)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(len(x))
            self.last = x.mean()
            return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.noise))

    class Nested(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers.insert(0, Counting())

    module = Nested()
    variate = ControlVariate()
    # A program would have baked the state in.
    prediction = GradientPrediction(format="fp32", engine="eager", microbatches=N, check_separable=False)
    fit(module, tmp_path, prediction, variate)
    layer = module.layers[0]
    assert layer.calls == STEPS  # type: ignore[union-attr]
    assert layer.seen == [BATCH // N] * STEPS  # type: ignore[union-attr]
    # Exact and predicted passes drew the same noise: an fp32 prediction is the exact gradient.
    assert variate.correction.statistics is not None
    assert float(variate.correction.statistics.mean("residual").sum()) < 1e-10


def test_hooks_of_parameters_fire_for_exact_passes_only(tmp_path: Path) -> None:
    module, fired = Model(), []
    module.layers[0].weight.register_hook(lambda gradient: fired.append(gradient))  # type: ignore[union-attr]
    fit(module, tmp_path, *stack())
    assert len(fired) == STEPS


def test_hooks_that_see_a_gradient_before_it_is_complete_are_refused(tmp_path: Path) -> None:
    module = Model()
    module.layers[0].weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[union-attr]
    with pytest.raises(MisconfigurationException, match=r"layers\.0\.weight has a post-accumulate-grad hook"):
        fit(module, tmp_path, *stack())


def test_pt114743_tied_parameters_get_one_gradient_with_both_uses_summed(tmp_path: Path) -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
            self.layers[2].weight = self.layers[0].weight

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.layers(batch["x"]).pow(2).mean()

    stock, ours = Tied(), Tied()
    fit(stock, tmp_path, predicted=False)
    for arm in (stack(), stack(exact=2), [GradientPrediction(format="fp32", microbatches=N, exact=0)]):
        ours = Tied()
        fit(ours, tmp_path, *arm)
        assert ours.layers[2].weight is ours.layers[0].weight
        torch.testing.assert_close(weights(ours), weights(stock), rtol=1e-5, atol=1e-7)


def test_samples_coupled_in_training_mode_alone_are_refused(tmp_path: Path) -> None:
    class Coupled(Model):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            x = batch["x"]
            if self.training:
                x = (x - x.mean(0)) / (1 + x.std(0))
            return functional.mse_loss(self.layers(x), batch["y"])

    with pytest.raises(MisconfigurationException, match="not separable over samples"):
        fit(Coupled(), tmp_path, *stack())


def test_a_second_fit_starts_afresh(tmp_path: Path) -> None:
    callbacks = stack(refresh_every=3, exact=1)
    first, again, alone = Model(), Model(), Model()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(3.0)
    fit(first, tmp_path, *callbacks)
    fit(again, tmp_path, *callbacks)
    fit(alone, tmp_path, *stack(refresh_every=3, exact=1))
    assert torch.equal(weights(again), weights(alone))


def test_a_step_that_changes_its_trainable_set_is_counted_each_time(tmp_path: Path) -> None:
    class Unfreezes(Model):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            self.layers[0].requires_grad_(batch_idx != 0)
            return super().training_step(batch, batch_idx)

    callback = ComputeLedger()
    fit(Unfreezes(), tmp_path, callback, predicted=False)
    forward = 2 * BATCH * (6 * 10 + 10 * 2)
    head = (
        2 * BATCH * 10 * 2
    )  # gradient of the head's weight; with the first layer also of its input, and of that weight
    backward = head + 2 * (2 * head + 2 * BATCH * 6 * 10)
    totals = callback.ledger.totals()
    assert (totals["scarce/forward"].flops, totals["scarce/backward"].flops) == (STEPS * forward, backward)


def test_attributes_that_cannot_be_compared_are_no_obstacle(tmp_path: Path) -> None:
    module = Model()
    module.adjacency = torch.eye(3).to_sparse()
    module.missing = torch.full((1,), torch.nan).expand(3)
    assert fit(module, tmp_path, *stack()).global_step == STEPS


def test_a_batch_of_the_users_own_class_is_copied_for_every_pass(tmp_path: Path) -> None:
    class Batch:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y, self.me = x, y, self

    class Own(Model):
        def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> Any:
            return Batch(batch["x"], batch["y"])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch.x.mul_(0.5)
            return functional.mse_loss(self.layers(batch.x), batch.y)

    def split(batch: Batch, n: int) -> list[Batch]:
        return [Batch(x, y) for x, y in zip(batch.x.chunk(n), batch.y.chunk(n), strict=True)]

    stock, ours = Own(), Own()
    fit(stock, tmp_path, ComputeLedger(), predicted=False)
    fit(ours, tmp_path, *stack(split_fn=split, weights=lambda batch: len(batch.x)))
    torch.testing.assert_close(weights(ours), weights(stock), rtol=1e-5, atol=1e-7)


def test_frozen_low_precision_layers_are_given_their_rounding(tmp_path: Path) -> None:
    class Adapter(Model):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 6).to(torch.bfloat16).requires_grad_(False)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            x = self.base(batch["x"].to(torch.bfloat16)).float()
            return functional.mse_loss(self.layers(x), batch["y"])

    assert fit(Adapter(), tmp_path, *stack()).global_step == STEPS


class Switching(Model):
    summed = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self.layers(batch["x"]), batch["y"], reduction="sum" if self.summed else "mean")


def test_each_fit_is_checked_and_callbacks_can_be_pickled_between(tmp_path: Path) -> None:
    module, callbacks = Switching(), stack()
    fit(module, tmp_path, *callbacks)
    callbacks = pickle.loads(pickle.dumps(callbacks))
    module.summed = True
    with pytest.raises(MisconfigurationException, match="weights='sum'"):
        fit(module, tmp_path, *callbacks)
