"""Run a user's training step as a function: (weights, micro-batch, seed) -> (loss, gradients).

Nothing else may come out of it. A prediction is a second look at the same batch: what it logs, counts, draws or
overwrites would be counted twice by the user's own bookkeeping.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_ledger.flops import FlopCounter
from lightning_ledger.microbatches import private_copy
from lightning_ledger.program.isolation import ShadowBuffers, generators_kept, seeded, without_side_effects

Context = Callable[[], contextlib.AbstractContextManager[Any]]


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
        tangent: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]] | None:
        with context():
            loss = training_loss(self.module.training_step(*arguments), self.module)
        if loss is None:
            return None
        if counter is not None:
            counter.phase = "backward"
        refuse_detached(loss, self.module)
        if not wanted:
            return loss.detach(), ()
        seed = None if tangent is None else tangent.to(loss).expand_as(loss)
        return loss.detach(), torch.autograd.grad(loss, tuple(wanted), seed, allow_unused=True)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run what ``torch.compile`` was applied to as it was before, traced or not."""
    with torch.compiler.set_stance("force_eager"), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


def differentiate(
    module: pl.LightningModule,
    wanted: Sequence[Tensor],
    replaced: Mapping[str, Tensor],
    arguments: Sequence[Any],
    seed: int,
    context: Context = contextlib.nullcontext,
    counter: FlopCounter | None = None,
    tangent: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]] | None:
    """The training step and its backward pass, with other tensors in place of some of the module's.

    Args:
        module: the user's module.
        wanted: leaves to differentiate by.
        replaced: tensors by parameter or buffer name.
        arguments: what ``training_step`` takes; it may write to them.
        seed: seeds the global generators for the pass.
        context: the Trainer's precision context around the forward pass.
        counter: counts FLOPs, switched from forward to backward between the two.
        tangent: what the loss's gradient starts from; 1 by default.

    Returns:
        The detached loss and a gradient for each of ``wanted`` (None where the loss does not depend on it), or None
        if the training step returned None.
    """
    device = wanted[0].device if wanted else torch.device("cpu")
    eager = _uncompiled() if is_compiled(module) else contextlib.nullcontext()
    step, inputs = _Step(module), (wanted, arguments, context, counter, tangent)
    names = {f"module.{name}": tensor for name, tensor in replaced.items()}
    with torch.enable_grad(), without_side_effects(module), seeded(seed, device), eager:
        return torch.func.functional_call(step, names, inputs) if names else step(*inputs)  # type: ignore[no-any-return]


def training_step_gradients(
    module: pl.LightningModule,
    weights: Mapping[str, Tensor],
    arguments: Sequence[Any],
    seed: int,
    buffers: ShadowBuffers,
    context: Context = contextlib.nullcontext,
    counter: FlopCounter | None = None,
    loss_scale: float = 1.0,
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
        loss_scale: multiplies the loss before its backward pass, and is divided out of the gradients: small ones
            underflow in float16 without it.

    Returns:
        The detached loss and a gradient per weight (None for one the loss does not depend on), or None if the
        training step returned None.

    Raises:
        MisconfigurationException: if the step returns no usable loss.
    """
    own = dict(module.named_parameters())
    # A leaf with hooks, such as a logger's, is differentiated through an alias: these gradients are not its training's.
    weights = {name: w.detach().requires_grad_() if w._backward_hooks else w for name, w in weights.items()}
    replaced = {name: w for name, w in weights.items() if own[name] is not w} | buffers.fresh()
    batch, *rest = arguments
    wanted, tangent = tuple(weights.values()), None if loss_scale == 1 else torch.tensor(loss_scale)
    result = differentiate(module, wanted, replaced, (private_copy(batch), *rest), seed, context, counter, tangent)
    if result is None:
        return None
    loss, gradients = result
    return loss, {name: unscaled(g, loss_scale) for name, g in zip(weights, gradients, strict=True)}


def loss_in_the_next_step(
    module: pl.LightningModule, arguments: Sequence[Any], seed: int, context: Context = contextlib.nullcontext
) -> float | None:
    """The loss of a training step that was run once before: attributes are as that left them.

    Buffers and random generators are put back in between, and everything after it.

    Args:
        module: the user's module.
        arguments: what ``training_step`` takes: micro-batch, batch index.
        seed: seeds the global generators for each of the two.
        context: the Trainer's precision context.

    Returns:
        The second loss, or None if the training step returned None.
    """
    device = next(module.parameters()).device
    eager = _uncompiled() if is_compiled(module) else contextlib.nullcontext()
    step, (batch, *rest), result = _Step(module), arguments, None
    with torch.enable_grad(), without_side_effects(module), eager:
        for _ in range(2):
            names = {f"module.{name}": buffer for name, buffer in ShadowBuffers(module).fresh().items()}
            inputs = ((), (private_copy(batch), *rest), context, None, None)
            with seeded(seed, device), generators_kept(module):
                result = torch.func.functional_call(step, names, inputs)
    return None if result is None else float(result[0])


def unscaled(gradient: Tensor | None, loss_scale: float) -> Tensor | None:
    """A gradient of a scaled loss as it would be without the scale."""
    return gradient if gradient is None or loss_scale == 1 else gradient / loss_scale


def loss_scale_of(precision: Precision) -> float:
    """By what the Trainer multiplies the loss before its backward pass, rounded down to a power of two.

    Multiplying and dividing by a power of two is exact.

    Args:
        precision: the Trainer's precision plugin.

    Returns:
        The scale; 1 where the plugin scales nothing.

    Example:
        >>> from lightning.pytorch.plugins import MixedPrecision
        >>> loss_scale_of(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1000.0)))
        512.0
        >>> loss_scale_of(Precision())
        1.0
    """
    scaler = getattr(precision, "scaler", None)
    return 1.0 if scaler is None else 2.0 ** (math.frexp(scaler.get_scale())[1] - 1)


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
