"""Exact shares below one a batch: every Bernoulli draw with its probability, every systematic draw with its length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lightning_ledger.control_variate import (
    centre_coefficient,
    coefficients,
    estimate_loss,
    estimate_variance,
    sum_factors,
)
from lightning_ledger.microbatches import draw_bernoulli, draw_systematic

EVEN, UNEVEN = [0.2] * 5, [0.4, 0.3, 0.15, 0.1, 0.05]

Draws = Callable[[int, float], Iterator[tuple[float, tuple[int, ...]]]]  # n, q -> probability and set


def bernoulli(n: int, q: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    for k in range(n + 1):
        for control in itertools.combinations(range(n), k):
            yield q**k * (1 - q) ** (n - k), control


def systematic(n: int, q: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The first phase is uniform, and the set changes only where a multiple of q brings it to a whole number."""
    edges = sorted({0.0, 1.0} | {-i * q % 1.0 for i in range(n + 1)})
    for low, high in itertools.pairwise(edges):
        yield high - low, draw_systematic(n, q, (low + high) / 2)[0]


def estimates(
    draws: Draws, weights: list[float], q: float, lam: float, g: Tensor, h: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the estimate for each draw."""
    probabilities, found = [], []
    for probability, control in draws(len(weights), q):
        exact, predicted = (torch.tensor(c, dtype=g.dtype) for c in coefficients(weights, control, True, lam, q))
        centre = centre_coefficient(weights, control, q)
        probabilities.append(probability)
        found.append(torch.tensordot(exact, g, 1) + torch.tensordot(predicted, h, 1) + centre * b)
    return torch.tensor(probabilities, dtype=g.dtype), torch.stack(found)


def gradients(n: int = 5, d: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    g, h = torch.randn(2, n, d, generator=generator, dtype=torch.float64)
    return g, h + 0.5, torch.randn(d, generator=generator, dtype=torch.float64)  # predictions unrelated, and biased


def test_every_draw_by_hand() -> None:
    # w = 1/2, 1/2; g = 1, 3; h = 2, 2; lam = 1/2, b = 1, q = 1/4: sum_i w_i (lam h_i + b) = 2.
    #   C = {}:     2
    #   C = {0}:    2 + 4 * 1/2 (1 - 1 - 1) = 0
    #   C = {1}:    2 + 4 * 1/2 (3 - 1 - 1) = 4
    #   C = {0, 1}: 2 - 2 + 2 = 2;   (9 * 2 + 3 * 0 + 3 * 4 + 1 * 2) / 16 = 2 = (1 + 3) / 2
    g, h, b = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 3.0], [2.0, 2.0], 1.0))
    probabilities, found = estimates(bernoulli, [0.5, 0.5], 0.25, 0.5, g, h, b)
    assert found.tolist() == [2.0, 0.0, 4.0, 2.0]
    assert (probabilities * 16).tolist() == [9.0, 3.0, 3.0, 1.0]


@pytest.mark.parametrize("draws", [bernoulli, systematic])
@pytest.mark.parametrize("q", [0.03, 0.125, 0.3, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("weights", [EVEN, UNEVEN, [1.0] * 5])
def test_the_mean_over_all_draws_is_the_full_batch_gradient(
    draws: Draws, q: float, lam: float, weights: list[float]
) -> None:
    g, h, b = gradients()
    probabilities, found = estimates(draws, weights, q, lam, g, h, b)
    assert float(probabilities.sum()) == pytest.approx(1, rel=1e-12)
    full = torch.tensordot(torch.tensor(weights, dtype=torch.float64), g, 1)
    torch.testing.assert_close(probabilities @ found, full, rtol=1e-11, atol=1e-11)
    if q == 1:
        torch.testing.assert_close(found[-1], full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("draws", [bernoulli, systematic])
def test_the_mean_loss_over_all_draws_is_the_full_batch_loss(draws: Draws) -> None:
    exact, predicted = dict(enumerate([1.0, 2.0, 4.0, 0.5, 3.0])), dict(enumerate([2.0, 2.0, 1.0, 1.0, 0.0]))
    mean = sum(p * estimate_loss(UNEVEN, c, exact, predicted, share=0.3) for p, c in draws(5, 0.3))
    assert mean == pytest.approx(sum(w * exact[i] for i, w in enumerate(UNEVEN)), rel=1e-11)


def test_the_factors_of_the_weighted_sums_are_the_coefficients() -> None:
    for control in ((), (1,), (0, 3)):
        on_control, elsewhere = sum_factors(5, len(control), share=0.3)
        expected = [0.8 * w * (on_control if i in control else elsewhere) for i, w in enumerate(UNEVEN)]
        found = coefficients(UNEVEN, control, coefficient=0.8, share=0.3)
        assert list(found.predicted) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_impossible_shares_are_refused(share: float) -> None:
    for call in (
        lambda: coefficients(EVEN, [1], share=share),
        lambda: centre_coefficient(EVEN, [1], share),
        lambda: sum_factors(5, 1, share=share),
    ):
        with pytest.raises(ValueError, match=r"share=.* must be a probability above 0"):
            call()


def test_a_share_needs_the_correction() -> None:
    with pytest.raises(ValueError, match=r"share=0\.1 with corrected=False"):
        coefficients(EVEN, [1], corrected=False, share=0.1)
    with pytest.raises(ValueError, match="must name distinct micro-batches"):
        centre_coefficient(EVEN, [1, 1], 0.1)


# ------------------------------------------------------------------------------------------------------------- variance


@pytest.mark.parametrize("draws", [bernoulli, systematic])
@pytest.mark.parametrize("q", [0.03, 0.125, 0.3, 0.5, 0.77])
@pytest.mark.parametrize("centred", [False, True])
def test_the_variance_formula(draws: Draws, q: float, centred: bool) -> None:
    """Over draws by enumeration, over batches by algebra.

    With residuals of mean m and covariance S, independent of one another, the estimate less its target is
    ``sum_i a_i (r_i - b)``, ``a_i = (1{i in C} / q - 1) / n``: ``tr S sum_i a_i^2 + ||m - b||^2 (sum_i a_i)^2``.
    """
    n, d, missed = 5, 0.7, 0.2 if centred else 1.9
    expected = 0.0
    for probability, control in draws(n, q):
        a = [((i in control) / q - 1) / n for i in range(n)]
        expected += probability * (d * sum(x * x for x in a) + missed * sum(a) ** 2)
    kind = "bernoulli" if draws is bernoulli else "systematic"
    assert estimate_variance(0.0, d, n, q, kind, missed) == pytest.approx(expected, rel=1e-9)
    assert estimate_variance(3.0, d, n, q, kind, missed) == pytest.approx(expected + 3 / n, rel=1e-9)


def test_the_variance_of_a_uniform_draw_has_no_bias_term() -> None:
    n, k, d = 5, 2, 0.7
    expected = 0.0
    sets = list(itertools.combinations(range(n), k))
    for control in sets:
        a = [((i in control) * n / k - 1) / n for i in range(n)]
        assert sum(a) == pytest.approx(0, abs=1e-12)
        expected += d * sum(x * x for x in a) / len(sets)
    assert estimate_variance(1.0, d, n, k / n, missed=50.0) == pytest.approx(1 / n + expected, rel=1e-12)
    assert expected == pytest.approx(d * (1 / k - 1 / n), rel=1e-12)


def test_a_centre_that_knows_the_mean_residual_takes_the_bias_out_of_the_variance() -> None:
    g, h, _ = gradients()
    h = g + 2 + 0.1 * h  # badly biased
    mean = (g - h).mean(0)

    def variance(b: Tensor) -> float:
        probabilities, found = estimates(bernoulli, EVEN, 0.2, 1.0, g, h, b)
        return float(probabilities @ (found - g.mean(0)).square().sum(1))

    residual = (g - h - mean).square().sum() / 5
    # Given the batch: (1 - q) / (q n) times the mean square of what the centre leaves.
    assert variance(mean) == pytest.approx(float(residual) * 0.8 / (0.2 * 5), rel=1e-9)
    assert variance(0 * mean) == pytest.approx(float(residual + mean.square().sum()) * 0.8 / (0.2 * 5), rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------- draws


def test_bernoulli_draws_are_independent_with_their_probability() -> None:
    generator, n, q, steps = torch.Generator().manual_seed(0), 4, 0.3, 4000
    chosen = torch.zeros(steps, n)
    for step in range(steps):
        control = draw_bernoulli(n, q, generator)
        assert list(control) == sorted(set(control))
        chosen[step, list(control)] = 1
    assert (chosen.mean(0) - q).abs().max() < 4.5 * math.sqrt(q * (1 - q) / steps)
    correlations = torch.corrcoef(chosen.T) - torch.eye(n)
    assert correlations.abs().max() < 4.5 / math.sqrt(steps)
    assert draw_bernoulli(n, 0.0, generator) == ()


def test_draws_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    draw_bernoulli(8, 0.5, torch.Generator().manual_seed(0))
    draw_systematic(8, 0.5, 0.3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("q", [0.01, 0.125, 0.3, 0.9])
@pytest.mark.parametrize("sizes", [[8], [8, 3, 5]])
def test_systematic_draws_are_evenly_spaced_over_batches(q: float, sizes: list[int]) -> None:
    phase, count, members = 0.37, 0, []
    for step in range(400):
        n = sizes[step % len(sizes)]
        control, phase = draw_systematic(n, q, phase)
        members += [count + i for i in control]
        count += n
    gaps = {b - a for a, b in itertools.pairwise(members)}
    assert gaps <= {math.floor(1 / q), math.ceil(1 / q)}
    assert abs(len(members) - q * count) <= 1


@pytest.mark.parametrize("q", [0.03, 0.3])
def test_each_micro_batch_of_a_later_batch_too_has_inclusion_probability_q(q: float) -> None:
    n, later = 5, 3
    edges = sorted({0.0, 1.0} | {-i * q % 1.0 for i in range(n * (later + 1) + 1)})
    inclusion = [0.0] * n
    for low, high in itertools.pairwise(edges):
        phase = (low + high) / 2
        for _ in range(later):
            _, phase = draw_systematic(n, q, phase)
        for i in draw_systematic(n, q, phase)[0]:
            inclusion[i] += high - low
    assert inclusion == pytest.approx([q] * n, rel=1e-9)


def test_impossible_draws_are_refused() -> None:
    for draw in (lambda: draw_bernoulli(4, 1.2, torch.Generator()), lambda: draw_systematic(4, -0.1, 0.0)):
        with pytest.raises(ValueError, match=r"share=.*between 0 and 1"):
            draw()
    with pytest.raises(ValueError, match=r"phase=1\.0"):
        draw_systematic(4, 0.5, 1.0)
