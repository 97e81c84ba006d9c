"""Where no graph can stand for the training step, the eager predictor takes over: noticed, said once, and right."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import Work
from lightning_ledger.program import trainable
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import Regression, Samples, trainer, weights
from tests.program_cases import Pair, normal, same

DIFFERS = r"run eagerly from now on: the captured program's gradient differs"


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return normal(4, 8, seed=seed), normal(4, 3, seed=seed + 100)


class Scaled(Regression):
    """Its loss depends on something that is no tensor."""

    def __init__(self, scale: Callable[[Scaled, int], float]) -> None:
        super().__init__()
        self.scale, self.factor = scale, 1.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) * self.scale(self, batch_idx)


@pytest.mark.parametrize(
    "scale",
    [lambda module, batch_idx: module.factor, lambda module, batch_idx: 1.0 + batch_idx],
    ids=["attribute", "batch_idx"],
)
def test_pt179804_a_program_that_differs_is_refused(scale: Callable[[Scaled, int], float]) -> None:
    torch.manual_seed(0)
    pair = Pair(Scaled(scale))
    pair.warm_up(batch(0))
    pair.module.factor = 4.0
    # Use 3 is the program's, which has not seen the change; use 4 is compared.
    assert not pair.agree(batch(1), 1, 3)
    with pytest.warns(UserWarning, match=DIFFERS):
        assert pair.agree(batch(1), 1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use in range(5):
            assert pair.agree(batch(use), use, use)
    assert pair.ran == [False, True, True, True, True, True, True]
    assert pair.program.engine == "eager"


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "random"])
def test_pt179804_random_numbers_of_other_libraries_are_noticed_at_the_second_use(draw: Callable[[], float]) -> None:
    torch.manual_seed(0)
    pair = Pair(Scaled(lambda module, batch_idx: 0.5 + draw()))
    assert pair.agree(batch(0), 0)  # captured under the seed that it is compared under
    with pytest.warns(UserWarning, match=DIFFERS):
        assert pair.agree(batch(0), 1)
    for use in range(5):
        assert pair.agree(batch(use), use)
    assert all(pair.ran)


def test_pt179804_a_change_after_many_uses_is_noticed_at_the_next_comparison() -> None:
    torch.manual_seed(0)
    pair = Pair(Scaled(lambda module, batch_idx: module.factor))
    for use in range(1, 18):
        assert pair.agree(batch(use), use)
    pair.module.factor = 2.0
    with pytest.warns(UserWarning, match=DIFFERS):
        wrong = [not pair.agree(batch(use), use) for use in range(18, 33)]
    assert wrong == [True] * 14 + [False]  # use 32


class GlobalStep(Regression):
    """The loss's weight rises from step to step, as warm-ups of auxiliary losses do."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) * (1.0 + self.global_step)


def fit(module: Regression, directory: Path, engine: str, steps: int = 6, data: Any = None) -> dict[str, Work]:
    """Train on four micro-batches a step, one of them exact; what was charged."""
    ledger = ComputeLedger()
    prediction = GradientPrediction(format="int8", microbatches=4, exact=1, seed=3, engine=engine)
    callbacks = [ledger, prediction, ControlVariate()]
    run = trainer(directory, *callbacks, strategy=PredictedGradientStrategy(), max_steps=steps, max_epochs=steps)
    run.fit(module, DataLoader(Samples(24), batch_size=8) if data is None else data)
    return dict(ledger.ledger.totals())


def test_pt179804_global_step_is_noticed_in_the_second_step_of_a_fit(tmp_path: Path) -> None:
    found = []
    for engine in ("eager", "captured"):
        torch.manual_seed(0)
        module = GlobalStep()
        fit(module, tmp_path / engine, engine, steps=1)
        found.append(weights(module))
    assert torch.equal(*found)
    # Uses 1, 2 and 4 of the program, in the first step, are compared, and use 8, in the second.
    with pytest.warns(UserWarning, match=DIFFERS):
        fit(GlobalStep(), tmp_path / "second", "captured", steps=2)


class Branching(Regression):
    """Control flow that depends on data, in the user's own source."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.ask = ask

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        if self.ask(x):  # the line to name
            return 2 * self.loss(batch)
        return self.loss(batch)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum() > 0,
        lambda x: x.sum().item() > 0,
        lambda x: float(x.max()) > 1,
        lambda x: x.sum().tolist() > 0,
        lambda x: x.sum().numpy() > 0,
        lambda x: np.asarray(x).sum() > 0,
    ],
    ids=["bool", "item", "float", "tolist", "numpy", "asarray"],
)
def test_pt143249_data_dependent_control_flow_falls_back_naming_the_source_line(ask: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    pair = Pair(Branching(ask))
    with pytest.warns(UserWarning, match=rf"could not be captured.*{re.escape(Path(__file__).name)}:\d+: `"):
        assert pair.agree(batch(0))
    for use in range(6):
        assert pair.agree(batch(use), use)
    assert all(pair.ran)
    assert pair.program.captures == 0


def test_python_values_of_constants_may_be_read() -> None:
    torch.manual_seed(0)
    pair = Pair(Branching(lambda x: torch.arange(3).tolist()[1] + torch.ones(2).numpy()[0] + torch.tensor(2).item()))
    pair.warm_up(batch(0))
    assert pair.agree(batch(1))
    assert pair.ran == [False]


class Masked(Regression):
    """Its loss is over the samples that a mask selects: as many as there are."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        chosen = x[:, 0] > 0
        return (self.layers(x)[chosen] - y[chosen]).pow(2).mean()


@pytest.mark.parametrize("into", [False, True], ids=["predict", "predict_into"])
@pytest.mark.parametrize("at", [2, 3])
def test_a_program_that_fails_on_another_shape_inside_gives_way(at: int, into: bool) -> None:
    torch.manual_seed(0)
    pair = Pair(Masked())
    few, many = (torch.full((4, 8), -1.0), normal(4, 3)), (torch.full((4, 8), -1.0), normal(4, 3))
    few[0][:2, 0], many[0][:3, 0] = 1.0, 1.0
    for use in range(1, at):
        assert pair.agree(few, use)
    predicted: dict[str, Tensor | None] = {}

    def predict() -> Tensor | None:
        if into:
            return pair.program.predict_into(predicted.__setitem__, many, 5, 0)
        loss, gradients = pair.program.predict(many, 5, 0) or (None, {})
        predicted.update(gradients)
        return loss

    with pytest.warns(UserWarning, match="run eagerly from now on: the captured program failed with RuntimeError"):
        loss = predict()
    assert loss is not None
    assert same((loss, {name: predicted[name] for name in trainable(pair.module)}), pair.eager.predict(many, 5, 0))
    for use in range(5):
        assert pair.agree(many if use % 2 else few, use)
    assert pair.ran[-5:] == [True] * 5


class Skipping(Regression):
    """Returns None for some batches."""

    def __init__(self, skips: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self.skips = skips

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return None if self.skips(batch[0], batch_idx) else self.loss(batch)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_skipped_by_its_index_is_skipped_whole_whatever_a_program_says(tmp_path: Path) -> None:
    found, totals = [], []
    for engine in ("eager", "captured"):
        torch.manual_seed(0)
        module = Skipping(lambda x, batch_idx: batch_idx == 1)
        warned = pytest.warns(UserWarning, match="the training step returned None, which no program can")
        with contextlib.nullcontext() if engine == "eager" else warned:
            totals.append(fit(module, tmp_path / engine, engine))
        found.append(weights(module))
    assert torch.equal(*found)
    for account in ("fleet/prediction", "fleet/control", "scarce/forward", "scarce/backward"):
        assert totals[0][account] == totals[1][account], account


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_skipped_by_its_data_is_predicted_eagerly(tmp_path: Path) -> None:
    samples = Samples(8)
    bad = torch.full_like(samples.x, float("nan")), samples.y
    found = []
    for engine in ("eager", "captured"):
        torch.manual_seed(0)
        module = Skipping(lambda x, batch_idx: x.isnan().any())
        warned = pytest.warns(UserWarning, match="could not be captured as a program: it takes a Python value")
        with contextlib.nullcontext() if engine == "eager" else warned:
            fit(module, tmp_path / engine, engine, data=DataLoader([(samples.x, samples.y), bad] * 3, batch_size=None))
        found.append(weights(module))
    assert torch.equal(*found)


def test_a_step_that_skips_its_first_micro_batch_is_captured_at_the_first_with_a_loss() -> None:
    torch.manual_seed(0)
    pair = Pair(Skipping(lambda x, batch_idx: batch_idx == 0))
    assert pair.predict(batch(0), 1, 0) is None
    assert pair.program.captures == 0
    for use in range(3):
        assert pair.agree(batch(use), use, 1)
    assert pair.program.captures == 1
    assert pair.ran == [True, True, False, True]


def test_an_error_of_the_training_step_is_the_users_own() -> None:
    class Broken(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.mse_loss(self.layers(batch[0]), batch[1], reduction="none")

    with pytest.raises(MisconfigurationException, match="must be a single number"):
        Pair(Broken()).predict(batch(0))
