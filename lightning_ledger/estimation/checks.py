"""What predicted gradients cannot train rightly, refused before the first step.

Each refusal says what was found, why it fails, and the way out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ledger.microbatches import MicroBatch
from lightning_ledger.program import Context, seeded, training_loss, unchanged_buffers, without_side_effects

# Of a loss: float32 sums of a few thousand terms differ by about 1e-6, low-precision autocast by about 1e-2.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}


def refuse_unsupported(module: pl.LightningModule, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse what can be seen before any batch: manual optimization, L-BFGS, sparse embedding gradients.

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
    coarse: Sequence[MicroBatch],
    fine: Sequence[MicroBatch],
    arguments: Sequence[Any],
    context: Context = contextlib.nullcontext,
) -> bool:
    """Check once, numerically, that the batch's loss does not depend on where the batch is cut.

        sum over coarse pieces of w_j loss_j  =  sum over micro-batches of w_i loss_i

    holds if each sample's loss depends on no other sample and the weights are the loss's own. Run without gradients
    and in evaluation mode, so that dropout does not blur the comparison.

    Args:
        module: the user's module.
        coarse: the first batch in half as many pieces, with their weights.
        fine: the same batch in its micro-batches.
        arguments: the rest of what ``training_step`` takes.
        context: the Trainer's precision context.

    Returns:
        Whether a comparison was possible; where not, it should be tried on a later batch.

    Raises:
        MisconfigurationException: if the two sides differ, with both and their ratio.
    """
    if len(coarse) == len(fine):
        return False
    device = next((p.device for p in module.parameters()), torch.device("cpu"))

    def loss(part: MicroBatch, seed: int = 0) -> Tensor:
        with torch.no_grad(), without_side_effects(module), seeded(seed, device), context():
            value = training_loss(module.training_step(part.data, *arguments), module)
        return torch.tensor(float("nan")) if value is None else value.detach()

    modes = {layer: layer.training for layer in module.modules()}
    try:
        module.eval()
        with unchanged_buffers(module):
            whole = sum(part.weight * float(loss(part)) for part in coarse)
            parts = [loss(part) for part in fine]
            again = float(loss(fine[0], seed=1))
    finally:
        for layer, training in modes.items():
            layer.training = training
    apart = sum(part.weight * float(value) for part, value in zip(fine, parts, strict=True))
    if not (math.isfinite(whole) and math.isfinite(apart)):
        return False

    tolerance = max(TOLERANCE.get(parts[0].dtype, 3e-2), _autocast_tolerance(context))
    step = f"{type(module).__qualname__}.training_step"
    if abs(again - float(parts[0])) > tolerance * (1e-6 + abs(again)) / 10:
        rank_zero_warn(
            f"{step} draws random numbers even in evaluation mode, so whether its loss is separable over samples "
            "cannot be checked by comparing values. If each sample's loss depends on no other sample, silence this "
            "with GradientPrediction(check_separable=False)."
        )
        return True
    if abs(whole - apart) > tolerance * (1e-6 + abs(whole) + abs(apart)):
        ratio = whole / apart if apart else math.inf
        summed = abs(ratio - len(fine) / len(coarse)) < 0.02
        hint = (
            "That is the ratio of a loss summed over samples: pass weights='sum'."
            if summed
            else "If it averages over tokens, pass weights=TokenWeights(key=..., ignore_index=..., shift=...), with "
            "shift where the model shifts labels inside, as HF's do. If it compares samples with one another (in-batch "
            "negatives, batch statistics), no split of it is right: train it without GradientPrediction."
        )
        raise MisconfigurationException(
            f"The loss of {step} is not separable over samples: cut into {len(coarse)} pieces the first batch's loss "
            f"is {whole:.6g}, into {len(fine)} micro-batches {apart:.6g} (ratio {ratio:.4g}). {hint}"
        )
    return True


def _autocast_tolerance(context: Context) -> float:
    """The tolerance that the precision context asks for: autocast hides its dtype from the returned loss."""
    with context():
        return 3e-2 if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") else 0.0
