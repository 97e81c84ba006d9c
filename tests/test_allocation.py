"""Plans by brute force, the ends of the scale, and the switch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_ledger.control_variate import (
    Candidate,
    Plan,
    Switch,
    best_plan,
    effective_batch,
    estimate_variance,
    plans,
    predictions_only_error,
    relative_cost,
    relative_cost_interval,
    step_cost,
    watch,
)

V, F = 2.0, 3.0
INT8 = Candidate("int8", residual=0.004 * V, cost=0.15, missed=0.01 * V)
INT4 = Candidate("int4", residual=0.1 * V, cost=0.06, missed=0.3 * V)
BAD = Candidate("bad", residual=0.95 * V, cost=0.3, missed=2 * V)


def brute_force(candidate: Candidate, n: int, draw: str, floor: float, ceiling: float) -> tuple[float, float]:
    """The least R and its share, over every k or a fine grid of q."""
    if draw == "uniform":
        shares = [k / n for k in range(1, n + 1) if floor <= k / n <= ceiling]
    else:
        top = min(ceiling, 1 / n) if draw == "systematic" else ceiling
        shares = [floor * (top / floor) ** (i / 20_000) for i in range(20_001)]

    def relative(q: float) -> float:
        variance = estimate_variance(V, candidate.residual, n, q, draw, candidate.missed)  # type: ignore[arg-type]
        return variance * step_cost(n, q, candidate.cost, F) / (V * F)

    best = min(shares, key=relative)
    return relative(best), best


@pytest.mark.parametrize(("floor", "ceiling"), [(1e-3, 1.0), (0.05, 0.5), (0.2, 0.9)])
@pytest.mark.parametrize("candidate", [INT8, INT4, BAD], ids=lambda c: c.name)
@pytest.mark.parametrize("n", [4, 8, 100])
def test_plans_equal_brute_force(candidate: Candidate, n: int, floor: float, ceiling: float) -> None:
    found = [plan for plan in plans(V, F, [candidate], [n], floor, ceiling) if plan.name != "exact"]
    assert {plan.draw for plan in found} >= {"uniform", "bernoulli"}
    for plan in found:
        least, share = brute_force(candidate, n, plan.draw, floor, ceiling)
        assert floor - 1e-12 <= plan.share <= ceiling + 1e-12
        if plan.draw == "uniform":
            assert plan.share == pytest.approx(share, rel=1e-12)
        if plan.draw == "systematic" and plan.share * n < 1 - 1e-9 and share * n > 1 - 1e-6:
            continue  # the grid's end at one a batch is the uniform plan
        assert plan.relative_cost <= least * (1 + 1e-9)
        assert plan.relative_cost == pytest.approx(least, rel=1e-4)


def test_the_best_plan_is_the_best_of_everything_allowed() -> None:
    numbers, candidates = [4, 8, 24, 100], [INT8, INT4, BAD]
    found = plans(V, F, candidates, numbers)
    best = min(
        brute_force(c, n, draw, 1e-3, 1.0)[0]
        for c, n, draw in itertools.product(candidates, numbers, ("uniform", "systematic", "bernoulli"))
    )
    assert found[0].relative_cost == pytest.approx(best, rel=1e-4)
    assert found[0] == best_plan(V, F, candidates, numbers)
    assert [plan.relative_cost for plan in found] == sorted(plan.relative_cost for plan in found)
    assert found == plans(V, F, candidates, reversed(numbers))  # whatever the order of the numbers
    for plan in found:
        assert plan.relative_cost == pytest.approx(plan.variance * plan.cost / (V * F), rel=1e-12)


def test_a_plan_by_hand() -> None:
    # n = 10, D = 0.2, c p = 0.3, F = 3, V = 2: delta = w = 0.1, best share sqrt(0.01 / 0.9) = 0.105: k = 1 or 2.
    #   k = 1: variance 0.2 + 0.2 * 9/10 = 0.38, cost 3 + 3 = 6:  R = 2.28 / 6 = 0.38
    #   k = 2: variance 0.2 + 0.2 * 4/10 = 0.28, cost 3 + 6 = 9:  R = 2.52 / 6 = 0.42
    found = best_plan(2.0, 3.0, [Candidate("x", residual=0.2, cost=0.3)], [10], draws=["uniform"])
    assert found == Plan(pytest.approx(0.38), "x", 10, 0.1, "uniform", pytest.approx(0.38), pytest.approx(6.0))


def test_a_predictor_that_does_not_pay_is_left_for_exact_training() -> None:
    found = plans(V, F, [BAD], [8, 4])
    assert found[0] == Plan(1.0, "exact", 4, 1.0, "uniform", V / 4, 4 * F)
    assert all(plan.relative_cost > 1 for plan in found[1:])


def test_a_continuous_share_reaches_the_relative_cost() -> None:
    plain = Candidate("plain", residual=0.01 * V, cost=0.15)
    for plan in plans(V, F, [plain], [3], draws=["bernoulli"]):
        if plan.name != "exact":
            assert plan.relative_cost == pytest.approx(relative_cost(0.01, 0.05), rel=1e-12)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="pass 0 < floor <= ceiling <= 1"):
        plans(V, F, [INT8], [8], floor=0.0)
    with pytest.raises(ValueError, match="both must be positive"):
        plans(0.0, F, [INT8], [8])
    with pytest.raises(ValueError, match=r"microbatches=\[0, 8\]"):
        plans(V, F, [INT8], [8, 0])


def test_a_share_limit_that_no_k_meets_leaves_the_uniform_draw_out() -> None:
    found = plans(V, F, [INT8], [4], floor=0.01, ceiling=0.2)
    assert {plan.draw for plan in found if plan.name != "exact"} == {"bernoulli", "systematic"}


# ------------------------------------------------------------------------------------------------------------- formulas


def test_predictions_only_error_matches_simulation() -> None:
    generator, n, trials = torch.Generator().manual_seed(0), 5, 20_000
    bias, h = torch.tensor([0.3, -0.1, 0.2]), torch.tensor([1.0, 0.5, 2.0])
    predictions = bias + h.sqrt() * torch.randn(trials, n, 3, generator=generator)  # of a gradient whose mean is 0
    squares = predictions.mean(1).square().sum(1)
    truth = predictions_only_error(float(h.sum()), float(bias.square().sum()), n)
    assert abs(float(squares.mean()) - truth) < 4 * float(squares.std()) / math.sqrt(trials)


def test_the_effective_batch_by_hand() -> None:
    # delta = 1/4, n = 8, k = 2: V/n + D (1/2 - 1/8) = V (1/8 + 3/32) = V 7/32.
    assert effective_batch(0.25, 8, 2 / 8) == pytest.approx(32 / 7)
    assert effective_batch(1.3, 8, 2 / 8) == 2.0  # an estimate of delta can leave [0, 1] by sampling error


@pytest.mark.parametrize("w", [0.01, 0.05, 0.4])
def test_the_interval_of_the_relative_cost_holds_every_value_within(w: float) -> None:
    def at_most_all(delta: float) -> float:
        """R at the best share of at most 1, by brute force."""
        return min((1 + delta * (1 / q - 1)) * (w + q) for q in (10 ** (-i / 400) for i in range(2401)))

    for low, high in itertools.combinations([0.0, 0.01, 0.2, 0.6, 0.97, 1.0], 2):
        least, greatest = relative_cost_interval(low, high, w)
        inside = [at_most_all(low + (high - low) * i / 20) for i in range(21)]
        assert least == pytest.approx(min(inside), rel=1e-3)
        assert greatest == pytest.approx(max(inside), rel=1e-3)


# --------------------------------------------------------------------------------------------------------------- switch


def after(switch: Switch, *seen: float | None) -> Switch:
    for value in seen:
        switch = watch(switch, value)
    return switch


def test_predictions_go_off_after_patience_in_a_row() -> None:
    start = Switch(patience=3)
    assert after(start, 1.2, 1.2).on
    assert not after(start, 1.2, 1.2, 1.01).on
    # One good observation in between, and the count starts anew.
    assert after(start, 1.2, 1.2, 0.99, 1.2, 1.2).on
    assert not after(start, 1.2, 1.2, 1.0, 1.2, 1.2, 1.2).on


def test_predictions_come_back_only_below_the_margin() -> None:
    off = after(Switch(patience=1, margin=0.2), 1.1)
    assert not off.on
    assert not after(off, 0.99, 0.81, 0.8).on
    back = after(off, 0.79)
    assert back == Switch(on=True, doubts=0, patience=1, margin=0.2)
    # Hysteresis: between 1 - margin and 1 either state stays as it is.
    for state in (off, back):
        assert after(state, 0.9, 0.95, 0.85).on == state.on


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_no_observation_is_no_evidence(nothing: float | None) -> None:
    for state in (Switch(patience=2, doubts=1), Switch(on=False)):
        assert watch(state, nothing) == state


def test_watching_returns_a_new_state() -> None:
    state = Switch(patience=1)
    assert not watch(state, 2.0).on
    assert state == Switch(patience=1)


def test_a_switch_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="patience=0"):
        Switch(patience=0)
    for margin in (-0.1, 1.0):
        with pytest.raises(ValueError, match="margin="):
            Switch(margin=margin)
