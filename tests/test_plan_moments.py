"""The dry run's statistics: against the gradients themselves, and against Gaussians of known covariance."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning_runs import TokenModel, token_batch
from torch import Tensor, nn

from lightning_ledger.control_variate import Layout
from lightning_ledger.estimation import PredictionSettings
from lightning_ledger.microbatches import Splitter, draw_seeds, make_microbatches
from lightning_ledger.planning.forecast import noise_scale
from lightning_ledger.planning.jackknife import jackknife, left_out
from lightning_ledger.planning.measure import DryRun
from lightning_ledger.planning.moments import (
    BatchMoments,
    ExactMoments,
    Sketches,
    best_coefficient,
    delta_at_best,
    delta_at_one,
    mean_covariance,
    squared_bias,
    squared_mean,
)
from lightning_ledger.planning.settings import PlanSettings
from lightning_ledger.precision import Lowering, derive_seed
from lightning_ledger.predictors import EagerPredictor
from lightning_ledger.program import ShadowBuffers, trainable, training_step_gradients

# A gate that opens by the first sample of a micro-batch is not separable, on purpose.
EAGER = PredictionSettings(engine="eager", microbatches=4, check_separable=False)


def moments_of(g: Tensor, h: Tensor) -> tuple[list[ExactMoments], list[BatchMoments]]:
    """Moments of [B, n, d] gradients and predictions of one parameter."""
    parameters = {"w": torch.zeros(g.shape[-1])}
    sketch = Sketches(parameters, Layout.of(parameters))
    exact, kinds = [], []
    for batch_g, batch_h in zip(g, h, strict=True):
        rows = [[sketch({"w": row}) for row in batch] for batch in (batch_g, batch_h)]
        exact.append(ExactMoments.of(rows[0]))
        kinds.append(BatchMoments.of(*rows))
    return exact, kinds


@pytest.fixture(scope="module")
def gaussian() -> tuple[list[ExactMoments], list[BatchMoments]]:
    """g = mu + z and h = mu + bias + z/2 + u/10 in 40 dimensions: Cov(g, h)/Var(h) = .5/.26, a bias of .3 |mu|."""
    generator = torch.Generator().manual_seed(0)
    z, u = (torch.randn(60, 16, 40, generator=generator, dtype=torch.float64) for _ in range(2))
    mu = torch.full((40,), 0.5, dtype=torch.float64)
    return moments_of(mu + z, 1.3 * mu + z / 2 + u / 10)


def test_gaussian_variance_ratios_are_the_closed_form(gaussian):
    _, kinds = gaussian
    # e = z/2 - u/10: Var(e) = .26 of Var(g) = 1. At lam = .5/.26 the residual is 1 - .25/.26.
    assert delta_at_one(kinds) == pytest.approx(0.26, rel=0.02)
    assert float(best_coefficient(mean_covariance(kinds))) == pytest.approx(0.5 / 0.26, rel=0.02)
    assert delta_at_best(kinds) == pytest.approx(1 - 0.25 / 0.26, rel=0.05)


def test_gaussian_noise_scale_and_bias_are_the_closed_form(gaussian):
    exact, kinds = gaussian
    # |mu|^2 = 40/4; 960 samples of variance 40: |mean|^2 deviates by 2 |mu| / sqrt(960), 2% of it.
    assert squared_mean(exact) == pytest.approx(10.0, rel=0.08)
    assert noise_scale(exact) == pytest.approx(4.0, rel=0.08)
    assert squared_bias(kinds) == pytest.approx(0.09 * 10.0, rel=0.15)


def test_what_is_drawn_once_a_batch_is_no_bias_but_an_error_of_the_step():
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(200, 4, 30, generator=generator, dtype=torch.float64)
    of_batch = torch.randn(200, 1, 30, generator=generator, dtype=torch.float64)
    _, kinds = moments_of(g, g + of_batch)
    # 200 batches' mean of 30 such errors has a square of 30/200; taken off, what is left deviates by about .04.
    assert abs(squared_bias(kinds)) < 0.12
    assert sum(batch.squared_step_bias for batch in kinds) / 200 == pytest.approx(30, rel=0.06)


def test_sketches_keep_inner_products():
    generator = torch.Generator().manual_seed(0)
    parameters = {"x.a": torch.zeros(300, 40), "x.b": torch.zeros(50), "y": torch.zeros(7)}
    layout = Layout.of(parameters)
    a, b = ({n: torch.randn(p.shape, generator=generator) + 0.5 for n, p in parameters.items()} for _ in range(2))
    of_layers = [sum(float((a[n] * b[n]).sum()) for n in names) for names in (("x.a", "x.b"), ("y",))]
    whole = Sketches(parameters, layout, size=20_000)
    assert whole.shape == (2, 12_050)
    assert (whole(a) * whole(b)).sum(1).tolist() == pytest.approx(of_layers, rel=1e-5)
    assert float((whole({"x.b": b["x.b"]}) * whole(a)).sum()) == pytest.approx(float(a["x.b"] @ b["x.b"]), rel=1e-4)
    short = Sketches(parameters, layout, size=1009)
    norms = sum(float(a[n].square().sum()) for n in ("x.a", "x.b"))
    folded = (short(a) * short(b)).sum(1).tolist()
    assert folded != pytest.approx(of_layers, rel=1e-5)
    assert abs(folded[0] - of_layers[0]) < 4 * (2 / 1009) ** 0.5 * norms
    assert folded[1] == pytest.approx(of_layers[1], rel=1e-5)  # a small layer loses nothing
    assert torch.allclose(short(a, 3.0), 3 * short(a))


def test_leaving_out_a_micro_batch_is_what_the_others_say():
    generator = torch.Generator().manual_seed(2)
    g, h = (torch.randn(1, 6, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    (whole,) = moments_of(g, h)[1]
    for i in range(6):
        others = [j for j in range(6) if j != i]
        (rest,) = moments_of(g[:, others], h[:, others])[1]
        assert torch.allclose(whole.without(i).covariance, rest.covariance)
        assert whole.without(i).n == 5


def test_few_batches_are_told_apart_by_their_micro_batches():
    generator = torch.Generator().manual_seed(2)
    g, h = (torch.randn(5, 3, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    kinds = moments_of(g, h)[1]
    assert [len(rest) for rest in left_out(kinds)] == [4] * 5
    assert len(left_out(kinds[:2])) == 6
    pairs = moments_of(g[:, :2], h[:, :2])[1]
    assert left_out(pairs[:1]) == []  # one micro-batch of two has no spread
    assert [len(rest) for rest in left_out(pairs[:2])] == [1] * 2  # a batch of two goes whole


def test_intervals_from_few_micro_batches_hold_the_truth():
    """One batch of 4 micro-batches at a time: nominally 95%, and a jackknife of a ratio of variances falls short."""
    generator, held = torch.Generator().manual_seed(3), 0
    for _ in range(200):
        z, u = (torch.randn(1, 4, 60, generator=generator, dtype=torch.float64) for _ in range(2))
        _, kinds = moments_of(z, z + 0.3 * u)
        half = jackknife([delta_at_best(rest) for rest in left_out(kinds)])
        held += abs(delta_at_best(kinds) - 0.09) < half
    assert 0.9 < held / 200 < 0.99


def test_jackknife_of_a_ratio_is_close_to_the_delta_method():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(40, 2, generator=generator, dtype=torch.float64) + 1
    x, y = values.T
    half = jackknife([float((x.sum() - x[i]) / (y.sum() - y[i])) for i in range(40)])
    spread = (x - x.sum() / y.sum() * y).std() / y.mean() / 40**0.5
    assert half == pytest.approx(2.0227 * float(spread), rel=0.03)  # Student's 95% quantile at 39 degrees
    assert jackknife([1.0]) is None


@pytest.mark.parametrize("options", [{"gated": True}, {"tied": True}, {"dropout": 0.3}, {"frozen": True}])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_dry_run_matches_gradients_kept_whole(options, rounding):
    """The slow way: keep every gradient, and take covariances of the stacked vectors."""
    torch.manual_seed(0)
    module = TokenModel(**options)
    batches = [(token_batch(10, seed), (0,)) for seed in range(3)]
    forecast = DryRun(module, EAGER, PlanSettings(formats="int4", roundings=rounding)).run(batches)

    predictor = EagerPredictor(module, Lowering("int4", rounding, module=module))
    generator, weights, splitter = torch.Generator().manual_seed(0), trainable(module), Splitter()
    exact, errors, within, of_error = [], [], [], []
    for number, (batch, arguments) in enumerate(batches):
        parts = make_microbatches(batch, 4, splitter, "samples")
        predictor.refresh(weights, derive_seed(0, number))
        rows = []
        for part, seed in zip(parts, draw_seeds(4, generator), strict=True):
            found = (
                training_step_gradients(module, weights, (part.data, *arguments), seed, ShadowBuffers(module)),
                predictor.predict(part.data, seed, *arguments),
            )
            rows.append([4 * part.weight * flat(weights, gradients) for _, gradients in found])
        g, h = (torch.stack(column) for column in zip(*rows, strict=True))
        exact.append(g)
        errors.append((g - h).mean(0))
        within.append(float(g.var(0).sum()))
        of_error.append(float((g - h).var(0).sum()))
    g = torch.cat(exact)
    signal = float(g.sum(0).square().sum() - g.square().sum()) / (12 * 11)
    bias = sum(float(a @ b) for a in errors for b in errors if a is not b) / 6
    (kind,) = forecast.formats
    assert kind.delta_at_one == pytest.approx(sum(of_error) / sum(within), rel=1e-4)
    if signal > 0:
        assert forecast.noise_scale == pytest.approx(sum(within) / 3 / signal, rel=1e-3)
        assert kind.bias == pytest.approx((max(0.0, bias) / signal) ** 0.5, rel=1e-2, abs=1e-3)
    else:
        assert forecast.noise_scale is None


def flat(weights: dict[str, Tensor], gradients: dict[str, Tensor | None]) -> Tensor:
    parts = [torch.zeros(w.numel()) if gradients[n] is None else gradients[n].flatten() for n, w in weights.items()]
    return torch.cat(parts).double()


class Linear(pl.LightningModule):
    """The loss is linear in the weights, so that a micro-batch's gradient is its mean input."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 1, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()


def test_linear_gaussian_module_has_the_noise_scale_of_its_data():
    generator = torch.Generator().manual_seed(0)
    batches = [(0.25 + torch.randn(64, 32, generator=generator), (0,)) for _ in range(6)]
    settings = PredictionSettings(engine="eager", microbatches=16)
    forecast = DryRun(Linear(32), settings, PlanSettings("fp32,int8", "nearest", batches=6)).run(batches)
    # A sample's gradient has variance 32 and a mean of square 32/16: B = 16 samples, 4 micro-batches of 4.
    assert forecast.samples == 4
    assert forecast.noise_scale_samples == pytest.approx(16, rel=0.3)
    full, *_ = forecast.formats
    assert (full.prediction.rounding, full.delta.value, full.delta_at_one, full.bias) == ("nearest", 0.0, 0.0, 0.0)
    assert full.rho2 == 1
    # Inputs of 4 rounded to 127 steps: the error of one is below (largest/127)^2/12 of a variance of 1.
    assert all(0 < kind.delta.value < 5**2 / 127**2 / 12 for kind in forecast.formats[1:])


def test_prices_and_work_are_hand_worked():
    batches = [(torch.randn(8, 32, generator=torch.Generator().manual_seed(b)), (0,)) for b in range(2)]
    options = PlanSettings("int8", "nearest", fleet_price=0.1)
    forecast = DryRun(Linear(32), PredictionSettings(engine="eager", microbatches=4), options).run(batches)
    # 2 samples x 32 features: 2 * 64 FLOPs forward, and as many backward, since inputs need no gradient.
    assert (forecast.forward_flops, forecast.exact_flops) == (128, {"fp32": 256})
    (kind,) = forecast.formats
    assert kind.prediction.flops == {"int8": 256}
    assert (kind.prediction.w, kind.prediction.w_at_one) == pytest.approx((0.1, 1.0))
    assert forecast.work["exact"] == forecast.work["int8 nearest"] == 8 * 256
    # One row of 32 eight-bit weights, with a scale of four bytes.
    assert kind.prediction.weight_bytes == 36
    assert kind.delta.low <= kind.delta.value <= kind.delta.high
    assert kind.break_even.low <= kind.break_even.value <= kind.break_even.high
