"""A run that is killed in mid-epoch and resumed ends where the uninterrupted run ends, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import optimal_coefficient
from lightning_ledger.ledger import Work, read_ledger, verify_ledger
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import Samples, ValidatedRegression, relative_error, trainer, weights

# torchdata 0.11 tells torch a vital that torch 2.13 no longer wants to know.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # A resumed run need not save again.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
]

# 26 samples in batches of 4: seven batches an epoch, the last of 2. The checkpoint falls into the second epoch, after
# the coefficient has left its start-up value of 1 and two steps after the weights' refresh where that is every third;
# the kill into the third.
EPOCHS, SAVED, KILLED, STEPS = 3, 11, 16, 21


class Kill(pl.Callback):
    """Fails when the batch after step ``KILLED`` begins."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == KILLED:
            raise InterruptedError("killed")


class SaveAtBatchEnd(pl.Callback):
    """Saves in ``on_train_batch_end``: before the hooks of every callback that comes after it in the list."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == SAVED and not self.path.exists():
            trainer.save_checkpoint(self.path)


@dataclass
class Run:
    """One training with fresh objects.

    Args:
        directory: of ``ledger.jsonl``.
        arm: name of the arm.
        seed: of the initial weights; a resumed run must not need them.
    """

    directory: Path
    arm: str
    seed: int = 0
    ledger: ComputeLedger = field(default_factory=ComputeLedger)
    prediction: GradientPrediction | None = None
    correction: ControlVariate | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        # Masks are private where gradients are predicted; stock Lightning does not restore the global generator.
        dropout = 0.0 if self.arm == "ledger_alone" else 0.5
        self.module = ValidatedRegression(dropout=dropout, optimizer="adamw", schedule=True)
        self.callbacks: list[pl.Callback] = [self.ledger]
        if self.arm == "ledger_alone":
            return
        refresh, exact = (3 if "stale" in self.arm else 1), (0 if self.arm == "predictions_only" else 1)
        self.prediction = GradientPrediction(
            format="int8", rounding="stochastic", microbatches=4, exact=exact, refresh_every=refresh, seed=5
        )
        self.callbacks.append(self.prediction)
        if self.arm.startswith("corrected"):
            self.correction = ControlVariate(coefficient="optimal")
            self.callbacks.append(self.correction)

    def fit(self, *others: pl.Callback, first: bool = False, ckpt_path: Path | None = None) -> Run:
        """Train to the end, or on from a checkpoint, with other callbacks after ours, or before them."""
        callbacks = [*others, *self.callbacks] if first else [*self.callbacks, *others]
        strategy = "auto" if self.prediction is None else PredictedGradientStrategy()
        self.trainer = trainer(
            self.directory,
            *callbacks,
            strategy=strategy,
            max_epochs=EPOCHS,
            enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in others),
        )
        train = StatefulDataLoader(Samples(26), batch_size=4)
        self.trainer.fit(self.module, train, DataLoader(Samples(6, seed=9), batch_size=4), ckpt_path=ckpt_path)
        return self

    def state(self) -> dict[str, Any]:
        """Everything that must survive: weights, optimizer, schedule, and what the callbacks carry."""
        return {
            "weights": self.module.state_dict(),
            "optimizer": self.trainer.optimizers[0].state_dict(),
            "schedule": self.trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "prediction": self.prediction.state_dict() if self.prediction else None,
            "statistics": self.correction.state_dict() if self.correction else None,
            "ledger": {name: w for name, w in self.ledger.ledger.totals().items() if not name.startswith("waste/")},
            "exact_equivalent": self.ledger.ledger.exact_equivalent,
            "steps": self.ledger.ledger.steps,
            "values": {k: v for k, v in self.ledger.values().items() if k.endswith(("fleet", "exact_equivalent"))},
        }

    def waste(self) -> dict[str, Work]:
        return {name: w for name, w in self.ledger.ledger.totals().items() if name.startswith("waste/")}


def model_checkpoint(path: Path) -> pl.Callback:
    return ModelCheckpoint(path.parent, path.stem, every_n_train_steps=SAVED, save_top_k=-1)


SAVERS: dict[str, tuple[Callable[[Path], pl.Callback], bool]] = {
    "saver_before_ours": (SaveAtBatchEnd, True),
    "saver_after_ours": (SaveAtBatchEnd, False),
    "model_checkpoint": (model_checkpoint, False),
}
ARMS = ["ledger_alone", "predictions_only", "mixed", "corrected", "corrected_stale"]


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested states are not bit-identical."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
    return [] if same else [f"{path}: {a} != {b}"]


def killed(directory: Path, arm: str, saver: str) -> tuple[Run, Path]:
    """A run that was killed in mid-epoch, and the checkpoint it left."""
    make, first = SAVERS[saver]
    path = directory / "checkpoints" / "saved.ckpt"
    run = Run(directory, arm)
    with pytest.raises(InterruptedError, match="killed"):
        run.fit(make(path), Kill(), first=first)
    assert path.exists()
    assert run.trainer.global_step == KILLED
    return run, path


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("arm", ARMS)
def test_pl19815_midepoch_checkpoint_charges_each_batch_once(arm: str, saver: str, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", arm).fit()
    interrupted, path = killed(tmp_path / "killed", arm, saver)
    resumed = Run(tmp_path / "killed", arm, seed=1).fit(ckpt_path=path)
    assert resumed.trainer.global_step == whole.trainer.global_step == STEPS
    assert differences(resumed.state(), whole.state()) == []
    assert whole.waste() == {}

    file = tmp_path / "killed" / "ledger.jsonl"
    assert verify_ledger(file).ok
    history = read_ledger(file)
    assert history.totals == resumed.ledger.ledger.totals()
    assert history.exact_equivalent == whole.ledger.ledger.exact_equivalent
    assert history.steps == STEPS
    assert history.run == interrupted.ledger.ledger.run

    # Lost: the five steps 12 to 16. Step 14 ends the epoch with a batch of 2 samples, which makes 2 micro-batches, and
    # is followed by 2 validation batches. So 4 + 4 + 2 + 4 + 4 = 18 predictions, one exact pass a step.
    waste = resumed.waste()
    if arm == "ledger_alone":
        assert waste["waste/lost_steps"].passes == 5 + 2
        assert waste["waste/lost_steps"].samples == 4 * 4 + 2 + 6
        assert "waste/lost_prediction" not in waste
    else:
        predictions, exact = {"predictions_only": (18, 0), "mixed": (18 - 5, 5)}.get(arm, (18, 5))
        assert waste["waste/lost_prediction"].passes == predictions
        assert waste["waste/lost_steps"].passes == exact + 2


def test_states_that_are_compared_are_not_trivial(tmp_path: Path) -> None:
    run = Run(tmp_path, "corrected_stale").fit()
    assert run.prediction is not None
    assert run.correction is not None
    statistics = run.correction.correction.statistics
    assert statistics is not None
    assert float((optimal_coefficient(statistics) - 1).abs().max()) > 1e-4
    state = run.prediction.state_dict()
    assert state["steps"] == STEPS
    stale = torch.cat([w.detach().double().flatten() for w in state["weights"].values()])
    assert relative_error(stale, weights(run.module)) > 1e-4  # of step 18, three steps before
    other = Run(tmp_path / "other", "corrected_stale", seed=1).fit()
    assert differences(run.state(), other.state())


def test_resuming_restores_the_private_generator(tmp_path: Path) -> None:
    """The comparison above could pass with a generator that nobody reads: without its state the run differs."""
    whole = Run(tmp_path / "whole", "corrected").fit()
    _, path = killed(tmp_path / "killed", "corrected", "saver_before_ours")
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"]["GradientPrediction"]
    state["generator"] = torch.Generator().manual_seed(99).get_state()
    torch.save(checkpoint, path)
    resumed = Run(tmp_path / "killed", "corrected").fit(ckpt_path=path)
    paths = {difference.split("/")[1].split(":")[0] for difference in differences(resumed.state(), whole.state())}
    assert {"weights", "prediction", "statistics"} <= paths
    assert not {"ledger", "steps"} & paths  # the draw changes no amount of work


@pytest.mark.parametrize("kept", [True, False])
def test_resumed_run_in_a_new_directory_takes_the_old_file_along_if_it_is_there(kept: bool, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", "corrected").fit()
    _, path = killed(tmp_path / "killed", "corrected", "model_checkpoint")
    if not kept:
        (tmp_path / "killed" / "ledger.jsonl").unlink()
    resumed = Run(tmp_path / "elsewhere", "corrected").fit(ckpt_path=path)
    assert differences(resumed.state(), whole.state()) == []
    assert set(resumed.waste()) == ({"waste/lost_steps", "waste/lost_prediction"} if kept else {"waste/lost_steps"})
    history = read_ledger(tmp_path / "elsewhere")
    assert history.totals == resumed.ledger.ledger.totals()
    assert history.steps == whole.ledger.ledger.steps
    assert verify_ledger(tmp_path / "elsewhere").ok


@pytest.mark.parametrize("arm", ["ledger_alone", "corrected_stale"])
def test_resuming_twice_from_one_checkpoint_keeps_the_totals(arm: str, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", arm).fit()
    _, path = killed(tmp_path / "killed", arm, "saver_before_ours")
    again = Run(tmp_path / "killed", arm)
    with pytest.raises(InterruptedError, match="killed"):
        again.fit(Kill(), ckpt_path=path)
    resumed = Run(tmp_path / "killed", arm).fit(ckpt_path=path)
    assert differences(resumed.state(), whole.state()) == []
    assert resumed.waste()["waste/lost_steps"].passes == 2 * (5 + 2)  # the same five steps were lost twice
    assert read_ledger(tmp_path / "killed").totals == resumed.ledger.ledger.totals()
    assert verify_ledger(tmp_path / "killed").ok


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward"])
def test_checkpoint_of_a_failure_holds_finished_batches_only(hook: str, tmp_path: Path) -> None:
    """Lightning runs the batch in flight again, so the checkpoint must not have charged it."""

    class Fail(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
            trainer.save_checkpoint(path)

    def fail(trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == KILLED:
            raise InterruptedError("killed")

    path, callback = tmp_path / "failed.ckpt", Fail()
    setattr(callback, hook, fail)
    with pytest.raises(InterruptedError, match="killed"):
        Run(tmp_path, "ledger_alone").fit(callback)
    totals = torch.load(path, weights_only=True)["callbacks"]["ComputeLedger"]["totals"]
    # 16 steps: two epochs and two batches more, and validation before the first epoch and after the two.
    assert totals.keys() == {"scarce/forward", "scarce/backward", "scarce/validation"}
    assert totals["scarce/forward"]["samples"] == 2 * 26 + 2 * 4
    assert totals["scarce/forward"]["passes"] == KILLED
    assert totals["scarce/validation"]["samples"] == 3 * 6


@pytest.mark.parametrize("change", [{"kind": "somebody.else"}, {"schema": 99}])
@pytest.mark.parametrize("callback", ["ComputeLedger", "GradientPrediction", "ControlVariate"])
def test_checkpoint_of_another_kind_or_schema_is_refused_by_name(
    callback: str, change: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "saved.ckpt"
    Run(tmp_path / "first", "corrected").fit(SaveAtBatchEnd(path))
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"][callback]
    assert {"kind", "schema"} <= state.keys()
    kind = state["kind"]
    state.update(change)
    torch.save(checkpoint, path)
    run = Run(tmp_path / "second", "corrected")
    (found,) = change.values()
    with pytest.raises(ValueError, match=repr(found)) as error:
        run.fit(ckpt_path=path)
    assert repr(kind if "kind" in change else state["schema"]) in str(error.value)
    assert run.trainer.global_step == 0
