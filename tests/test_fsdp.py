"""Two processes that share one model's parameters under FSDP2 estimate what one process does."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import AdaptiveAllocation, ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import Work
from lightning_ledger.microbatches import TokenWeights
from lightning_ledger.strategies import PredictedGradientFSDPStrategy
from tests.ddp_runs import BATCH, Model, Seen, fit, rank, ranks
from tests.lightning_runs import relative_error, token_batch
from tests.two_ranks import Failed, on_two_ranks

RELATIVE = 1e-6
SAMPLES, N = 6, 3


class Sharded(Model):
    """The same model, its layers sharded."""

    def configure_model(self) -> None:
        for layer in (self.embed, self.widen, self.narrow, self.head):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Watch(pl.Callback):
    """Whole gradients, as ``on_after_backward`` sees them."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        held = [whole(p.grad).detach().double().flatten() for p in pl_module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(held))


def parts(steps: int, ignored: bool = False) -> list[list[BATCH]]:
    """Batches of each rank, and last those of one process."""
    own = [[token_batch(SAMPLES, 10 * step + r, ignored and r == 1) for step in range(steps)] for r in range(2)]
    return [*own, [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in zip(*own, strict=True)]]


def _sharded(
    data: Sequence[list[BATCH]],
    prediction: dict[str, Any] | None,
    coefficient: float | None = 1.0,
    strategy: dict[str, Any] | None = None,
    more: Sequence[pl.Callback] = (),
    module: type[Model] = Sharded,
    **options: Any,
) -> Seen:
    torch.manual_seed(0)
    callbacks: list[pl.Callback] = [ledger := ComputeLedger(), watch := Watch(), *more]
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1, **(strategy or {})}
    used: pl.strategies.Strategy
    if prediction is None:
        used = ModelParallelStrategy(**sizes)
    else:
        used = PredictedGradientFSDPStrategy(**sizes)
        fixed = {"format": "fp32", "engine": "eager", "check_separable": False, "weights": TokenWeights()}
        callbacks.append(GradientPrediction(**{**fixed, "microbatches": N, **prediction}))
        if coefficient is not None:
            callbacks.append(ControlVariate(coefficient=coefficient))
    model = module(**options.pop("model", {}))
    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            strategy=used,
            devices=2,
            callbacks=callbacks,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            default_root_dir=Path(directory) / str(rank()),
            max_epochs=1,
            **options,
        )
        trainer.fit(model, DataLoader(data[rank()], batch_size=None))
    weights = torch.cat([whole(p).detach().double().flatten() for p in model.parameters()])
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Seen(weights, watch.gradients, [], logged, ledger.ledger.totals(), ledger.ledger.exact_equivalent)


def run(data: list[list[BATCH]], *arguments: Any, **options: Any) -> Seen:
    first, second = on_two_ranks(_run, data, arguments, options)
    assert torch.equal(first.weights, second.weights)
    return first  # type: ignore[no-any-return]


def _run(data: list[list[BATCH]], arguments: Sequence[Any], options: dict[str, Any]) -> Seen:
    return _sharded(data, *arguments, **options)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"model": {"optimizer": "adamw"}}], ids=str)
@pytest.mark.parametrize("exact", [0, 1, 2, N])
def test_two_shards_are_one_process_and_stock_fsdp(exact: int, options: dict[str, Any]) -> None:
    """Unrounded predictions: whatever is drawn, the gradient is the batch's."""
    data = parts(4)
    ours = run(data, {"exact": exact}, 1.0 if exact else None, **options)
    stock = run(data, None, **options)
    one = fit(data[2], None, **options)
    assert relative_error(ours.weights, stock.weights) < RELATIVE
    assert relative_error(ours.weights, one.weights) < RELATIVE


def _forced(data: list[list[BATCH]], draws: list[tuple[tuple[int, ...], ...]], coefficient: float | None) -> list[Any]:
    """First gradients, one for each pair of draws; on one process, those of both ranks' batches, averaged."""
    found = []
    for pair in draws:
        shares = [rank()] if ranks() > 1 else [0, 1]
        gradients = []
        for r in shares:
            where = "sharded" if ranks() > 1 else "drawing"
            with patch(f"lightning_ledger.estimation.{where}.draw_control", return_value=pair[r]):
                prediction = {"format": "int4", "exact": 1, "engine": "eager", "microbatches": N}
                if ranks() > 1:
                    gradients.append(_sharded(data, prediction, coefficient).gradients[0])
                else:
                    more = [] if coefficient is None else [ControlVariate(coefficient=coefficient)]
                    gradients.append(fit(data[r], prediction, *more, correction=False).gradients[0])
        found.append(torch.stack(gradients).mean(0))
    return found


@pytest.mark.parametrize("coefficient", [0.7, None])
def test_the_estimate_is_one_processs_and_unbiased(coefficient: float | None) -> None:
    data, singles = parts(1), [(i,) for i in range(N)]
    draws = list(itertools.product(singles, singles))
    ours, _ = on_two_ranks(_forced, data, draws, coefficient)
    for mine, theirs in zip(ours, _forced(data, draws, coefficient), strict=True):
        assert relative_error(mine, theirs) < RELATIVE
    exact = run(data, None).gradients[0]
    error = relative_error(torch.stack(ours).mean(0), exact)
    assert error < RELATIVE if coefficient is not None else error > 1e-3


@pytest.mark.parametrize("weigh", [False, True])
def test_ranks_with_unequal_token_counts(weigh: bool) -> None:
    data = parts(2, ignored=True)
    ours = run(data, {"exact": 1}, strategy={"weigh_ranks": weigh})
    stock, one = run(data, None), fit(data[2], None)
    assert relative_error(ours.weights, (one if weigh else stock).weights) < RELATIVE
    assert relative_error(one.weights, stock.weights) > 100 * RELATIVE


def test_the_ledger_counts_both_shards() -> None:
    data = parts(2)
    first, second = (x.totals for x in on_two_ranks(_run, data, ({"format": "int8", "exact": 1},), {}))
    one = fit(data[0], {"format": "int8", "exact": 1, "microbatches": N, "engine": "eager", "check_separable": False})
    assert first == second == {name: 2 * work for name, work in one.totals.items()}
    assert first["fleet/prediction"] == Work(**{**vars(first["fleet/prediction"]), "passes": 2 * 2 * (N - 1)})


class Whole(Model):
    """Shards nothing."""

    def configure_model(self) -> None:
        pass


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "optimal": (({}, "optimal"), {}, r"ControlVariate\(coefficient='optimal'\) needs statistics.*coefficient=1.0"),
    "adaptive": (({},), {"more": [AdaptiveAllocation()]}, "AdaptiveAllocation needs statistics"),
    "captured": (({"engine": "captured"},), {}, "engine='captured' captures a program of whole weights"),
    "weights": (({"format": "w8a16"},), {}, "rounds weights alone"),
    "stale": (({"refresh_every": 2},), {}, "refresh_every=2 keeps a copy of whole weights"),
    "checked": (({"check_separable": True},), {}, "check_separable=True compares whole gradients"),
    "whole": (({},), {"module": Whole}, "Whole.configure_model shards nothing"),
    "tensors": (
        ({},),
        {"strategy": {"data_parallel_size": 1, "tensor_parallel_size": 2}, "module": Whole},
        "tensor_parallel_size=2: products",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_whole_gradients_is_refused(name: str) -> None:
    arguments, options, refusal = REFUSED[name]
    with pytest.raises(Failed, match=refusal):
        on_two_ranks(_run, parts(1), arguments, options)


def test_ranks_with_unequal_numbers_of_micro_batches_are_refused() -> None:
    data = parts(1)
    data[1][0] = {key: value[:2] for key, value in data[1][0].items()}
    with pytest.raises(Failed, match="Rank 1 has 2 micro-batches, and others have another number"):
        on_two_ranks(_run, data, ({},), {})
