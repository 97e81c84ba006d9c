"""What every gradient predictor does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from lightning_ledger.flops import StepFlops
from lightning_ledger.program import Deliver

Prediction = tuple[Tensor, dict[str, Tensor | None]]


class GradientPredictor(ABC):
    """The plug point: anything that maps (weights, micro-batch, seed) to (loss, gradients).

    Two rules keep the corrected estimate unbiased, whatever the predictor's quality: a prediction depends on nothing
    but weights, micro-batch, seed and loss scale, and it has no effect on the module.
    """

    @abstractmethod
    def refresh(self, weights: Mapping[str, Tensor], seed: int = 0) -> None:
        """Take these weights for all predictions until the next call.

        Args:
            weights: trainable parameters by name. Kept as they are, not copied: pass clones to predict at stale
                weights, the live parameters to follow them.
            seed: of the stochastic rounding of the weights, if any.
        """

    @abstractmethod
    def predict(self, microbatch: Any, seed: int, *arguments: Any, loss_scale: float = 1.0) -> Prediction | None:
        """Predict one micro-batch's loss and gradients.

        Args:
            microbatch: the samples, structured as the user's batch.
            seed: of this micro-batch; the exact pass on it runs under the same one.
            *arguments: the rest of what ``training_step`` takes, such as the batch index.
            loss_scale: a power of two that multiplies the loss before its backward pass, and is divided out of the
                gradients: small ones underflow in float16 without it.

        Returns:
            The loss and a gradient per trainable parameter (None where the loss does not depend on it), or None if
            the training step skipped the micro-batch.
        """

    def predict_into(
        self, deliver: Deliver, microbatch: Any, seed: int, *arguments: Any, loss_scale: float = 1.0
    ) -> Tensor | None:
        """Predict, and deliver each gradient as soon as it is known: no gradient set needs to exist.

        Args:
            deliver: takes ``(name, gradient)``; it may keep the gradient, and must not change it.
            microbatch: as in :meth:`predict`.
            seed: as in :meth:`predict`.
            *arguments: as in :meth:`predict`.
            loss_scale: as in :meth:`predict`.

        Returns:
            The loss, or None if the training step skipped the micro-batch.
        """
        prediction = self.predict(microbatch, seed, *arguments, loss_scale=loss_scale)
        if prediction is None:
            return None
        loss, gradients = prediction
        for name, gradient in gradients.items():
            if gradient is not None:
                deliver(name, gradient)
        return loss

    @abstractmethod
    def work(self, shape: Hashable, skipped: bool = False) -> StepFlops | None:
        """FLOPs of one prediction on micro-batches of this shape.

        Args:
            shape: ``shape_key(microbatch)``.
            skipped: of one whose training step returned None: it had no backward pass.

        Returns:
            The count, or None before the first such prediction.
        """

    def run_eagerly(self, reason: str) -> bool:
        """Predict from now on by running the training step itself, because ``reason``.

        Returns:
            Whether that changes anything.
        """
        return False
