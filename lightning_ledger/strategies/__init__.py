"""The only code that alters training: each strategy mixes :class:`PredictedGradients` into one of Lightning's."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ledger.strategies.ddp import PredictedGradientDDPStrategy
from lightning_ledger.strategies.fsdp import PredictedGradientFSDPStrategy
from lightning_ledger.strategies.predicted_gradients import PredictedGradients
from lightning_ledger.strategies.single_device import PredictedGradientStrategy

__all__ = [
    "PredictedGradientDDPStrategy",
    "PredictedGradientFSDPStrategy",
    "PredictedGradientStrategy",
    "PredictedGradients",
]

for _strategy, _where in (
    (PredictedGradientStrategy, "One device"),
    (PredictedGradientDDPStrategy, "One process a device (DDP)"),
    (PredictedGradientFSDPStrategy, "Sharded parameters (FSDP2)"),
):
    # Of `strategy: a.class.Path` in YAML, Lightning's CLI makes a string, and its Trainer looks that up in lower case.
    _class = _strategy.__name__.lower()
    for _name in (_strategy.strategy_name, _class, f"{__name__}.{_class}"):
        if _name not in StrategyRegistry.available_strategies():
            StrategyRegistry.register(
                _name,
                _strategy,
                description=f"{_where}; gradients predicted at low precision. Needs the GradientPrediction callback.",
            )
