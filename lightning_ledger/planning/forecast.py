"""What the measured moments and the prices say of each kind of prediction. Nothing here needs the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_ledger.control_variate import break_even, relative_cost_interval
from lightning_ledger.ledger_file import plain
from lightning_ledger.planning.jackknife import jackknife, left_out
from lightning_ledger.planning.moments import (
    BatchMoments,
    ExactMoments,
    delta_at_best,
    delta_at_one,
    mean_covariance,
    squared_bias,
    squared_mean,
)

if TYPE_CHECKING:
    from lightning_ledger.planning.ways import Verdict


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% interval, both ends None where two micro-batches give none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Prediction:
    """What making one kind of prediction took.

    Attributes:
        format: number formats of the products.
        rounding: "nearest" or "stochastic".
        flops: of one prediction, by format.
        seconds: of one prediction on this machine, the median; those that captured or checked a program included.
        engine: "captured", "compiled" or "eager".
        why_eager: why, if a program was asked for.
        kind: whether the format is native or emulated here, and how.
        unlowered: why products stayed in high precision, by layer and product.
        weight_bytes: the weights of its products, rounded and with their scales, each form that is used.
        w: price of one prediction over price of one exact gradient.
        w_at_one: the same at a fleet price of 1.
    """

    format: str
    rounding: str
    flops: Mapping[str, int]
    seconds: float
    engine: str
    why_eager: str
    kind: str
    unlowered: Mapping[str, str]
    weight_bytes: int
    w: float
    w_at_one: float

    @property
    def label(self) -> str:
        """Format and rounding."""
        return f"{self.format} {self.rounding}"


@dataclass(frozen=True)
class FormatForecast:
    """What one kind of prediction promises.

    Attributes:
        prediction: what making one took.
        delta_at_one: D / V with lam = 1.
        delta: D / V at lam*, by layer, chosen on other batches; of one batch alone at lam = 1.
        bias: ``||mean(g - h)|| / ||mean g||``, sampling error removed; None where no mean gradient can be told from
            the noise.
        step_bias: the same with one rounding of the weights, which stochastic rounding draws anew each step.
        h_variance: H / V.
        relative_cost: R, variance times cost relative to exact training.
        break_even: the fleet price at which R = 1.
    """

    prediction: Prediction
    delta_at_one: float
    delta: Interval
    bias: float | None
    step_bias: float | None
    h_variance: float
    relative_cost: Interval
    break_even: Interval

    @property
    def rho2(self) -> float:
        """Share of the exact gradients' variance that predictions explain: 1 - delta at lam*."""
        return 1 - self.delta.value


@dataclass(frozen=True)
class Forecast:
    """The result of a dry run.

    Attributes:
        module: the user's class.
        step: optimizer steps of the checkpoint it is about; 0 without one.
        batches: looked at, all or in part.
        looked_at: micro-batches of theirs that were measured.
        microbatches: n, in one batch.
        accumulated: batches that one optimizer step adds up.
        samples: in one micro-batch, on average; 0 where they cannot be counted.
        exact_flops: of one exact gradient, by format.
        exact_seconds: of one, on this machine, the median.
        forward_flops: of one forward-equivalent.
        fleet_price: of one forward-equivalent; with ``prices`` by format, that of formats without their own.
        prices: the price book.
        noise_scale: B = V / ||mean gradient||^2 in micro-batches, None where no mean gradient can be told from noise.
        formats: the kinds of prediction.
        verdict: among the ways to spend.
        memory: bytes of parameters, of one gradient set, and of what else the dry run held.
        work: FLOPs of the dry run, by what ran.
        seconds: it took.
    """

    module: str
    step: int
    batches: int
    looked_at: int
    microbatches: int
    accumulated: int
    samples: float
    exact_flops: Mapping[str, int]
    exact_seconds: float
    forward_flops: int
    fleet_price: float
    prices: Mapping[str, Any]
    noise_scale: float | None
    formats: Sequence[FormatForecast]
    verdict: Verdict
    memory: Mapping[str, int]
    work: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def step_microbatches(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.microbatches * self.accumulated

    @property
    def noise_scale_samples(self) -> float | None:
        """The noise scale in samples: the batch size it suggests."""
        return None if self.noise_scale is None or not self.samples else self.noise_scale * self.samples

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: plain containers, non-finite numbers as strings."""
        data: dict[str, Any] = plain(asdict(self))
        for entry, known in zip(data["formats"], self.formats, strict=True):
            entry["rho2"] = known.rho2
        return {**data, "noise_scale_samples": self.noise_scale_samples}


def noise_scale(batches: Sequence[ExactMoments]) -> float | None:
    """``B = V / ||mean gradient||^2`` in micro-batches (McCandlish et al., arXiv 1812.06162, B_simple).

    Args:
        batches: what each showed of the exact gradients.

    Returns:
        B, or None while no mean gradient can be told from the noise.
    """
    signal = squared_mean(batches)
    variance = math.fsum(batch.variance for batch in batches) / len(batches)
    return variance / signal if signal > 0 and variance > 0 else None


def forecast_format(
    prediction: Prediction, batches: Sequence[BatchMoments], exact: Sequence[ExactMoments]
) -> FormatForecast:
    """Statistics of one kind of prediction, R at its price, and the fleet price at which it breaks even.

    Args:
        prediction: its cost.
        batches: its moments.
        exact: those of the exact gradients, of the same batches.

    Returns:
        The forecast. R and the break-even price are at lam*; intervals are the jackknife's.
    """
    signal = squared_mean(exact)
    moments = mean_covariance(batches)
    step_bias = math.fsum(batch.squared_step_bias for batch in batches) / len(batches)

    deltas = [_delta(batches), *map(_delta, left_out(batches))]
    prices = [break_even(delta) / prediction.w_at_one if prediction.w_at_one else math.inf for delta in deltas]
    costs = [relative_cost_interval(0.0, delta, prediction.w)[1] for delta in deltas]
    return FormatForecast(
        prediction,
        delta_at_one(batches),
        _interval(deltas, highest=1.0),
        _ratio(squared_bias(batches), signal),
        _ratio(step_bias, signal),
        float(moments.h.sum()) / float(moments.of_exact().sum()),
        _interval(costs, highest=1 + prediction.w),
        _interval(prices, highest=math.inf),
    )


def _delta(batches: Sequence[BatchMoments]) -> float:
    return min(max(delta_at_best(batches), 0.0), 1.0)


def _interval(estimates: Sequence[float], highest: float) -> Interval:
    """The first of these, and how far those after it, each without one observation, are apart."""
    value, half = estimates[0], jackknife(estimates[1:])
    if half is None or not math.isfinite(half):
        return Interval(value)
    return Interval(value, max(0.0, value - half), min(highest, value + half))


def _ratio(square: float, signal: float) -> float | None:
    return math.sqrt(max(0.0, square) / signal) if signal > 0 else None
