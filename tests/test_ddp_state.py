"""What several processes share: statistics, decisions, ledger and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import AdaptiveAllocation, ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import Statistics
from lightning_ledger.estimation import Allocation, Centre
from lightning_ledger.estimation.ranks import Ranks
from lightning_ledger.ledger import Work, read_ledger, verify_ledger
from lightning_ledger.reports import compare
from tests.ddp_runs import Model, fit, rank, ranks
from tests.lightning_runs import relative_error, token_batch
from tests.two_ranks import on_two_ranks

SAMPLES = 8


def batches(count: int, of: int | None = None, same: bool = False) -> list[dict[str, Tensor]]:
    """A rank's batches; by default this process's."""
    r = rank() if of is None else of
    return [token_batch(SAMPLES, seed=step if same else 10 * step + r) for step in range(count)]


class Probe(pl.Callback):
    """Hands out what the callbacks of a run carry."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (self.correction,) = (c.correction for c in trainer.callbacks if isinstance(c, ControlVariate))
        (self.prediction,) = (c for c in trainer.callbacks if isinstance(c, GradientPrediction))


# ---------------------------------------------------------------------------------------------------------- statistics


def _statistics(of: int | None, steps: int, prediction: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    probe = Probe()
    if of is not None:  # one process, drawing as that rank does
        prediction = {**prediction, "seed": Ranks(of, 2).seed(prediction.get("seed", 0))}
    seen = fit(batches(steps, of), prediction, probe, **options)
    c = probe.correction
    assert c.statistics is not None
    return {
        "statistics": c.statistics.state_dict(),
        "adam": None if c.adam is None else c.adam.state_dict(),
        "ratios": c.cost_ratios,
        "logged": {name: value for name, value in seen.logged.items() if name.startswith("gpcv/")},
    }


@pytest.mark.parametrize("exact", [1, 2])
def test_statistics_are_the_mean_of_what_each_rank_measures(exact: int) -> None:
    prediction = {"format": "int4", "exact": exact, "engine": "eager"}
    ours = on_two_ranks(_statistics, None, 1, prediction, {})
    alone = [_statistics(r, 1, prediction, {}) for r in range(2)]
    found, (a, b) = ours[0]["statistics"], (x["statistics"] for x in alone)
    for name, (total, weight, _) in found["averages"].items():
        mean = (a["averages"][name][0] + b["averages"][name][0]) / 2
        assert weight == a["averages"][name][1]
        assert torch.allclose(total, mean, rtol=1e-5, atol=1e-12), name
        assert torch.equal(total, ours[1]["statistics"]["averages"][name][0])
    # Two ranks' drift averages before it is squared: half the variance, which bias_z must know.
    drift = (a["drift"][0][0] + b["drift"][0][0]) / 2
    rate = a["drift"][0][1]
    assert torch.allclose(found["drift"][0][0], drift, rtol=1e-4)
    assert torch.allclose(found["drift"][1][0], torch.outer(drift, drift) / rate, rtol=1e-4)
    # The last residual is a rank's own.
    for r in range(2):
        assert torch.allclose(ours[r]["statistics"]["previous"], alone[r]["statistics"]["previous"], atol=1e-7)


@pytest.mark.parametrize("strategy", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_statistics_see_local_gradients_not_averaged_ones(strategy: dict[str, Any]) -> None:
    """Unrounded predictions are a rank's own exact gradients: only averaging could tell them apart."""
    options = {"strategy": strategy, "accumulate_grad_batches": 2}
    for exact in (1, 2):
        for seen in on_two_ranks(_statistics, None, 6, {"exact": exact, "engine": "eager"}, options):
            averages = seen["statistics"]["averages"]
            assert float(averages["residual"][0].sum()) < 1e-10 * float(averages["gg"][0].sum())
            assert float(averages["gg"][0].sum()) > 0


def test_every_rank_has_the_same_coefficients_prices_and_logs() -> None:
    options = {"model": {"optimizer": "adamw"}}
    first, second = on_two_ranks(_statistics, None, 36, {"format": "int4", "engine": "eager"}, options)
    for metric in ("statistics", "adam"):
        for name, (total, *weights) in first[metric]["averages"].items():
            other, *other_weights = second[metric]["averages"][name]
            assert torch.equal(total, other), name
            assert weights == other_weights
    assert first["ratios"] == second["ratios"]
    assert first["ratios"][0] > 0
    assert first["logged"] == second["logged"]
    assert first["logged"]["gpcv/delta"] > 0
    assert not torch.equal(first["statistics"]["previous"], second["statistics"]["previous"])


# ----------------------------------------------------------------------------------------------------------- decisions


def _decisions(formats: str | list[str], steps: int) -> list[Any]:
    decided = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            (correction,) = (c.correction for c in trainer.callbacks if isinstance(c, ControlVariate))
            decided.append(correction.allocation)

    fit(
        batches(steps),
        {"format": formats, "microbatches": 4, "exact": 3, "engine": "eager"},
        AdaptiveAllocation(every=2),
        Note(),
        model={"optimizer": "adamw"},
    )
    return decided


@pytest.mark.parametrize("formats", ["int4", ["int4", "int8"]])
def test_all_ranks_decide_alike(formats: str | list[str]) -> None:
    first, second = on_two_ranks(_decisions, formats, 44)
    assert first == second
    assert len(set(first)) > 1  # and something was decided


# ------------------------------------------------------------------------------------------------------------ counting


class Validated(Model):
    """Validates on its training loss."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)


@dataclass
class Books:
    """A ledger, as one rank has it."""

    totals: dict[str, Work]
    exact_equivalent: Work
    steps: int
    logged: dict[str, float]


def _books(directory: str, prediction: dict[str, Any] | None, predictions_only: bool = False) -> Books:
    """Two epochs of two batches with validation; every batch has the same shape, so that all ranks do equal work."""
    ledger = ComputeLedger()
    torch.manual_seed(0)
    callbacks: list[pl.Callback] = [ledger]
    strategy: Any = "auto" if ranks() == 1 else "ddp"
    if prediction is not None:
        strategy = "predicted_gradients" if ranks() == 1 else "predicted_gradients_ddp"
        callbacks += [GradientPrediction(**prediction)] + [ControlVariate()] * (not predictions_only)
    trainer = pl.Trainer(
        strategy=strategy,
        devices=ranks(),
        callbacks=callbacks,
        default_root_dir=directory,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        max_epochs=2,
    )
    data = DataLoader(batches(2), batch_size=None)
    trainer.fit(Validated(), data, DataLoader(batches(1), batch_size=None))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("ledger/")}
    return Books(ledger.ledger.totals(), ledger.ledger.exact_equivalent, ledger.ledger.steps, logged)


PREDICTIONS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "corrected": {"format": "int8", "microbatches": 4, "exact": 1},
    "all_exact": {"format": "int8", "microbatches": 4, "exact": 4},
}


@pytest.mark.parametrize("arm", PREDICTIONS)
def test_totals_are_sums_over_ranks(arm: str, tmp_path: Path) -> None:
    several, single = tmp_path / "several", tmp_path / "single"
    first, second = on_two_ranks(_books, str(several), PREDICTIONS[arm])
    one = _books(str(single), PREDICTIONS[arm])
    assert first.totals == second.totals == {account: 2 * work for account, work in one.totals.items()}
    assert first.exact_equivalent == second.exact_equivalent == 2 * one.exact_equivalent
    assert first.steps == one.steps == 4
    assert "scarce/validation" in first.totals
    # Seconds add up too: those of the file are more than any one rank's would be, and at least positive.
    assert all(first.totals[account].seconds > 0 for account, work in one.totals.items() if work.seconds)
    # What is logged is the total: of twice the work, and so the same saving.
    assert first.logged["ledger/total"] == pytest.approx(2 * one.logged["ledger/total"], rel=1e-12)
    assert first.logged["ledger/saving"] == pytest.approx(one.logged["ledger/saving"], rel=1e-12)
    # The first rank's file tells it, once, and other tools read it.
    (path,) = several.rglob("ledger.jsonl")
    history = read_ledger(path)
    assert verify_ledger(path).ok
    assert (history.totals, history.exact_equivalent, history.steps) == (first.totals, first.exact_equivalent, 4)
    assert len(history.marks) == 2


def test_compare_reads_a_run_of_several_processes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("stock", "corrected", "one")]
    on_two_ranks(_books, str(paths[0]), PREDICTIONS["stock"])
    on_two_ranks(_books, str(paths[1]), PREDICTIONS["corrected"])
    _books(str(paths[2]), PREDICTIONS["corrected"])
    stock, corrected, one = compare(paths, target=100.0).rows
    assert stock.exact
    assert not corrected.exact
    assert corrected.total == pytest.approx(2 * one.total, rel=1e-12)
    assert corrected.samples == 2 * one.samples == stock.samples


# -------------------------------------------------------------------------------------------------------------- resume


class Save(pl.Callback):
    """Saves at the end of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class Fractional(pl.Callback):
    """Draws each micro-batch with probability q, around a centre, as ``AdaptiveAllocation`` may decide."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (correction,) = (c.correction for c in trainer.callbacks if isinstance(c, ControlVariate))
        correction.allocation = Allocation("int4", 0.3, "bernoulli")
        correction.centre = correction.centre or Centre(decay=correction.decay)


def _trained(directory: str, path: str, fractional: bool, resume: bool) -> dict[str, Any]:
    prediction = {"format": "int4", "rounding": "stochastic", "engine": "eager", "refresh_every": 2, "seed": 3}
    probe, more = Probe(), [Fractional()] if fractional else []
    seen = fit(
        batches(9),
        prediction,
        *more,
        probe,
        *([] if resume else [Save(path)]),
        directory=directory,
        model={"optimizer": "adamw", "dropout": 0.5},
        max_epochs=2,
        ckpt_path=path if resume else None,
    )
    statistics, centre = probe.correction.statistics, probe.correction.centre
    assert isinstance(statistics, Statistics)
    return {
        "weights": seen.weights,
        "totals": {name: work for name, work in seen.totals.items() if not name.startswith("waste/")},
        "previous": statistics.previous,
        "averages": torch.cat([a.total for a in statistics.averages.values()]),
        "generator": probe.prediction.state.generator.get_state(),
        "centre": None if centre is None else torch.cat([x.flatten() for x in centre.mean.values()]),
    }


@pytest.mark.parametrize("fractional", [False, True])
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(fractional: bool, tmp_path: Path) -> None:
    path, whole, rest = (str(tmp_path / name) for name in ("saved.ckpt", "whole", "rest"))
    uninterrupted = on_two_ranks(_trained, whole, path, fractional, False)
    resumed = on_two_ranks(_trained, rest, path, fractional, True)
    for r in range(2):
        for name, value in uninterrupted[r].items():
            same = torch.equal(value, resumed[r][name]) if isinstance(value, Tensor) else value == resumed[r][name]
            assert same, (r, name)
    # Each rank went on with its own draws, residuals and centre.
    for name in ("generator", "previous", *(["centre"] if fractional else [])):
        assert not torch.equal(resumed[0][name], resumed[1][name])
    assert relative_error(resumed[0]["weights"], torch.zeros_like(resumed[0]["weights"]) + 1) > 0.01


def test_a_checkpoint_of_two_processes_resumes_with_one(tmp_path: Path) -> None:
    path, whole, rest = (str(tmp_path / name) for name in ("saved.ckpt", "whole", "rest"))
    on_two_ranks(_trained, whole, path, False, False)
    assert _trained(rest, path, False, True)["weights"].isfinite().all()


def test_a_process_that_handles_an_error_asks_nothing_of_the_others() -> None:
    """It saves a last checkpoint alone: a collective would wait for ever, and here there is no process group at all."""
    variate, ledger = ControlVariate(), ComputeLedger()
    variate._ranks = ledger._ranks = Ranks(rank=1, size=2)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not Ranks(rank=1, size=2).together
        assert "ranks" not in variate.state_dict()
        ledger._settle()
    assert Ranks(rank=1, size=2).together
    with pytest.raises(ValueError, match="process group"):
        variate.state_dict()
