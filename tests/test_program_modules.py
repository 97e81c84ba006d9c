"""Modules hard to capture: a program gives the eager numbers, or the eager predictor takes over and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_ledger.program import trainable
from tests.lightning_runs import Regression, TokenModel, token_batch
from tests.program_cases import Pair, move, normal

USES_3_TO_10 = [False, True, False, False, False, True, False, False]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return normal(4, 8, seed=seed), normal(4, 3, seed=seed + 100)


def agrees_throughout(pair: Pair, batches: list[Any]) -> bool:
    """Whether uses 3 to 10, on these batches in turn and at changing weights, are the eager predictor's to the bit."""
    agreed = []
    for step in range(4):
        agreed += [pair.agree(batches[(step + i) % len(batches)], seed=10 * step + i) for i in range(2)]
        move(pair.module, seed=step)
        pair.refresh(seed=step)
    return all(agreed)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_pt114743_tied_parameters_get_one_gradient_with_both_uses_summed(rounding: str) -> None:
    torch.manual_seed(0)
    pair = Pair(TokenModel(tied=True, dropout=0.2), "int8", rounding)
    pair.warm_up(token_batch(4))
    assert agrees_throughout(pair, [token_batch(4, seed=1), token_batch(4, seed=2)])
    assert pair.ran == USES_3_TO_10

    exact = Pair(pair.module, "fp32")
    for use in range(3):
        prediction = exact.predict(token_batch(4), use)
    assert prediction is not None
    assert exact.ran == [True, True, False]
    assert "embed.weight" in prediction[1]
    assert "head.weight" not in prediction[1]
    # Untied, the embedding and the head have a gradient each; tied, their sum.
    untied = TokenModel(dropout=0.2)
    untied.load_state_dict(pair.module.state_dict())
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        untied.training_step(token_batch(4), 0).backward()
    both = untied.embed.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(prediction[1]["embed.weight"], both, rtol=1e-5, atol=1e-7)


class Normed(Regression):
    """BatchNorm in evaluation mode, and a buffer that the step writes to and reads."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))
        self.norm.eval()
        self.norm.running_mean.add_(0.3)
        self.norm.running_var.mul_(2.0)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        x, y = batch
        return functional.mse_loss(self.layers(self.norm(x)), y) * self.calls

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def test_pt99662_buffers_are_inputs_that_a_program_leaves_unchanged() -> None:
    torch.manual_seed(0)
    module = Normed()
    kept = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
    pair = Pair(module, "int8")
    pair.warm_up(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.ran == USES_3_TO_10
    for name, buffer in module.named_buffers():
        assert buffer is kept[name][0]
        assert torch.equal(buffer, kept[name][1]), name
    # What an exact pass leaves in them is seen by the next prediction.
    before = pair.predict(batch(1), 5)
    module.calls += 1
    module.norm.running_mean.sub_(1.0)
    assert pair.agree(batch(1), 5)
    after = pair.predict(batch(1), 5)
    assert before is not None
    assert after is not None
    assert pair.ran[-3:] == [False, False, False]
    assert not torch.equal(before[0], after[0])


def test_a_layer_in_another_mode_has_another_program() -> None:
    torch.manual_seed(0)
    pair = Pair(Normed(), "int8")
    pair.warm_up(batch(0))
    pair.module.layers.eval()
    assert pair.agree(batch(0))  # a second kind of pass is captured when it comes back in a later step
    assert pair.program.captures == 1
    pair.refresh()
    for use in range(3):
        assert pair.agree(batch(0), use)
    assert pair.program.captures == 2
    pair.module.layers.train()
    assert pair.agree(batch(0))
    assert pair.program.captures == 2
    assert pair.ran == [True, True, True, False, False]


class SpectrallyNormed(Regression):
    """Power iteration writes to its buffers in every training-mode forward pass."""

    def __init__(self, old: bool) -> None:
        super().__init__()
        self.normed = (nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm)(nn.Linear(8, 8))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return functional.mse_loss(self.layers(self.normed(x)), y)


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("old", [False, True], ids=["parametrization", "hook"])
def test_pt66363_spectral_norm_is_captured_and_its_buffers_stay(old: bool) -> None:
    torch.manual_seed(0)
    module = SpectrallyNormed(old)
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    assert kept
    pair = Pair(module, "int8")
    pair.warm_up(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.ran == USES_3_TO_10
    assert all(torch.equal(buffer, kept[name]) for name, buffer in module.named_buffers())


class Penalised(Regression):
    """A gradient penalty: the step differentiates by its input, and training differentiates that again."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = x.detach().requires_grad_()
        predicted = self.layers(x)
        (slope,) = torch.autograd.grad(predicted.sum(), x, create_graph=True)
        return functional.mse_loss(predicted, y) + (slope.norm(dim=1) - 1).pow(2).mean()


@pytest.mark.parametrize("fmt", ["fp32", "int8"])
def test_pt91469_gradient_penalty_is_differentiated_twice(fmt: str) -> None:
    torch.manual_seed(0)
    pair = Pair(Penalised(dropout=0.2), fmt)
    pair.warm_up(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.ran == USES_3_TO_10
    if fmt == "fp32":
        prediction = pair.predict(batch(3), 5)
        with torch.random.fork_rng([]):
            torch.manual_seed(5)
            loss = pair.module.training_step(batch(3), 0)
        weights = trainable(pair.module)
        exact = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        assert prediction is not None
        torch.testing.assert_close(prediction[0], loss.detach())
        torch.testing.assert_close(prediction[1], dict(zip(weights, exact, strict=True)))


class Checkpointed(Regression):
    """Recomputes its layers in the backward pass."""

    def __init__(self, dropout: float, use_reentrant: bool = False) -> None:
        super().__init__(dropout)
        self.use_reentrant = use_reentrant
        self.before = nn.Linear(8, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return functional.mse_loss(checkpoint(self.layers, self.before(x), use_reentrant=self.use_reentrant), y)


def test_a_checkpointed_layer_without_dropout_is_captured() -> None:
    torch.manual_seed(0)
    pair = Pair(Checkpointed(dropout=0.0))
    pair.warm_up(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.ran == USES_3_TO_10


def test_a_checkpointed_layer_with_dropout_is_refused_and_predicted_eagerly() -> None:
    torch.manual_seed(0)
    pair = Pair(Checkpointed(dropout=0.5))
    with pytest.warns(UserWarning, match=r"run eagerly from now on: .*random numbers of a checkpointed layer"):
        assert pair.agree(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.program.engine == "eager"
    assert all(pair.ran)


def test_reentrant_checkpointing_is_refused_with_the_repair() -> None:
    with pytest.raises(RuntimeError, match="set use_reentrant=False"):
        Pair(Checkpointed(dropout=0.0, use_reentrant=True)).predict(batch(0))


class Compiled(Regression):
    """A part of it runs through ``torch.compile``."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.layers = torch.compile(self.layers, backend="eager")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def test_a_compiled_submodule_is_captured_as_what_it_compiles() -> None:
    torch.manual_seed(0)
    pair = Pair(Compiled(), "int8")
    pair.warm_up(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.ran == USES_3_TO_10


class ClippedGradient(torch.autograd.Function):
    """The identity; its backward pass clips."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return dy.clamp(-ctx.most, ctx.most) * (1 + x.abs()), None


class Clipped(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return functional.mse_loss(ClippedGradient.apply(self.layers(x), 0.01), y)


def test_a_custom_autograd_function_keeps_its_own_backward_pass() -> None:
    torch.manual_seed(0)
    pair = Pair(Clipped(), "int8")
    pair.warm_up(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.ran == USES_3_TO_10


class Silent(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "int8", "w4a16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_autocast_is_captured(fmt: str, rounding: str) -> None:
    torch.manual_seed(0)
    pair = Pair(Silent(0.2), fmt, rounding, context=lambda: torch.autocast("cpu", torch.bfloat16))
    pair.warm_up(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.ran == USES_3_TO_10


@pytest.mark.parametrize("fmt", ["fp32", "int8"])
def test_a_double_precision_module_gets_double_precision_gradients(fmt: str) -> None:
    torch.manual_seed(0)
    pair = Pair(Silent(0.2).double(), fmt)
    batches = [tuple(x.double() for x in batch(seed)) for seed in range(3)]
    pair.warm_up(batches[0])
    assert agrees_throughout(pair, batches[1:])
    assert pair.ran == USES_3_TO_10
    prediction = pair.predict(batches[0])
    assert prediction is not None
    assert {g.dtype for g in prediction[1].values() if g is not None} == {torch.float64}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_frozen_parameters_changed_in_place_are_seen(rounding: str) -> None:
    torch.manual_seed(0)
    pair = Pair(TokenModel(frozen=True, unused=True), "int8", rounding)
    data = token_batch(4)
    pair.warm_up(data)
    before = pair.predict(data, 5)
    with torch.no_grad():
        pair.module.widen.weight.mul_(1.5)
    after = pair.predict(data, 5)
    assert pair.agree(data, 5)
    assert before is not None
    assert after is not None
    assert not torch.equal(before[0], after[0])
    assert "widen.weight" not in after[1]
    assert after[1]["spare.weight"] is None
    assert pair.ran == [False, True, False]
    pair.refresh(seed=1)
    assert pair.agree(data, 5)
    assert pair.ran[-1] is False


class Shared(Regression):
    """Two parameters whose gradients are the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return functional.mse_loss(self.layers(x) + self.left + self.right, y)


def test_gradients_are_the_callers_own() -> None:
    torch.manual_seed(0)
    pair = Pair(Shared())
    pair.warm_up(batch(0))
    prediction, expected = pair.predict(batch(1), 7), pair.eager.predict(batch(1), 7, 0)
    assert pair.ran == [False]
    assert prediction is not None
    assert expected is not None
    for name, gradient in prediction[1].items():
        assert gradient is not None
        gradient.add_(1.0)
        assert torch.equal(gradient, expected[1][name] + 1.0), name
    assert pair.agree(batch(1), 8)


class Scored(Regression):
    """Metrics that look at values, each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)  # checks that labels are in range
        self.mean = MeanMetric()  # removes NaN
        self.scores = MetricCollection({"a": MulticlassAccuracy(3), "b": MulticlassF1Score(3)})  # compares states

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        labels = batch[1].argmax(1)
        self.accuracy(self.layers(batch[0]), labels)
        self.scores.update(self.layers(batch[0]), labels)
        self.mean.update(loss)
        return loss


def test_pl4921_metrics_stay_out_of_capture() -> None:
    pair = Pair(Scored(), "int8")
    pair.warm_up(batch(0))
    assert agrees_throughout(pair, [batch(1), batch(2)])
    assert pair.ran == USES_3_TO_10
    assert pair.program.engine == "captured"
    metrics = (pair.module.accuracy, pair.module.mean, *pair.module.scores.values())
    assert all(metric.update_count == 0 for metric in metrics)
    assert "forward" not in pair.module.accuracy.__dict__
