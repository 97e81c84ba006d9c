"""The estimator and its allocation, against arithmetic by hand, enumeration of every draw, and brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lightning_ledger.control_variate import (
    Coefficients,
    best_share,
    break_even,
    coefficients,
    estimate_loss,
    relative_cost,
)

# --------------------------------------------------------------------------------------------------------- coefficients


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimates(weights: list[float], g: Tensor, h: Tensor, k: int, lam: float, corrected: bool = True) -> Tensor:
    """The estimate for every set C of k micro-batches; g and h are [n, ...], double precision."""
    found = []
    for control in itertools.combinations(range(len(weights)), k):
        exact, predicted = (torch.tensor(c, dtype=g.dtype) for c in coefficients(weights, control, corrected, lam))
        found.append(torch.tensordot(exact, g, 1) + torch.tensordot(predicted, h, 1))
    return torch.stack(found)


def test_every_draw_by_hand() -> None:
    weights, g, h = [0.5, 0.3, 0.2], doubles([1.0, 2.0, 4.0]), doubles([2.0, 2.0, 1.0])
    # lam = 1/2, k = 1: sum_i w_i lam h_i = (1.0 + 0.6 + 0.2) / 2 = 0.9, plus 3 w_i (g_i - h_i / 2) for the exact one:
    #   C = {0}: 0.9 + 1.5 (1 - 1)   = 0.9
    #   C = {1}: 0.9 + 0.9 (2 - 1)   = 1.8
    #   C = {2}: 0.9 + 0.6 (4 - 0.5) = 3.0        their mean is 1.9 = 0.5 + 0.6 + 0.8, the full-batch gradient
    expected = doubles([0.9, 1.8, 3.0])
    torch.testing.assert_close(estimates(weights, g, h, k=1, lam=0.5), expected, rtol=1e-12, atol=0)
    # Mixed: exact on C, predicted elsewhere: 0.5*1 + 0.3*2 + 0.2*1, 0.5*2 + 0.3*2 + 0.2*1, 0.5*2 + 0.3*2 + 0.2*4.
    mixed = estimates(weights, g, h, k=1, lam=0.5, corrected=False)
    torch.testing.assert_close(mixed, doubles([1.3, 1.8, 2.4]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0, 1.7])
@pytest.mark.parametrize("weights", [[0.2] * 5, [0.4, 0.3, 0.15, 0.1, 0.05], [1.0] * 5])
def test_the_mean_over_all_draws_is_the_full_batch_gradient(k: int, lam: float, weights: list[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    g, h = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)  # predictions unrelated to the gradients
    full = torch.tensordot(doubles(weights), g, 1)
    torch.testing.assert_close(estimates(weights, g, h, k, lam).mean(0), full, rtol=1e-12, atol=1e-12)
    mixed = estimates(weights, g, h, k, lam, corrected=False).mean(0)
    assert (mixed - full).abs().max() > 0.01  # the ablation is biased


def covariance(x: Tensor, y: Tensor) -> float:
    """tr Cov of two sets of n vectors, with n - 1 degrees of freedom."""
    n = len(x)
    return float(((x - x.mean(0)) * (y - y.mean(0))).sum() / (n - 1))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_the_variance_over_all_draws_is_d_times_one_over_k_minus_one_over_n(k: int, lam: float) -> None:
    weights = [0.4, 0.3, 0.15, 0.1, 0.05]
    generator = torch.Generator().manual_seed(1)
    g, h = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    scaled = 5 * doubles(weights)[:, None]  # n w_i g_i stands for g_i
    d = covariance(scaled * (g - lam * h), scaled * (g - lam * h))
    found = estimates(weights, g, h, k, lam)
    variance = float((found - found.mean(0)).square().sum(1).mean())
    assert variance == pytest.approx(d * (1 / k - 1 / 5), rel=1e-10)


def test_the_neutral_settings() -> None:
    weights = (0.5, 0.3, 0.2)
    everything = Coefficients(exact=weights, predicted=(0.0, 0.0, 0.0))
    nothing = Coefficients(exact=(0.0, 0.0, 0.0), predicted=weights)
    for corrected in (True, False):
        assert coefficients(weights, [2, 0, 1], corrected, 0.8) == everything
        assert coefficients(weights, [], corrected, 0.8) == nothing
    # lam = 0 ignores predictions: the mean of the exact ones alone.
    assert coefficients(weights, [1], coefficient=0.0) == Coefficients((0.0, 3 * 0.3, 0.0), (0.0, 0.0, 0.0))


@pytest.mark.parametrize("control", [[0, 0], [3], [-1]])
def test_impossible_draws_are_refused(control: list[int]) -> None:
    with pytest.raises(ValueError, match=r"control=.* must name distinct micro-batches of 0\.\.2"):
        coefficients([0.5, 0.3, 0.2], control)


def test_the_loss_is_estimated_without_bias() -> None:
    weights, exact, predicted = [0.5, 0.3, 0.2], {0: 1.0, 1: 2.0, 2: 4.0}, {0: 2.0, 1: 2.0, 2: 1.0}
    # lam = 1: sum_i w_i l^_i = 1.8, plus 3 w_i (l_i - l^_i): 1.8 - 1.5, 1.8 + 0, 1.8 + 1.8; mean 1.9.
    found = [estimate_loss(weights, [i], {i: exact[i]}, predicted) for i in range(3)]
    assert found == pytest.approx([0.3, 1.8, 3.6], rel=1e-12)
    assert sum(found) / 3 == pytest.approx(0.5 + 0.6 + 0.8, rel=1e-12)
    assert estimate_loss(weights, [2], {2: 4.0}, predicted, corrected=False) == pytest.approx(2.4, rel=1e-12)


# ----------------------------------------------------------------------------------------------------------- allocation

DELTAS = [0.002, 0.1, 0.5, 0.9]
RATIOS = [0.005, 0.05, 0.3]  # w = c p / F


def product(delta: float, w: float, q: float) -> float:
    """Variance times cost at an exact share q, relative to plain exact training.

    Variance V/n + D (1/k - 1/n) is V/n times 1 + delta (1/q - 1); cost n c p + k F is n F times w + q.
    """
    return (1 + delta * (1 / q - 1)) * (w + q)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("w", RATIOS)
def test_share_and_relative_cost_equal_brute_force(delta: float, w: float) -> None:
    grid = [i / 50_000 for i in range(1, 50_001)]
    best = min(grid, key=lambda q: product(delta, w, q))
    found = best_share(delta, w)
    assert found == pytest.approx(best, abs=1 / 50_000)
    if found < 1:
        # The minimum is flat: half a grid step aside costs far less than 1e-6 of it.
        assert relative_cost(delta, w) == pytest.approx(product(delta, w, best), rel=1e-5)
    else:  # a share above 1 does not exist: R is out of reach, and above 1 all the same
        assert 1 < relative_cost(delta, w) < product(delta, w, best)


def test_the_ends_of_the_scale() -> None:
    assert relative_cost(0.0, 0.05) == pytest.approx(0.05)  # perfect predictions: their price is all
    assert relative_cost(1.0, 0.05) == 1.0  # worthless ones: nothing is won
    assert best_share(0.0, 0.05) == 0.0
    assert best_share(1.0, 0.05) == best_share(0.9, 5.0) == 1.0
    # An estimate of delta can leave [0, 1] by sampling error.
    assert relative_cost(-0.1, 0.05) == relative_cost(0.0, 0.05)
    assert best_share(1.2, 0.05) == 1.0
    assert break_even(1.2) == 0.0


def test_the_numbers_of_the_design() -> None:
    assert [round(relative_cost(delta, 0.05), 2) for delta in (0.002, 0.1, 0.5)] == [0.07, 0.28, 0.75]


@pytest.mark.parametrize("delta", DELTAS)
def test_break_even_is_where_the_relative_cost_is_one(delta: float) -> None:
    w = break_even(delta)
    assert 0 < w < 1
    assert 1 - delta == pytest.approx(4 * w / (1 + w) ** 2, rel=1e-12)
    assert relative_cost(delta, w) == pytest.approx(1.0, rel=1e-12)
    assert relative_cost(delta, 0.99 * w) < 1 < relative_cost(delta, 1.01 * w)


def test_break_even_by_hand() -> None:
    # delta = 1/4: (1 - 1/2) / (1 + 1/2) = 1/3; and 4/3 / (16/9) = 3/4 = 1 - delta.
    assert math.isclose(break_even(0.25), 1 / 3, rel_tol=1e-12)
