"""What a worker's copy of the module must follow, besides the trainable parameters.

A worker holds the module as it was at first. Predictions in the training process see what the training step sees:
buffers, frozen parameters, training modes, and numbers kept as attributes (an annealed coefficient, a step count). So
these follow, as they change. What hides in other objects does not; a prediction that depends on it is stale, and
corrected as any wrong prediction is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ledger.program import trainable

_PLAIN = (bool, int, float, str, type(None))
_OF_TRAINER = ("current_epoch", "global_step", "max_epochs", "max_steps", "num_training_batches", "world_size")

Changes = dict[tuple[str, str, str], Any]
"""(kind, path, name) -> value: "tensor" (a name of a buffer or parameter), "attribute", or "trainer"."""


class Following:
    """Notices what changes in a module, and remembers all that ever did.

    Args:
        module: as workers are given it.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._tensors = dict(self._fingerprints())
        # A worker's copy has no Trainer: all of that is news to it.
        self._attributes = {key: value for key, value in _attributes(module) if key[0] != "trainer"}
        self._serial = 0
        self._changed: dict[tuple[str, str, str], tuple[int, Any]] = {}

    def look(self) -> int:
        """Notice changes; the number of this look."""
        self._serial += 1
        named = {**dict(self._module.named_buffers()), **dict(self._module.named_parameters())}
        for name, mark in self._fingerprints():
            if self._tensors.get(name) != mark:
                self._tensors[name] = mark
                self._changed["tensor", "", name] = self._serial, named[name].detach().cpu().clone()
        for key, value in _attributes(self._module):
            if key not in self._attributes or not _same(self._attributes[key], value):
                self._attributes[key] = value
                self._changed[key] = self._serial, value
        return self._serial

    def since(self, serial: int) -> Changes:
        """What changed after the look of this number."""
        return {key: value for key, (at, value) in self._changed.items() if at > serial}

    def _fingerprints(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Where a tensor lies, its version, and its sum: writes through ``.data`` leave no other record."""
        learned = trainable(self._module).keys()
        named = [*self._module.named_buffers(), *self._module.named_parameters()]
        tensors = {name: t for name, t in named if name not in learned}
        sums = [t.detach().sum(dtype=torch.float64).reshape(()) if _summable(t) else None for t in tensors.values()]
        known = [s.cpu() for s in sums if s is not None]
        values = iter(torch.stack(known).tolist() if known else [])
        for (name, tensor), total in zip(tensors.items(), sums, strict=True):
            number = None if total is None else repr(next(values))  # of NaN too, equal if the same
            yield name, (tensor.data_ptr(), tensor._version, tuple(tensor.shape), number)


def follow(module: pl.LightningModule, changes: Mapping[tuple[str, str, str], Any]) -> None:
    """Bring a worker's copy of the module up to date."""
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    layers = dict(module.named_modules())
    position = {}
    for (kind, path, name), value in changes.items():
        if kind == "tensor":
            with torch.no_grad():
                _put(module, name, value) if tensors[name].shape != value.shape else tensors[name].copy_(value)
        elif kind == "attribute":
            layers[path].__dict__[name] = value
        else:
            position[name] = value
    if position:
        held = module._trainer
        values = {**(vars(held) if isinstance(held, SimpleNamespace) else _AT_REST), **position}
        stand_in: Any = SimpleNamespace(**values)
        module.trainer = stand_in


_AT_REST = {
    "training": True,
    "validating": False,
    "testing": False,
    "predicting": False,
    "sanity_checking": False,
    "loggers": [],
    "logger": None,
    "global_rank": 0,
    "is_global_zero": True,
}


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, value)


def _attributes(module: pl.LightningModule) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Plain attributes of every layer, its training mode among them, and where the Trainer is."""
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            if type(value) in _PLAIN and name != "_trainer":
                yield ("attribute", path, name), value
    trainer = module._trainer
    if trainer is not None:
        for name in _OF_TRAINER:
            yield ("trainer", "", name), getattr(trainer, name)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _summable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_complex()
