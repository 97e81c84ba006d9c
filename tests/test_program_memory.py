"""How much memory a captured prediction takes beyond a plain training step, in gradient sets."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_ledger.estimation import Correction, GradientEstimator, PredictionSettings, PredictionState
from tests.program_cases import Pair, normal

LAYERS, WIDTH = 8, 512


class Deep(pl.LightningModule):
    """So many weights, and so few samples, that activations hardly count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).pow(2).mean()
        return loss


def peak(run: Callable[[], object]) -> float:
    """The most memory that ``run`` held at once beyond what was held before, in sets of gradients."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        result = run()
    del result
    results = measured.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most / (4 * LAYERS * WIDTH**2)


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def test_a_plain_step_needs_its_own_gradients() -> None:
    module, batch = deep(), normal(4, WIDTH)
    assert peak(lambda: module.training_step(batch, 0).backward()) == pytest.approx(1.0, abs=0.02)


# Rounded weights are kept until the next refresh. The most is what an emulated format takes: fp32 numbers for each of
# the two axes that products contract, two sets.
@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["fp32", "bf16", "int8", "mxfp4", "w4a16"])
def test_a_streamed_prediction_holds_a_few_layers_gradients_beyond_rounded_weights(fmt: str, rounding: str) -> None:
    pair, batch = Pair(deep(), fmt, rounding), normal(4, WIDTH)
    pair.warm_up(batch)
    assert pair.agree(batch)
    compared = peak(lambda: pair.predict(batch))
    streamed = peak(lambda: pair.program.predict_into(lambda name, gradient: None, batch, 1, 0))
    whole = peak(lambda: pair.predict(batch))
    pair.refresh(1)
    fresh = peak(lambda: pair.predict(batch))
    print(f"{fmt} {rounding}: streamed {streamed:.2f}, whole {whole:.2f}, fresh {fresh:.2f}, compared {compared:.2f}")
    assert pair.ran == [False, True, False, False]
    some = 2.5 / LAYERS
    assert streamed < some
    assert whole < 1 + some
    assert fresh < 1 + 2 + some
    assert compared < 2 + some


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "most"), [("bf16", 2.8), ("int8", 2.6)])
def test_a_corrected_step_holds_two_sums_of_predictions_beyond_plain_training(fmt: str, most: float) -> None:
    """Above a plain step: a sum over C, one over the rest, and the rounded weights."""
    found = {}
    for engine in ("eager", "captured"):
        module, batch = deep(), normal(16, WIDTH)
        estimator = GradientEstimator(
            module,
            PredictionSettings(format=fmt, microbatches=4, exact=1, engine=engine, check_separable=False),
            PredictionState(torch.Generator().manual_seed(0)),
            Correction(),
        )

        def step(module: Deep = module, estimator: GradientEstimator = estimator, batch: Tensor = batch) -> None:
            module.zero_grad()
            estimator.forward(batch, 0).backward()
            estimator.backward()
            estimator.state.steps += 1

        for _ in range(2):  # eight uses of the program; the third step uses it for uses 9 to 12
            step()
        module.zero_grad()
        found[engine] = peak(step)
    print(f"{fmt}: a step peaks at {found} sets")
    assert found["captured"] <= found["eager"] + 0.05
    assert found["captured"] < 1.0 + most
