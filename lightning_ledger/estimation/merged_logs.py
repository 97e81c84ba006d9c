"""The exact side of a step: the user's own training step on the micro-batches of C, logging as one batch would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MetricCollection


class MergedLogs:
    """Collects what several passes log and logs it once, averaged by the passes' weights.

    A batch that trains as k micro-batches so logs each key once, as it would whole. Values reduced by ``min``, ``max``
    or ``sum`` are merged that way; torchmetrics objects are logged as they are, having seen every pass.

    Attributes:
        weight: weight of the pass that is running.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self._calls: dict[str, list[tuple[Any, tuple[Any, ...], dict[str, Any], float]]] = {}
        self._collections: dict[int, tuple[MetricCollection, tuple[Any, ...], dict[str, Any]]] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for ``LightningModule.log``."""
        if isinstance(value, Tensor):
            value = value.detach()
        self._calls.setdefault(name, []).append((value, args, kwargs, self.weight))

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Stands in for ``LightningModule.log_dict``."""
        if isinstance(dictionary, MetricCollection):
            self._collections[id(dictionary)] = (dictionary, args, kwargs)
            return
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def replay(self, module: pl.LightningModule) -> None:
        """Log the merged values through the module's own methods."""
        for name, calls in self._calls.items():
            values, (_, args, kwargs, _) = [c[0] for c in calls], calls[-1]
            if all(isinstance(v, (Number, Tensor)) for v in values):
                # As Lightning converts them, but in double precision: an average of equals must be that value.
                stacked = torch.stack([torch.as_tensor(v).double().reshape(()) for v in values])
                value: Any = _merge(stacked, [c[3] for c in calls], kwargs.get("reduce_fx", "mean"))
                like = values[-1]
                floating = isinstance(like, Tensor) and like.is_floating_point()
                value = value.to(like.dtype if floating else torch.get_default_dtype())
            else:
                value = values[-1]
            if kwargs.get("batch_size") is not None:
                kwargs = {**kwargs, "batch_size": sum(c[2]["batch_size"] for c in calls)}
            module.log(name, value, *args, **kwargs)
        for collection, args, kwargs in self._collections.values():
            module.log_dict(collection, *args, **kwargs)


def _merge(values: Tensor, weights: list[float], reduce_fx: Any) -> Tensor:
    name = getattr(reduce_fx, "__name__", reduce_fx)
    if name in ("min", "amin"):
        return values.min()
    if name in ("max", "amax"):
        return values.max()
    if name == "sum":
        return values.sum()
    share = torch.tensor(weights, dtype=values.dtype, device=values.device)
    return (values * share).sum() / share.sum()


@contextlib.contextmanager
def merged_logs(module: pl.LightningModule, passes: int) -> Iterator[MergedLogs]:
    """Merge what ``passes`` runs of the training step log; a single one logs directly.

    Args:
        module: the user's module.
        passes: how many runs follow.

    Yields:
        The collector; set its ``weight`` before each pass.
    """
    logs = MergedLogs()
    if passes == 1:
        yield logs
        return
    # Shadow the methods in the instance's dict: the class and other instances stay untouched.
    module.__dict__.update(log=logs.log, log_dict=logs.log_dict)
    try:
        yield logs
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]
    logs.replay(module)
