"""Predictions on a real Ray cluster are those made in process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_runs import Regression, Samples, TokenModel, token_batch, trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet import FleetSettings, Job, Observers, PredictorRecipe, RaySettings, SimulatedSettings
from lightning_ledger.fleet.cluster import Cluster
from lightning_ledger.fleet.ray import RayFleet
from lightning_ledger.ledger import Work
from lightning_ledger.microbatches import MicroBatch
from lightning_ledger.program import trainable

pytestmark = pytest.mark.usefixtures("ray_workers")
TRANSFERS = ("transfer/weights", "transfer/gradients")


class Annealed(Regression):
    """Its loss depends on everything that a worker's copy must follow."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.anneal = 1.0
        self.frozen = nn.Linear(8, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        drift = self.anneal * (self.seen + self.global_step + self.current_epoch)
        return (self.layers(x) + self.frozen(x) - y).square().mean() + 1e-3 * drift * self.layers(x).mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.anneal *= 0.5
        self.layers[2].train(batch_idx % 2 == 0)  # dropout comes and goes
        self.frozen.weight.data.mul_(0.9)  # as averaged weights are written, with no record


def fit(
    fleet: FleetSettings | str,
    directory: Path,
    model: Callable[[], L.LightningModule] = lambda: Regression(dropout=0.1, optimizer="adamw"),
    engine: Any = "captured",
    steps: int = 6,
) -> tuple[Tensor, Mapping[str, Work], Mapping[str, Any]]:
    """Weights, ledger and logged values after some steps."""
    L.seed_everything(0, verbose=False)
    module, ledger = model(), ComputeLedger()
    prediction = GradientPrediction(microbatches=4, fleet=fleet, engine=engine)
    runner = trainer(
        directory, prediction, ControlVariate(), ledger, strategy="predicted_gradients", max_steps=steps, max_epochs=9
    )
    runner.fit(module, DataLoader(Samples(32), batch_size=8))
    return weights(module), ledger.ledger.totals(), runner.callback_metrics


def test_training_on_one_worker_is_training_in_process_to_the_bit(tmp_path: Path) -> None:
    here, here_work, here_logged = fit("in_process", tmp_path)
    there, there_work, there_logged = fit(RaySettings(workers=1), tmp_path)
    assert torch.equal(here, there)
    assert {a: w for a, w in there_work.items() if a not in TRANSFERS} == here_work
    assert float(there_logged["gpcv/loss"]) == float(here_logged["gpcv/loss"])
    # 195 parameters: weights once a step; a batch of 8 samples, 11 numbers each.
    assert there_work["transfer/weights"] == Work(bytes=6 * 4 * (195 + 8 * 11))
    # Two sums; the sampled coordinates (all 195) of the one micro-batch of C; norms of 4 jobs in 2 layers, in double.
    assert there_work["transfer/gradients"] == Work(bytes=6 * (4 * (195 + 195 + 195) + 8 * 4 * 2))


def test_training_on_two_workers_adds_in_the_order_of_their_chunks(ray_fleet: Any, tmp_path: Path) -> None:
    here, here_work, _ = fit("in_process", tmp_path)
    there, there_work, _ = fit(ray_fleet, tmp_path)
    simulated, simulated_work, _ = fit(SimulatedSettings(workers=2), tmp_path)
    assert torch.equal(there, simulated)
    torch.testing.assert_close(there, here, rtol=0, atol=1e-6)  # Adam's steps are up to 1e-2
    for account in ("fleet/control", "fleet/prediction", "scarce/forward", "scarce/backward"):
        assert there_work[account] == here_work[account] == simulated_work[account]
    for account in TRANSFERS:
        assert there_work[account] == simulated_work[account]
    assert there_work["setup/checks"].flops > here_work["setup/checks"].flops  # each worker captures its own program


def test_a_worker_follows_buffers_attributes_modes_and_the_trainer(ray_fleet: Any, tmp_path: Path) -> None:
    here, *_ = fit(SimulatedSettings(workers=2), tmp_path, Annealed, engine="eager")
    there, *_ = fit(ray_fleet, tmp_path, Annealed, engine="eager")
    assert torch.equal(here, there)


def test_what_a_step_raises_on_workers_is_raised_here_with_their_traceback(ray_fleet: Any, tmp_path: Path) -> None:
    class Failing(Regression):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            if not isinstance(self._trainer, L.Trainer):
                raise KeyError("no such column")
            return super().loss(batch)

    with pytest.raises(RuntimeError, match=r"(?s)Failing.training_step raised.*KeyError: 'no such column'"):
        fit(ray_fleet, tmp_path, Failing)


def test_a_module_that_cannot_be_sent_is_named(ray_fleet: Any, tmp_path: Path) -> None:
    module = Regression()
    module.lock = open(tmp_path / "log", "w")  # noqa: SIM115
    with pytest.raises(TypeError, match="Regression cannot be sent to Ray's workers"):
        fit(ray_fleet, tmp_path, lambda: module)
    module.lock.close()


def test_an_address_without_a_cluster_is_refused() -> None:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(ConnectionError, match="No Ray cluster answers at address='127"):
            RaySettings(address="127.0.0.1:9").open(Regression())


@pytest.mark.parametrize("engine", ["captured", "onnxruntime"])
def test_every_engine_predicts_on_workers(engine: Any, ray_workers: Cluster) -> None:
    module = TokenModel(dropout=0.1, tied=True)
    layout = Layout.of(trainable(module))
    recipe = PredictorRecipe("int8", engine=engine)
    fleets = [
        SimulatedSettings(workers=2).open(module).fleet(recipe, layout, Observers()),
        RayFleet(ray_workers, module, recipe, layout),
    ]
    results = []
    for fleet in fleets:
        fleet.refresh(trainable(module), seed=1)
        for _ in range(3):  # from its third use on a program runs alone
            jobs = [Job(MicroBatch(token_batch(2, i), i, 2, 0, 0.25), 7 + i, control=i == 1) for i in range(4)]
            fleet.submit(jobs, (0,), True)
            found = fleet.gather()
        results.append(found)
    here, there = results
    assert here.losses == there.losses
    for a, b in ((here.control, there.control), (here.rest, there.rest)):
        assert a.keys() == b.keys()
        for name, gradient in a.items():
            assert gradient is not None
            assert torch.equal(gradient, b[name])
    assert torch.equal(here.samples[1], there.samples[1])
