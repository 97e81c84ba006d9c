"""What whole trainings charge to the ledger, against arithmetic done by hand; compiled modules among them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.counted_modules import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    BACKWARD,
    FORWARD,
    Attention,
    Opaque,
    Perceptron,
    Validated,
    opaque_product,
)


def fit(
    module: pl.LightningModule,
    folder: Path,
    callbacks: list[pl.Callback],
    batches: list[int],
    predicted: bool = False,
    shape: tuple[int, ...] = (6,),
    validate: bool = False,
    **settings: Any,
) -> None:
    """Fit on batches of these sizes."""
    data = TensorDataset(torch.randn(sum(batches), *shape))
    starts = [sum(batches[:i]) for i in range(len(batches))]
    rows = [list(range(start, start + size)) for start, size in zip(starts, batches, strict=True)]
    loader = DataLoader(data, batch_sampler=rows)
    quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
    options: dict[str, Any] = {"max_epochs": 1, "num_sanity_val_steps": 0, **dict.fromkeys(quiet, False), **settings}
    trainer = pl.Trainer(
        strategy=PredictedGradientStrategy() if predicted else "auto",
        callbacks=callbacks,
        accelerator="cpu",
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, loader, loader if validate else None)
    assert trainer.global_step > 0


@pytest.mark.parametrize(
    ("make", "shape", "forward", "backward"),
    [(Perceptron, (6,), FORWARD, BACKWARD), (Attention, (5, 8), ATTENTION_FORWARD, ATTENTION_BACKWARD)],
)
@pytest.mark.parametrize("predicted", [False, True])
def test_the_ledger_equals_hand_arithmetic_under_either_strategy(
    tmp_path: Path,
    make: type[pl.LightningModule],
    shape: tuple[int, ...],
    forward: int,
    backward: int,
    predicted: bool,
) -> None:
    ledger = ComputeLedger()
    callbacks = [ledger, GradientPrediction(microbatches=4, exact=4)] if predicted else [ledger]
    fit(make(), tmp_path, callbacks, [8, 8, 5], predicted, shape, max_epochs=2)
    totals = ledger.ledger.totals()
    totals.pop("setup/checks", None)  # the strategy's check that the loss is separable
    assert set(totals) == {"scarce/forward", "scarce/backward"}
    samples = 2 * (8 + 8 + 5)
    assert dict(totals["scarce/forward"].flops_by_format) == {"fp32": samples * forward}
    assert dict(totals["scarce/backward"].flops_by_format) == {"fp32": samples * backward}
    assert totals["scarce/forward"].samples == ledger.ledger.exact_equivalent.samples == samples
    assert ledger.ledger.exact_equivalent.flops == samples * (forward + backward)


def test_predictions_are_fleet_work_in_their_format(tmp_path: Path) -> None:
    ledger = ComputeLedger()
    stack = [ledger, GradientPrediction(format="int4", engine="eager", microbatches=4, exact=1), ControlVariate()]
    fit(Perceptron(), tmp_path, stack, [8, 8, 8], predicted=True)
    totals = ledger.ledger.totals()
    # Three steps, four micro-batches of two samples; one exact, all four predicted, one of these on the exact one.
    assert totals["scarce/forward"].flops == 3 * 2 * FORWARD
    assert totals["scarce/backward"].flops == 3 * 2 * BACKWARD
    assert dict(totals["fleet/control"].flops_by_format) == {"int4": 3 * 2 * (FORWARD + BACKWARD)}
    assert dict(totals["fleet/prediction"].flops_by_format) == {"int4": 3 * 6 * (FORWARD + BACKWARD)}
    # Separability is checked on the first batch: gradients of all eight samples in two pieces and in their halves, and
    # of the first piece once more; and two forward passes of it in a row.
    assert totals["setup/checks"].flops == (8 + 8 + 4) * (FORWARD + BACKWARD) + 2 * 4 * FORWARD
    assert ledger.ledger.exact_equivalent.flops == 3 * 8 * (FORWARD + BACKWARD)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("predicted", [False, True])
def test_pl20235_samples_are_counted_for_batches_of_1_2_1(tmp_path: Path, accumulate: int, predicted: bool) -> None:
    ledger = ComputeLedger()
    callbacks: list[pl.Callback] = [ledger]
    if predicted:
        callbacks += [GradientPrediction(microbatches=2, exact=1, check_separable=False), ControlVariate()]
    fit(Perceptron(), tmp_path, callbacks, [1, 2, 1], predicted, accumulate_grad_batches=accumulate)
    totals = ledger.ledger.totals()
    exact = totals["scarce/forward"].samples
    only_predicted = totals["fleet/prediction"].samples if predicted else 0
    # The batch of two is cut in two, one exact and one predicted; a batch of one has nothing to predict.
    assert (exact, only_predicted) == ((3, 1) if predicted else (4, 0))
    assert exact + only_predicted == ledger.ledger.exact_equivalent.samples == 4
    assert ledger.ledger.steps == -(-3 // accumulate)


@pytest.mark.parametrize("predicted", [False, True])
def test_an_uncounted_operation_is_warned_about_once(tmp_path: Path, predicted: bool) -> None:
    # Two shapes, exact and predicted passes, several epochs: each is a new chance to warn.
    callbacks = [ComputeLedger(), GradientPrediction(microbatches=2, exact=1)] if predicted else [ComputeLedger()]
    with opaque_product() as product, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Opaque(product), tmp_path, callbacks, [6, 4], predicted=predicted, max_epochs=2)
    about = [str(w.message) for w in caught if "No FLOP formula" in str(w.message)]
    assert len(about) == 1, about
    assert "lightning_ledger_tests::opaque" in about[0]
    assert "register_flop_formula" in about[0]


# ------------------------------------------------------------------------------------------------------------ compiled


def _part(module: Perceptron, backend: str) -> Perceptron:
    module.net = torch.compile(module.net, backend=backend)
    return module


def _in_place(module: Perceptron, backend: str) -> Perceptron:
    module.net.compile(backend=backend)
    return module


def _whole(module: Perceptron, backend: str) -> Any:
    return torch.compile(module, backend=backend)  # Lightning takes it apart again: nothing in it is wrapped


WAYS = [_part, _in_place, _whole]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("predicted", [False, True])
def test_a_compiled_module_costs_what_the_uncompiled_one_does(
    tmp_path: Path, way: Callable[[Perceptron, str], Any], predicted: bool
) -> None:
    torch._dynamo.reset()
    ledger = ComputeLedger()
    callbacks = [ledger, GradientPrediction(microbatches=2, exact=2)] if predicted else [ledger]
    fit(way(Validated(), "eager"), tmp_path, callbacks, [4, 4], predicted, validate=True)
    totals = ledger.ledger.totals()
    assert totals["scarce/forward"].flops == 8 * FORWARD
    assert totals["scarce/backward"].flops == 8 * BACKWARD
    assert totals["scarce/validation"].flops == 8 * FORWARD
    assert totals["setup/checks"].flops >= 2 * (FORWARD + BACKWARD)  # the shadow step, of one shape


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_module_runs_compiled_while_it_is_counted(
    tmp_path: Path, way: Callable[[Perceptron, str], Any]
) -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            graphs.append("train" if torch.is_grad_enabled() else "validate")
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    fit(way(Validated(), backend), tmp_path, [ComputeLedger()], [4, 4, 4], validate=True)
    # Every training step; of the validation batches all but the first, which is run eagerly to be counted.
    assert graphs.count("train") == 3
    assert graphs.count("validate") == 2


def trained_on_predictions(folder: Path, format: str, way: Callable[[Perceptron, str], Any] | None) -> Tensor:
    """The weights after three steps of one exact and one predicted micro-batch each, uncorrected."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Perceptron()
    stack: list[pl.Callback] = [GradientPrediction(format=format, microbatches=2, exact=1)]
    fit(way(module, "aot_eager") if way else module, folder, stack, [8, 8, 8], predicted=True)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("way", WAYS)
def test_predictions_of_a_compiled_module_are_lowered(tmp_path: Path, way: Callable[[Perceptron, str], Any]) -> None:
    # The exact passes are compiled; their graphs would hide the products from the lowering, and must not be predicted
    # with.
    expected = trained_on_predictions(tmp_path, "int4", None)
    torch.testing.assert_close(trained_on_predictions(tmp_path, "int4", way), expected, rtol=0, atol=1e-6)
    unrounded = trained_on_predictions(tmp_path, "fp32", None)
    assert (unrounded - expected).abs().max() > 1e-4
