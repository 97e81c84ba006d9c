"""Precision plugins of the Trainer: float16 with its loss scale, bfloat16, float64.

Lightning takes 16-mixed for GPUs alone from ``precision=``; as a plugin it runs on the CPU, GradScaler included.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import read_ledger
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import Engine, ProgramPredictor
from lightning_ledger.program import loss_scale_of
from tests.settings_runs import (
    ARMS,
    BATCH,
    SAMPLES,
    Model,
    Same,
    check_unbiased,
    every_arm,
    fresh,
    ledger_of,
    stack,
    tensors,
    trainer,
)

TINY = 2.0**-22  # below float16's smallest normal number, 2^-14: a loss of this size has gradients near its last, 2^-24


def float16(**scaler: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaler))


class Faint(Model):
    """Its gradients are too small for float16, and its learning rate makes up for that."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        output = self(x)
        # Autocast leaves the sum in float32: the factor meets float16 on the way back, at the layers' outputs.
        return TINY * nn.functional.mse_loss(output, y.to(output.dtype))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2 / TINY, momentum=0.9)


def moved(model: L.LightningModule) -> Tensor:
    """How far the weights went from where they began."""
    start = fresh(type(model)).state_dict()
    return torch.cat([(value.double() - start[name].double()).flatten() for name, value in model.state_dict().items()])


def apart(model: L.LightningModule, reference: L.LightningModule) -> float:
    return float((moved(model) - moved(reference)).norm() / moved(reference).norm())


# Each product is rounded to 11 bits, a relative error of 2^-11, and a batch's sums are rounded in other places; some
# ten roundings in a step, eight steps with momentum. A wrong scale of any kind would be 25 % or more.
FLOAT16 = 16 * 2**-11


@every_arm
@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_pl4151_float16_equals_float32_where_gradients_underflow_without_the_scale(
    optimizer: str, arm: str, tmp_path: Path
) -> None:
    class Fused(Faint):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.2 / TINY, momentum=0.9, fused=True)

    model = Fused if optimizer == "fused" else Faint
    same = Same(tmp_path, model)  # float32
    runner, ours = same.run("predicted_gradients", *stack(arm), plugins=float16())
    assert runner.global_step == same.stock.global_step
    assert apart(ours, same.reference) < FLOAT16
    _, unscaled = same.run("predicted_gradients", *stack(arm, check_separable=False), plugins=float16(enabled=False))
    assert apart(unscaled, same.reference) > 0.25


@pytest.mark.parametrize("fused", [False, True])
def test_pl15501_a_fused_adamw_that_unscales_inside_its_step(fused: bool, tmp_path: Path) -> None:
    class AdamW(Faint):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3 * TINY, fused=fused)

    same = Same(tmp_path, AdamW, plugins=float16)
    for arm in ARMS:
        _, ours = same.run("predicted_gradients", *stack(arm))
        # Where a gradient is near zero its sign, and with it the first steps of Adam, hang on the last bit.
        assert apart(ours, same.reference) < 2 * FLOAT16


@every_arm
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_pl4151_clipping_sees_unscaled_gradients(algorithm: str, arm: str, tmp_path: Path) -> None:
    settings = {"gradient_clip_val": 0.05 * TINY, "gradient_clip_algorithm": algorithm}
    same = Same(tmp_path, Faint, **settings)  # float32
    _, ours = same.run("predicted_gradients", *stack(arm), plugins=float16())
    assert ours.norms == pytest.approx(same.reference.norms, rel=FLOAT16)
    assert min(ours.norms) > 0.05 * TINY  # it bites
    assert apart(ours, same.reference) < FLOAT16


@every_arm
def test_accumulation_under_a_loss_scale(arm: str, tmp_path: Path) -> None:
    same = Same(tmp_path, Faint, accumulate_grad_batches=3)  # float32
    _, ours = same.run("predicted_gradients", *stack(arm), plugins=float16())
    assert apart(ours, same.reference) < FLOAT16


@pytest.mark.parametrize("accumulate", [1, 3])
def test_float16_estimates_average_to_the_exact_gradient(accumulate: int, tmp_path: Path) -> None:
    # An exact pass is scaled by what its draw multiplies it by, and rounds accordingly where float16 is near its end.
    check_unbiased(tmp_path, Faint, rounding=2**-11, plugins=float16, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_estimates_average_to_the_exact_gradient(precision: str, tmp_path: Path) -> None:
    # Gradients in bfloat16 are themselves rounded to 2^-9, each time something is added.
    rounding = {"bf16-mixed": 1e-5, "64-true": 1e-6, "bf16-true": 2**-7}[precision]
    check_unbiased(tmp_path, precision=precision, rounding=rounding)


@every_arm
def test_bf16_true_is_as_close_to_stock_as_bf16_rounds(arm: str, tmp_path: Path) -> None:
    # Weights near 1/3 move by steps of 2^-10 at least: what rounds differently moves one such step more or less, in
    # each of four optimizer steps.
    same = Same(tmp_path, precision="bf16-true", max_epochs=1)
    _, ours = same.run("predicted_gradients", *stack(arm))
    assert {value.dtype for value in ours.state_dict().values()} == {torch.bfloat16}
    assert moved(same.reference).norm() > 0.5
    assert (moved(ours) - moved(same.reference)).abs().max() < 4 * 2**-8


def first_batch() -> list[Tensor]:
    return next(iter(DataLoader(tensors(SAMPLES, 1), batch_size=BATCH)))


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_a_prediction_in_float16_needs_the_scale(engine: Engine) -> None:
    batch, module = first_batch(), fresh(Faint)
    truth = torch.autograd.grad(module.loss(batch), list(module.parameters()))
    predictor = ProgramPredictor(module, Lowering("fp32"), float16().train_step_context, engine)
    predictor.refresh(dict(module.named_parameters()))
    for _ in range(4):
        errors = {}
        for scale in (1.0, 2.0**16):
            _, gradients = predictor.predict(batch, 0, 0, loss_scale=scale)
            errors[scale] = max(
                float((g - gradients[name]).norm() / g.norm())
                for g, (name, _) in zip(truth, module.named_parameters(), strict=True)
            )
        assert errors[2.0**16] < FLOAT16
        assert errors[1.0] > 0.25


@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")  # of torch's own use
@pytest.mark.parametrize("engine", ["eager", "captured", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_prediction_does_not_depend_on_the_scale_where_nothing_underflows(engine: Engine) -> None:
    batch, predictor = first_batch(), ProgramPredictor(module := fresh(Model), Lowering("int8"), engine=engine)
    predictor.refresh(dict(module.named_parameters()))
    for pair in range(1, 4):
        plain, scaled = (predictor.predict(batch, pair, 0, loss_scale=scale) for scale in (1.0, 2.0**16))
        if engine == "compiled" and pair < 3:
            continue  # uses 1, 2 and 4 are the eager predictor's, which rounds elsewhere
        assert torch.equal(plain[0], scaled[0])
        for name, gradient in plain[1].items():
            assert torch.equal(gradient, scaled[1][name])
    assert predictor.engine == engine


def test_the_scale_of_predictions_is_a_power_of_two_below_the_scalers() -> None:
    for scale in (1.0, 3.0, 2.0**16, 1e-3):
        found = loss_scale_of(float16(init_scale=scale))
        assert math.log2(found) == round(math.log2(found))
        assert found <= scale < 2 * found
    assert loss_scale_of(float16(enabled=False)) == 1


def calm() -> MixedPrecision:
    """A scale at which no gradient of :class:`Model` overflows."""
    return float16(init_scale=2.0**8)


class Overflow(L.Callback):
    """Makes one batch's loss so large that its gradients overflow in float16, as a spike in the data does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.at:
            batch[1].mul_(1e6)


class Watched(Model):
    """Keeps its weights after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[Tensor] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.path.append(nn.utils.parameters_to_vector(self.parameters()).detach().clone())


@every_arm
def test_pl18828_a_skipped_step_is_waste_and_teaches_nothing(arm: str, tmp_path: Path) -> None:
    same = Same(tmp_path, Watched, plugins=calm, callbacks=lambda: [Overflow(5)])
    reference, (_, ours) = same.reference, same.run("predicted_gradients", *(callbacks := stack(arm)))
    for model in (reference, ours):
        skipped = [t for t in range(1, 8) if torch.equal(model.path[t], model.path[t - 1])]
        assert skipped == [5]
    assert apart(ours, reference) < FLOAT16

    # The same run without the spike does the same work, and wastes none of it.
    even = stack(arm)
    trainer(tmp_path / "even", *even, plugins=calm()).fit(fresh(Watched))
    spent, expected = ledger_of(callbacks), ledger_of(even)
    assert spent.steps == expected.steps == 8
    assert not [a for a in expected.totals() if a.startswith("waste/")]
    one = {account: work.flops * 8 // 26 for account, work in expected.totals().items()}  # the sixth batch is full
    wasted = {"waste/skipped_step": ("scarce/forward", "scarce/backward")}
    wasted["waste/lost_prediction"] = ("fleet/prediction", "fleet/control")
    for account, sources in wasted.items():
        lost = spent.totals()[account].flops if account in spent.totals() else 0
        assert lost == sum(
            expected.totals()[s].flops - (spent.totals()[s].flops if s in spent.totals() else 0)
            for s in sources
            if s in expected.totals()
        )
        assert (lost > 0) == any(one.get(s) for s in sources)
    assert spent.exact_equivalent.samples == expected.exact_equivalent.samples - BATCH == 2 * SAMPLES - BATCH
    history = read_ledger(tmp_path)
    assert history.totals == spent.totals()
    assert history.steps == 8
    if ARMS[arm] == (1, True):
        statistics = callbacks[2].correction.statistics
        assert statistics is not None
        assert statistics.steps == 7 == even[2].correction.statistics.steps - 1
        assert all(bool(average.total.isfinite().all()) for average in statistics.averages.values())


def test_pl18828_the_ledger_alone_sees_a_skipped_step(tmp_path: Path) -> None:
    totals = []
    for spike in (5, -1):
        callback = ComputeLedger()
        trainer(tmp_path / str(spike), callback, Overflow(spike), strategy="auto", plugins=calm()).fit(fresh(Model))
        totals.append(callback.ledger.totals())
    spent, expected = totals
    assert spent["waste/skipped_step"].samples == BATCH
    for account in ("scarce/forward", "scarce/backward"):
        assert spent[account].samples == max(0, expected[account].samples - BATCH)
    whole = sum(expected[a].flops for a in ("scarce/forward", "scarce/backward"))
    assert spent["waste/skipped_step"].flops == whole * BATCH // (2 * SAMPLES)


def test_the_scaler_survives_a_resume(tmp_path: Path) -> None:
    def run(epochs: int, path: Path | None = None) -> tuple[L.Trainer, Any]:
        callbacks = [GradientPrediction(format="int8", microbatches=4, seed=3), ControlVariate()]
        runner = trainer(tmp_path, *callbacks, plugins=float16(growth_interval=3), max_epochs=epochs)
        runner.fit(model := fresh(Faint), ckpt_path=path)
        return runner, model

    whole, model = run(2)
    run(1)[0].save_checkpoint(path := tmp_path / "half.ckpt")
    runner, other = run(2, path)
    assert runner.precision_plugin.scaler.get_scale() == whole.precision_plugin.scaler.get_scale() == 2.0**18
    assert torch.equal(moved(other), moved(model))
