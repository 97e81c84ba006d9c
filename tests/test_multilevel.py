"""Predictors of rising fidelity: every joint draw, the variance, and the allocation by brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_ledger.control_variate import (
    best_share,
    coefficients,
    level_costs,
    multilevel_coefficients,
    multilevel_relative_cost,
    multilevel_shares,
    multilevel_variance,
    relative_cost,
)


def gradients(levels: int, n: int, d: int = 6) -> Tensor:
    """[L, n, d] unrelated to one another: unbiasedness asks nothing of predictors."""
    return torch.randn(levels, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def joint_draws(n: int, sizes: list[int]) -> list[tuple[tuple[int, ...], ...]]:
    return list(itertools.product(*(list(itertools.combinations(range(n), k)) for k in sizes)))


def estimates(weights: list[float], sizes: list[int], lams: list[float], passes: Tensor) -> Tensor:
    """The estimate for every joint draw."""
    found = [
        torch.tensordot(torch.tensor(multilevel_coefficients(weights, draw, lams), dtype=passes.dtype), passes, 2)
        for draw in joint_draws(len(weights), sizes)
    ]
    return torch.stack(found)


@pytest.mark.parametrize(
    ("weights", "sizes", "lams"),
    [
        ([0.4, 0.3, 0.2, 0.1], [1], [0.8]),
        ([0.4, 0.3, 0.2, 0.1], [2, 1], [0.8, 1.1]),
        ([0.25] * 4, [3, 2], [1.0, 1.0]),
        ([0.4, 0.3, 0.2, 0.1], [4, 1], [0.0, 0.7]),
        ([0.5, 0.3, 0.2], [2, 2, 1], [0.9, 0.8, 1.0]),
    ],
)
def test_the_mean_over_all_joint_draws_is_the_full_batch_gradient(
    weights: list[float], sizes: list[int], lams: list[float]
) -> None:
    passes = gradients(len(sizes) + 1, len(weights))
    full = torch.tensordot(torch.tensor(weights, dtype=torch.float64), passes[-1], 1)
    torch.testing.assert_close(estimates(weights, sizes, lams, passes).mean(0), full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [[2], [3, 2], [4, 1]])
def test_the_variance_over_all_joint_draws_adds_up_over_levels(sizes: list[int]) -> None:
    n, lams = 4, [0.8, 1.1][: len(sizes)]
    passes = gradients(len(sizes) + 1, n)
    scaled = passes * torch.tensor([*lams, 1.0], dtype=torch.float64)[:, None, None]
    residuals = [float(d.var(0).sum()) for d in scaled.diff(dim=0)]
    found = estimates([1 / n] * n, sizes, lams, passes)
    variance = float((found - found.mean(0)).square().sum(1).mean())
    shares = [k / n for k in sizes]
    assert variance == pytest.approx(multilevel_variance(0.0, residuals, n, shares), rel=1e-10)
    # Over batches V/n comes on top, as of the exact gradient's own.
    assert multilevel_variance(2.0, residuals, n, shares) == pytest.approx(2.0 / n + variance, rel=1e-10)


def test_every_coefficient_by_hand() -> None:
    # w = (1/2, 1/4, 1/4), lam = (1/2, 1), C_2 = {0, 2} of 3: n/k = 3/2; C_3 = {1}: n/k = 3.
    #   h_1: w/2 less 3/2 w/2 on C_2 = (1/4 - 3/8, 1/8, 1/8 - 3/16)
    #   h_2: 3/2 w on C_2, less 3 w on C_3 = (3/4, -3/4, 3/8)
    #   g:   3 w on C_3 = (0, 3/4, 0)
    found = multilevel_coefficients([0.5, 0.25, 0.25], [[0, 2], [1]], [0.5, 1.0])
    assert found == ((-0.125, 0.125, -0.0625), (0.75, -0.75, 0.375), (0.0, 0.75, 0.0))


@pytest.mark.parametrize("control", [(1,), (0, 3)])
def test_two_levels_are_the_plain_control_variate(control: tuple[int, ...]) -> None:
    weights = [0.4, 0.3, 0.2, 0.1]
    predicted, exact = multilevel_coefficients(weights, [control], [0.8])
    plain = coefficients(weights, control, coefficient=0.8)
    assert exact == pytest.approx(plain.exact, rel=1e-12)
    assert predicted == pytest.approx(plain.predicted, rel=1e-12)
    assert multilevel_coefficients(weights, []) == (tuple(weights),)  # no level but the exact one


def test_impossible_draws_are_refused() -> None:
    with pytest.raises(ValueError, match=r"controls\[1\] is empty"):
        multilevel_coefficients([0.5, 0.5], [[0], []])
    with pytest.raises(ValueError, match="must name distinct micro-batches"):
        multilevel_coefficients([0.5, 0.5], [[2]])
    with pytest.raises(ValueError, match="1 coefficients for 2 draws"):
        multilevel_coefficients([0.5, 0.5], [[0], [1]], [1.0])
    with pytest.raises(ValueError, match=r"ratios=.* pass 3 positive costs"):
        multilevel_shares([0.1, 0.1], [0.1, 0.2])


@pytest.mark.parametrize("delta", [0.002, 0.1, 0.5, 0.97, 1.2])
@pytest.mark.parametrize("w", [0.005, 0.05, 0.3])
def test_with_two_levels_shares_and_cost_are_the_plain_ones(delta: float, w: float) -> None:
    (share,) = multilevel_shares([delta], [w, 1.0])
    assert share == pytest.approx(best_share(delta, w), rel=1e-12)
    if share < 1:
        found = multilevel_relative_cost([delta], [w, 1.0], [share])
        assert found == pytest.approx(relative_cost(delta, w), rel=1e-12)


@pytest.mark.parametrize(
    ("deltas", "costs"),
    [
        ([0.1, 0.002], [0.01, 0.05, 1.0]),
        ([0.3, 0.05], [0.02, 0.1, 1.0]),
        ([0.5, 0.001], [0.04, 0.05, 1.0]),  # the second level is so cheap that it runs on everything
        ([0.7, 0.6], [0.04, 0.3, 1.0]),  # worthless predictors: their variances exceed V
        ([0.1, 0.0], [0.01, 0.05, 1.0]),  # a perfect second predictor
    ],
)
def test_shares_equal_brute_force(deltas: list[float], costs: list[float]) -> None:
    ratios = level_costs(costs)
    shares = multilevel_shares(deltas, ratios)
    found = multilevel_relative_cost(deltas, ratios, shares)
    grid = [10 ** (-4 * i / 400) for i in range(401)] + [1e-9]
    best = min(multilevel_relative_cost(deltas, ratios, pair) for pair in itertools.product(grid, grid))
    assert found <= best * (1 + 1e-9)
    assert found == pytest.approx(best, rel=2e-3)  # the grid's steps are of 2.3%, and the minimum is flat
    free = [i for i, q in enumerate(shares) if 0 < q < 1]
    rule = [shares[i] / (deltas[i] / ratios[i + 1]) ** 0.5 for i in free]
    assert rule == pytest.approx(rule[:1] * len(rule), rel=1e-12)  # k_l in proportion to sqrt(D_l / cost_l)


def test_a_third_level_pays_where_fidelities_are_far_apart() -> None:
    two = multilevel_relative_cost([0.1], [0.01, 1.0], multilevel_shares([0.1], [0.01, 1.0]))
    ratios = level_costs([0.01, 0.05, 1.0])
    three = multilevel_relative_cost([0.1, 0.002], ratios, multilevel_shares([0.1, 0.002], ratios))
    # sqrt(0.1) + sqrt(0.9 * 0.01) = 0.411, squared 0.169; sqrt(0.00898) + sqrt(0.005) + sqrt(0.0021) = 0.211: 0.0446.
    assert two == pytest.approx(0.169, abs=5e-4)
    assert three == pytest.approx(0.0446, abs=5e-5)
