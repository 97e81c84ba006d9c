"""Over all sets C of exact micro-batches the mean estimate is the full-batch gradient: counted out, not sampled.

    estimate_C = sum_i w_i lam h_i + (n/k) sum_{i in C} w_i (g_i - lam h_i)        mean over C = sum_i w_i g_i = G

The exact gradients g_i come from plain autograd, the weights w_i from counting by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.control_variate import optimal_coefficient
from lightning_ledger.estimation import Correction, GradientEstimator, PredictionSettings, PredictionState, drawing
from lightning_ledger.microbatches import TokenWeights, draw_control
from lightning_ledger.precision import FORMATS, Lowering
from lightning_ledger.precision.rounding import derive_seed
from lightning_ledger.predictors import EagerPredictor, Engine
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.lightning_runs import (
    IGNORED,
    Gradients,
    Regression,
    Samples,
    TokenModel,
    exact_gradient,
    flat,
    relative_error,
    token_batch,
    trainer,
)

N = 4
SEEDS = (11, 2**62 + 1, 13, 14)
RELATIVE = 1e-5  # float32 sums of a few hundred terms, of size G/k and below, round to about 1e-6
ROUNDINGS = ("nearest", "stochastic")
# Formats so coarse that a prediction is visibly not the gradient; those in blocks only on whole blocks.
COARSE = ("int8", "fp8", "fp8_tensor", "int4", "w4a16", "w4a8")
COARSE_IN_BLOCKS = ("mxfp8", "mxfp6", "mxfp4", "nvfp4")

# A small layer has shapes that formats in blocks refuse, which they say; the gradients are then exact.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Of the products in .*, these stay in high precision", "ignore:Only .* of a prediction's FLOPs run in"
)

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One kind of training step.

    Args:
        model: arguments of the model.
        samples: in the batch, cut into N micro-batches.
        ignored: mask some labels.
        weights: as given to the plug-in.
        coefficient: lam, None for the optimal one.
        refresh_every: optimizer steps between refreshes of the predictor's weights.
        steps: optimizer steps taken before the sets are enumerated.
        length: of a sample.
    """

    model: dict[str, Any] = field(default_factory=dict)
    samples: int = 8
    ignored: bool = False
    weights: Any = "samples"
    coefficient: float | None = 1.0
    refresh_every: int = 1
    steps: int = 0
    length: int = 6

    def batch(self, seed: int) -> Batch:
        return token_batch(self.samples, seed=seed, ignored=self.ignored, length=self.length)

    def parts(self, batch: Batch) -> list[Batch]:
        """The micro-batches: balanced, the larger ones first (7 samples: 2, 2, 2, 1)."""
        columns = {key: torch.tensor_split(value, N) for key, value in batch.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(N)]

    def shares(self, parts: Sequence[Batch]) -> list[float]:
        """w_i: each micro-batch's share of what the loss averages over."""
        if self.weights == "sum":
            return [1.0] * len(parts)
        shift = 1 if self.model.get("shift") else 0
        counts = [int((part["labels"][:, shift:] != IGNORED).sum()) for part in parts]
        if self.weights == "samples":
            counts = [len(part["labels"]) for part in parts]
        return [count / sum(counts) for count in counts]


CASES = {
    "equal": Case(),
    "unequal": Case(samples=7),
    "tokens_with_ignore_index": Case(samples=7, ignored=True, weights=TokenWeights()),
    "tokens_shifted": Case({"shift": True}, samples=7, ignored=True, weights=TokenWeights(shift=True)),
    "summed_loss": Case({"reduction": "sum"}, samples=7, weights="sum"),
    "dropout": Case({"dropout": 0.5}, samples=7),
    "tied": Case({"tied": True}),
    "frozen": Case({"frozen": True}),
    "unused": Case({"unused": True}),
    "used_by_some_micro_batches_only": Case({"gated": True}, samples=4),
    "coefficient_0.8": Case(samples=7, coefficient=0.8),
    "optimal_coefficient": Case({"dropout": 0.5}, samples=7, coefficient=None, steps=11),
    "blocks": Case({"width": 32, "hidden": 64, "dropout": 0.5}, length=16),  # micro-batches of 2 samples: 32 tokens
    "two_steps_stale": Case({"dropout": 0.5}, samples=7, coefficient=0.8, refresh_every=3, steps=5),
}


DATA_DEPENDENT = "used_by_some_micro_batches_only"


class Step:
    """A training step of one case, ready to be estimated with any set C.

    Args:
        case: the kind of step.
        format: of the predictions.
        rounding: of the predictions.
        engine: of the predictions; the gradients they are checked against are always predicted eagerly.
        corrected: with the control variate, or the uncorrected mix.
        force: tells the estimator which set to use; None leaves it to its draw.
    """

    def __init__(
        self,
        case: Case,
        format: str,
        rounding: str,
        corrected: bool,
        force: Callable[[tuple[int, ...] | None], None],
        engine: Engine = "eager",
    ) -> None:
        torch.manual_seed(7)
        self.case, self._force = case, force
        self.module = TokenModel(**case.model)
        self.batch = case.batch(seed=1)
        self.parts = case.parts(self.batch)
        self.shares = case.shares(self.parts)
        self.state = PredictionState(torch.Generator().manual_seed(3))
        self.correction = Correction(case.coefficient) if corrected else None
        prediction = PredictionSettings(
            format=format,
            rounding=rounding,
            engine=engine,
            microbatches=N,
            refresh_every=case.refresh_every,
            seed=3,
            weights=case.weights,
            check_separable=False,
        )
        self._estimator = GradientEstimator(self.module, prediction, self.state, self.correction)
        self._predictor = EagerPredictor(self.module, Lowering(format, rounding))
        self._predicted_at: tuple[int, dict[str, Tensor]] = (0, {})
        for step in range(case.steps):
            self._advance(step)
        self._remember_weights()

    def _remember_weights(self) -> None:
        if self.state.steps % self.case.refresh_every == 0:
            trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
            copies = {name: p.detach().clone().requires_grad_() for name, p in trainable.items()}
            self._predicted_at = self.state.steps, copies

    def _advance(self, step: int) -> None:
        """One optimizer step with the estimator's own draw."""
        self._remember_weights()
        gradients = self._gradients(self.case.batch(seed=100 + step), None)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if (gradient := gradients.get(name)) is not None:
                    parameter.sub_(0.2 * gradient)
        self.state.steps += 1

    def _gradients(self, batch: Batch, control: tuple[int, ...] | None, scale: float = 1.0) -> Gradients:
        self._force(control)
        k = 1 if control is None else len(control)
        self._estimator.prediction = replace(self._estimator.prediction, exact=k)
        self.module.zero_grad(set_to_none=True)
        loss = self._estimator.forward(batch, 0)
        (scale * loss).backward()
        self._estimator.backward()
        return {name: p.grad for name, p in self.module.named_parameters() if p.requires_grad}

    def estimate(self, control: tuple[int, ...], scale: float = 1.0) -> Gradients:
        """The estimate with this set C; the statistics stay what they were, as they do within one step."""
        before = self.correction.statistics if self.correction else None
        gradients = self._gradients(self.batch, control, scale)
        if self.correction and before is not None:
            self.correction.statistics = before
        return gradients

    def exact(self) -> tuple[list[Tensor], Gradients]:
        """Each g_i, flat, and G = sum_i w_i g_i by parameter."""
        gradients = [exact_gradient(self.module, part, seed)[1] for part, seed in zip(self.parts, SEEDS, strict=True)]
        total: Gradients = {}
        for w, gradient in zip(self.shares, gradients, strict=True):
            for name, g in gradient.items():
                held = total.get(name)
                total[name] = held if g is None else w * g if held is None else held + w * g
        return [flat(self.module, g) for g in gradients], total

    def predicted(self) -> list[Tensor]:
        """Each h_i, flat, each predicted by itself at the weights that this step's predictions are due to use."""
        refreshed, at = self._predicted_at
        self._predictor.refresh(at, derive_seed(3, refreshed))
        predictions = [self._predictor.predict(part, s, 0) for part, s in zip(self.parts, SEEDS, strict=True)]
        return [flat(self.module, p[1]) for p in predictions if p is not None]

    def coefficients(self) -> Tensor:
        """lam of every parameter element, from the statistics of the steps before."""
        assert self.correction is not None
        fixed = self.correction.coefficient
        statistics = self.correction.statistics
        by_layer: dict[str, float] = {}
        if fixed is None:
            assert statistics is not None
            by_layer = dict(zip(statistics.layers, optimal_coefficient(statistics).tolist(), strict=True))
        lam: Gradients = {
            name: torch.full_like(p, by_layer[name.rpartition(".")[0] or name] if fixed is None else fixed)
            for name, p in self.module.named_parameters()
        }
        return flat(self.module, lam)

    def weighted(self, gradients: Sequence[Tensor], indices: Sequence[int] = range(N)) -> Tensor:
        """sum over these micro-batches of w_i times their gradient."""
        total = torch.zeros_like(gradients[0])
        for i in indices:
            total += self.shares[i] * gradients[i]
        return total


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, ...] | None], None]:
    """Replace the draw of C by a given set, and the seeds by fixed ones: h_i and g_i are then the same for every C."""
    forced: list[tuple[int, ...] | None] = [None]

    def control(n: int, k: int, generator: torch.Generator) -> tuple[int, ...]:
        drawn = draw_control(n, k, generator)
        if forced[0] is None:
            return drawn
        assert (n, k) == (N, len(forced[0]))
        return forced[0]

    monkeypatch.setattr(drawing, "draw_control", control)
    monkeypatch.setattr(drawing, "draw_seeds", lambda n, generator: SEEDS[:n])
    return lambda control: forced.__setitem__(0, control)


def sets(k: int) -> list[tuple[int, ...]]:
    return list(combinations(range(N), k))


def enumerated() -> list[tuple[str, str, str, Engine]]:
    """Case, format, rounding, engine: every format on two cases, every case in three formats, both engines."""
    every, three = list(FORMATS), ["fp32", "int8", "int4"]
    found: list[tuple[str, str, str, Engine]] = []
    for rounding in ROUNDINGS:
        for name in CASES:
            names = every if name in ("tokens_with_ignore_index", "blocks") else three
            found += [(name, fmt, rounding, "eager") for fmt in names]
        found += [("blocks", fmt, rounding, "captured") for fmt in FORMATS]
    programs = [name for name in CASES if name not in ("blocks", DATA_DEPENDENT)]
    return found + [(name, "int4", "stochastic", "captured") for name in programs]


def check_unbiased(step: Step, lossy: bool) -> None:
    """The mean over all sets is the truth, and no single estimate is, if predictions are lossy."""
    _, truth = step.exact()
    total = flat(step.module, truth)
    if lossy:
        assert relative_error(step.weighted(step.predicted()), total) > 100 * RELATIVE
    for k in (1, 2):
        estimates = []
        for control in sets(k):
            gradients = step.estimate(control)
            assert {n for n, g in gradients.items() if g is None} == {n for n, g in truth.items() if g is None}
            estimates.append(flat(step.module, gradients))
        assert relative_error(torch.stack(estimates).mean(0), total) < RELATIVE
        if lossy:
            assert min(relative_error(estimate, total) for estimate in estimates) > 100 * RELATIVE


def is_lossy(name: str, format: str) -> bool:
    return name == "two_steps_stale" or format in COARSE or (name == "blocks" and format in COARSE_IN_BLOCKS)


@pytest.mark.parametrize(("name", "format", "rounding", "engine"), enumerated())
def test_mean_over_all_sets_is_the_full_batch_gradient(
    name: str, format: str, rounding: str, engine: Engine, force: Callable[[tuple[int, ...] | None], None]
) -> None:
    step = Step(CASES[name], format, rounding, corrected=True, force=force, engine=engine)
    check_unbiased(step, is_lossy(name, format))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_data_dependent_control_flow_is_predicted_eagerly_and_told_once(
    rounding: str, force: Callable[[tuple[int, ...] | None], None]
) -> None:
    step = Step(CASES[DATA_DEPENDENT], "int4", rounding, corrected=True, force=force, engine="captured")
    with pytest.warns(UserWarning, match="Predictions run eagerly from now on.*data-dependent control flow") as told:
        check_unbiased(step, lossy=True)
    assert len(told) == 1


@pytest.mark.parametrize(("format", "rounding"), [("fp32", "nearest"), ("int8", "stochastic"), ("int4", "nearest")])
@pytest.mark.parametrize("name", CASES)
def test_each_estimate_is_the_formula_term_by_term(
    name: str, format: str, rounding: str, force: Callable[[tuple[int, ...] | None], None]
) -> None:
    step = Step(CASES[name], format, rounding, corrected=True, force=force)
    g, _ = step.exact()
    h, lam = step.predicted(), step.coefficients()
    for control in [(0,), (3,), (0, 2, 3)]:
        outside = [i for i in range(N) if i not in control]
        expected = lam * (step.weighted(h, control) + step.weighted(h, outside))
        expected += N / len(control) * (step.weighted(g, control) - lam * step.weighted(h, control))
        assert relative_error(flat(step.module, step.estimate(control)), expected) < RELATIVE


def test_unused_parameters_keep_no_gradient(force: Callable[[tuple[int, ...] | None], None]) -> None:
    step = Step(CASES["unused"], "int8", "nearest", corrected=True, force=force)
    gradients = step.estimate((2,))
    assert [name for name, g in gradients.items() if g is None] == ["spare.weight", "spare.bias"]


def test_gate_is_used_by_some_micro_batches_only(force: Callable[[tuple[int, ...] | None], None]) -> None:
    # The case above would be an ordinary one otherwise. Samples 0..3 begin with the tokens 0..3: 1 and 3 open the gate.
    step = Step(CASES["used_by_some_micro_batches_only"], "fp32", "nearest", corrected=True, force=force)
    missing = [exact_gradient(step.module, part, 0)[1]["gate"] is None for part in step.parts]
    assert missing == [True, False, True, False]


def test_optimal_coefficients_of_the_case_differ_by_layer(force: Callable[[tuple[int, ...] | None], None]) -> None:
    step = Step(CASES["optimal_coefficient"], "int4", "nearest", corrected=True, force=force)
    lam = step.coefficients()
    assert len(lam.unique()) == 4  # embed, widen, narrow, head
    assert float((lam - 1).abs().max()) > 0.01


def test_stale_predictions_of_the_case_differ_from_fresh_ones(
    force: Callable[[tuple[int, ...] | None], None],
) -> None:
    step = Step(CASES["two_steps_stale"], "fp32", "nearest", corrected=True, force=force)
    stale, (fresh, _) = step.predicted(), step.exact()
    assert min(relative_error(h, g) for h, g in zip(stale, fresh, strict=True)) > 0.01


@pytest.mark.parametrize(
    "name", ["equal", "unequal", "tokens_with_ignore_index", "tokens_shifted", "summed_loss", "tied", "frozen"]
)
def test_weighted_micro_batches_are_the_whole_batch(name: str, force: Callable[[tuple[int, ...] | None], None]) -> None:
    """The target itself: without dropout sum_i w_i g_i is the gradient of the loss on the uncut batch."""
    step = Step(CASES[name], "fp32", "nearest", corrected=True, force=force)
    _, truth = step.exact()
    _, whole = exact_gradient(step.module, step.batch, 0)
    assert relative_error(flat(step.module, truth), flat(step.module, whole)) < RELATIVE


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["blocks", "two_steps_stale"])
def test_mixed_arm_is_biased_by_the_predictions_outside(
    name: str, format: str, rounding: str, force: Callable[[tuple[int, ...] | None], None]
) -> None:
    """Mixed: sum_C w_i g_i + sum_notC w_i h_i. i is outside C in a share 1 - k/n of the sets."""
    step = Step(CASES[name], format, rounding, corrected=False, force=force)
    g, truth = step.exact()
    total, h = flat(step.module, truth), step.predicted()
    for k in (1, 2):
        mean = torch.stack([flat(step.module, step.estimate(control)) for control in sets(k)]).mean(0)
        bias = (1 - k / N) * (step.weighted(h) - step.weighted(g))
        assert relative_error(mean, total + bias) < RELATIVE
        if is_lossy(name, format):
            assert relative_error(mean, total) > 100 * RELATIVE


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("corrected", [False, True])
def test_no_exact_micro_batch_leaves_the_predictions_alone(
    corrected: bool, format: str, rounding: str, force: Callable[[tuple[int, ...] | None], None]
) -> None:
    for name in ("blocks", "two_steps_stale"):
        step = Step(CASES[name], format, rounding, corrected=corrected, force=force)
        assert relative_error(flat(step.module, step.estimate(())), step.weighted(step.predicted())) < RELATIVE


def test_all_micro_batches_exact_is_the_full_batch_gradient(
    force: Callable[[tuple[int, ...] | None], None],
) -> None:
    step = Step(CASES["dropout"], "int4", "nearest", corrected=True, force=force)
    _, truth = step.exact()
    assert relative_error(flat(step.module, step.estimate((0, 1, 2, 3))), flat(step.module, truth)) < RELATIVE


@pytest.mark.parametrize("scale", [0.25, 2.0**16])
def test_estimate_is_scaled_as_the_returned_loss_is(
    scale: float, force: Callable[[tuple[int, ...] | None], None]
) -> None:
    """Accumulation divides the loss, loss scaling multiplies it: both passes follow, whoever does it."""
    step = Step(CASES["coefficient_0.8"], "int4", "nearest", corrected=True, force=force)
    plain = flat(step.module, step.estimate((1,)))
    assert relative_error(flat(step.module, step.estimate((1,), scale=scale)), scale * plain) < RELATIVE


class GradientRecorder(pl.Callback):
    """What ``.grad`` holds when ``on_after_backward`` fires."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.gradients.append(flat(pl_module, {name: p.grad for name, p in pl_module.named_parameters()}))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_trainer_path_with_its_own_draws(format: str, k: int, tmp_path: Path) -> None:
    """Nothing is replaced: private seeds are tried until each set was drawn. No dropout: h_i depends on no seed."""
    samples = Samples(7)
    loader = torch.utils.data.DataLoader(samples, batch_size=7)
    estimates: dict[tuple[int, ...], Tensor] = {}
    for seed in range(60):
        drawn = draw_control(N, k, torch.Generator().manual_seed(seed))
        if drawn in estimates:
            continue
        recorder = GradientRecorder()
        torch.manual_seed(5)
        module = Regression()
        run = trainer(
            tmp_path,
            GradientPrediction(format=format, microbatches=N, exact=k, seed=seed),
            ControlVariate(coefficient=1.0),
            recorder,
            strategy=PredictedGradientStrategy(),
            max_steps=1,
        )
        run.fit(module, loader)
        (estimates[drawn],) = recorder.gradients
    assert sorted(estimates) == sets(k)

    torch.manual_seed(5)
    module = Regression()
    loss = module.loss((samples.x, samples.y))
    names = [name for name, _ in module.named_parameters()]
    truth = flat(module, dict(zip(names, torch.autograd.grad(loss, list(module.parameters())), strict=True)))
    assert relative_error(torch.stack(list(estimates.values())).mean(0), truth) < RELATIVE
    assert min(relative_error(estimate, truth) for estimate in estimates.values()) > 100 * RELATIVE
