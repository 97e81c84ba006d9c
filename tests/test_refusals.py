"""What cannot be trained rightly is refused before it is: each error says what was found, and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.microbatches import TokenWeights
from lightning_ledger.precision import FORMATS
from lightning_ledger.strategies import PredictedGradientStrategy

BATCH, STEPS = 8, 2


class Model(L.LightningModule):
    """A linear regression; subclasses break one rule each. It counts its optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        return self.layer(x).pow(2).mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.steps += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        x = torch.randn(STEPS * BATCH, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), batch_size=BATCH)


def fit(
    tmp_path: Path,
    model: L.LightningModule,
    *callbacks: L.Callback,
    strategy: Any = "predicted_gradients",
    **options: Any,
) -> L.Trainer:
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(model)
    return trainer


def refused(tmp_path: Path, model: L.LightningModule, *callbacks: L.Callback, **options: Any) -> str:
    """The message of the refusal; nothing must have been trained by then."""
    before = [p.clone() for p in model.parameters()]
    with pytest.raises((MisconfigurationException, TypeError, ValueError)) as error:
        fit(tmp_path, model, *callbacks, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(error.value)


def says(message: str, *parts: str) -> None:
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"


def stack(**arguments: Any) -> list[L.Callback]:
    return [GradientPrediction(**{"engine": "eager", "microbatches": 4, "exact": 1, **arguments}), ControlVariate()]


def test_the_model_of_these_tests_trains_where_no_rule_is_broken(tmp_path: Path) -> None:
    model = Model()
    assert fit(tmp_path, model, ComputeLedger(), *stack()).global_step == STEPS
    assert model.steps == STEPS


# ------------------------------------------------------------------------------------------ modules and their layers


def test_pl17281_manual_optimization_is_refused(tmp_path: Path) -> None:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    says(refused(tmp_path, Manual(), *stack()), "Manual uses manual optimization", "drop GradientPrediction")


def test_pt4829_sparse_embeddings_are_refused_by_parameter_name(tmp_path: Path) -> None:
    class Sparse(Model):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.table = nn.ModuleDict({"words": layer})

    for layer in (nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(9, 4, sparse=True)):
        says(refused(tmp_path, Sparse(layer), *stack()), "table.words.weight", "sparse=True", "sparse=False")
    # A frozen one has no gradient at all.
    frozen = Sparse(nn.Embedding(9, 4, sparse=True).requires_grad_(False))
    assert fit(tmp_path, frozen, *stack()).global_step == STEPS


class WithBatchNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.body(batch[0])], batch_idx)


def test_opacus319_training_mode_batchnorm_is_refused_by_layer_path(tmp_path: Path) -> None:
    message = refused(tmp_path, WithBatchNorm(), *stack())
    says(message, "BatchNorm in training mode at 'body.1'", "GroupNorm", "eval()", "allow_batchnorm=True")


def test_opacus319_batchnorm_is_refused_before_any_pass_has_run(tmp_path: Path) -> None:
    model = WithBatchNorm()
    refused(tmp_path, model, *stack())
    assert int(model.body[1].num_batches_tracked) == 0


def test_opacus319_batchnorm_trains_where_it_is_allowed_or_in_eval(tmp_path: Path) -> None:
    class Frozen(WithBatchNorm):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.body[1].eval()

    for model, arguments in ((WithBatchNorm(), {"allow_batchnorm": True}), (Frozen(), {})):
        before = model.body[0].weight.clone()
        assert fit(tmp_path, model, *stack(**arguments)).global_step == STEPS
        assert not torch.equal(before, model.body[0].weight)


def test_a_module_without_trainable_parameters_is_refused(tmp_path: Path) -> None:
    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer.requires_grad_(False)

        def configure_optimizers(self) -> None:
            return None

    with pytest.warns(UserWarning, match="configure_optimizers"):
        message = refused(tmp_path, Frozen(), *stack())
    says(message, "Frozen has no trainable parameter", "requires_grad=True")


# -------------------------------------------------------------------------------------------------------- optimizers


def test_pl4083_lbfgs_is_refused_by_name(tmp_path: Path) -> None:
    class Second(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    says(refused(tmp_path, Second(), *stack()), "LBFGS evaluates its closure several times", "AdamW")


def test_ranger46_an_optimizer_that_ignores_its_closure_is_named(tmp_path: Path) -> None:
    class Deaf(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    class Ranged(Model):
        def configure_optimizers(self) -> Any:
            return Deaf(self.parameters(), lr=0.1)

    message = refused(tmp_path, Ranged(), *stack())
    says(message, "Deaf.step evaluated its closure 0 times", "call the closure it is given")


def test_an_optimizer_that_evaluates_its_closure_twice_is_named(tmp_path: Path) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    class Greedy(Model):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    # Its own step has happened by the time it can be known; training does not go on.
    model = Greedy()
    with pytest.raises(MisconfigurationException) as error:
        fit(tmp_path, model, *stack())
    says(str(error.value), "Twice.step evaluated its closure 2 times", "first-order optimizer")
    assert model.steps == 2  # the two evaluations of the first step


# ------------------------------------------------------------------------------------------------------------ losses


class Contrastive(Model):
    """Each sample is told from the others of its batch: in-batch negatives."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.layer(batch[0])
        return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


def test_simclr13_in_batch_negatives_are_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, Contrastive(), *stack())
    says(message, "Contrastive.training_step is not separable over samples", "ratio", "without GradientPrediction")


class Summed(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * len(batch[0])


def test_hf37766_a_summed_loss_is_told_apart_by_its_ratio(tmp_path: Path) -> None:
    # Two pieces of 4 samples weigh 1/2 each, four of 2 weigh 1/4: 4 loss / 2 loss = 2.
    message = refused(tmp_path, Summed(), *stack())
    says(message, "not separable", "ratio 2)", "weights='sum'")
    assert fit(tmp_path, Summed(), *stack(weights="sum")).global_step == STEPS


def test_pl20350_a_mean_over_tokens_asks_for_token_weights(tmp_path: Path) -> None:
    class Tokens(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, targets = batch
            return nn.functional.cross_entropy(self.layer(x).flatten(0, 1), targets.flatten())

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(BATCH, 5, 4, generator=generator)
            targets = torch.randint(3, (BATCH, 5), generator=generator)
            for sample in range(BATCH):  # sample i keeps 1 to 5 of its targets
                targets[sample, 1 + sample % 5 :] = -100
            return DataLoader(TensorDataset(x, targets), batch_size=BATCH)

    says(refused(tmp_path, Tokens(), *stack()), "not separable", "TokenWeights(key=..., ignore_index=..., shift=...)")
    assert fit(tmp_path, Tokens(), *stack(weights=TokenWeights(key=1))).global_step == 1


@pytest.mark.parametrize(
    ("output", "parts"),
    [
        (lambda loss: {"los": loss}, ["training_step returned a dict with the keys ['los']", "'loss'"]),
        (lambda loss: loss.expand(2), ["a loss of shape (2,)", ".mean()"]),
        (lambda loss: loss.detach(), ["depends on no trainable parameter", "detached"]),
        (lambda loss: loss.item(), ["returned float", "loss tensor"]),
    ],
    ids=["no-loss-key", "not-a-number", "detached", "no-tensor"],
)
@pytest.mark.parametrize("exact", [0, 1, 4])
def test_pl7750_an_unusable_loss_names_the_users_training_step(
    output: Callable[[Tensor], Any], parts: list[str], exact: int, tmp_path: Path
) -> None:
    class Wrong(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output(super().training_step(batch, batch_idx))

    says(refused(tmp_path, Wrong(), GradientPrediction(microbatches=4, exact=exact)), "Wrong.training_step", *parts)


def test_pl5243_a_batch_skipped_in_part_is_refused(tmp_path: Path) -> None:
    class Partial(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if bool((batch[0] == self.marked).all(1).any()) else loss

    model = Partial()
    model.marked = model.train_dataloader().dataset.tensors[0][BATCH - 1]  # in the last micro-batch of the first batch
    for exact in (0, 1, 4):
        message = refused(
            tmp_path, model, GradientPrediction(engine="eager", microbatches=4, exact=exact, check_separable=False)
        )
        says(message, "Partial.training_step returned None for micro-batches [3]", "0 * loss")


# ----------------------------------------------------------------------------------------------------------- batches


class Graphs:
    """A batch of graphs as graph libraries make it: nodes of all graphs in one tensor, and who owns them."""

    def __init__(self, x: Tensor, owner: Tensor) -> None:
        self.x, self.owner = x, owner

    def __len__(self) -> int:
        return len(self.x)  # nodes, not graphs: the trap


def graphs(samples: list[tuple[Tensor]]) -> Graphs:
    nodes = [x.expand(1 + i % 3, -1) for i, (x,) in enumerate(samples)]
    return Graphs(torch.cat(nodes), torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor([*map(len, nodes)])))


class OverGraphs(Model):
    """The mean over graphs of the sum over each one's nodes."""

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        values = self.layer(batch.x).pow(2).sum(1)
        return values.sum() / batch.owner.unique().numel()

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader().dataset, batch_size=BATCH, collate_fn=graphs)


def by_graph(batch: Graphs, n: int) -> list[Graphs]:
    masks = [torch.isin(batch.owner, ids) for ids in batch.owner.unique().chunk(n)]
    return [Graphs(batch.x[mask], batch.owner[mask]) for mask in masks]


def test_pyg9829_a_batch_type_that_cannot_be_split_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path, OverGraphs(), *stack())
    says(message, "test_refusals.Graphs", "how to split it", "split_fn, a function (batch, n) ->")


def test_pyg9829_split_fn_splits_by_graph(tmp_path: Path) -> None:
    def count(part: Graphs) -> int:
        return part.owner.unique().numel()

    models = [OverGraphs(), OverGraphs()]
    models[1].load_state_dict(models[0].state_dict())
    fit(tmp_path, models[0], strategy="auto")
    fit(tmp_path, models[1], *stack(format="fp32", split_fn=by_graph, weights=count))
    # With predictions in fp32 the estimate is the gradient, up to the rounding of sums of some dozens of terms.
    torch.testing.assert_close(models[1].layer.weight, models[0].layer.weight, rtol=1e-5, atol=1e-6)


def test_pyg9829_split_fn_without_weights_asks_for_them(tmp_path: Path) -> None:
    says(refused(tmp_path, OverGraphs(), *stack(split_fn=by_graph)), "weights='samples'", "Pass a callable as weights")


def test_composer833_columns_and_a_list_of_samples_are_not_guessed(tmp_path: Path) -> None:
    class Pairs(Model):
        def train_dataloader(self) -> Any:
            x, y = torch.randn(2, 4), torch.randn(2, 4)
            return DataLoader(TensorDataset(x, y), batch_size=2)

    says(refused(tmp_path, Pairs(), *stack(microbatches=2)), "container of columns", "list of samples", "split_fn")


# --------------------------------------------------------------------------------------------- callbacks and strategy


def test_pl15256_a_missing_callback_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    for callbacks in ([ComputeLedger()], [ComputeLedger(), ControlVariate()]):
        message = refused(tmp_path, Model(), *callbacks)
        says(message, "needs the callback GradientPrediction", *(type(c).__name__ for c in callbacks), "callbacks+:")


@pytest.mark.parametrize("double", [ComputeLedger, GradientPrediction, ControlVariate])
def test_pl15256_a_doubled_callback_is_named(double: type[L.Callback], tmp_path: Path) -> None:
    stacked = [ComputeLedger(), GradientPrediction(microbatches=4), ControlVariate()]
    # Lightning itself refuses two of one class, when the Trainer is built; a user's subclass is left to us.
    with pytest.raises(RuntimeError, match=f"more than one stateful callback of type `{double.__name__}`"):
        fit(tmp_path, Model(), *stacked, double())
    own = type("Own", (double,), {})
    says(refused(tmp_path, Model(), *stacked, own()), f"{double.__name__} callbacks are configured", "eep one")


@pytest.mark.parametrize("strategy", ["auto", "single"])
@pytest.mark.parametrize("callback", [GradientPrediction, ControlVariate])
def test_predictions_under_a_foreign_strategy_are_refused(
    callback: type[L.Callback], strategy: str, tmp_path: Path
) -> None:
    chosen = L.pytorch.strategies.SingleDeviceStrategy("cpu") if strategy == "single" else strategy
    message = refused(tmp_path, Model(), callback(), strategy=chosen)
    says(message, callback.__name__, "SingleDeviceStrategy", "Trainer(strategy=PredictedGradientStrategy())")


def test_a_control_variate_without_exact_gradients_is_refused(tmp_path: Path) -> None:
    says(refused(tmp_path, Model(), *stack(exact=0)), "exact=0", "exact=1 or more", "drop ControlVariate")


@pytest.mark.parametrize("strategy", ["predicted_gradients", PredictedGradientStrategy])
def test_two_devices_are_refused(strategy: Any, tmp_path: Path) -> None:
    chosen = strategy if isinstance(strategy, str) else strategy()
    message = refused(tmp_path, Model(), *stack(), strategy=chosen, devices=2)
    says(message, "one device", "2", "devices=1")


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: GradientPrediction(format="int9"), ["format='int9'", *FORMATS]),
        (lambda: GradientPrediction(format="INT8"), ["Did you mean format='int8'?"]),
        (lambda: GradientPrediction(rounding="up"), ["rounding='up'", "'nearest'", "'stochastic'"]),
        (lambda: GradientPrediction(microbatches=4, exact=5), ["exact=5", "microbatches=4", "Raise microbatches"]),
        (lambda: GradientPrediction(exact=-1), ["exact=-1", "at least 0"]),
        (lambda: GradientPrediction(exact=0.5), ["exact=0.5", "integer"]),
        (lambda: GradientPrediction(exact=True), ["exact=True", "integer"]),
        (lambda: GradientPrediction(microbatches=0, exact=0), ["microbatches=0", "at least 1"]),
        (lambda: GradientPrediction(refresh_every=0), ["refresh_every=0", "at least 1"]),
        (lambda: ControlVariate(coefficient="best"), ["coefficient='best'", "'optimal'"]),
        (lambda: ControlVariate(scope="module"), ["scope='module'", "'layer'", "'global'"]),
        (lambda: ControlVariate(decay=1.0), ["decay=1.0", "below 1"]),
        (lambda: ComputeLedger(microbatch_samples=0), ["microbatch_samples=0", "at least 1"]),
    ],
)
def test_arguments_out_of_range_are_named(make: Callable[[], L.Callback], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        make()
    says(str(error.value), *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"weights": "tokens"}, ["weights='tokens'", "TokenWeights"]),
        ({"weights": TokenWeights(key="labels")}, ["key='labels'", "keys present: 0"]),
        ({"split_fn": lambda batch, n: [batch] * (n + 1)}, ["split_fn returned 5 micro-batches", "1 to 4"]),
        ({"split_fn": lambda batch, n: iter([batch])}, ["split_fn returned a", "list or tuple"]),
        ({"weights": lambda part: -1.0}, ["weights callable", "-1.0", "at least 0"]),
    ],
    ids=["unknown-weights", "no-such-key", "too-many-pieces", "generator", "negative-weight"],
)
def test_what_only_a_batch_can_show_is_refused_at_the_first_one(
    arguments: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    says(refused(tmp_path, Model(), *stack(**arguments)), *parts)
