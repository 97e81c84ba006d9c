"""Predictions in ONNX Runtime keep what every predictor promises, and training with them goes where it should."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from examples.digits import DigitsClassifier, DigitsDataModule
from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.predictors import Engine
from lightning_ledger.predictors.captured import BOUNDS, difference
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import trainer
from tests.program_cases import Pair, batch_of, digits, gpt, move, same
from tests.test_contracts import REQUESTS, equal, everything, model, trainable
from tests.test_enumeration import CASES, Step, check_unbiased, force, is_lossy  # noqa: F401  a fixture
from tests.test_onnx import Odd

ENGINE: Engine = "onnxruntime"


def close(pair: Pair, seed: int, batch: int) -> bool:
    """Whether the program's prediction is within the bound of the eager one."""
    microbatch = batch_of(pair.module, batch)
    found, expected = pair.predict(microbatch, seed), pair.eager.predict(microbatch, seed, 0)
    assert found is not None
    return difference(found, expected) < BOUNDS[ENGINE]


@pytest.mark.parametrize(("make", "fmt", "rounding"), [(digits, "int8", "stochastic"), (gpt, "fp32", "nearest")])
def test_a_predictor_keeps_to_the_eager_one_at_fresh_weights(
    make: Callable[[], pl.LightningModule], fmt: str, rounding: str
) -> None:
    pair = Pair(make(), fmt, rounding, ENGINE)
    pair.warm_up(batch_of(pair.module, 0))
    for step in range(2):
        for batch in (1, 2):
            assert all(close(pair, seed, batch) for seed in (7, 8))
        move(pair.module, seed=step)
        pair.refresh(seed=step)
    # Uses 3 to 10: those that are powers of two run the training step for comparison, the others ONNX Runtime alone.
    assert pair.ran == [False, True, False, False, False, True, False, False]
    assert (pair.program.captures, pair.program.compilations, pair.program.engine) == (1, 1, ENGINE)


def test_a_prediction_depends_on_weights_micro_batch_and_seed_alone_and_leaves_no_trace() -> None:
    module = model()
    pair = Pair(module, "int8", "nearest", ENGINE)
    del module.training_step  # the plain one again
    microbatch, seed, index = REQUESTS[0]
    for _ in range(2):  # the uses that are compared return the training step's own numbers
        pair.program.predict(microbatch, seed, index)
    assert pair.program.compilations == 1
    before = everything(module)
    first = pair.program.predict(microbatch, seed, index)
    pair.program.predict(microbatch, seed, index)  # the fourth use is compared
    others = [pair.program.predict(microbatch, seed + 1, index) for _ in range(2)]
    again = pair.program.predict(microbatch, seed, index)
    assert same(first, again)
    assert same(*others)
    assert not same(first, others[0])  # dropout
    assert equal(everything(module), before)
    assert first is not None
    assert again is not None
    assert list(first[1]) == list(trainable(module))
    assert {name for name, g in first[1].items() if g is None} == {"gated", "unused.weight", "unused.bias"}
    again_as_it_was = copy.deepcopy(again)
    for gradient in (*first[1].values(), *again[1].values()):
        if gradient is not None:
            gradient.zero_()  # the caller's own
    pair.program.predict(microbatch, seed, index)  # the eighth
    assert same(again_as_it_was, pair.program.predict(microbatch, seed, index))


def test_what_cannot_be_exported_is_predicted_as_captured_and_told_once() -> None:
    pair = Pair(Odd(), "int8", "nearest", ENGINE)
    batch = (batch_of(digits(), 0)[0], torch.zeros(4))
    expected = r"not in ONNX Runtime: ONNX has no form of .*sort.*\(in second\).*bessel_j0.*\(in first\)"
    with pytest.warns(UserWarning, match=expected) as told:
        assert all(pair.agree(batch, seed) for seed in range(4))
    assert len(told) == 1
    assert pair.program.engine == "captured"


@pytest.mark.parametrize(
    ("name", "format", "rounding"),
    [("blocks", "fp32", "nearest"), ("dropout", "int4", "stochastic"), ("tokens_with_ignore_index", "int8", "nearest")],
)
def test_mean_over_all_sets_is_the_full_batch_gradient(
    name: str,
    format: str,
    rounding: str,
    force: Callable[[tuple[int, ...] | None], None],  # noqa: F811
) -> None:
    step = Step(CASES[name], format, rounding, corrected=True, force=force, engine=ENGINE)
    check_unbiased(step, is_lossy(name, format))


def validation_loss(directory: Path, module: pl.LightningModule, data: pl.LightningDataModule, engine: Engine) -> float:
    """After thirty steps of corrected int8 predictions."""
    run = trainer(
        directory,
        GradientPrediction(format="int8", engine=engine, microbatches=4),
        ControlVariate(),
        strategy=PredictedGradientStrategy(),
        max_steps=30,
        val_check_interval=30,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    run.fit(module, datamodule=data)
    return float(run.callback_metrics["val_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["digits", "gpt"])
def test_training_reaches_the_loss_of_captured_predictions(kind: str, tmp_path: Path) -> None:
    losses = []
    for engine in ("captured", ENGINE):
        pl.seed_everything(0)
        if kind == "digits":
            losses.append(validation_loss(tmp_path, DigitsClassifier(channels=8), DigitsDataModule(64), engine))
        else:
            module = GPT(layers=1, heads=2, width=64, context=32, dropout=0.1, warmup_steps=5, learning_rate=2e-3)
            data = TextDataModule(context=32, batch_size=16, val_windows=16)
            losses.append(validation_loss(tmp_path, module, data, engine))
    assert losses[0] < {"digits": 2.0, "gpt": 5.2}[kind]  # it has learned something
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
