"""What predicted gradients cannot train rightly, refused before the first step.

Each refusal says what was found, why it fails, and the way out.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_ledger.control_variate import WeightedSum
from lightning_ledger.microbatches import MicroBatch
from lightning_ledger.program import (
    Context,
    ShadowBuffers,
    loss_in_the_next_step,
    trainable,
    training_step_gradients,
)

# Relative differences of a loss and of a gradient that rounding explains, with room to spare: in float32 correct
# weights gave 1e-7 on a GPT-2, and one wrong token in a hundred 4e-3 of the gradient; bfloat16 rounds to 4e-3.
TOLERANCE = {torch.float64: (1e-6, 1e-6), torch.float32: (1e-3, 1e-4)}
LOW_PRECISION_TOLERANCE = (3e-2, 5e-2)


def refuse_unsupported(module: pl.LightningModule, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse what can be seen before any batch: manual optimization, L-BFGS, sparse or complex gradients.

    Args:
        module: the user's module.
        optimizers: as configured.

    Raises:
        MisconfigurationException: naming what was found and the way out.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__qualname__} uses manual optimization: it calls backward itself, so no prediction can be "
            "added to its gradients. Use automatic optimization, or drop GradientPrediction and keep ComputeLedger, "
            "which works under any strategy."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(
                "LBFGS evaluates its closure several times a step and assumes that each time shows the same function, "
                "which a random draw of exact micro-batches is not. Use a first-order optimizer such as AdamW or SGD."
            )
    for path, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            raise MisconfigurationException(
                f"The embedding {path!r} has sparse=True: its gradient {path}.weight is a sparse tensor, which cannot "
                "be summed in place with predictions. Build it with sparse=False."
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise MisconfigurationException(
                f"The parameter {name!r} is complex ({parameter.dtype}); norms and statistics of gradients are those "
                "of real numbers. Keep it as a real parameter of shape [..., 2], and use torch.view_as_complex(it)."
            )


def refuse_accumulation_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Refuse hooks that see a gradient before it is complete, such as an optimizer that steps in the backward pass.

    Args:
        parameters: trainable ones, by name.

    Raises:
        MisconfigurationException: naming one.
    """
    for name, parameter in parameters.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise MisconfigurationException(
                f"{name} has a post-accumulate-grad hook. It would run after the exact backward pass and before the "
                "predictions are added, on a part of the gradient. Move what it does to on_after_backward or to the "
                "optimizer, or train without GradientPrediction."
            )


def refuse_batchnorm(module: nn.Module) -> None:
    """Refuse training-mode BatchNorm: it couples the samples of a batch, so micro-batches change its result.

    Args:
        module: in the mode it trains in.

    Raises:
        MisconfigurationException: naming the layers.
    """
    coupled = [path for path, layer in module.named_modules() if isinstance(layer, _BatchNorm) and layer.training]
    if coupled:
        raise MisconfigurationException(
            f"BatchNorm in training mode at {', '.join(map(repr, coupled[:5]))}{' ...' if coupled[5:] else ''}: it "
            "normalises with the statistics of the batch it sees, so the gradient of a micro-batch is not its share of "
            "the full batch's. Replace it (BatchNorm2d(c) -> GroupNorm(32, c)), or freeze its statistics by keeping "
            "these layers in eval(), or pass GradientPrediction(allow_batchnorm=True): each micro-batch is then "
            "normalised by itself (ghost batch normalisation), and running statistics see exact micro-batches only."
        )


def check_separable(
    module: pl.LightningModule,
    cuts: Sequence[tuple[Any, Sequence[MicroBatch]]],
    arguments: Sequence[Any],
    context: Context = contextlib.nullcontext,
    batchnorm: bool = False,
    loss_scale: float = 1.0,
) -> bool:
    """Check once, numerically, that loss and gradient of a batch do not depend on where it is cut.

        loss(piece) = sum over its parts of w_i loss(part_i),  and the same for gradients

    holds if each sample's loss depends on no other sample and the weights are the loss's own. Losses alone would not
    tell: at random weights all samples have nearly the same loss, whatever the weights. Dropout is switched off, so
    that it does not blur the comparison. The first piece's loss must also be the same when its step is run a second
    time, from the attributes that the first time left.

    Args:
        module: the user's module.
        cuts: pieces of the first batch, each with its parts and their weights within the piece.
        arguments: the rest of what ``training_step`` takes.
        context: the Trainer's precision context.
        batchnorm: samples coupled by training-mode BatchNorm are accepted: compare in evaluation mode.
        loss_scale: of the backward passes; gradients that underflow could not be compared.

    Returns:
        Whether a comparison was possible; where not, it should be tried on a later batch.

    Raises:
        MisconfigurationException: if the two sides differ, with both and their ratio; if state is carried from step to
            step.
    """
    cuts = [(piece, parts) for piece, parts in cuts if len(parts) > 1]
    if not cuts:
        return False
    step = f"{type(module).__qualname__}.training_step"
    loss_tolerance, gradient_tolerance = _tolerances(module, context)
    summed = functools.partial(_Sum.of, module, arguments=arguments, context=context, loss_scale=loss_scale)
    # In training mode, with dropout layers alone switched off; a step that still draws random numbers is tried in
    # evaluation mode, where functional dropout is off as well.
    for mode in (_without_dropout_layers, _evaluating)[batchnorm:]:
        with mode(module):
            again = summed([(cuts[0][0], 1.0)], seed=1).loss
            for number, (piece, parts) in enumerate(cuts):
                whole = summed([(piece, 1.0)])
                if number == 0 and again != whole.loss:
                    break  # it draws random numbers
                if number == 0:
                    next_loss = loss_in_the_next_step(module, (piece, *arguments), 0, context)
                    _refuse_carried_state(step, whole.loss, next_loss)
                apart = summed([(part.data, part.weight) for part in parts])
                if not all(math.isfinite(x) for side in (whole, apart) for x in (side.loss, side.size)):
                    return False
                slack = loss_tolerance * (1e-6 + abs(whole.loss) + abs(apart.loss))
                losses_differ = abs(whole.loss - apart.loss) > slack
                difference = whole.distance(apart) / (1e-12 + whole.size + apart.size)
                if losses_differ or difference > gradient_tolerance:
                    raise MisconfigurationException(
                        _not_separable(step, whole.loss, apart.loss, difference, losses_differ)
                    )
            else:
                return True
        if not math.isfinite(again):
            return False
    rank_zero_warn(
        f"{step} draws random numbers even in evaluation mode, so whether its loss is separable over samples cannot be "
        "checked by comparing values. If each sample's loss depends on no other sample, silence this with "
        "GradientPrediction(check_separable=False)."
    )
    return True


def _refuse_carried_state(step: str, fresh: float, again: float | None) -> None:
    # A hidden state tells little at random weights; the same operations on the same numbers agree to the bit.
    if again is not None and abs(fresh - again) > 1e-7 * abs(fresh):
        raise MisconfigurationException(
            f"{step} carries state in attributes from one call to the next: a piece of the batch has loss {fresh:.6g}, "
            f"and {again:.6g} when it is run once more. Each micro-batch would begin with what another one left (a "
            "hidden state of other samples, or a counter that moves once a micro-batch). Begin each call anew, move "
            "what counts batches to on_train_batch_start, or train without GradientPrediction. If that difference "
            "does no harm, pass GradientPrediction(check_separable=False)."
        )


@contextlib.contextmanager
def _modes(module: nn.Module, switched_off: Callable[[nn.Module], bool]) -> Iterator[None]:
    modes = {layer: layer.training for layer in module.modules()}
    try:
        for layer in modes:
            if switched_off(layer):
                layer.training = False
        yield
    finally:
        for layer, training in modes.items():
            layer.training = training


def _without_dropout_layers(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    return _modes(module, lambda layer: isinstance(layer, _DropoutNd))


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    # cuDNN's recurrent layers have no backward pass in evaluation mode; PyTorch's own have one.
    enabled, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    try:
        with _modes(module, lambda layer: True):
            yield
    finally:
        torch.backends.cudnn.enabled = enabled


class _Sum(NamedTuple):
    """Weighted sums over parts of a batch: of losses, of gradients, and of the gradients' norms."""

    loss: float
    gradient: dict[str, Tensor]
    size: float

    @classmethod
    def of(
        cls,
        module: pl.LightningModule,
        parts: Sequence[tuple[Any, float]],
        arguments: Sequence[Any],
        context: Context,
        seed: int = 0,
        loss_scale: float = 1.0,
    ) -> _Sum:
        weights, buffers = trainable(module), ShadowBuffers(module)
        loss, total, size = 0.0, WeightedSum(), 0.0
        for data, weight in parts:
            result = training_step_gradients(
                module, weights, (data, *arguments), seed, buffers, context, loss_scale=loss_scale
            )
            if result is None:
                return cls(math.nan, {}, math.nan)
            loss += weight * float(result[0])
            total.add(result[1], weight)
            size += weight * _norm(g for g in result[1].values() if g is not None)
        return cls(loss, total.total, size)

    def distance(self, other: _Sum) -> float:
        names = self.gradient.keys() | other.gradient.keys()
        zero = torch.zeros(())
        return _norm(self.gradient.get(n, zero) - other.gradient.get(n, zero) for n in names)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(t.float().norm()) for t in tensors))


def _tolerances(module: pl.LightningModule, context: Context) -> tuple[float, float]:
    """Of the loss and of the gradient; autocast hides its own dtype from both, so the context is asked."""
    with context():
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return LOW_PRECISION_TOLERANCE
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}  # frozen low-precision layers round too
    return max(TOLERANCE.get(kind, LOW_PRECISION_TOLERANCE) for kind in kinds)


def _not_separable(step: str, whole: float, apart: float, difference: float, losses_differ: bool) -> str:
    ratio = whole / apart if apart else math.inf
    if losses_differ and abs(ratio - 2) < 0.02:
        hint = "That is the ratio of a loss summed over samples: pass weights='sum'."
    else:
        hint = (
            "If it averages over tokens, pass weights=TokenWeights(key=..., ignore_index=..., shift=...), with shift "
            "where the model shifts labels inside, as HF's do. If it compares samples with one another (in-batch "
            "negatives, batch statistics), no split of it is right: train it without GradientPrediction."
        )
    return (
        f"The loss of {step} is not separable over samples: a piece of a batch has loss {whole:.6g} in one, "
        f"and {apart:.6g} as the weighted sum of its two halves (ratio {ratio:.4g}); the two gradients differ by "
        f"{difference:.2g} of their size. {hint}"
    )
