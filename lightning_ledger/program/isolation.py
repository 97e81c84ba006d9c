"""Isolation: a pass over the user's module that leaves no trace in it, and draws its own random numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torchmetrics import Metric

_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run with every global generator seeded, and leave each exactly where it was.

    Torch (CPU and ``device``), NumPy and Python. The exact pass and the prediction of a micro-batch run under the
    same seed, so that they draw the same dropout masks.

    Args:
        seed: 63-bit seed.
        device: whose generator is included besides the CPU's.

    Example:
        >>> with seeded(1, torch.device("cpu")):
        ...     a = torch.rand(2)
        >>> with seeded(1, torch.device("cpu")):
        ...     b = torch.rand(2)
        >>> bool((a == b).all())
        True
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  the global state is the point
    on_device = [device.index or 0] if device.type not in ("cpu", "mps") else []
    try:
        with torch.random.fork_rng(on_device, device_type=device.type if on_device else "cuda"):
            torch.default_generator.manual_seed(seed)
            if on_device:
                getattr(torch, device.type).manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _remember(owner: nn.Module) -> Callable[[], None]:
    """Snapshot a module's own Python attributes; the returned function puts them back, in place where it can."""
    saved = {name: value for name, value in owner.__dict__.items() if name not in _MODULE_INTERNALS}
    seen: set[int] = set()
    tensors = isinstance(owner, (pl.LightningModule, Metric))
    contents = [restore for value in saved.values() for restore in _remember_content(value, seen, tensors)]

    def restore() -> None:
        for name in owner.__dict__.keys() - saved.keys() - _MODULE_INTERNALS:
            del owner.__dict__[name]
        for restore_content in contents:
            restore_content()
        owner.__dict__.update(saved)

    return restore


def _remember_content(value: Any, seen: set[int], tensors: bool) -> Iterator[Callable[[], object]]:
    """Functions that put back what a generator, a container and the containers inside it hold now, and a tensor.

    Tensors in lists stay out: outputs collected over an epoch would be copied again in every prediction.
    """
    if isinstance(value, torch.Generator):
        yield functools.partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.RandomState):
        yield functools.partial(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        yield functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if not isinstance(value, (Tensor, *_CONTAINERS)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if tensors and not value.is_inference():
            yield functools.partial(_put_back, value, value.detach().clone(), value._version)
        return
    content = copy.copy(value)
    yield functools.partial(_refill, value, content)
    if isinstance(value, set):
        return
    inside = (*_CONTAINERS, Tensor, *_GENERATORS) if isinstance(content, dict) else (*_CONTAINERS, *_GENERATORS)
    for item in content.values() if isinstance(content, dict) else content:
        if isinstance(item, inside):  # a vocabulary has a hundred thousand items that are not
            yield from _remember_content(item, seen, tensors)


def _put_back(tensor: Tensor, content: Tensor, version: int) -> None:
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(content)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for a logging method."""


@contextlib.contextmanager
def without_side_effects(module: pl.LightningModule) -> Iterator[None]:
    """Silence a LightningModule: what runs inside leaves no log, no metric update, no new attribute.

    ``self.log``, ``self.log_dict`` and ``self.print`` do nothing; ``self.logger`` is a dummy; torchmetrics work but
    forget; lists, dicts, numbers and random generators kept as attributes of any module are put back, nested ones too,
    and so are tensors of a LightningModule or a metric. Other objects (a metric outside the module tree, a meter of the
    user's own class, ``wandb.log`` called directly) cannot be seen and are not protected.

    Args:
        module: the user's module, attached to a Trainer or not.
    """
    owners = list(module.modules())
    restores = [_remember(owner) for owner in owners]
    trainer = module._trainer
    loggers = trainer.loggers if trainer is not None else []
    try:
        for owner in owners:
            if isinstance(owner, pl.LightningModule):
                # In the instance's dict, where they shadow the methods and where _remember drops them again.
                owner.__dict__.update(log=_nothing, log_dict=_nothing, print=_nothing)
        if trainer is not None and loggers:
            trainer.loggers = [DummyLogger() for _ in loggers]
        yield
    finally:
        if trainer is not None and loggers:
            trainer.loggers = loggers
        for restore in restores:
            restore()


@contextlib.contextmanager
def generators_kept(module: nn.Module) -> Iterator[None]:
    """Leave the random generators that are attributes of a module where they are.

    Args:
        module: whose generators.
    """
    held = [x for layer in module.modules() for x in layer.__dict__.values() if isinstance(x, _GENERATORS)]
    restores = [restore for generator in held for restore in _remember_content(generator, set(), tensors=False)]
    try:
        yield
    finally:
        for restore in restores:
            restore()


@contextlib.contextmanager
def without_metrics(module: nn.Module) -> Iterator[None]:
    """Let torchmetrics take no update and return zero, for a trace: their checks look at values, which no trace can.

    What is predicted does not depend on them; where it does, the comparison with the training step tells.

    Args:
        module: whose metrics.
    """
    metrics = [layer for layer in module.modules() if isinstance(layer, Metric)]
    updates = [metric.__dict__["update"] for metric in metrics]
    try:
        for metric in metrics:
            metric.__dict__.update(update=_nothing, forward=_zero)
        yield
    finally:
        for metric, update in zip(metrics, updates, strict=True):
            metric.__dict__["update"] = update
            del metric.__dict__["forward"]


def _zero(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(())


@contextlib.contextmanager
def without_power_iteration(module: nn.Module) -> Iterator[None]:
    """Let spectral norms use their singular vectors as they are: the first pass of a batch has brought them closer.

    Args:
        module: whose layers are normalised, by either of PyTorch's spectral norms.
    """
    iterating = [
        layer
        for layer in module.modules()
        if layer.training
        and (
            isinstance(layer, _SpectralNorm)
            or any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values())
        )
    ]
    try:
        for layer in iterating:
            layer.training = False
        yield
    finally:
        for layer in iterating:
            layer.training = True


class ShadowBuffers:
    """Copies of a module's buffers for predictions to write on, so that the module's own stay as they are.

    A buffer is copied again only when its original or its copy was written to; running statistics are always, since
    normalisation kernels leave no record of their writes.

    Args:
        module: the module whose buffers are shadowed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[str, tuple[Tensor, int, Tensor, int]] = {}
        self._unrecorded = {
            f"{path}.{name}".lstrip(".")
            for path, layer in module.named_modules()
            if isinstance(layer, _NormBase)
            for name, _ in layer.named_buffers(recurse=False)
        }

    def fresh(self) -> dict[str, Tensor]:
        """Name to a copy that equals the buffer's present value."""
        fresh = {}
        for name, buffer in self._module.named_buffers():
            held = self._copies.get(name)
            if (
                held is None
                or name in self._unrecorded
                or held[0] is not buffer
                or held[1] != buffer._version
                or held[2]._version != held[3]
                or held[2].device != buffer.device
            ):
                shadow = buffer.detach().clone()
                held = self._copies[name] = (buffer, buffer._version, shadow, shadow._version)
            fresh[name] = held[2]
        return fresh
