"""Gradients leave a captured program when they are complete, not before."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import EagerPredictor, ProgramPredictor


class FilledInLater(torch.autograd.Function):
    """A linear layer whose backward names the weight gradient first, and fills it in row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        gw = torch.zeros_like(w)
        for row in range(len(gw)):
            gw[row] = g[:, row] @ x
        return g @ w, gw


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4) / 12)
        self.after = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.after(FilledInLater.apply(batch, self.weight)).square().mean()  # type: ignore[no-any-return]


def test_a_gradient_that_is_filled_in_later_is_delivered_full() -> None:
    model, batch = Model(), torch.randn(5, 4)
    program, eager = ProgramPredictor(model, Lowering("fp32")), EagerPredictor(model, Lowering("fp32"))
    for predictor in (program, eager):
        predictor.refresh(dict(model.named_parameters()))
    for use in range(1, 6):  # uses 3 and 5 are not compared
        copies: dict[str, Tensor] = {}

        def deliver(name: str, gradient: Tensor, copies: dict[str, Tensor] = copies) -> None:
            copies[name] = gradient.clone()

        program.predict_into(deliver, batch, use, 0)
        expected = eager.predict(batch, use, 0)
        assert expected is not None
        assert copies.keys() == expected[1].keys()
        assert all(g is not None and torch.equal(copies[name], g) for name, g in expected[1].items())
    assert program.engine == "captured"


class MovingAverage(Model):
    """Updates frozen weights inside its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(3, 4), requires_grad=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.average.data.mul_(0.9).add_(self.weight.data, alpha=0.1)
        return (batch @ self.weight.t() - batch @ self.average.t()).square().mean()


@pytest.mark.parametrize("make", [ProgramPredictor, EagerPredictor])
def test_a_training_step_that_writes_to_parameters_is_refused(make: type[ProgramPredictor | EagerPredictor]) -> None:
    model = MovingAverage()
    predictor = make(model, Lowering("fp32"))
    predictor.refresh({"weight": model.weight})
    with pytest.raises(MisconfigurationException, match=r"writes to the parameter 'average'.*on_train_batch_end"):
        predictor.predict(torch.randn(5, 4), 0, 0)


def test_running_statistics_that_kernels_write_unrecorded_are_followed() -> None:
    class Normed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.after(self.norm(batch) @ self.weight.t()).square().mean()  # type: ignore[no-any-return]

    model, batch = Normed(), torch.randn(8, 4) + 3
    predictor = EagerPredictor(model, Lowering("fp32"))
    predictor.refresh(dict(model.named_parameters()))
    predictor.predict(batch, 0, 0)
    for _ in range(5):
        model.training_step(batch, 0)
    model.norm.eval()
    predicted = predictor.predict(batch, 0, 0)
    assert predicted is not None
    assert float(predicted[0]) == model.training_step(batch, 0).item()
