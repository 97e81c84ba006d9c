"""Any exact share through the estimator itself: by enumeration of the draws, and without predictions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout
from lightning_ledger.estimation import (
    Allocation,
    Centre,
    Correction,
    GradientEstimator,
    PredictionSettings,
    PredictionState,
    drawing,
)
from lightning_ledger.ledger import Ledger
from lightning_ledger.microbatches import TokenWeights
from lightning_ledger.precision import Lowering, derive_seed
from lightning_ledger.predictors import EagerPredictor
from tests.lightning_runs import IGNORED, TokenModel, exact_gradient, flat, relative_error, token_batch

N, SEEDS, LAM = 4, (11, 12, 13, 14), 0.8
RELATIVE = 1e-5  # float32 sums of a few hundred terms, of size 1/q and below
WEIGHTS: dict[str, Any] = {"tokens": TokenWeights(), "sum": "sum"}


class Step:
    """One training step, to be estimated under any allocation and draw.

    Args:
        weights: as given to the plug-in.
        centred: with a centre of random numbers, which any earlier steps could have left.
    """

    def __init__(self, weights: str = "tokens", centred: bool = False) -> None:
        torch.manual_seed(7)
        self.module = TokenModel(dropout=0.5, gated=True, reduction="sum" if weights == "sum" else "mean")
        self.batch = token_batch(7, seed=1, ignored=True)
        columns = {key: torch.tensor_split(value, N) for key, value in self.batch.items()}
        self.parts = [{key: column[i] for key, column in columns.items()} for i in range(N)]
        counts = [int((part["labels"] != IGNORED).sum()) for part in self.parts]
        self.shares = [1.0] * N if weights == "sum" else [count / sum(counts) for count in counts]
        self.state = PredictionState(torch.Generator().manual_seed(3))
        self.correction = Correction(LAM)
        self.ledger = Ledger()
        prediction = PredictionSettings(
            format="int4",
            engine="eager",
            microbatches=N,
            seed=3,
            weights=WEIGHTS[weights],
            check_separable=False,
        )
        self._estimator = GradientEstimator(self.module, prediction, self.state, self.correction, self.ledger)
        self.centre = None
        if centred:
            generator = torch.Generator().manual_seed(4)
            mean = {name: torch.randn(p.shape, generator=generator) for name, p in self.module.named_parameters()}
            self.centre = Centre(mean, steps=5)

    def estimate(self, allocation: Allocation, scale: float = 1.0) -> Tensor:
        """The gradient, flat; statistics and centre stay what they were."""
        before = self.correction.statistics
        self.correction.allocation, self.correction.centre = allocation, self.centre
        self.module.zero_grad(set_to_none=True)
        (scale * self._estimator.forward(self.batch, 0)).backward()
        self._estimator.backward()
        self.correction.statistics = before
        return flat(self.module, {name: p.grad for name, p in self.module.named_parameters()})

    def exact(self) -> list[Tensor]:
        """Each g_i."""
        found = [exact_gradient(self.module, part, s)[1] for part, s in zip(self.parts, SEEDS, strict=True)]
        return [flat(self.module, gradients) for gradients in found]

    def predicted(self, format: str = "int4") -> list[Tensor]:
        """Each h_i, predicted by itself."""
        predictor = EagerPredictor(self.module, Lowering(format, "nearest"))
        predictor.refresh(dict(self.module.named_parameters()), derive_seed(3, 0))
        found = [predictor.predict(part, s, 0) for part, s in zip(self.parts, SEEDS, strict=True)]
        return [flat(self.module, prediction[1]) for prediction in found if prediction is not None]

    def weighted(self, gradients: list[Tensor]) -> Tensor:
        """sum_i w_i times the gradient."""
        return torch.stack([w * g for w, g in zip(self.shares, gradients, strict=True)]).sum(0)


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "draw_seeds", lambda n, generator: SEEDS[:n])


def bernoulli(step: Step, q: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[float, Tensor]]:
    for k in range(N + 1):
        for control in itertools.combinations(range(N), k):
            monkeypatch.setattr(drawing, "draw_bernoulli", lambda n, share, generator, forced=control: forced)
            yield q**k * (1 - q) ** (N - k), step.estimate(Allocation("int4", q, "bernoulli"))


def systematic(step: Step, q: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[float, Tensor]]:
    edges = sorted({0.0, 1.0} | {-i * q % 1.0 for i in range(N + 1)})
    for low, high in itertools.pairwise(edges):
        step.state.phase = (low + high) / 2
        yield high - low, step.estimate(Allocation("int4", q, "systematic"))
        assert step.state.phase == pytest.approx(((low + high) / 2 + N * q) % 1.0)


@pytest.mark.parametrize("draws", [bernoulli, systematic])
@pytest.mark.parametrize("q", [0.1, 0.4])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_mean_over_all_draws_is_the_full_batch_gradient(
    draws: Any, q: float, centred: bool, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(weights, centred)
    drawn = list(draws(step, q, monkeypatch))
    truth = step.weighted(step.exact())
    assert sum(p for p, _ in drawn) == pytest.approx(1)
    assert relative_error(torch.stack([p * g for p, g in drawn]).sum(0), truth) < RELATIVE
    assert min(relative_error(g, truth) for _, g in drawn) > 100 * RELATIVE


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_empty_draw_leaves_predictions_and_centre(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(weights, centred=True)
    monkeypatch.setattr(drawing, "draw_bernoulli", lambda n, share, generator: ())
    found = step.estimate(Allocation("int4", 0.1, "bernoulli"), scale=64.0)
    assert step.centre is not None
    b = flat(step.module, step.centre.mean)  # a mean of n w_i (g_i - lam h_i): sum_i w_i b = b / n sum_i n w_i / sum w
    assert relative_error(found, 64 * (LAM * step.weighted(step.predicted()) + b)) < RELATIVE


def test_the_centre_is_the_mean_residual_of_earlier_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    step.centre = Centre(decay=0.75)
    g, h = step.exact(), step.predicted()
    expected = torch.zeros_like(g[0])
    for count, control in enumerate([(1,), (), (0, 2), (3,), (1,), (2,), (3,)]):
        monkeypatch.setattr(drawing, "draw_bernoulli", lambda n, share, generator, forced=control: forced)
        step.estimate(Allocation("int4", 0.2, "bernoulli"), scale=8.0)
        step.centre = step.correction.centre
        if control:
            residual = sum(N * step.shares[i] * (g[i] - LAM * h[i]) for i in control) / len(control)
            seen = count + (count == 0)  # one of the steps before showed nothing
            expected = expected + max(1 / seen, 0.25) * (residual - expected)
        assert step.centre is not None
        assert relative_error(flat(step.module, step.centre.mean), expected) < RELATIVE
    assert step.centre.steps == 6


@pytest.mark.parametrize("k", [1, 2, 4])
def test_without_predictions_the_estimate_is_the_mean_over_c(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    step.state.steps = 1  # no probe
    estimates = []
    for control in itertools.combinations(range(N), k):
        monkeypatch.setattr(drawing, "draw_control", lambda n, k, generator, forced=control: forced)
        estimates.append(step.estimate(Allocation("int4", k / N, predicting=False)))
    truth = step.weighted(step.exact())
    assert relative_error(torch.stack(estimates).mean(0), truth) < RELATIVE
    assert not any(account.startswith("fleet/") for account in step.ledger.totals())


def test_a_probe_changes_nothing_but_what_is_known() -> None:
    step = Step("sum")
    without, probed = (Allocation("int4", 1.0, predicting=False, probe_every=every) for every in (5, 1))
    step.state.steps = 3
    plain = step.estimate(without)
    assert "fleet/probe" not in step.ledger.totals()
    step.correction.allocation = probed
    step.module.zero_grad(set_to_none=True)
    (16.0 * step._estimator.forward(step.batch, 0)).backward()
    step._estimator.backward()
    found = flat(step.module, {name: p.grad for name, p in step.module.named_parameters()})
    assert relative_error(found, 16 * plain) < RELATIVE
    assert step.ledger.totals()["fleet/probe"].passes == 2
    assert {a for a in step.ledger.totals() if a.startswith("fleet/")} == {"fleet/probe"}

    # Every parameter is small enough to be sampled whole: one residual n w_i (g_i - h_i), squared, layer by layer.
    statistics = step.correction.statistics
    assert statistics is not None
    assert statistics.steps == 1
    squares = []
    for g, h in zip(step.exact(), step.predicted(), strict=True):
        squares.append(float((N * (g - h)).square().sum()))
    assert min(abs(float(statistics.mean("residual").sum()) / square - 1) for square in squares) < 1e-4
    # The two predictions of the probe, as if they were the batch: H = ||h_i - h_j||^2 / 2.
    pairs = [float((N * (a - b)).square().sum()) / 2 for a, b in itertools.combinations(step.predicted(), 2)]
    assert min(abs(float(statistics.mean("h_variance").sum()) / pair - 1) for pair in pairs) < 1e-4
    assert float(statistics.averages["est"].weight) == 0  # of a batch of 2: no estimate of this training


def test_a_layout_samples_the_test_model_whole() -> None:
    layout = Layout.of(dict(TokenModel(gated=True).named_parameters()))
    assert layout.inflation.eq(1).all()
