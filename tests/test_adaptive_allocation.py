"""``AdaptiveAllocation`` in the Trainer: what it decides, when, at what cost, and what it leaves in the log."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ledger import PriceBook
from lightning_ledger.callbacks import AdaptiveAllocation, ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import best_share, report
from lightning_ledger.history import Mark
from lightning_ledger.ledger import read_ledger, verify_ledger
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import Regression, Samples, trainer, weights

# torchdata 0.11 tells torch a vital that torch 2.13 no longer wants to know.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

N = 8


class Rows(pl.Callback):
    """The values of every step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class SaveAtBatchEnd(pl.Callback):
    """Saves in the middle of an epoch, when the loader's own state can be saved too."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Run:
    """One training of a perceptron on 32 samples a batch, in 8 micro-batches of 4 unless said.

    Args:
        directory: of the ledger.
        price: of a forward-equivalent on the fleet; backward and forward of two layers are 2.75 times that.
        format: of the predictions, or several to choose from.
        optimizer: of the module.
        microbatches: n.
        variate: other settings of ``ControlVariate``.
        allocation: settings of ``AdaptiveAllocation``.
    """

    def __init__(
        self,
        directory: Path,
        price: float = 0.05,
        format: str | list[str] = "int4",
        optimizer: str = "adamw",
        microbatches: int = N,
        variate: dict[str, Any] | None = None,
        **allocation: Any,
    ) -> None:
        torch.manual_seed(0)
        self.directory, self.rows = directory, Rows()
        self.module = Regression(optimizer=optimizer)
        self.ledger = ComputeLedger(prices=PriceBook(fleet_forward=price))
        self.prediction = GradientPrediction(format=format, microbatches=microbatches, exact=1, engine="eager")
        self.variate = ControlVariate(**(variate or {}))
        self.allocation = AdaptiveAllocation(**allocation)
        self.callbacks: list[pl.Callback] = [self.allocation, self.ledger, self.prediction, self.variate, self.rows]

    def fit(self, steps: int, ckpt_path: Path | None = None, data: Samples | None = None) -> Run:
        strategy = PredictedGradientStrategy()
        run = trainer(self.directory, *self.callbacks, strategy=strategy, max_steps=steps, max_epochs=-1)
        loader = StatefulDataLoader(data or Samples(32 * 80), batch_size=32)
        run.fit(self.module, loader, ckpt_path=ckpt_path)
        self.trainer = run
        return self

    def marks(self) -> list[Mark]:
        return list(read_ledger(self.directory).marks)

    def column(self, name: str) -> list[float]:
        return [row[f"gpcv/{name}"] for row in self.rows.rows]


def test_the_share_follows_the_live_optimum(tmp_path: Path) -> None:
    """Predictions so dear that the best k is not always 1, and that one would rather do without."""
    run = Run(tmp_path, price=4.0, every=5, switch=False).fit(50)
    shares, exact, predicting = (run.column(x) for x in ("allocated_share", "exact_share", "predicting"))
    assert shares == exact
    assert shares[:10] == [1 / N] * 10  # nothing is decided before ten observations
    assert set(predicting) == {1.0}
    assert len(set(shares)) > 1
    marks = run.marks()
    assert [mark.step for mark in marks] == list(range(10, 50, 5))
    for mark in marks:
        found = {name.removeprefix("gpcv/"): value for name, value in mark.metrics.items()}
        # The numbers that the step before logged are those that the decision rests on.
        row = run.rows.rows[mark.step - 1]
        # Adam's metric is observed after 20 steps, and decides after 10 more.
        metric = "adam/" if mark.step >= 30 else ""
        assert found["allocation_delta"] == pytest.approx(row[f"gpcv/{metric}delta"], rel=0.1)
        assert found["allocation_cost_ratio"] == pytest.approx(4.0)
        assert found["allocation_delta_low"] <= found["allocation_delta"] <= found["allocation_delta_high"]
        assert found["allocated_share"] == shares[mark.step]
        best = min(max(best_share(found["allocation_delta"], 4.0), 1 / N), 1 - 1 / N)
        assert abs(found["allocated_share"] - best) < 1 / N
    assert verify_ledger(tmp_path).ok


def test_plain_statistics_decide_where_the_optimizer_has_no_metric(tmp_path: Path) -> None:
    run = Run(tmp_path, optimizer="sgd").fit(21)
    assert not any(name.startswith("gpcv/adam/") for name in run.rows.rows[-1])
    assert [mark.step for mark in run.marks()] == [10, 20]


def test_limits_are_kept(tmp_path: Path) -> None:
    assert set(Run(tmp_path / "floor", floor=0.5).fit(25).column("exact_share")[20:]) == {0.5}
    run = Run(tmp_path / "ceiling", price=0.9, ceiling=0.125, switch=False).fit(25)
    assert set(run.column("exact_share")) == {0.125}


def cost_without_checks(run: Run) -> float:
    """Of the run, over what the same samples would have cost exactly."""
    costs = run.ledger.ledger.costs(run.ledger.prices)
    costs.pop("setup/checks")
    return sum(costs.values()) / run.ledger.values()["ledger/exact_equivalent"]


@pytest.mark.parametrize("price", [0.875, 2.0, 100.0])
def test_hopeless_predictions_never_start(price: float, tmp_path: Path) -> None:
    """Eight perfect predictions and an exact gradient would cost 8 w + 1 >= 8: the price tells before any of them."""
    run = Run(tmp_path, price=price, probe_every=10).fit(60)
    assert set(run.column("predicting")) == {0.0}
    (mark,) = run.marks()
    assert (mark.step, mark.metrics["gpcv/predicting"]) == (0, 0)
    assert mark.metrics["gpcv/allocation_cost_ratio"] == pytest.approx(price)
    totals = run.ledger.ledger.totals()
    assert not any(account.startswith("fleet/") for account in totals)
    assert totals["scarce/forward"].passes == 60 * N
    assert cost_without_checks(run) == pytest.approx(1, rel=1e-9)
    assert run.ledger.ledger.cost(run.ledger.prices) < 1.03 * run.ledger.values()["ledger/exact_equivalent"]


def test_what_does_not_pay_costs_little(tmp_path: Path) -> None:
    """Dear enough for int4 not to pay, and not so dear that the price alone would tell."""
    run = Run(tmp_path, price=0.85, probe_every=10).fit(150)
    predicting = run.column("predicting")
    off = predicting.index(0.0)
    assert 10 < off < 50
    assert not any(predicting[off:])
    assert run.ledger.ledger.cost(run.ledger.prices) < 1.03 * run.ledger.values()["ledger/exact_equivalent"]
    # Each no doubles the time to the next probe, from 10 steps to 80.
    first = 10 * -(-off // 10)
    probes = [step for step in range(off, 150) if step in (first, *range(first + 20 - first % 20, 40, 20), 40, 80)]
    assert run.ledger.ledger.totals()["fleet/probe"].passes == 2 * len(probes)


def test_predictions_that_do_not_pay_go_off_and_come_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "dear", price=0.85, format="int4", patience=5, probe_every=4).fit(60)
    predicting = run.column("predicting")
    off = predicting.index(0.0)
    assert 11 <= off <= 40
    assert not any(predicting[off:])  # probes agree: it stays off
    assert run.rows.rows[off - 1]["gpcv/relative_cost"] > 1
    probes = run.ledger.ledger.totals()["fleet/probe"].passes
    assert cost_without_checks(run) == pytest.approx(
        (off * (8 * 0.85 + 1) + (60 - off) * 8 + probes * 0.85) / 480, rel=1e-3
    )
    checkpoint = tmp_path / "off.ckpt"
    run.trainer.save_checkpoint(checkpoint)

    # The same run, at a price at which they do pay: the first probe says so.
    cheap = Run(tmp_path / "cheap", price=0.02, format="int4", patience=5, probe_every=4).fit(80, checkpoint)
    predicting = cheap.column("predicting")
    assert predicting[0] == 0
    assert predicting[-1] == 1
    on = predicting.index(1.0)
    assert on <= 5
    assert all(predicting[on:])


@pytest.mark.parametrize("draw", ["systematic", "bernoulli"])
def test_fewer_exact_micro_batches_than_one_a_batch(draw: str, tmp_path: Path) -> None:
    run = Run(tmp_path, format="int8", fractional=True, draw=draw).fit(60)
    share = run.column("allocated_share")[-1]
    assert 0.01 <= share < 1 / N
    exact = run.column("exact_share")
    assert set(exact[:30]) == {1 / N}  # the optimizer's metric has no say yet
    assert {0.0, 1 / N} <= set(exact[30:])
    assert run.ledger.values()["ledger/saving"] > 0.85  # one a batch saves 1 - 1/8 - .05 = .825
    assert run.column("loss")[-1] < 0.5 * run.column("loss")[0]
    if draw == "systematic":
        assert sum(exact) * N == pytest.approx(sum(run.column("allocated_share")) * N, abs=3)  # three offsets at most


def test_the_present_batch_has_no_say(tmp_path: Path) -> None:
    """At a decision, other samples change the statistics, and so the next decision, but not this one."""
    plain, changed = Samples(32 * 80), Samples(32 * 80)
    changed.y[32 * 20 : 32 * 21] *= -50.0
    runs = [Run(tmp_path / name).fit(31, data=data) for name, data in (("a", plain), ("b", changed))]
    for key in ("allocated_share", "exact_share"):
        first, second = (run.column(key)[:21] for run in runs)
        assert first == second
    first, second = ([mark.metrics for mark in run.marks()] for run in runs)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


@pytest.mark.parametrize(
    ("price", "options"),
    [(4.0, {"switch": False}), (0.05, {"fractional": True}), (0.85, {"patience": 4})],
)
def test_resumed_is_uninterrupted(price: float, options: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"price": price, "every": 5, "probe_every": 6, **options}
    whole = Run(tmp_path / "whole", **settings).fit(45)
    first, checkpoint = Run(tmp_path / "first", **settings), tmp_path / "saved.ckpt"
    first.callbacks.append(SaveAtBatchEnd(checkpoint, 33))
    first.fit(33)
    resumed = Run(tmp_path / "resumed", **settings)
    resumed.fit(45, checkpoint)
    assert torch.equal(weights(resumed.module), weights(whole.module))
    for key in ("allocated_share", "predicting", "exact_share"):
        assert first.column(key) + resumed.column(key) == whole.column(key)
    last, expected = resumed.rows.rows[-1], whole.rows.rows[-1]  # the latter holds old values of ended columns too
    assert last == pytest.approx({key: expected[key] for key in last}, nan_ok=True)
    assert len(set(whole.column("exact_share"))) > 1


def test_statistics_can_be_observed_less_often(tmp_path: Path) -> None:
    run = Run(tmp_path, variate={"observe_every": 2}).fit(44)
    assert run.variate.correction.statistics is not None
    assert run.variate.correction.adam is not None
    assert (run.variate.correction.statistics.steps, run.variate.correction.adam.steps) == (22, 2)


def test_the_documented_keys_are_the_logged_ones(tmp_path: Path) -> None:
    texts = (GradientPrediction.__doc__, ControlVariate.__doc__, AdaptiveAllocation.__doc__, report.__doc__)
    promised = {key for text in texts for key in re.findall(r"``(gpcv/\w+)``", text or "")}
    twice = promised - {"gpcv/coefficient", "gpcv/cosine", "gpcv/bias_z", "gpcv/loss", "gpcv/exact_share"}
    promised -= {"gpcv/format_index", "gpcv/between_share"}  # one format only
    twice -= {"gpcv/allocated_share", "gpcv/predicting", "gpcv/format_index", "gpcv/between_share"}
    promised |= {key.replace("gpcv/", "gpcv/adam/") for key in twice}
    rows = Run(tmp_path).fit(26).rows.rows  # a value without a meaning yet is left out of its row
    logged = {key for row in rows for key in row if key.startswith("gpcv/")}
    assert logged <= promised
    # Where no mean gradient can be told from the noise of so few steps.
    assert promised - logged <= {f"gpcv/adam/{name}" for name in ("bias", "noise_scale", "noise_scale_samples")}


def test_the_ledger_records_how_the_run_allocated(tmp_path: Path) -> None:
    Run(tmp_path, every=7, patience=3).fit(2)
    settings = read_ledger(tmp_path).header["settings"]
    expected = {"floor": 0.01, "every": 7, "switch": True, "patience": 3, "margin": 0.1, "exact_without": None}
    assert expected.items() <= settings["allocation"].items()


def test_it_can_be_pickled_after_training(tmp_path: Path) -> None:
    run = Run(tmp_path).fit(12)
    again = pickle.loads(pickle.dumps(run.allocation))
    assert again.switch == run.allocation.switch


class Silent(pl.LightningModule):
    """Never gets as far as training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise AssertionError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


REFUSED: dict[str, tuple[list[pl.Callback], str]] = {
    "no_correction": ([GradientPrediction(), AdaptiveAllocation()], "there is no ControlVariate"),
    "no_prediction": ([ControlVariate(), AdaptiveAllocation()], "there is no GradientPrediction"),
    "all_exact": (
        [GradientPrediction(microbatches=4, exact=4), ControlVariate(), AdaptiveAllocation()],
        "starts with none of one kind",
    ),
    "ceiling": ([GradientPrediction(), ControlVariate(), AdaptiveAllocation(ceiling=0.1)], "Pass fractional=True"),
    "too_many": ([GradientPrediction(), ControlVariate(), AdaptiveAllocation(exact_without=9)], "exact_without=9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    callbacks, message = REFUSED[name]
    run = trainer(tmp_path, *callbacks, strategy=PredictedGradientStrategy(), max_steps=1)
    with pytest.raises(MisconfigurationException, match=message):
        run.fit(Silent(), DataLoader(Samples(8), batch_size=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"floor": 0.0}, "floor=0.0"),
        ({"floor": 0.5, "ceiling": 0.25}, "floor=0.5, ceiling=0.25"),
        ({"every": 0}, "every=0"),
        ({"probe_every": True}, "probe_every=True"),
        ({"exact_without": 0}, "exact_without=0"),
        ({"draw": "uniform"}, "draw='uniform' is unknown"),
        ({"patience": 0}, "patience=0"),
        ({"margin": 1.0}, "margin=1.0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        AdaptiveAllocation(**arguments)
