"""Runs under one Trainer setting: equal to stock Lightning's, and right on average over every draw.

The yardstick is stock Lightning on the same data and weights. Four arms must equal it up to rounding: all micro-batches
exact; and, because an fp32 prediction *is* the gradient, fp32 predictions alone, mixed with exact ones, and corrected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import Ledger
from lightning_ledger.microbatches import draw_control, draw_seeds

SAMPLES, BATCH, N = 26, 8, 4  # 4 batches, the last one of 2 samples
VALIDATION = 6


def tensors(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 5, generator=generator), torch.randn(samples, 1, generator=generator))


class Model(L.LightningModule):
    """A perceptron for regression, trained with momentum, which remembers every earlier gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(5, 8)
        self.head = nn.Linear(8, 1)
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(gradients).norm()) if gradients else 0.0)

    def train_dataloader(self) -> Any:
        return DataLoader(tensors(SAMPLES, 1), batch_size=BATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(tensors(VALIDATION, 2), batch_size=3)

    test_dataloader = predict_dataloader = val_dataloader


ARMS: dict[str, tuple[int, bool]] = {
    "all exact": (N, True),
    "predictions": (0, False),
    "mixed": (1, False),
    "corrected": (1, True),
}
every_arm = pytest.mark.parametrize("arm", ARMS)


def stack(arm: str = "corrected", **arguments: Any) -> list[L.Callback]:
    exact, corrected = ARMS[arm]
    prediction = GradientPrediction(**{"format": "fp32", "microbatches": N, "exact": exact, **arguments})
    return [ComputeLedger(), prediction, *([ControlVariate()] if corrected else [])]


def trainer(
    tmp_path: Path, *callbacks: L.Callback, strategy: Any = "predicted_gradients", **settings: Any
) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "max_epochs": 2, "enable_checkpointing": False, "log_every_n_steps": 1}
    return L.Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        **(quiet | settings),
    )


def fresh(model: type[L.LightningModule]) -> L.LightningModule:
    torch.manual_seed(0)
    return model()


def made(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of one run: what is given as a function, such as callbacks and plugins, is made anew for each."""
    return {name: value() if callable(value) else value for name, value in settings.items()}


class Same:
    """Trains a model in stock Lightning and in every arm, with the same settings, and compares the outcome."""

    def __init__(self, tmp_path: Path, model: type[L.LightningModule] = Model, **settings: Any) -> None:
        self.path, self.model, self.settings = tmp_path, model, settings
        self.stock, self.reference = self.run("auto")

    def run(self, strategy: Any, *callbacks: L.Callback, **others: Any) -> tuple[L.Trainer, Any]:
        settings = made(self.settings) | others
        own = settings.pop("callbacks", [])
        model = fresh(self.model)
        runner = trainer(self.path, *own, *callbacks, strategy=strategy, **settings)
        runner.fit(model)
        return runner, model

    def check(self, arm: str, rtol: float = 1e-5, atol: float = 1e-6, **arguments: Any) -> tuple[L.Trainer, Any]:
        """Equal to stock; the tolerance is that of fp32 sums of some hundred terms, carried over some ten steps."""
        callbacks = stack(arm, **arguments)
        runner, model = self.run("predicted_gradients", *callbacks)
        assert runner.global_step == self.stock.global_step > 0
        assert runner.current_epoch == self.stock.current_epoch
        ours, theirs = model.state_dict(), self.reference.state_dict()
        assert list(ours) == list(theirs)
        assert any(not torch.equal(theirs[name], value) for name, value in fresh(self.model).state_dict().items())
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol)
        ledger = callbacks[0].ledger
        assert ledger.steps == runner.global_step
        exact, _ = ARMS[arm]
        assert ("scarce/forward" in ledger.totals()) == (exact > 0)
        assert ("fleet/prediction" in ledger.totals()) == (exact < N)
        return runner, model


def ledger_of(callbacks: list[L.Callback]) -> Ledger:
    return callbacks[0].ledger


# ----------------------------------------------------------------------------------- one exact micro-batch, every draw


class Increments(L.Callback):
    """Keeps what each batch added to the gradients, as if the loss were neither scaled nor the weights ever moved."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self.before = gradients(pl_module)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        added = gradients(pl_module) - self.before
        self.seen.append(added / (1.0 if scaler is None else scaler.get_scale()))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0


def gradients(module: nn.Module) -> Tensor:
    """All gradients as one vector in double precision; a missing one is zero."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([part.detach().double().flatten() for part in parts])


def controls(seed: int, sizes: list[int]) -> list[int]:
    """The exact micro-batch of each batch, as the private generator of this seed draws it."""
    generator, drawn = torch.Generator().manual_seed(seed), []
    for n in sizes:
        drawn += draw_control(n, 1, generator)
        draw_seeds(n, generator)
    return drawn


def covering_seeds(sizes: list[int]) -> list[int]:
    """Few seeds that, between them, make every micro-batch of every batch the exact one."""
    missing = {(t, i) for t, n in enumerate(sizes) for i in range(n)}
    drawn, seeds = {seed: set(enumerate(controls(seed, sizes))) for seed in range(300)}, []
    while missing:
        seeds.append(max(drawn, key=lambda seed: len(drawn[seed] & missing)))
        missing -= drawn[seeds[-1]]
    return seeds


def check_unbiased(
    tmp_path: Path,
    model: type[L.LightningModule] = Model,
    sizes: tuple[int, ...] = (4, 4, 4, 2),
    rounding: float = 1e-5,
    format: str = "int4",
    **settings: Any,
) -> None:
    """With one exact micro-batch, what a batch adds to the gradients is on average what it adds if all are exact.

    The weights stand still, so that a batch's estimate depends on its own draw only; runs of several seeds make each
    micro-batch of each batch the exact one. The prediction, of four bits, is far off.

    Args:
        tmp_path: a folder.
        model: the user's module.
        sizes: micro-batches of each batch of an epoch.
        rounding: relative, of float32 sums.
        format: of the predictions.
        **settings: of the Trainer; functions make theirs, see :func:`made`.
    """
    epochs = settings.setdefault("max_epochs", 1)

    def run(exact: int, seed: int) -> list[Tensor]:
        own, watch, module = made(settings), Increments(), fresh(model)
        prediction = GradientPrediction(
            format=format, microbatches=N, exact=exact, seed=seed, check_separable=False, engine="eager"
        )
        callbacks = [*own.pop("callbacks", []), prediction, ControlVariate(coefficient=0.9), watch]
        trainer(tmp_path, *callbacks, **{"limit_val_batches": 0, **own}).fit(module)
        return watch.seen

    batches = list(sizes) * epochs
    truth = run(N, 0)
    assert len(truth) == len(batches)
    estimates: list[dict[int, Tensor]] = [{} for _ in batches]
    for seed in covering_seeds(batches):
        for found, control, added in zip(estimates, controls(seed, batches), run(1, seed), strict=True):
            found[control] = added
    apart = 0.0
    for n, found, whole in zip(batches, estimates, truth, strict=True):
        assert len(found) == n
        assert whole.norm() > 0
        mean = torch.stack(list(found.values())).mean(0)
        assert (mean - whole).norm() <= rounding * max(float(x.norm()) for x in found.values())
        apart = max(apart, *(float((x - whole).norm() / whole.norm()) for x in found.values()))
    assert apart > 0.01  # each draw by itself is off
