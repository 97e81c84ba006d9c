"""A user's training step as a function: (weights, micro-batch, seed) -> (loss, gradients)."""

from lightning_ledger.program.capture import Deliver, GradientProgram, NotCapturable, capture
from lightning_ledger.program.isolation import (
    ShadowBuffers,
    seeded,
    without_power_iteration,
    without_side_effects,
)
from lightning_ledger.program.step import (
    Context,
    count_in_shadow,
    is_compiled,
    loss_in_the_next_step,
    loss_scale_of,
    refuse_detached,
    trainable,
    training_loss,
    training_step_gradients,
)

__all__ = [
    "Context",
    "Deliver",
    "GradientProgram",
    "NotCapturable",
    "ShadowBuffers",
    "capture",
    "count_in_shadow",
    "is_compiled",
    "loss_in_the_next_step",
    "loss_scale_of",
    "refuse_detached",
    "seeded",
    "trainable",
    "training_loss",
    "training_step_gradients",
    "without_power_iteration",
    "without_side_effects",
]
