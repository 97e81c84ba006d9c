"""What Lightning does with the estimate: the gradient that hooks, clipping, accumulation and the optimizer see.

Predictions here are unrounded (fp32) but one step stale, so that they are wrong in a way that plain autograd can
repeat: h_i is micro-batch i's gradient at the weights of the step before. The oracle computes the estimate of every
possible draw of C from that; the gradient that Lightning sees must be one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.microbatches import TokenWeights
from lightning_ledger.strategies import PredictedGradientStrategy

N, SAMPLES, RATE = 4, 8, 0.1
# The same sums of a few float32 terms in another order: some tens of rounding units of 6e-8.
ROUNDING = {"rel": 1e-5, "abs": 1e-6}

Gradient = Tensor  # all parameters' gradients in one vector


class Model(L.LightningModule):
    """A small perceptron, always from the same weights. Subclasses replace the loss."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))

    def loss(self, batch: Any) -> Tensor:
        return (self.layers(batch) - 1).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Watch(L.Callback):
    """Keeps the gradients and the weights of every batch, hook by hook."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.after_backward: list[Gradient] = []
        self.before_step: list[Gradient] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.weights.append(flat(pl_module.parameters()))

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.after_backward.append(gradient(pl_module))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.before_step.append(gradient(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if "gpcv/loss" in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics["gpcv/loss"]))


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1).clone() for t in tensors])


def gradient(module: nn.Module) -> Gradient:
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())


def batches(count: int, samples: int = SAMPLES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 6, generator=generator) for _ in range(count)]


def gpcv(exact: int = 1, refresh_every: int = 1, **options: Any) -> list[L.Callback]:
    prediction = GradientPrediction(format="fp32", microbatches=N, exact=exact, refresh_every=refresh_every, **options)
    return [prediction, ControlVariate(coefficient=1.0)]


def fit(
    directory: Path,
    data: Sequence[Any],
    *callbacks: L.Callback,
    model: L.LightningModule | None = None,
    strategy: Any = "predicted_gradients",
    **settings: Any,
) -> tuple[L.LightningModule, Watch]:
    """Train on these batches in order; what the hooks saw."""
    model, watch = Model() if model is None else model, Watch()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        callbacks=[*callbacks, watch],
        logger=False,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"max_epochs": 1, **settings},
    )
    trainer.fit(model, DataLoader(data, batch_size=None))
    return model, watch


def stock(directory: Path, data: Sequence[Any], **settings: Any) -> tuple[L.LightningModule, Watch]:
    """Plain Lightning on the same batches."""
    return fit(directory, data, strategy="auto", **settings)


def loss_and_gradient(weights: Tensor, batch: Any, model: Model | None = None) -> tuple[float, Gradient]:
    """Plain autograd at given weights."""
    model = Model() if model is None else model
    nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    loss = model.loss(batch)
    return float(loss.detach()), flat(torch.autograd.grad(loss, list(model.parameters())))


def estimates(batch: Tensor, fresh: Tensor, stale: Tensor, k: int) -> list[Gradient]:
    """The estimate for every C of k micro-batches: exact gradients at fresh weights, predictions at stale ones."""
    parts = batch.chunk(N)
    g = [loss_and_gradient(fresh, part)[1] / N for part in parts]
    h = [loss_and_gradient(stale, part)[1] / N for part in parts]
    sets = itertools.combinations(range(N), k)
    return [sum(h) + N / k * sum(g[i] - h[i] for i in c) for c in sets]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=ROUNDING["rel"], atol=ROUNDING["abs"])


def test_on_after_backward_sees_the_final_estimate(tmp_path):
    data = batches(6)
    _, watch = fit(tmp_path, data, *gpcv(exact=1, refresh_every=2))
    assert len(watch.after_backward) == 6
    drawn = []
    for step, (batch, seen) in enumerate(zip(data, watch.after_backward, strict=True)):
        # Refreshed at steps 0, 2, 4: fresh there, one step old at 1, 3, 5.
        stale = watch.weights[step - step % 2]
        possible = estimates(batch, watch.weights[step], stale, k=1)
        matches = [close(seen, estimate) for estimate in possible]
        # Fresh unrounded predictions have no error, so that every draw gives the full-batch gradient.
        assert sum(matches) == (1 if step % 2 else N)
        drawn.append(matches.index(True))
    assert len({drawn[1], drawn[3], drawn[5]}) > 1  # C is drawn anew


def test_the_optimizer_steps_on_the_estimate(tmp_path):
    model, watch = fit(tmp_path, batches(4), *gpcv(refresh_every=2))
    weights = [*watch.weights, flat(model.parameters())]
    for before, after, estimate in zip(weights, weights[1:], watch.after_backward, strict=False):
        assert torch.allclose(after, before - RATE * estimate, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.01), ("value", 0.002)])
def test_pl18669_clipping_sees_the_corrected_gradient(tmp_path, algorithm, limit):
    data = batches(6)
    model, watch = fit(
        tmp_path, data, *gpcv(refresh_every=2), gradient_clip_val=limit, gradient_clip_algorithm=algorithm
    )
    weights = [*watch.weights, flat(model.parameters())]
    for step, batch in enumerate(data):
        # Lightning's order: on_before_optimizer_step, then clipping, then the step.
        assert torch.equal(watch.before_step[step], watch.after_backward[step])
        possible = estimates(batch, weights[step], weights[step - step % 2], k=1)
        (estimate, *_) = (e for e in possible if close(watch.before_step[step], e))
        assert float(estimate.norm() if algorithm == "norm" else estimate.abs().max()) > limit  # it bites
        clipped = estimate * limit / estimate.norm() if algorithm == "norm" else estimate.clamp(-limit, limit)
        stepped = (weights[step] - weights[step + 1]) / RATE
        # Differences of weights near 1, over the rate: a rounding unit of 6e-8 / 0.1.
        assert torch.allclose(stepped, clipped, rtol=1e-4, atol=2e-6)


class InPlace(Model):
    """Gradients are views of one buffer, zeroed and never freed, as DDP keeps its buckets."""

    def on_train_start(self) -> None:
        self.bucket = torch.zeros(sum(p.numel() for p in self.parameters()))
        start = 0
        for parameter in self.parameters():
            parameter.grad = self.bucket[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self.views = [p.grad for p in self.parameters()]
        self.kept: list[bool] = []

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.kept.append(all(p.grad is view for p, view in zip(self.parameters(), self.views, strict=True)))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("exact", [0, 1, 2, N])
def test_pt25814_grad_is_added_in_place(tmp_path, exact):
    data = batches(3)
    callbacks = gpcv(exact)[: 1 if exact == 0 else 2]
    model, watch = fit(tmp_path, data, *callbacks, model=InPlace(), accumulate_grad_batches=2)
    assert model.kept == [True] * 3
    # The buffer holds the last window's gradient: that of batch 3 alone, which is divided as stock Lightning divides.
    _, plain = stock(tmp_path, data, accumulate_grad_batches=2)
    assert torch.equal(model.bucket, watch.after_backward[-1])
    assert close(model.bucket, plain.after_backward[-1])


class Tokens(Model):
    """A mean over the targets that are not ignored: sequences of unequal length."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.layers(batch["x"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)


def token_batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        labels = torch.randint(3, (SAMPLES, 5), generator=generator)
        for sample, length in enumerate((5, 1, 5, 4, 1, 1, 2, 1)):
            labels[sample, length:] = -1
        found.append({"x": torch.randn(SAMPLES, 5, 6, generator=generator), "labels": labels})
    return found


@pytest.mark.parametrize("exact", [1, N])
def test_pl20350_token_means_over_unequal_micro_batches(tmp_path, exact):
    data = token_batches(3)
    weights = TokenWeights(key="labels", ignore_index=-1)
    _, watch = fit(tmp_path, data, *gpcv(exact, weights=weights), model=Tokens())
    for batch, at, seen, loss in zip(data, watch.weights, watch.after_backward, watch.losses, strict=True):
        full_loss, full = loss_and_gradient(at, batch, Tokens())
        assert close(seen, full)
        assert loss == pytest.approx(full_loss, **ROUNDING)
        # Targets in micro-batches of two: 6, 9, 2, 3. The mean of their means is another gradient altogether.
        parts = [{key: value[i : i + 2] for key, value in batch.items()} for i in range(0, SAMPLES, 2)]
        assert [int((part["labels"] >= 0).sum()) for part in parts] == [6, 9, 2, 3]
        naive = sum(loss_and_gradient(at, part, Tokens())[1] for part in parts) / N
        assert (naive - full).norm() > 0.05 * full.norm()


def test_pl20350_token_means_weighed_by_samples_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"not separable over samples.*TokenWeights"):
        fit(tmp_path, token_batches(1), *gpcv(), model=Tokens())


@pytest.mark.parametrize("exact", [1, N])
def test_pl19987_ragged_window_uses_lightnings_divisor(tmp_path, exact):
    # 7 batches in windows of 3: the last window of each epoch holds one.
    data, settings = batches(7), {"accumulate_grad_batches": 3, "max_epochs": 2}
    reference, plain = stock(tmp_path, data, **settings)
    model, watch = fit(tmp_path, data, *gpcv(exact), **settings)
    assert len(watch.before_step) == len(plain.before_step) == 6
    assert all(map(close, watch.after_backward, plain.after_backward))
    assert all(map(close, watch.before_step, plain.before_step))
    assert close(flat(model.parameters()), flat(reference.parameters()))


def test_pl19987_a_ragged_last_batch_has_fewer_micro_batches(tmp_path):
    # 8, 8, then 3 samples: 4, 4, 3 micro-batches.
    data = [*batches(2), *batches(1, samples=3)]
    _, plain = stock(tmp_path, data)
    _, watch = fit(tmp_path, data, *gpcv())
    assert all(map(close, watch.after_backward, plain.after_backward))


class Scaled(Model):
    """Sums over the samples and divides by a number fixed in advance, as models that ignore the normaliser do."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * len(batch) / 5


def test_hf37766_a_fixed_normaliser_is_refused_with_its_ratio(tmp_path):
    # Two pieces of 4 samples weigh 1/2 each, four of 2 samples 1/4 each: 4/5 against 2/5 of the mean.
    with pytest.raises(MisconfigurationException, match=r"Scaled\.training_step.*\(ratio 2\).*weights='sum'"):
        fit(tmp_path, batches(1), *gpcv(), model=Scaled())


def test_hf37766_the_repair_trains_as_stock_does(tmp_path):
    data = batches(3)
    _, plain = stock(tmp_path, data, model=Scaled())
    _, watch = fit(tmp_path, data, *gpcv(weights="sum"), model=Scaled())
    assert all(map(close, watch.after_backward, plain.after_backward))


@pytest.mark.parametrize("exact", [0, 1, N])
def test_pl15315_losses_are_reported_undivided(tmp_path, exact):
    data = batches(7)
    callbacks = gpcv(exact)[: 1 if exact == 0 else 2]
    _, watch = fit(tmp_path, data, *callbacks, accumulate_grad_batches=3)
    full = [loss_and_gradient(at, batch)[0] for at, batch in zip(watch.weights, data, strict=True)]
    # Lightning hands its callbacks a third of it; fp32 predictions have the exact losses.
    assert watch.losses == pytest.approx(full, **ROUNDING)


class NTXent(Model):
    """SimCLR's loss: each view against its partner, all other samples of the batch being negatives."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        views = torch.cat([self.layers(batch["left"]), self.layers(batch["right"])])
        views = functional.normalize(views, dim=1)
        similarity = views @ views.T / 0.5
        similarity = similarity.masked_fill(torch.eye(len(views), dtype=torch.bool), -torch.inf)
        return functional.cross_entropy(similarity, torch.arange(len(views)).roll(len(views) // 2))


def test_simclr13_in_batch_negatives_are_refused(tmp_path):
    left, right = batches(2)
    data = [{"left": left, "right": right}]
    model = NTXent()
    with pytest.raises(MisconfigurationException, match=r"not separable over samples.*in-batch negatives"):
        fit(tmp_path, data, *gpcv(), model=model)
    assert all(p.grad is None for p in model.parameters())
    # It is right to refuse: the micro-batches' mean gradient is not the batch's.
    at = flat(model.parameters())
    _, full = loss_and_gradient(at, data[0], NTXent())
    parts = [{"left": left[i : i + 2], "right": right[i : i + 2]} for i in range(0, SAMPLES, 2)]
    split = sum(loss_and_gradient(at, part, NTXent())[1] for part in parts) / N
    assert (split - full).norm() > 0.2 * full.norm()


class Skipping(Model):
    """Returns None for every second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 2 else self.loss(batch)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:Predictions run eagerly from now on. the training step returned None")
@pytest.mark.parametrize("exact", [0, 1, N])
def test_pl5243_training_step_none_injects_nothing(tmp_path, exact):
    data = batches(5)
    callbacks = gpcv(exact)[: 1 if exact == 0 else 2]
    reference, plain = stock(tmp_path, data, model=Skipping())
    model, watch = fit(tmp_path, data, *callbacks, model=Skipping())
    # A skipped batch has no backward pass; the next one's gradient is its own and nothing else.
    assert len(watch.after_backward) == len(plain.after_backward) == 3
    assert all(map(close, watch.after_backward, plain.after_backward))
    assert torch.equal(watch.weights[1], watch.weights[2])
    assert close(flat(model.parameters()), flat(reference.parameters()))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:Predictions run eagerly from now on. the training step returned None")
def test_pl5243_training_step_none_keeps_what_was_accumulated(tmp_path):
    # Windows of two: a batch and a skipped one.
    data = batches(4)
    reference, _ = stock(tmp_path, data, model=Skipping(), accumulate_grad_batches=2)
    model, _ = fit(tmp_path, data, *gpcv(), model=Skipping(), accumulate_grad_batches=2)
    assert close(flat(model.parameters()), flat(reference.parameters()))


class Unnamed(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        return {"objective": self.loss(batch), "batch": batch}


@pytest.mark.parametrize("callbacks", [gpcv(0)[:1], gpcv(1), gpcv(N)], ids=["predicted", "corrected", "exact"])
def test_pl7750_a_dict_without_loss_names_the_users_step(tmp_path, callbacks):
    with pytest.raises(MisconfigurationException) as caught:
        fit(tmp_path, batches(1), *callbacks, model=Unnamed())
    message = str(caught.value)
    assert "Unnamed.training_step" in message
    assert "['batch', 'objective']" in message
    assert "'loss'" in message
    assert "Strategy" not in message


class Untouched(Model):
    """Notices if training begins."""

    began = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.began = True
        return super().training_step(batch, batch_idx)


class Doubled(GradientPrediction):
    """A user's variant: another type, so that Lightning does not notice the double."""


class DoubledCorrection(ControlVariate):
    pass


class DoubledLedger(ComputeLedger):
    pass


WRONG_STACKS: dict[str, tuple[Callable[[], list[L.Callback]], str]] = {
    "none": (list, r"needs the callback GradientPrediction.*`callbacks\+:`"),
    "ledger alone": (lambda: [ComputeLedger()], r"needs the callback GradientPrediction.*ComputeLedger"),
    "correction alone": (lambda: [ControlVariate()], "needs the callback GradientPrediction"),
    "two predictions": (lambda: [*gpcv(), Doubled()], "Two GradientPrediction callbacks"),
    "two corrections": (lambda: [*gpcv(), DoubledCorrection()], "Two ControlVariate callbacks"),
    "two ledgers": (lambda: [*gpcv(), ComputeLedger(), DoubledLedger()], "2 ComputeLedger callbacks"),
}


@pytest.mark.parametrize("strategy", ["predicted_gradients", PredictedGradientStrategy])
@pytest.mark.parametrize("stack", WRONG_STACKS)
def test_pl15256_missing_or_doubled_callbacks_fail_at_setup(tmp_path, stack, strategy):
    make, expected = WRONG_STACKS[stack]
    refused(tmp_path, make(), strategy if isinstance(strategy, str) else strategy(), expected)


@pytest.mark.parametrize("index", [0, 1])
def test_pl15256_predictions_under_a_stock_strategy_fail_at_setup(tmp_path, index):
    callback = gpcv()[index]
    refused(tmp_path, [callback], "auto", f"{type(callback).__name__} needs a strategy that predicts gradients")


def test_pl15256_two_ledgers_under_a_stock_strategy_fail_at_setup(tmp_path):
    refused(tmp_path, [ComputeLedger(), DoubledLedger()], "auto", "2 ComputeLedger callbacks")


@pytest.mark.parametrize("double", [GradientPrediction, ControlVariate, ComputeLedger])
def test_pl15256_lightning_itself_refuses_two_of_one_type(tmp_path, double):
    with pytest.raises(RuntimeError, match=f"more than one stateful callback of type `{double.__name__}`"):
        fit(tmp_path, batches(1), *gpcv(), ComputeLedger(), double())


def refused(directory: Path, callbacks: list[L.Callback], strategy: Any, expected: str) -> None:
    model = Untouched()
    with pytest.raises(MisconfigurationException, match=expected):
        fit(directory, batches(1), *callbacks, model=model, strategy=strategy)
    assert not model.began
    assert not list(directory.rglob("ledger.jsonl"))
