"""Hugging Face's GPT-2 trains under the plug-in as it is: aliased labels, dropout, tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.hf_gpt2 import HFGPT2
from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.microbatches import TokenWeights
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import EagerPredictor
from lightning_ledger.strategies import PredictedGradientStrategy

CONTEXT = 16
SHIFTED = TokenWeights(key="labels", shift=True)


class Padded(HFGPT2):
    """The same model on dict batches whose padding is left out of the loss, as HF's collators make them."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss


class Losses(L.Callback):
    """Keeps ``gpcv/loss``, the estimate of the full-batch loss, batch by batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["gpcv/loss"]))


def model(cls: type[HFGPT2] = HFGPT2, dropout: float = 0.1) -> Any:
    L.seed_everything(0, verbose=False)
    return cls(layers=1, heads=2, width=32, context=CONTEXT, dropout=dropout, learning_rate=1e-2)


def text(rows: int) -> Tensor:
    """Rows of an alphabet that repeats, each from another letter on."""
    return ((torch.arange(CONTEXT) + torch.arange(rows).unsqueeze(1) * 5) % 26 + 97).long()


def ragged(lengths: list[int]) -> dict[str, Tensor]:
    """One batch of rows of these lengths, the rest padding."""
    tokens = text(len(lengths))
    padding = torch.arange(CONTEXT) >= torch.tensor(lengths).unsqueeze(1)
    # Short rows repeat one letter and are easy: the rows' losses differ, as they do in real text.
    return {"input_ids": tokens.masked_fill(padding, 0), "labels": tokens.masked_fill(padding, -100)}


def fit(directory: Path, module: HFGPT2, data: Any, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=directory,
        limit_val_batches=0,
        max_epochs=1,
        **settings,
    )
    trainer.fit(module, *loaders(data))
    return trainer


def loaders(data: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches to train on; one to validate on, unused, since the module has a ``validation_step``."""
    return DataLoader(data, batch_size=None), DataLoader([text(2)], batch_size=None)


def gradients(module: HFGPT2, batch: Any, seed: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain autograd; tied weights count once, dropout draws from ``seed``."""
    with torch.random.fork_rng([]):
        if seed is not None:
            torch.manual_seed(seed)
        inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch, "labels": batch}
        loss = module.model(**inputs).loss
    names, parameters = zip(*module.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_gpt2_trains_unchanged(tmp_path):
    module, losses = model(), Losses()
    weights = module.state_dict()["model.lm_head.weight"].clone()
    callbacks = [ComputeLedger(), GradientPrediction(format="int8", microbatches=8, exact=1), ControlVariate(), losses]
    trainer = fit(tmp_path, module, [text(16)] * 30, *callbacks, strategy=PredictedGradientStrategy())
    assert trainer.global_step == len(losses.seen) == 30
    # ln 256 = 5.5 at the start, the entropy of 26 letters (3.3) well below it; an alphabet is predictable.
    assert losses.seen[0] == pytest.approx(5.5, abs=0.3)
    assert losses.seen[-1] < 2.5
    # Still tied, and trained.
    assert module.model.lm_head.weight is module.model.transformer.wte.weight
    assert not torch.equal(weights, module.model.lm_head.weight)
    # 30 steps of 1 exact and 8 predicted passes, each counted on its account.
    passes = {account: work.passes for account, work in callbacks[0].ledger.totals().items() if work.passes}
    assert passes == {"scarce/forward": 30, "fleet/prediction": 210, "fleet/control": 30}


def test_pl17415_state_dict_keys_are_the_same_with_and_without(tmp_path):
    untouched, stock, planned = model(), model(), model()
    fit(tmp_path, stock, [text(8)] * 2)
    callbacks = [ComputeLedger(), GradientPrediction(microbatches=4), ControlVariate()]
    fit(tmp_path, planned, [text(8)] * 2, *callbacks, strategy="predicted_gradients")
    assert list(planned.state_dict()) == list(stock.state_dict()) == list(untouched.state_dict())
    assert [name for name, _ in planned.named_parameters()] == [name for name, _ in untouched.named_parameters()]
    assert [name for name, _ in planned.named_modules()] == [name for name, _ in untouched.named_modules()]
    assert vars(planned).keys() == vars(stock).keys()
    untouched.load_state_dict(planned.state_dict(), strict=True)


def test_pl17415_checkpoints_load_in_stock_lightning(tmp_path):
    module = model()
    callbacks = [GradientPrediction(microbatches=4), ControlVariate()]
    trainer = fit(tmp_path, module, [text(8)] * 2, *callbacks, strategy="predicted_gradients")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = HFGPT2.load_from_checkpoint(tmp_path / "last.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gc_dpr12_a_prediction_draws_the_exact_pass_masks(dropout):
    """At full precision the prediction is the exact gradient, bit for bit, under the same seed."""
    module = model(dropout=dropout).train()
    predictor = EagerPredictor(module, Lowering("fp32"))
    predictor.refresh(dict(module.named_parameters()))
    batch = text(4)
    for seed in (7, 8, 7):
        loss, exact = gradients(module, batch, seed)
        predicted_loss, predicted = predictor.predict(batch, seed, 0)
        assert torch.equal(loss, predicted_loss)
        assert predicted.keys() == exact.keys()
        assert all(torch.equal(predicted[name], exact[name]) for name in exact)
    # Another seed draws other masks, if there are any.
    other, _ = predictor.predict(batch, 8, 0)
    assert torch.equal(other, loss) == (dropout == 0)


def test_gc_dpr12_masks_are_shared_under_the_trainer(tmp_path):
    module = model(dropout=0.5)
    passes: list[list[Tensor]] = []

    def begin(*args: Any) -> None:
        passes.append([])

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        passes[-1].append((output == 0).clone())

    module.model.register_forward_pre_hook(begin)
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.register_forward_hook(keep)
    prediction = GradientPrediction(format="fp32", engine="eager", microbatches=4, exact=2, check_separable=False)
    callbacks = [prediction, ControlVariate()]
    fit(tmp_path, module, [text(8)], *callbacks, strategy="predicted_gradients")
    # Four predictions, then the exact passes on two of the same micro-batches. Embeddings, attention output and MLP
    # output are dropout modules; the attention weights' own masks are covered bit for bit by the test above.
    assert [len(masks) for masks in passes] == [3] * 6
    predicted, exact = passes[:4], passes[4:]

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert [sum(same(e, p) for p in predicted) for e in exact] == [1, 1]
    # Each micro-batch has masks of its own, about half zeros.
    assert sum(same(a, b) for a in predicted for b in predicted) == 4
    assert all(0.3 < float(mask.float().mean()) < 0.7 for masks in passes for mask in masks)


@pytest.mark.parametrize("aliased", [True, False])
def test_labels_may_be_the_input_ids_themselves(aliased):
    """One tensor object in two places of a batch is two inputs: pointing the labels elsewhere moves the gradient."""
    module = model(Padded, dropout=0.0)
    predictor = EagerPredictor(module, Lowering("fp32"))
    predictor.refresh(dict(module.named_parameters()))
    tokens = text(4)
    batches = [{"input_ids": tokens, "labels": tokens if aliased else tokens.clone()}]
    batches.append({"input_ids": tokens, "labels": tokens.flip(1)})
    for batch in batches:  # the second after the first: no memory of what the labels were
        loss, exact = gradients(module, batch)
        predicted_loss, predicted = predictor.predict(batch, 0, 0)
        assert torch.equal(loss, predicted_loss)
        assert all(torch.equal(predicted[name], exact[name]) for name in exact)
    first, second = (gradients(module, batch)[1] for batch in batches)
    assert not torch.equal(first["model.transformer.wte.weight"], second["model.transformer.wte.weight"])


def test_aliased_labels_train_as_separate_ones_do(tmp_path):
    weights = []
    for aliased in (True, False):
        module, tokens = model(Padded), text(8)
        batch = {"input_ids": tokens, "labels": tokens if aliased else tokens.clone()}
        callbacks = [GradientPrediction(microbatches=4, weights=SHIFTED), ControlVariate()]
        fit(tmp_path, module, [batch] * 3, *callbacks, strategy="predicted_gradients")
        weights.append(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


LENGTHS = [2, 16, 3, 16, 2, 12, 16, 4]
UNSHIFTED = [TokenWeights(key="labels"), "samples"]


def padded(steps: int = 0) -> Padded:
    """The padded model, after some steps of plain training."""
    module, batch = model(Padded, dropout=0.0), ragged(LENGTHS)
    optimizer = module.configure_optimizers()
    for _ in range(steps):
        optimizer.zero_grad()
        module.model(**batch).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return module


def batch_gradient_error(directory: Path, module: Padded, weights: Any, check: bool = True) -> float:
    """Relative error, against plain autograd on the whole batch, of the gradient that the optimizer would see."""
    batch = ragged(LENGTHS)
    _, exact = gradients(module, batch)
    seen: dict[str, Tensor] = {}

    class Keep(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.update({name: p.grad.clone() for name, p in pl_module.named_parameters()})

    prediction = GradientPrediction(format="fp32", microbatches=4, weights=weights, check_separable=check)
    fit(directory, module, [batch], prediction, ControlVariate(), Keep(), strategy="predicted_gradients")
    assert seen.keys() == exact.keys()
    error = torch.cat([(seen[name] - exact[name]).reshape(-1) for name in exact])
    return float(error.norm() / torch.cat([g.reshape(-1) for g in exact.values()]).norm())


@pytest.mark.parametrize("steps", [0, 20])
def test_token_weights_that_shift_give_the_full_batch_gradient(tmp_path, steps):
    # Sums of 4 micro-batches' gradients, in another order than the whole batch's: some rounding units of 6e-8.
    assert batch_gradient_error(tmp_path, padded(steps), SHIFTED) < 1e-5


@pytest.mark.parametrize("weights", UNSHIFTED)
@pytest.mark.parametrize("steps", [0, 20])
def test_unshifted_weights_are_measurably_wrong(tmp_path, steps, weights):
    assert batch_gradient_error(tmp_path, padded(steps), weights, check=False) > 0.01


@pytest.mark.parametrize("weights", UNSHIFTED)
@pytest.mark.parametrize("steps", [0, 20], ids=["at random weights", "of a trained model"])
def test_unshifted_weights_are_caught(tmp_path, steps, weights):
    """Also where all samples' losses are still alike, as random weights make them, while their gradients are not."""
    with pytest.raises(MisconfigurationException, match=r"not separable over samples.*TokenWeights\(.*shift"):
        batch_gradient_error(tmp_path, padded(steps), weights)
