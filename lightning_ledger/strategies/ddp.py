"""The strategy for several processes that each hold the whole model."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ledger.strategies.predicted_gradients import PredictedGradients


class PredictedGradientDDPStrategy(PredictedGradients, DDPStrategy):
    """Trains with DDP from predicted gradients: every process estimates its own batch's gradient, DDP averages them.

    In Python ``Trainer(strategy=PredictedGradientDDPStrategy(), devices=8)`` or ``strategy="predicted_gradients_ddp"``;
    in YAML

        strategy:
          class_path: lightning_ledger.strategies.PredictedGradientDDPStrategy
          init_args: {find_unused_parameters: true}

    With R processes and unbiased estimates e_r of their gradients G_r, each from draws of its own,

        mean_r e_r    has the expectation    mean_r G_r

    which is what stock DDP steps on. Where batches differ in what the loss averages over (tokens, say), the mean of
    their means is not the mean over all of it; ``weigh_ranks=True`` makes it so:

        sum_r c_r G_r / sum_r c_r    c_r: what process r's loss averages over, by ``GradientPrediction(weights=...)``

    and the sum of the G_r for a loss that sums (``weights="sum"``). Predictions run on the module itself, not through
    DDP; exact passes too, except that the last backward pass of a step is announced to DDP, which averages in it what
    all of them left in ``.grad``. A parameter that no pass of a process reached counts as unused there: tell DDP with
    ``find_unused_parameters=True``, as always.

    Args:
        weigh_ranks: weigh each process's batch by its share of what the loss averages over; by default all count
            alike, as in stock DDP.
        **kwargs: as of Lightning's ``DDPStrategy``, and through it torch's ``DistributedDataParallel``.

    Example:
        >>> PredictedGradientDDPStrategy(weigh_ranks=True, static_graph=True).weigh_ranks
        True
    """

    strategy_name = "predicted_gradients_ddp"

    def __init__(self, weigh_ranks: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weigh_ranks = weigh_ranks

    @property
    def accumulates_apart(self) -> bool:
        """DDP takes every backward pass for part of a static graph, so that only the announced one may reach it."""
        return isinstance(self.model, DistributedDataParallel) and bool(self.model.static_graph)

    def before_forward(self) -> None:
        """Send rank 0's buffers to all, when DDP's own forward pass would."""
        model = self.model
        if isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():
            model._sync_buffers()
            # Not again in the middle of the step, which before_last_backward announces.
            model.require_forward_param_sync = False

    def before_last_backward(self, loss: Tensor) -> Tensor:
        """Pass the loss through DDP, which then averages ``.grad`` in its backward pass; not while accumulating."""
        model, module = self.model, self.lightning_module
        if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return loss
        assert module is not None
        # DDP waits for every parameter that the loss reaches: also those that only predictions or earlier passes did.
        held = [p for p in module.parameters() if p.requires_grad and p.grad is not None]
        model.module = _Reaching(held)
        try:
            announced: Tensor = model(loss)
        finally:
            model.module = module
        return announced

    def after_last_backward(self) -> None:
        """Refuse to go on where DDP still waits for a parameter's gradient."""
        model, module = self.model, self.lightning_module
        if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return
        assert module is not None
        unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
        if unused and not (model.find_unused_parameters or model.static_graph):
            raise MisconfigurationException(
                f"On rank {self.global_rank} no pass of the batch reached the parameters {', '.join(unused[:5])}"
                f"{' ...' if unused[5:] else ''}, and DDP waits for their gradients. Pass "
                f"{type(self).__name__}(find_unused_parameters=True), or freeze what is not used."
            )


class _Reaching(nn.Module):
    """The identity, whose backward pass also reaches these parameters, with nothing to add to their gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._reached = tuple(parameters)

    def forward(self, loss: Tensor) -> Tensor:
        reached: Tensor = _Reach.apply(loss, *self._reached)
        return reached


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        # A user's gradient hook wants a tensor.
        ctx.parameters = [p if p._backward_hooks else None for p in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients, *(None if p is None else torch.zeros_like(p) for p in ctx.parameters)
