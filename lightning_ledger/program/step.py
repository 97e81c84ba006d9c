"""Run a user's training step as a function: (weights, micro-batch, seed) -> (loss, gradients).

Nothing else may come out of it. A prediction is a second look at the same batch: what it logs, counts, draws or
overwrites would be counted twice by the user's own bookkeeping.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ledger.flops import FlopCounter
from lightning_ledger.microbatches import private_copy

Context = Callable[[], contextlib.AbstractContextManager[Any]]

_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name; a tied one once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def training_loss(output: Any, module: pl.LightningModule) -> Tensor | None:
    """The loss in what a user's ``training_step`` returned.

    Args:
        output: a tensor, a mapping with a ``"loss"``, or None to skip the batch.
        module: whose training step it was, for the error.

    Returns:
        The loss, or None for a skipped batch.

    Raises:
        MisconfigurationException: if there is no loss in it.

    Example:
        >>> training_loss({"loss": torch.tensor(2.0)}, pl.LightningModule())
        tensor(2.)
    """
    step = f"{type(module).__qualname__}.training_step"
    if output is None:
        return None
    if isinstance(output, Tensor):
        if output.numel() != 1:
            raise MisconfigurationException(
                f"{step} returned a loss of shape {tuple(output.shape)}; it must be a single number. Reduce it with "
                ".mean() or .sum()."
            )
        return output
    if isinstance(output, Mapping):
        if isinstance(output.get("loss"), Tensor):
            return training_loss(output["loss"], module)
        raise MisconfigurationException(
            f"{step} returned a dict with the keys {sorted(map(str, output))}, but under automatic optimization the "
            "key 'loss' must hold the loss tensor. Return {'loss': loss, ...}."
        )
    raise MisconfigurationException(
        f"{step} returned {type(output).__name__}. Return the loss tensor, a dict with a 'loss', or None to skip."
    )


def refuse_detached(loss: Tensor, module: pl.LightningModule) -> None:
    """Refuse a loss that no gradient can be computed of.

    Raises:
        MisconfigurationException: naming the training step it came from.
    """
    if not loss.requires_grad:
        raise MisconfigurationException(
            f"The loss of {type(module).__qualname__}.training_step depends on no trainable parameter: it was "
            "detached, or computed under torch.no_grad(). Return the loss with its graph."
        )


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


class ShadowBuffers:
    """Copies of a module's buffers for predictions to write on, so that the module's own stay as they are.

    A buffer is copied again only when its original or its copy was written to.

    Args:
        module: the module whose buffers are shadowed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[str, tuple[Tensor, int, Tensor, int]] = {}

    def fresh(self) -> dict[str, Tensor]:
        """Name to a copy that equals the buffer's present value."""
        fresh = {}
        for name, buffer in self._module.named_buffers():
            held = self._copies.get(name)
            if (
                held is None
                or held[0] is not buffer
                or held[1] != buffer._version
                or held[2]._version != held[3]
                or held[2].device != buffer.device
            ):
                shadow = buffer.detach().clone()
                held = self._copies[name] = (buffer, buffer._version, shadow, shadow._version)
            fresh[name] = held[2]
        return fresh


class _Step(nn.Module):
    """Gives ``torch.func.functional_call`` a forward: the training step together with its backward.

    The backward runs inside, while weights are still substituted: activation checkpointing reads them again.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(
        self,
        wanted: Sequence[Tensor],
        arguments: Sequence[Any],
        context: Context,
        counter: FlopCounter | None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]] | None:
        with context():
            loss = training_loss(self.module.training_step(*arguments), self.module)
        if loss is None:
            return None
        if counter is not None:
            counter.phase = "backward"
        refuse_detached(loss, self.module)
        return loss.detach(), torch.autograd.grad(loss, tuple(wanted), allow_unused=True)


def training_step_gradients(
    module: pl.LightningModule,
    weights: Mapping[str, Tensor],
    arguments: Sequence[Any],
    seed: int,
    buffers: ShadowBuffers,
    context: Context = contextlib.nullcontext,
    counter: FlopCounter | None = None,
) -> tuple[Tensor, dict[str, Tensor | None]] | None:
    """Loss and gradients of one training step at given weights, with no side effect on the module.

    Args:
        module: the user's module.
        weights: trainable parameters by name: the module's own, or others of the same shapes (stale ones).
        arguments: what ``training_step`` takes: micro-batch, batch index.
        seed: seeds the global generators for the pass.
        buffers: the module's shadow buffers.
        context: the Trainer's precision context around the forward pass.
        counter: counts FLOPs, switched from forward to backward between the two.

    Returns:
        The detached loss and a gradient per weight (None for one the loss does not depend on), or None if the
        training step returned None.

    Raises:
        MisconfigurationException: if the step returns no usable loss.
    """
    device = next(iter(weights.values())).device if weights else torch.device("cpu")
    own = dict(module.named_parameters())
    # A leaf with hooks, such as a logger's, is differentiated through an alias: these gradients are not its training's.
    weights = {name: w.detach().requires_grad_() if w._backward_hooks else w for name, w in weights.items()}
    replaced = {f"module.{name}": w for name, w in weights.items() if own[name] is not w}
    replaced |= {f"module.{name}": b for name, b in buffers.fresh().items()}
    eager = torch.compiler.set_stance("force_eager") if is_compiled(module) else contextlib.nullcontext()
    step = _Step(module)
    with torch.enable_grad(), without_side_effects(module), seeded(seed, device), eager:
        batch, *rest = arguments
        inputs = (tuple(weights.values()), (private_copy(batch), *rest), context, counter)
        result = torch.func.functional_call(step, replaced, inputs) if replaced else step(*inputs)
    if result is None:
        return None
    loss, gradients = result
    return loss, dict(zip(weights, gradients, strict=True))


def count_in_shadow(
    module: pl.LightningModule,
    arguments: Sequence[Any],
    context: Context = contextlib.nullcontext,
) -> FlopCounter:
    """Count a training step without touching the real one: for modules that run compiled, where nothing is seen.

    Args:
        module: the user's module.
        arguments: what ``training_step`` takes.
        context: the Trainer's precision context.

    Returns:
        The counter, after one forward and backward pass.
    """
    counter = FlopCounter()
    with counter:
        training_step_gradients(module, trainable(module), arguments, 0, ShadowBuffers(module), context, counter)
    return counter


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to the module or a part of it.

    A LightningModule that went through ``Trainer.fit(torch.compile(module))`` keeps the compiler in an attribute.
    """
    return any(
        hasattr(m, "_orig_mod") or m._compiled_call_impl is not None or getattr(m, "_compiler_ctx", None)
        for m in module.modules()
    )
