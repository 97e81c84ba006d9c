"""The strategy for several processes that share one model's parameters."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FSDPModule

from lightning_ledger.estimation import PredictionSettings, PredictionState
from lightning_ledger.estimation.sharded import ShardedEstimator
from lightning_ledger.strategies.predicted_gradients import PredictedGradients


class PredictedGradientFSDPStrategy(PredictedGradients, ModelParallelStrategy):
    """Trains with FSDP2 from predicted gradients; ``configure_model`` shards the model, as Lightning's docs show.

        trainer = Trainer(strategy=PredictedGradientFSDPStrategy(data_parallel_size=8), devices=8, callbacks=[...])

    or ``strategy="predicted_gradients_fsdp"``. Every pass, predicted or exact, is one through the sharded module,
    scaled by its coefficient; predicted ones run inside the lowering mode. FSDP averages each over the processes, as it
    does for stock Lightning's accumulated batches. Statistics would need whole gradients, so lam is a number:
    ``ControlVariate(coefficient=1.0)``, and ``GradientPrediction(engine="eager", check_separable=False)``.

    Args:
        weigh_ranks: weigh each process's batch by its share of what the loss averages over; by default all count
            alike.
        **kwargs: as of Lightning's ``ModelParallelStrategy``; ``tensor_parallel_size`` must come out as 1.

    Example:
        >>> PredictedGradientFSDPStrategy(data_parallel_size=2, tensor_parallel_size=1).weigh_ranks
        False
    """

    strategy_name = "predicted_gradients_fsdp"

    def __init__(self, weigh_ranks: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weigh_ranks = weigh_ranks

    def make_estimator(
        self, module: pl.LightningModule, prediction: PredictionSettings, state: PredictionState
    ) -> ShardedEstimator:
        """What estimates the gradients of a sharded module.

        Raises:
            MisconfigurationException: if nothing is sharded, or tensors are parallel too.
        """
        if (parallel := self.device_mesh["tensor_parallel"].size()) > 1:
            raise MisconfigurationException(
                f"tensor_parallel_size={parallel}: products on tensor-parallel shards would be rounded with scales of "
                "shards, and every process draws for itself. Pass data_parallel_size=<processes> and "
                "tensor_parallel_size=1."
            )
        if not any(isinstance(layer, FSDPModule) for layer in module.modules()):
            raise MisconfigurationException(
                f"{type(module).__qualname__}.configure_model shards nothing: no gradient would be averaged. Call "
                "torch.distributed.fsdp.fully_shard there, on self.device_mesh['data_parallel'], or train with "
                "PredictedGradientDDPStrategy."
            )
        return ShardedEstimator(
            module,
            prediction,
            state,
            self._correction,
            self._ledger,
            self._unit_samples,
            self.precision_plugin.train_step_context,
            self.ranks,
            self.weigh_ranks,
        )
