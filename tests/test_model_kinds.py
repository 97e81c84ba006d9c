"""Every kind of network: all micro-batches exact is stock Lightning, and one exact is right on average over draws."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.estimation import drawing
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import relative_error, trainer
from tests.model_kinds import KINDS, Kind, gradient, states

N, STEPS = 4, 3
RELATIVE = 1e-5  # float32 sums of some hundred terms in another order

pytestmark = [
    pytest.mark.filterwarnings("ignore:Of the products in .*, these stay in high precision"),
    pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]


class Gradients(pl.Callback):
    """What the hooks saw after each backward pass.

    Args:
        again: begin every step with the buffers of the first.
    """

    def __init__(self, again: bool) -> None:
        self.again = again
        self.seen: list[Tensor] = []
        self._buffers: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._buffers = self._buffers or {name: b.clone() for name, b in pl_module.named_buffers()}
        if self.again:
            pl_module.load_state_dict(self._buffers, strict=False)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.append(gradient(pl_module))


def fit(
    directory: Path,
    module: pl.LightningModule,
    batches: Sequence[Any],
    *callbacks: pl.Callback,
    again: bool = False,
) -> list[Tensor]:
    """Train on these batches in order; the gradients of every step."""
    watch, predicted = Gradients(again), any(isinstance(c, GradientPrediction) for c in callbacks)
    strategy = PredictedGradientStrategy() if predicted else "auto"
    run = trainer(directory, *callbacks, watch, strategy=strategy, max_epochs=1)
    run.fit(module, DataLoader(batches, batch_size=None))
    assert run.global_step == len(batches) == len(watch.seen)
    return watch.seen


@pytest.fixture
def every_set_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of C are each micro-batch in turn, so that N steps see every draw of one exact micro-batch."""
    turn = iter(range(N))

    def in_turn(n: int, k: int, generator: torch.Generator) -> tuple[int, ...]:
        assert (n, k) == (N, 1)
        return (next(turn),)

    monkeypatch.setattr(drawing, "draw_control", in_turn)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """Each kind, with its own warnings silenced and no others."""
    kind = KINDS[request.param]
    with warnings.catch_warnings():
        for pattern in filter(None, kind.warns.split("|")):
            warnings.filterwarnings("ignore", pattern)
        yield kind


def test_all_exact_is_stock_lightning(kind: Kind, tmp_path: Path) -> None:
    stock, ours, batches = kind.make(), kind.make(), [kind.batch(seed) for seed in range(STEPS)]
    theirs = fit(tmp_path, stock, batches)
    seen = fit(tmp_path, ours, batches, GradientPrediction(microbatches=N, exact=N))
    for a, b in zip(seen, theirs, strict=True):
        assert relative_error(a, b) < RELATIVE
    before, after = states(kind.make()), states(ours)
    for name, value in states(stock).items():
        torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.usefixtures("every_set_in_turn")
def test_pt110832_one_exact_micro_batch_is_right_on_average_over_all_draws(kind: Kind, tmp_path: Path) -> None:
    # At rate 0 every step sees the same weights; with the same batch, the same micro-batches.
    stock, ours, batch = kind.make(rate=0.0), kind.make(rate=0.0), kind.batch(0)
    truth = fit(tmp_path, stock, [batch] * N, again=True)
    variate = ControlVariate(coefficient=1.0)
    estimates = fit(tmp_path, ours, [batch] * N, GradientPrediction(format="int8", microbatches=N), variate, again=True)
    full = torch.stack(truth).mean(0)
    assert relative_error(torch.stack(estimates).mean(0), full) < RELATIVE
    # No single estimate would do: predictions at eight bits are not the gradient.
    assert min(relative_error(e, full) for e in estimates) > 100 * RELATIVE
    assert variate.correction.statistics is not None
