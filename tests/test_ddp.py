"""Two processes under DDP step on what one process would step on, with one all-reduce of gradients a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_ledger.callbacks import ControlVariate, GradientPrediction
from lightning_ledger.callbacks.common import predicting_strategy
from lightning_ledger.estimation import Allocation
from lightning_ledger.microbatches import draw_bernoulli, draw_control
from tests.ddp_runs import BATCH, CountedReduction, Model, Seen, fit, rank, ranks
from tests.lightning_runs import relative_error, token_batch
from tests.two_ranks import Failed, on_two_ranks

RELATIVE = 1e-5
SAMPLES = 8


def parts(count: int, ignored: bool = False, seed: int = 0) -> list[list[BATCH]]:
    """Batches of each rank, and last those of one process: the two of a step in one."""
    own = [[token_batch(SAMPLES, seed + 10 * step + r, ignored) for step in range(count)] for r in range(2)]
    if ignored:  # rank 1 has half of rank 0's targets, about
        for batch in own[1]:
            batch["labels"][:, 3:] = -100
            batch["labels"][:, 0] = batch["tokens"][:, 1]
    both = [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in zip(*own, strict=True)]
    return [*own, both]


def mine(data: list[list[BATCH]]) -> list[BATCH]:
    """This rank's batches, or one process's."""
    return data[rank() if ranks() > 1 else 2]


def run(data: list[list[BATCH]], *arguments: Any, **options: Any) -> Seen:
    return fit(mine(data), *arguments, **options)


def on_both(data: list[list[BATCH]], prediction: dict[str, Any] | None, options: dict[str, Any]) -> list[Seen]:
    """What both ranks saw; their weights and gradients are the same."""
    first, second = on_two_ranks(_run, data, prediction, options)
    assert torch.equal(first.weights, second.weights)
    assert all(map(torch.equal, first.gradients, second.gradients)) or "accumulate_grad_batches" in options
    return [first, second]


def _run(data: list[list[BATCH]], prediction: dict[str, Any] | None, options: dict[str, Any]) -> Seen:
    return run(data, prediction, **options)


EXACT = {"exact": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adamw": {"model": {"optimizer": "adamw"}},
    "tied": {"model": {"tied": True}},
    "find_unused": {"model": {"unused": True}, "strategy": {"find_unused_parameters": True}},
    "gated": {"model": {"gated": True}, "strategy": {"find_unused_parameters": True}},
    "static_graph": {"strategy": {"static_graph": True}},
    "bucket_view": {"strategy": {"gradient_as_bucket_view": True}},
    "accumulation": {"accumulate_grad_batches": 3},
    "clip_norm": {"gradient_clip_val": 0.05},
    "clip_value": {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"},
    "double": {"precision": "64-true"},
}


def single(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "strategy"}


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_all_exact_are_one_process_and_stock_ddp(name: str) -> None:
    data, options = parts(4), SETTINGS[name]
    ours, _ = on_both(data, EXACT, options)
    stock, _ = on_both(data, None, options)
    one = run(data, None, **single(options))
    assert relative_error(ours.weights, stock.weights) < RELATIVE
    assert relative_error(ours.weights, one.weights) < RELATIVE
    # Stock DDP and ours leave the same parameters without a gradient.
    assert ours.missing == stock.missing
    windows = range(2, 4) if name == "accumulation" else range(4)  # only closed windows are averaged
    for step in windows:
        assert relative_error(ours.gradients[step], stock.gradients[step]) < RELATIVE
    assert float(ours.gradients[0].norm()) > 0.01


@pytest.mark.parametrize("name", SETTINGS)
def test_pt105723_perfect_predictions_leave_nothing_to_the_draw(name: str) -> None:
    """Whatever passes are announced to DDP and whatever are not, the gradient is the batch's."""
    data = parts(3)
    stock, _ = on_both(data, None, SETTINGS[name])
    for exact in (0, 1, 3):
        options = {**SETTINGS[name], "correction": exact > 0}
        ours, _ = on_both(data, {"exact": exact, "engine": "eager"}, options)
        assert relative_error(ours.weights, stock.weights) < RELATIVE, exact
        assert ours.missing == stock.missing


@pytest.mark.parametrize("exact", [0, 1, 4])
def test_bf16_mixed_is_stock_ddps(exact: int) -> None:
    data, options = parts(4), {"precision": "bf16-mixed"}
    settings = {"exact": exact, "check_separable": False}
    ours, _ = on_both(data, settings, {**options, "correction": exact > 0})
    stock, _ = on_both(data, None, options)
    moved, start = stock.weights, on_both(data, None, {**options, "limit_train_batches": 0})[0].weights
    # bfloat16 rounds every weight gradient to 8 bits, one of a batch or several of micro-batches.
    assert relative_error(ours.weights - start, moved - start) < 4 * 2.0**-8


@pytest.mark.parametrize("exact", [0, 1, 4])
def test_unused_parameters_are_refused_by_name(exact: int) -> None:
    options = {"model": {"unused": True}, "correction": exact > 0}
    refusal = r"no pass of the batch reached the parameters spare.weight, spare.bias.*find_unused_parameters=True"
    with pytest.raises(Failed, match=refusal):
        on_two_ranks(_run, parts(3), {"exact": exact, "engine": "eager"}, options)


# ------------------------------------------------------------------------------------------------------- unbiasedness

N = 3
CORRECTED = {"format": "int4", "microbatches": N, "exact": 1, "engine": "eager"}


class Fractional(pl.Callback):
    """Draws each micro-batch with probability q, as ``AdaptiveAllocation`` may decide."""

    def __init__(self, share: float) -> None:
        self.share = share

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (correction,) = (c.correction for c in trainer.callbacks if isinstance(c, ControlVariate))
        correction.allocation = Allocation("int4", self.share, "bernoulli")


def _forced(data: list[list[BATCH]], draws: list[tuple[tuple[int, ...], ...]], options: dict[str, Any]) -> list[Tensor]:
    """First gradients, one for each pair of draws."""
    found, share = [], options.pop("share", None)
    for pair in draws:
        callbacks = [] if share is None else [Fractional(share)]
        where = "lightning_ledger.estimation.drawing.draw_"
        with patch(where + ("control" if share is None else "bernoulli"), return_value=pair[rank()]):
            prediction = CORRECTED if share is None else {**CORRECTED, "microbatches": 2}
            found.append(run(data, prediction, *callbacks, **options).gradients[0])
    return found


def test_the_estimate_is_unbiased_over_both_ranks_draws() -> None:
    data = parts(1)
    singles = [(i,) for i in range(N)]
    draws = list(itertools.product(singles, singles))
    exact = on_both(data, EXACT, {})[0].gradients[0]
    seen, _ = on_two_ranks(_forced, data, draws, {})
    assert relative_error(torch.stack(seen).mean(0), exact) < RELATIVE
    # It takes the draws of both ranks: one of them fixed leaves a bias, and so does no correction.
    assert relative_error(torch.stack(seen[:N]).mean(0), exact) > 100 * RELATIVE
    mixed, _ = on_two_ranks(_forced, data, draws, {"correction": False})
    assert relative_error(torch.stack(mixed).mean(0), exact) > 100 * RELATIVE


def test_fractional_draws_are_unbiased_and_empty_ones_do_not_wait() -> None:
    data, share = parts(1), 0.3
    subsets = [(), (0,), (1,), (0, 1)]
    draws = list(itertools.product(subsets, subsets))
    exacts = torch.tensor([len(a) + len(b) for a, b in draws], dtype=torch.float64)
    chances = share**exacts * (1 - share) ** (4 - exacts)
    assert float(chances.sum()) == pytest.approx(1.0)
    exact = on_both(data, EXACT, {})[0].gradients[0]
    seen, _ = on_two_ranks(_forced, data, draws, {"share": share})
    assert relative_error(chances @ torch.stack(seen), exact) < RELATIVE


def test_every_rank_draws_for_itself() -> None:
    drawn = on_two_ranks(_drawn, parts(12))
    assert drawn[0] != drawn[1]
    assert drawn[0] == _drawn(parts(12))  # the first as one process does


def _drawn(data: list[list[BATCH]]) -> list[Any]:
    drawn = []

    def noted(n: int, k: int, generator: torch.Generator) -> tuple[int, ...]:
        drawn.append((draw_control(n, k, generator), generator.get_state().sum().item()))
        return drawn[-1][0]  # type: ignore[no-any-return]

    with patch("lightning_ledger.estimation.drawing.draw_control", noted):
        run(data, {"exact": 1, "engine": "eager"})
    return drawn


def test_masks_of_two_ranks_differ() -> None:
    """The same batch on both: with dropout their gradients differ, so that the mean is neither's."""
    batch = token_batch(SAMPLES)
    assert draw_bernoulli(3, 1.0, torch.Generator()) == (0, 1, 2)
    seen = {r: on_both([[batch]] * 3, EXACT, {"model": {"dropout": p}})[0] for r, p in (("off", 0.0), ("on", 0.5))}
    ones = {r: run([[batch]] * 3, EXACT, model={"dropout": p}) for r, p in (("off", 0.0), ("on", 0.5))}
    assert relative_error(seen["off"].gradients[0], ones["off"].gradients[0]) < RELATIVE
    assert relative_error(seen["on"].gradients[0], ones["on"].gradients[0]) > 0.1


# --------------------------------------------------------------------------------------------------------- collectives


def _counted(data: list[list[BATCH]], prediction: dict[str, Any], options: dict[str, Any]) -> tuple[list[int], int]:
    """Sizes of the buckets that DDP reduced, and of the largest other all-reduce."""
    counted, sizes, all_reduce = CountedReduction(), [0], torch.distributed.all_reduce

    def noted(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        if not more.get("async_op"):
            sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **more)

    with patch("torch.distributed.all_reduce", noted):
        run(data, prediction, counted, **options)
    return counted.buckets, max(sizes)


@pytest.mark.parametrize("exact", [0, 1, 2, 4])
@pytest.mark.parametrize("window", [1, 3])
def test_gradients_are_reduced_once_a_step(exact: int, window: int) -> None:
    # 7 batches in windows of 3: 3 steps, the last of one batch.
    options = {"accumulate_grad_batches": window, "correction": exact > 0, "model": {"width": 16, "hidden": 64}}
    for buckets, other in on_two_ranks(_counted, parts(7), {"exact": exact, "engine": "eager"}, options):
        parameters = sum(p.numel() for p in Model(width=16, hidden=64).parameters())
        assert buckets == [parameters] * (7 if window == 1 else 3)
        assert other < parameters / 4  # scalars, and a few numbers for each of four layers


class Buffered(Model):
    """Counts the tokens that this process saw in a buffer, as running statistics do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: BATCH, batch_idx: int) -> Tensor:
        if not torch.is_grad_enabled():
            raise AssertionError
        self.seen += batch["tokens"].float().mean()
        return super().training_step(batch, batch_idx)


def _buffers(data: list[list[BATCH]], prediction: dict[str, Any] | None, options: dict[str, Any]) -> float:
    module = Buffered()
    run(data, prediction, module=module, **options)
    return float(module.seen)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["every step", "accumulation"])
def test_buffers_are_sent_as_stock_ddp_sends_them(options: dict[str, Any]) -> None:
    stock = on_two_ranks(_buffers, parts(4), None, options)
    ours = on_two_ranks(_buffers, parts(4), {"microbatches": 1, "exact": 1}, options)
    assert ours == pytest.approx(stock)
    assert stock[0] != stock[1]  # of the last window each has its own


class Skips(Model):
    """Returns None on one rank, or on both, for the second batch."""

    def __init__(self, on: tuple[int, ...]) -> None:
        super().__init__()
        self.on = on

    def training_step(self, batch: BATCH, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 and rank() in self.on else super().training_step(batch, batch_idx)


def _skipping(data: list[list[BATCH]], on: tuple[int, ...], prediction: dict[str, Any], correction: bool) -> Seen:
    import warnings

    warnings.filterwarnings("ignore", "`training_step` returned `None`")
    return run(data, prediction, module=Skips(on), correction=correction)


@pytest.mark.parametrize("exact", [0, 1, 4])
@pytest.mark.parametrize("who", [0, 1])
def test_pl5243_none_on_one_rank_is_refused_on_both(who: int, exact: int) -> None:
    prediction = {"exact": exact, "engine": "eager"}
    with pytest.raises(Failed) as caught:
        on_two_ranks(_skipping, parts(3), (who,), prediction, exact > 0)
    message = str(caught.value)
    for r in range(2):
        assert f"Skips.training_step returned {'None' if r == who else 'a loss'} on rank {r}" in message
    assert "no answer" not in message


def test_pl5243_none_on_all_ranks_is_refused_by_lightning_itself() -> None:
    with pytest.raises(Failed, match="returning None in distributed training is not supported"):
        on_two_ranks(_skipping, parts(3), (0, 1), {"exact": 1, "engine": "eager"}, True)


# ------------------------------------------------------------------------------------------------ unequal ranks, hooks


@pytest.mark.parametrize("exact", [1, 4])
@pytest.mark.parametrize("weigh", [False, True])
def test_ranks_with_unequal_token_counts(weigh: bool, exact: int) -> None:
    data = parts(3, ignored=True)
    prediction = {"exact": exact, "engine": "eager"}
    ours, _ = on_both(data, prediction, {"strategy": {"weigh_ranks": weigh}})
    stock, _ = on_both(data, None, {})
    one = run(data, None)
    assert relative_error(ours.weights, (one if weigh else stock).weights) < RELATIVE
    assert relative_error(ours.gradients[0], (stock if weigh else one).gradients[0]) > 0.01
    # The loss reported is that whose gradient it is.
    if weigh:
        assert ours.logged["gpcv/loss"] == pytest.approx(run(data, prediction).logged["gpcv/loss"], rel=RELATIVE)


@pytest.mark.parametrize("weigh", [False, True])
def test_a_loss_that_sums(weigh: bool) -> None:
    data, options = parts(2), {"model": {"reduction": "sum"}, "gradient_clip_val": 0.1}
    ours, _ = on_both(data, {"exact": 1, "weights": "sum"}, {**options, "strategy": {"weigh_ranks": weigh}})
    stock, _ = on_both(data, None, options)
    # Before clipping: stock DDP steps on the mean of the ranks' sums.
    assert relative_error(ours.gradients[0], stock.gradients[0] * (2 if weigh else 1)) < RELATIVE


class Hooked(Model):
    """Looks at every gradient as it arrives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[str] = []

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.register_hook(self.noted(name))

    def noted(self, name: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            assert isinstance(gradient, Tensor)
            self.seen.append(name)

        return note


def _hooked(data: list[list[BATCH]]) -> int:
    module = Hooked(gated=True)
    run(data, {"exact": 1, "engine": "eager"}, module=module, strategy={"find_unused_parameters": True})
    assert isinstance(module.embed, nn.Embedding)
    return len(module.seen)


def test_hooks_on_parameters_get_tensors() -> None:
    assert all(seen > 0 for seen in on_two_ranks(_hooked, parts(3)))


@pytest.mark.parametrize(
    ("strategy", "ours"),
    [
        ("auto", "PredictedGradientStrategy"),
        ("ddp", "PredictedGradientDDPStrategy"),
        (pl.strategies.ModelParallelStrategy(), "PredictedGradientFSDPStrategy"),
        ("ddp_spawn", "PredictedGradientDDPStrategy"),
    ],
)
def test_deepspeed2329_another_strategy_is_refused_with_the_one_that_fits(strategy: Any, ours: str) -> None:
    devices = 1 if strategy == "auto" else 2
    trainer = pl.Trainer(strategy=strategy, devices=devices, accelerator="cpu", logger=False)
    with pytest.raises(MisconfigurationException, match=rf"which would train on exact gradients.*strategy={ours}\(\)"):
        predicting_strategy(trainer, GradientPrediction())
