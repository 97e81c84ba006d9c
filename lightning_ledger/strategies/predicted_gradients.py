"""What every strategy of ours does with a step, and Lightning's with the rest.

One step, with every hook and charge:

    strategy.training_step(batch)
        micro-batches, weights, C and seeds            private generator: the global one is never touched
        fleet.submit(micro-batches)                    -> fleet/prediction, fleet/control, transfer/*
        exact training_step on C                       -> scarce/forward
        returns a loss whose gradient is only a scale
    strategy.backward(loss)
        precision.pre_backward                         on_before_backward; AMP scales the loss
        precision.backward                             leaves AMP's scale and the accumulation divisor in that gradient
        exact backward on C, scaled by it              -> scarce/backward
        fleet.gather; .grad += scale * correction      in place, never rebound
        precision.post_backward                        on_after_backward sees the final estimate
    clipping, on_before_optimizer_step, optimizer step: as always

With several processes the predictions are added before the last exact backward pass, and that pass averages what is in
``.grad``, as it would on its own: one all-reduce of gradients a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_ledger.estimation import Correction, GradientEstimator, PredictionSettings, PredictionState
from lightning_ledger.estimation.checks import refuse_unsupported
from lightning_ledger.estimation.ranks import Ranks
from lightning_ledger.estimation.sharded import ShardedEstimator
from lightning_ledger.ledger import Ledger
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import loss_scale_of


class PredictedGradients(Strategy):
    """Mixin that makes a Lightning strategy estimate gradients from predictions; callbacks configure it.

    Mixed into a strategy's bases before the strategy itself. It overrides the public hooks ``connect``, ``setup``,
    ``training_step``, ``backward`` and ``optimizer_step``, and leaves everything else alone.

    Attributes:
        weigh_ranks: weigh each process's batch by its share of what the loss averages over, not all alike.
    """

    weigh_ranks = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self._prediction: tuple[PredictionSettings, PredictionState] | None = None
        self._correction: Correction | None = None
        self._ledger: Ledger | None = None
        self._unit_samples: int | None = None
        self._prices: PriceBook | None = None
        self._estimator: GradientEstimator | ShardedEstimator | None = None
        self._evaluations = 0
        self._chooses_formats = False

    # -------------------------------------------------------------------------------------- called by callbacks' setup

    def predict_with(self, prediction: PredictionSettings, state: PredictionState) -> None:
        """Predict gradients so; called by ``GradientPrediction``."""
        if self._prediction is not None:
            raise MisconfigurationException(
                "Two GradientPrediction callbacks are configured, and each would predict the same gradients. Keep one: "
                "a fragment added with `callbacks+:` and the same callback in your own list make two."
            )
        self._prediction = prediction, state

    def correct_with(self, correction: Correction) -> None:
        """Correct predictions so; called by ``ControlVariate``."""
        if self._correction is not None:
            raise MisconfigurationException(
                "Two ControlVariate callbacks are configured, and each would correct the same predictions. Keep one: a "
                "fragment added with `callbacks+:` and the same callback in your own list make two."
            )
        self._correction = correction

    def choose_formats(self) -> None:
        """Several formats have somebody to choose among them; called by ``AdaptiveAllocation``."""
        self._chooses_formats = True

    def charge_to(self, ledger: Ledger, prices: PriceBook, unit_samples: int | None) -> None:
        """Charge this ledger for everything that runs, at these prices; called by ``ComputeLedger``."""
        self._ledger, self._prices, self._unit_samples = ledger, prices, unit_samples

    @property
    def loss_values(self) -> dict[str, float]:
        """The last batch's ``gpcv/loss`` and ``gpcv/exact_share``."""
        return self._estimator.loss_values if self._estimator is not None else {}

    @property
    def statistics_values(self) -> dict[str, float]:
        """The last batch's statistics: the other ``gpcv/*`` keys."""
        return self._estimator.statistics_values if self._estimator is not None else {}

    @property
    def ranks(self) -> Ranks:
        """The processes that train together; known once the Trainer has set up its environment."""
        return Ranks.of(self)

    # ---------------------------------------------------------------------------------------- what a base strategy adds

    @property
    def accumulates_apart(self) -> bool:
        """Whether autograd must add to ``.grad`` in no backward pass but the last of a step."""
        return False

    def before_forward(self) -> None:
        """Called before the passes of a batch."""

    def before_last_backward(self, loss: Tensor) -> Tensor:
        """Called before the last backward pass of a batch, with everything else in ``.grad``.

        Args:
            loss: whose backward pass it is.

        Returns:
            The loss to use: its backward pass averages ``.grad`` over the processes, where that is due.
        """
        return loss

    def after_last_backward(self) -> None:
        """Called after that pass."""

    # ----------------------------------------------------------------------------------------------- Lightning's hooks

    def connect(self, model: pl.LightningModule) -> None:
        """A new run begins, and callbacks will configure it."""
        super().connect(model)
        self._forget()

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse what cannot be trained rightly, then set up as the base strategy does."""
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        module = self.lightning_module
        assert module is not None
        if self._prediction is None:
            raise MisconfigurationException(_missing_prediction(self, trainer))
        prediction, state = self._prediction
        if self._correction is not None and prediction.exact == 0:
            raise MisconfigurationException(
                "ControlVariate corrects predictions by exact gradients; GradientPrediction(exact=0) computes none. "
                "Set exact=1 or more, or drop ControlVariate to train on predictions alone."
            )
        if prediction.others and not self._chooses_formats:
            raise MisconfigurationException(
                f"GradientPrediction(format={list(prediction.formats)}) names several formats to choose from, and "
                "nothing chooses: add lightning_ledger.callbacks.AdaptiveAllocation(), or pass one format."
            )
        refuse_unsupported(module, ())
        super().setup(trainer)
        refuse_unsupported(module, self.optimizers)
        # Rounding has a stream of its own on every process, as draws have.
        prediction = replace(prediction, seed=self.ranks.seed(prediction.seed))
        self._estimator = self.make_estimator(module, prediction, state)

    def make_estimator(
        self, module: pl.LightningModule, prediction: PredictionSettings, state: PredictionState
    ) -> GradientEstimator | ShardedEstimator:
        """What estimates the gradients."""
        ranks = self.ranks
        return GradientEstimator(
            module,
            prediction,
            state,
            self._correction,
            self._ledger,
            self._unit_samples,
            self._prices,
            self.precision_plugin.train_step_context,
            lambda: loss_scale_of(self.precision_plugin),
            ranks=ranks,
            weigh_ranks=self.weigh_ranks,
            before_last=self.before_last_backward if ranks.size > 1 else None,
            apart=self.accumulates_apart,
        )

    def teardown(self) -> None:
        """Let go of batches, predictions and rounded weights."""
        estimator = self._estimator
        self._forget()
        try:
            super().teardown()
        finally:
            if estimator is not None:
                estimator.close()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Submit the predictions and run the exact passes; the returned loss stands for the whole batch."""
        if self._estimator is None:
            return super().training_step(*args, **kwargs)
        self._evaluations += 1
        self.before_forward()
        return self._estimator.forward(*args, *kwargs.values())

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Leave the estimate in ``.grad`` before ``on_after_backward`` fires."""
        if self._estimator is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._estimator.backward()
        self.after_last_backward()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step as always, and notice an optimizer that does not evaluate its closure exactly once."""
        self._evaluations = 0
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if self._estimator is None:
            return result
        if self._evaluations != 1:
            name = type(getattr(optimizer, "optimizer", optimizer)).__qualname__
            raise MisconfigurationException(
                f"{name}.step evaluated its closure {self._evaluations} times; Lightning computes the gradient inside "
                "that closure, so it must run exactly once a step. "
                + (
                    f"Make {name}.step call the closure it is given and step on the gradients it leaves."
                    if not self._evaluations
                    else "Use a first-order optimizer: each evaluation draws other exact micro-batches."
                )
            )
        assert self._prediction is not None
        self._prediction[1].steps += 1
        return result


def _missing_prediction(strategy: object, trainer: pl.Trainer) -> str:
    callbacks = ", ".join(type(c).__name__ for c in trainer.callbacks) or "none"  # type: ignore[attr-defined]
    return (
        f"{type(strategy).__name__} needs the callback GradientPrediction, and it is not among the callbacks "
        f"({callbacks}). Add lightning_ledger.callbacks.GradientPrediction(). With several config files, a later "
        "file's `callbacks:` list replaces the earlier ones, so a fragment must come last: "
        "`--config yours.yaml --config callbacks/gpcv.yaml` (it appends, with `callbacks+:`)."
    )
