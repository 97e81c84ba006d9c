"""Predictions leave no trace: no metric update, no log, no buffer, no attribute, no random draw.

Which samples got an exact gradient is told by autograd itself: only a backward pass accumulates into ``.grad``, so
the gradient of a parameter with one entry per sample, seen as it is accumulated, names the samples of each exact pass.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_precision, multiclass_recall

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import read_ledger
from lightning_ledger.strategies import PredictedGradientStrategy

BATCHES, BATCH, N = 3, 8, 4
SAMPLES = BATCHES * BATCH
MICRO = BATCH // N


def inputs() -> Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))


def labels(ids: Tensor) -> Tensor:
    return ids // 5 % 3


def guesses(ids: Tensor) -> Tensor:
    return ids % 3


class Model(L.LightningModule):
    """A linear regression over numbered samples; subclasses add what predictions must not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.probe = nn.Parameter(torch.zeros(SAMPLES))

    def loss(self, batch: Any) -> Tensor:
        ids, x = batch
        return self.layer(x).pow(2).mean() + self.probe[ids].mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(SAMPLES), inputs()), batch_size=BATCH)


class ExactPasses(L.Callback):
    """The samples of each exact pass, in the order of the backward passes."""

    def __init__(self) -> None:
        self.passes: list[Tensor] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.probe.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        self.passes.append(gradient.nonzero().flatten())

    @property
    def ids(self) -> Tensor:
        return torch.cat(self.passes)


class Rows(Logger):
    """A logger that keeps its rows in memory, with an experiment that can be called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, float], int | None]] = []
        self.called: list[int] = []

    name, version = "rows", "0"

    @property
    def experiment(self) -> Rows:
        return self

    def add(self, sample: int) -> None:
        self.called.append(sample)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((dict(metrics), step))

    def having(self, key: str) -> list[dict[str, float]]:
        return [row for row, _ in self.rows if key in row]


def trainer(
    tmp_path: Path, *callbacks: L.Callback, strategy: Any = "predicted_gradients", **settings: Any
) -> L.Trainer:
    quiet = {"logger": False, "max_epochs": 1, "log_every_n_steps": 1}
    return L.Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        **(quiet | settings),
    )


def predict(exact: int, **arguments: Any) -> list[L.Callback]:
    """The whole stack where correction is possible, and predictions alone where it is not."""
    # The training step itself: a captured program runs none of the Python whose effects are looked for here.
    settings = {"engine": "eager", "microbatches": N, "exact": exact, **arguments}
    callbacks: list[L.Callback] = [GradientPrediction(**settings)]
    return callbacks + ([ControlVariate()] if exact else [])


def fit(model: Model, tmp_path: Path, exact: int, arguments: Any = None, **settings: Any) -> Tensor:
    """Train; the samples that got an exact gradient, of which there must be as many as asked for."""
    L.seed_everything(1, verbose=False)
    watch = ExactPasses()
    runner = trainer(tmp_path, *predict(exact, **(arguments or {})), watch, **settings)
    runner.fit(model)
    steps = runner.max_epochs * BATCHES
    assert len(watch.passes) == steps * exact
    assert all(len(ids) == MICRO for ids in watch.passes)
    return watch.ids if exact else torch.zeros(0, dtype=torch.long)


every_share = pytest.mark.parametrize("exact", [1, 2, N])


# --------------------------------------------------------------------------------------------------------- metrics


class Metered(Model):
    """Logs a metric that depends on the samples alone, in one of the styles of torchmetrics' documentation."""

    def __init__(self, metric: Metric | MetricCollection, style: str, by_hand: bool) -> None:
        super().__init__()
        self.metric = metric
        self.style, self.by_hand = style, by_hand
        self.single = isinstance(metric, Metric)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, _ = batch
        values = (ids.float(),) if self.single else (guesses(ids), labels(ids))
        (self.metric if self.style == "forward" else self.metric.update)(*values)
        if not self.by_hand:
            if self.single:
                self.log("metric", self.metric, on_step=False, on_epoch=True)
            else:
                self.log_dict(self.metric, on_step=False, on_epoch=True)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        if self.by_hand:
            value = self.metric.compute()
            self.log_dict({"metric": value} if self.single else value)
            self.metric.reset()


every_style = pytest.mark.parametrize(
    ("style", "by_hand"), [("update", False), ("forward", False), ("update", True), ("forward", True)]
)


@every_share
@every_style
def test_pl4921_metrics_are_not_updated_by_predictions(style: str, by_hand: bool, exact: int, tmp_path: Path) -> None:
    L.seed_everything(1, verbose=False)
    watch = ExactPasses()
    runner = trainer(tmp_path, *predict(exact), watch)
    runner.fit(Metered(MeanMetric(), style, by_hand))
    assert len(watch.ids) == BATCHES * exact * MICRO
    assert torch.equal(runner.callback_metrics["metric"], watch.ids.float().mean())


@every_share
@every_style
def test_pl4921_collections_are_not_updated_by_predictions(
    style: str, by_hand: bool, exact: int, tmp_path: Path
) -> None:
    L.seed_everything(1, verbose=False)
    watch = ExactPasses()
    runner = trainer(tmp_path, *predict(exact), watch)
    # Precision and recall share their state in one compute group; macro accuracy is recall.
    classes = {"accuracy": MulticlassAccuracy(3), "precision": MulticlassPrecision(3), "recall": MulticlassRecall(3)}
    runner.fit(Metered(MetricCollection(classes, prefix="train/"), style, by_hand))
    seen = guesses(watch.ids), labels(watch.ids)
    oracles = {"accuracy": multiclass_accuracy, "precision": multiclass_precision, "recall": multiclass_recall}
    for name, oracle in oracles.items():
        assert torch.equal(runner.callback_metrics[f"train/{name}"], oracle(*seen, num_classes=3))


@every_share
@pytest.mark.parametrize("style", ["update", "forward"])
def test_pl4921_a_metric_that_keeps_every_value_keeps_each_exact_sample_once(
    style: str, exact: int, tmp_path: Path
) -> None:
    class Kept(Model):
        def __init__(self) -> None:
            super().__init__()
            self.metric = CatMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (self.metric if style == "forward" else self.metric.update)(batch[0].float())
            return self.loss(batch)

    model = Kept()
    ids = fit(model, tmp_path, exact)
    # Backward passes run in the order of the forward passes.
    assert torch.equal(model.metric.compute(), ids.float())


# ------------------------------------------------------------------------------------------------------------ logs


class Logging(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"batch": float(batch_idx), "largest": batch[0].float().max()}, reduce_fx="max")
        return loss


@pytest.mark.parametrize("predicted", [False, True])
def test_pl1173_one_ledger_row_per_optimizer_step(predicted: bool, tmp_path: Path) -> None:
    rows, ledger = Rows(), ComputeLedger(dirpath=str(tmp_path))
    stack = predict(1) if predicted else []
    strategy = PredictedGradientStrategy() if predicted else "auto"
    runner = trainer(tmp_path, ledger, *stack, strategy=strategy, logger=rows, max_epochs=2, accumulate_grad_batches=2)
    runner.fit(Logging())
    # 3 batches an epoch in windows of 2 are 2 steps, the last one short; 2 epochs are 4.
    assert ledger.ledger.steps == runner.global_step == 4
    history = read_ledger(tmp_path)
    assert history.steps == sum(segment.count for segment in history.segments) == 4
    assert len(rows.having("ledger/total")) == 4
    # Each of them is the user's own row, at a step of its own, in rising order of cost.
    assert all("train_loss_step" in row for row in rows.having("ledger/total"))
    steps = [step for row, step in rows.rows if "ledger/total" in row]
    assert steps == sorted(set(steps))
    totals = [row["ledger/total"] for row in rows.having("ledger/total")]
    assert totals == sorted(set(totals))


@every_share
def test_pl17177_user_logs_still_appear_once(exact: int, tmp_path: Path) -> None:
    def logged(strategy: Any, *callbacks: L.Callback) -> Rows:
        rows = Rows()
        L.seed_everything(1, verbose=False)
        trainer(tmp_path, *callbacks, strategy=strategy, logger=rows).fit(Logging())
        return rows

    stock, rows = logged("auto"), logged("predicted_gradients", *predict(exact))
    user = [[{k: v for k, v in row.items() if not k.startswith("gpcv/")} for row, _ in r.rows] for r in (stock, rows)]
    assert [row.keys() for row in user[0]] == [row.keys() for row in user[1]]
    assert [step for _, step in stock.rows] == [step for _, step in rows.rows]
    if exact == N:
        for expected, row in zip(*user, strict=True):
            # fp32 sums of four equal parts, over at most three steps
            assert row == pytest.approx(expected, rel=1e-6)
    else:
        # An epoch mean stays the mean of the steps, all of one batch size.
        steps = [row["train_loss_step"] for row in user[1] if "train_loss_step" in row]
        assert len(steps) == BATCHES
        assert user[1][-1]["train_loss_epoch"] == pytest.approx(sum(steps) / BATCHES, rel=1e-6)


def test_pl10349_epoch_means_weigh_batches_by_the_users_batch_size(tmp_path: Path) -> None:
    class Sized(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("mean", float(batch_idx), on_step=False, on_epoch=True, batch_size=len(batch[0]))
            return self.loss(batch)

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.arange(15), inputs()[:15]), batch_size=BATCH)

    runner = trainer(tmp_path, *predict(N))
    runner.fit(Sized())
    # Batches of 8 and of 7 samples, the latter in micro-batches of 2, 2, 2 and 1: (8 * 0 + 7 * 1) / 15.
    assert float(runner.callback_metrics["mean"]) == pytest.approx(7 / 15, rel=1e-6)


def test_pl17177_predictions_alone_log_nothing_of_the_users(tmp_path: Path) -> None:
    rows = Rows()
    fit(Logging(), tmp_path, exact=0, logger=rows)
    assert {key for row, _ in rows.rows for key in row} == {"epoch", "gpcv/loss", "gpcv/exact_share"}
    assert len(rows.having("gpcv/loss")) == BATCHES


@every_share
def test_direct_calls_of_the_experiment_are_silenced_in_predictions(exact: int, tmp_path: Path) -> None:
    class Direct(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for sample in batch[0].tolist():
                self.logger.experiment.add(sample)
            return self.loss(batch)

    rows = Rows()
    ids = fit(Direct(), tmp_path, exact, logger=rows)
    assert rows.called == ids.tolist()


def test_print_is_silenced_in_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.print("sample", int(batch[0][0]))
            return self.loss(batch)

    ids = fit(Printing(), tmp_path, exact=1)
    assert capsys.readouterr().out.splitlines() == [f"sample {i}" for i in ids[::MICRO].tolist()]


# ---------------------------------------------------------------------------------------------------------- buffers


class Counting(Model):
    """Keeps a count and a running sum of what it sees, in place, and a buffer it rebinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("last", torch.zeros(MICRO, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, x = batch
        self.count += 1
        self.total.mul_(0.5).add_(x.sum(0))
        self.last = ids.clone()
        return self.loss(batch)


@every_share
def test_pt96136_buffers_are_what_the_exact_passes_alone_leave(exact: int, tmp_path: Path) -> None:
    model = Counting()
    ids = fit(model, tmp_path, exact)
    total = torch.zeros(4)
    for part in inputs()[ids].split(MICRO):
        total = total * 0.5 + part.sum(0)
    assert int(model.count) == BATCHES * exact
    assert torch.equal(model.total, total)
    assert torch.equal(model.last, ids[-MICRO:])


class Normalised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, x = batch
        return self.loss((ids, self.norm(x)))


def test_pt96136_buffers_of_a_frozen_batchnorm_stay(tmp_path: Path) -> None:
    class Frozen(Normalised):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.norm.eval()

    model = Frozen()
    model.norm.running_mean.fill_(0.5)
    before = {name: b.clone() for name, b in model.named_buffers()}
    weight = model.norm.weight.clone()
    fit(model, tmp_path, exact=1)
    assert {name: b.tolist() for name, b in model.named_buffers()} == {n: b.tolist() for n, b in before.items()}
    assert not torch.equal(model.norm.weight, weight)


@every_share
def test_pt96136_buffers_of_a_training_batchnorm_see_exact_microbatches_only(exact: int, tmp_path: Path) -> None:
    model = Normalised()
    ids = fit(model, tmp_path, exact, {"allow_batchnorm": True, "check_separable": False})
    expected = nn.BatchNorm1d(4)
    for part in inputs()[ids].split(MICRO):
        expected(part)
    assert int(model.norm.num_batches_tracked) == BATCHES * exact
    assert torch.equal(model.norm.running_mean, expected.running_mean)
    assert torch.equal(model.norm.running_var, expected.running_var)


# ------------------------------------------------------------------------------------------------------- attributes


class Attributes(Model):
    """Keeps what it saw in every kind of attribute, as users do for their epoch-end hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.recent: deque[int] = deque(maxlen=2 * MICRO)
        self.unique: set[int] = set()
        self.counts: Counter[int] = Counter()
        self.passes = 0
        self.total = torch.zeros(())
        self.sums = {"ids": torch.zeros(())}
        self.by_kind: dict[str, list[int]] = {"even": [], "odd": []}
        self.by_default: defaultdict[int, list[int]] = defaultdict(list)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0].tolist()
        self.seen.extend(ids)
        self.recent.extend(ids)
        self.unique.update(ids)
        self.counts.update(ids)
        self.passes += 1
        self.total += sum(ids)
        self.sums["ids"] += sum(ids)
        self.newcomer = [*getattr(self, "newcomer", []), ids[0]]
        for i in ids:
            self.by_kind["odd" if i % 2 else "even"].append(i)
            self.by_default[i % 3].append(i)
        return self.loss(batch)


@every_share
def test_attributes_of_the_module_are_not_touched_by_predictions(exact: int, tmp_path: Path) -> None:
    model = Attributes()
    held = model.seen
    ids = fit(model, tmp_path, exact).tolist()
    assert model.seen == ids
    assert model.seen is held
    assert list(model.recent) == ids[-2 * MICRO :]
    assert model.unique == set(ids)
    assert model.counts == Counter(ids)
    assert model.passes == BATCHES * exact
    assert float(model.total) == float(model.sums["ids"]) == sum(ids)
    assert model.newcomer == ids[::MICRO]
    assert model.by_kind == {"even": [i for i in ids if i % 2 == 0], "odd": [i for i in ids if i % 2]}
    assert dict(model.by_default) == {r: kept for r in range(3) if (kept := [i for i in ids if i % 3 == r])}


def test_predictions_alone_leave_every_attribute_as_it_was(tmp_path: Path) -> None:
    model, fresh = Attributes(), Attributes()
    names = [name for name in vars(fresh) if name not in nn.Module().__dict__]
    names = [name for name in names if isinstance(getattr(fresh, name), (int, list, deque, set, dict, Tensor))]
    assert {"seen", "by_kind", "total", "passes"} < set(names)
    fit(model, tmp_path, exact=0)
    own = ("seen", "recent", "unique", "counts", "passes", "total", "sums", "by_kind", "by_default")
    assert all(getattr(model, name) == getattr(fresh, name) for name in own)
    assert not hasattr(model, "newcomer")


# ------------------------------------------------------------------------------------------------------- randomness


def states() -> tuple[list[int], Any, Any]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  the global state is what must not move
    return torch.get_rng_state().tolist(), random.getstate(), (name, list(keys), rest)


@pytest.mark.parametrize("exact", [0, 1, N])
def test_pl6988_global_rng_and_data_order_are_those_of_stock_lightning(exact: int, tmp_path: Path) -> None:
    class Shuffled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[list[int]] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.order.append(batch[0].tolist())

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.arange(SAMPLES), inputs()), batch_size=BATCH, shuffle=True)

    def run(strategy: Any, *callbacks: L.Callback) -> tuple[list[list[int]], Any]:
        L.seed_everything(3, verbose=False)
        model = Shuffled()
        trainer(tmp_path, *callbacks, strategy=strategy, max_epochs=2).fit(model)
        return model.order, states()

    stock = run("auto")
    assert len(stock[0]) == 2 * BATCHES
    assert stock[0][:BATCHES] != stock[0][BATCHES:]
    assert run("predicted_gradients", ComputeLedger(), *predict(exact, rounding="stochastic")) == stock


def test_randomness_of_any_library_is_shared_by_both_passes_of_a_microbatch(tmp_path: Path) -> None:
    draws: list[tuple[int, int, float, float, float]] = []  # held outside the module, where nothing puts it back

    class Random(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            noise = torch.rand(())
            numbers = float(noise), float(np.random.rand()), random.random()  # noqa: NPY002
            draws.append((batch_idx, int(batch[0][0]), *numbers))
            return self.loss(batch) * (1 + noise)

    fit(Random(), tmp_path, exact=1, arguments={"check_separable": False})
    # Each step predicts all four micro-batches and runs one of them exactly.
    assert len(draws) == BATCHES * (N + 1)
    passes = {key: list(group) for key, group in groupby(sorted(draws), key=lambda draw: draw[:2])}
    assert sorted(len(group) for group in passes.values()) == [1] * BATCHES * (N - 1) + [2] * BATCHES
    assert all(len(set(group)) == 1 for group in passes.values())
    for library in (2, 3, 4):
        assert len({group[0][library] for group in passes.values()}) == BATCHES * N


# ----------------------------------------------------------------------------------------------------------- errors


class Failing(Logging):
    """Fails in the ``at``-th call of its training step."""

    def __init__(self, calls: Iterator[int], at: int) -> None:
        super().__init__()
        self.seen: list[int] = []
        self._calls, self._at = calls, at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        if next(self._calls) == self._at:
            raise FloatingPointError("the user's own")
        return super().training_step(batch, batch_idx)


# Without the separability check a step is four predictions, then two exact passes: calls 6-9 and 10-11 are step 2's.
@pytest.mark.parametrize(("at", "exact_passes"), [(7, 2), (10, 3), (11, 4)])
def test_exceptions_pass_through_and_leave_nothing_swapped(at: int, exact_passes: int, tmp_path: Path) -> None:
    rows, ledger = Rows(), ComputeLedger(dirpath=str(tmp_path))
    model = Failing(iter(range(10_000)), at)
    runner = trainer(tmp_path, ledger, *predict(2, check_separable=False), logger=rows)
    L.seed_everything(1, verbose=False)
    with pytest.raises(FloatingPointError, match="the user's own") as raised:
        runner.fit(model)
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (frame.name, frame.filename) == ("training_step", __file__)
    assert not {"log", "log_dict", "print"} & vars(model).keys()
    assert len(model.seen) == exact_passes
    assert runner.loggers == [rows]
    assert _get_current_dispatch_mode_stack() == []
    assert not torch.overrides._get_current_function_mode_stack()


def test_training_goes_on_after_an_exception_with_the_same_callbacks(tmp_path: Path) -> None:
    stack = [ledger := ComputeLedger(dirpath=str(tmp_path)), *predict(2, check_separable=False)]
    model = Failing(iter(range(10_000)), at=10)
    with pytest.raises(FloatingPointError):
        trainer(tmp_path, *stack).fit(model)
    assert ledger.ledger.steps == 1
    runner = trainer(tmp_path, *stack)
    runner.fit(model)
    assert runner.global_step == BATCHES
    assert ledger.ledger.steps == read_ledger(tmp_path).steps == 1 + BATCHES
    assert read_ledger(tmp_path).totals == ledger.ledger.totals()
