"""Shapes that number formats dislike: short batches, odd sizes, lengths that are no multiple of a block."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.precision import FORMATS, Format
from tests.lightning_runs import trainer, weights
from tests.precision_oracle import every_rounding, rand, rounded_formats


class Layers(pl.LightningModule):
    """Linear layers of these sizes, in turn."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(tmp_path: Path, module: Layers, samples: int, steps: int = 1, **settings: Any) -> tuple[list[str], Any]:
    """The warnings of a run of so many samples a batch, in two micro-batches, and its ledger."""
    loader = DataLoader(TensorDataset(rand(steps * samples, module.sizes[0])), batch_size=samples)
    ledger = ComputeLedger()
    callbacks = [ledger, GradientPrediction(**{"microbatches": 2, "exact": 1, **settings}), ControlVariate()]
    runner = trainer(tmp_path, *callbacks, strategy="predicted_gradients", max_epochs=1)
    before = weights(module).clone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runner.fit(module, loader)
    assert runner.global_step == steps
    assert weights(module).isfinite().all()
    assert not torch.equal(weights(module), before)
    messages = [str(w.message) for w in told]
    return [m for m in messages if "stay in high precision" in m], ledger.ledger


@rounded_formats
@every_rounding
@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        pytest.param(2, (5, 7, 1), id="one row, odd sizes"),
        pytest.param(32, (33, 40, 3), id="sixteen rows, no multiple of 32"),
        pytest.param(64, (32, 64, 32), id="whole blocks"),
    ],
)
def test_every_format_trains_on_every_shape(
    tmp_path: Path, fmt: Format, rounding: str, samples: int, sizes: tuple[int, ...]
) -> None:
    if fmt.name not in FORMATS:
        return
    told, ledger = train(tmp_path, Layers(*sizes), samples, format=fmt.name, rounding=rounding, engine="eager")
    lengths = [samples // 2, *sizes]
    refused = any(fmt.refuses(length) for length in lengths)
    assert bool(told) == refused
    counted = ledger.totals()["fleet/prediction"].flops_by_format
    assert (fmt.name in counted) == (not all(fmt.refuses(length) for length in lengths))
    assert ("fp32" in counted) == refused


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_ao571_refusals_of_all_three_products_are_found_at_first_use_and_named_once(
    engine: str, tmp_path: Path
) -> None:
    # Contractions: outputs 40 and 64 inputs, input gradient 24, weight gradients 10 rows.
    told, ledger = train(tmp_path, Layers(40, 64, 24), 20, steps=4, format="mxfp4", engine=engine)
    products, *share = told
    for layer, product, length in (
        ("layers.0", "output", 40),
        ("layers.0", "grad_weight", 10),
        ("layers.1", "grad_input", 24),
        ("layers.1", "grad_weight", 10),
    ):
        assert products.count(f"{layer} {product} contracts {length} numbers, not a multiple of 32") == 1
    assert products.count("contracts") == 4  # the second layer's output contracts 64
    assert "Pad the layer, or choose a format without blocks for it, such as int8" in products
    assert [message.startswith("Only ") for message in share] == [True]
    # 4 steps of one prediction outside C: 10 samples, 2 * 64 * 24 each, run in the format.
    assert ledger.totals()["fleet/prediction"].flops_by_format["mxfp4"] == 4 * 10 * 2 * 64 * 24


def test_kept_layers_are_no_reason_to_warn(tmp_path: Path) -> None:
    told, ledger = train(tmp_path, Layers(32, 64, 64, 64, 24), 64, format="mxfp4", keep=["layers.3"], engine="eager")
    assert told == []
    counted = ledger.totals()["fleet/prediction"].flops_by_format
    # 32 samples. The kept layer: output, input and weight gradient.
    assert counted["fp32"] == 32 * 3 * 2 * 64 * 24
    assert counted["mxfp4"] == 32 * (2 * 2 * 32 * 64 + 2 * 3 * 2 * 64 * 64)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_torchtitan1703_mx_layers_that_are_no_multiple_of_a_block_stay_exact(name: str, tmp_path: Path) -> None:
    # A head of 10 classes in a model of whole blocks: its input gradient alone is refused.
    told, ledger = train(tmp_path, Layers(64, 96, 10), 64, format=name, engine="eager")
    block = 16 if name == "nvfp4" else 32
    assert len(told) == 1
    assert f"layers.1 grad_input contracts 10 numbers, not a multiple of {block}" in told[0]
    assert told[0].count("contracts") == 1
    assert ledger.totals()["fleet/prediction"].flops_by_format["fp32"] == 32 * 2 * 96 * 10


@pytest.mark.parametrize("samples", [2, 8, 32, 34])  # micro-batches of 1, 4, 16 and 17 rows
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_pt178469_int_mm_trains_on_micro_batches_of_few_rows(engine: str, samples: int, tmp_path: Path) -> None:
    # CUDA's integer kernel wants more than 16 rows, and multiples of 8.
    told, ledger = train(tmp_path, Layers(13, 17, 3), samples, steps=3, format="int8", engine=engine)
    assert told == []
    work = ledger.totals()["fleet/prediction"]
    # Unpadded: outputs and weight gradients of both layers, and the second one's input gradient.
    assert work.flops_by_format == {"int8": 3 * samples // 2 * 2 * (2 * 13 * 17 + 3 * 17 * 3)}
