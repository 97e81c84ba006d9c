"""Lightning's learning-rate and batch-size finders: same answers, same training after, accounts of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger
from lightning_ledger.ledger import read_ledger
from tests.settings_runs import ARMS, SAMPLES, Model, N, every_arm, fresh, ledger_of, stack, tensors, trainer

# The finders' own progress bar and their data loaders, in Lightning 2.6.
pytestmark = pytest.mark.filterwarnings("ignore:You seem to have configured a sampler in your DataLoader")


EPOCHS = 4  # of 4 batches


class Tunable(Model):
    """Has the attributes that the finders set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.2, 8

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(tensors(SAMPLES, 1), batch_size=self.batch_size)


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """The batch-size finder collects garbage before each trial: seconds, over all that is imported by now."""
    gc.freeze()
    yield
    gc.unfreeze()


def rates() -> L.Callback:
    return LearningRateFinder(min_lr=1e-3, max_lr=0.5, num_training_steps=EPOCHS * 4, early_stop_threshold=None)


def sizes() -> L.Callback:
    return BatchSizeFinder(steps_per_trial=2, init_val=4, max_trials=2)


# Samples that a finder runs on: until the epochs end; and two steps in each of two trials, the first of which takes
# the loader that is there, of 8.
TRIED = {"rates": EPOCHS * SAMPLES, "sizes": 2 * (8 + 8)}
FINDERS: dict[str, Callable[[], L.Callback]] = {"rates": rates, "sizes": sizes}


def run(directory: Path, strategy: Any, *callbacks: L.Callback) -> tuple[L.Trainer, Any]:
    runner, model = trainer(directory, *callbacks, strategy=strategy, max_epochs=EPOCHS), fresh(Tunable)
    runner.fit(model)
    return runner, model


@pytest.mark.parametrize(
    ("arm", "first"), [*((arm, False) for arm in ARMS), ("corrected", True)], ids=[*ARMS, "corrected, finder first"]
)
@pytest.mark.parametrize("finder", FINDERS)
def test_a_finder_finds_and_trains_as_in_stock(finder: str, first: bool, arm: str, tmp_path: Path) -> None:
    stock, reference = run(tmp_path / "stock", "auto", FINDERS[finder]())
    callbacks, own = stack(arm, engine="eager"), [FINDERS[finder]()]
    order = [*own, *callbacks] if first else [*callbacks, *own]
    runner, model = run(tmp_path / "ours", "predicted_gradients", *order)
    assert model.batch_size == reference.batch_size == 8
    assert model.lr == pytest.approx(reference.lr, rel=1e-6)
    assert runner.global_step == stock.global_step > 0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    # The ledger: what a run costs that begins with what was found, and the finder's own work beside it.
    alone = stack(arm, engine="eager")
    again = fresh(Tunable)
    again.lr, again.batch_size = model.lr, model.batch_size
    trainer(tmp_path / "alone", *alone, max_epochs=EPOCHS).fit(again)
    spent, expected = ledger_of(callbacks).totals(), ledger_of(alone).totals()
    tuning = {"setup/tuning", "fleet/tuning"} & spent.keys()
    exact, _ = ARMS[arm]
    assert tuning == {name for name, is_in in (("setup/tuning", exact > 0), ("fleet/tuning", exact < N)) if is_in}
    for account in expected.keys() - {"setup/checks"}:
        assert spent[account] == expected[account], account
    assert spent.keys() == expected.keys() | tuning
    assert ledger_of(callbacks).steps == ledger_of(alone).steps == runner.global_step
    assert ledger_of(callbacks).exact_equivalent == ledger_of(alone).exact_equivalent
    assert ledger_of(callbacks).forward_flops == ledger_of(alone).forward_flops
    if arm == "all exact":
        assert spent["setup/tuning"].samples == TRIED[finder]
    assert read_ledger(tmp_path / "ours").totals == spent
    # What predictions and statistics carry is put back, too: the draws are those of a run without a finder.
    mine, its = callbacks[1].state, alone[1].state
    assert torch.equal(mine.generator.get_state(), its.generator.get_state())
    assert mine.steps == its.steps
    if arm == "corrected":
        assert callbacks[2].correction.statistics.steps == alone[2].correction.statistics.steps


@pytest.mark.parametrize("finder", FINDERS)
def test_the_ledger_alone_meters_a_finder(finder: str, tmp_path: Path) -> None:
    _, reference = run(tmp_path / "stock", "auto", FINDERS[finder]())
    callback = ComputeLedger()
    runner, model = run(tmp_path / "ours", "auto", callback, FINDERS[finder]())
    assert model.lr == reference.lr
    assert torch.equal(model.head.weight, reference.head.weight)
    totals = callback.ledger.totals()
    assert totals["setup/tuning"].samples == TRIED[finder]
    # A sample costs the same wherever: forward and backward, as in training.
    trained = totals["scarce/forward"] + totals["scarce/backward"]
    assert trained.samples == EPOCHS * SAMPLES
    assert totals["setup/tuning"].flops * trained.samples == trained.flops * totals["setup/tuning"].samples
    assert not {"training_step", "backward"} & vars(runner.strategy).keys()
    assert read_ledger(tmp_path / "ours").totals == totals


@every_arm
def test_a_tuner_before_the_fit(arm: str, tmp_path: Path) -> None:
    def tuned(strategy: Any, *callbacks: L.Callback) -> tuple[float, Any]:
        runner, model = trainer(tmp_path, *callbacks, strategy=strategy, max_epochs=EPOCHS), fresh(Tunable)
        found = Tuner(runner).lr_find(
            model, min_lr=1e-3, max_lr=0.5, num_training=EPOCHS * 4, early_stop_threshold=None
        )
        runner.fit(model)
        return found.suggestion(), model

    callbacks = stack(arm, engine="eager")
    (expected, reference), (found, model) = tuned("auto"), tuned("predicted_gradients", *callbacks)
    assert found == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(model.head.weight, reference.head.weight, rtol=1e-4, atol=1e-5)
    assert ledger_of(callbacks).steps == 4 * EPOCHS
    assert {"setup/tuning", "fleet/tuning"} & ledger_of(callbacks).totals().keys()
    assert ledger_of(callbacks).exact_equivalent.samples == EPOCHS * SAMPLES


def test_a_trial_that_runs_out_of_memory_is_dropped(tmp_path: Path) -> None:
    class Large(Tunable):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) > 4:
                raise RuntimeError("CUDA out of memory.")
            return loss

    callback = ComputeLedger()
    model = fresh(Large)
    trainer(tmp_path, callback, BatchSizeFinder(steps_per_trial=2, init_val=2), strategy="auto").fit(model)
    assert model.batch_size == 4
    # The first trial runs on the loader that is there, of 8 samples, and fails; then 1, 2, 4 and again 8.
    assert callback.ledger.totals()["setup/tuning"].samples == 2 * (1 + 2 + 4)
