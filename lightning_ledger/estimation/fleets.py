"""One fleet for each number format in use."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ledger.control_variate import Layout
from lightning_ledger.estimation.checks import refuse_accumulation_hooks
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.estimation.settings import PredictionSettings, PredictionState
from lightning_ledger.fleet import Fleet, FleetBackend, Observers, PredictorRecipe
from lightning_ledger.precision import derive_seed
from lightning_ledger.program import Context, trainable


class Fleets:
    """One fleet for each number format, made when first asked for; all predict at one version of the weights.

    Args:
        module: the user's module.
        prediction: how to predict.
        state: steps taken, and stale weights if there are any.
        metering: of what predictions take.
        context: the Trainer's precision context.

    Attributes:
        layout: of the trainable parameters.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        prediction: PredictionSettings,
        state: PredictionState,
        metering: StepMetering,
        context: Context,
    ) -> None:
        self._module = module
        self._prediction = prediction
        self._state = state
        self._metering = metering
        self._context = context
        self._backend: FleetBackend | None = None
        self._fleets: dict[str, Fleet] = {}
        self._refreshed: dict[str, int] = {}  # format: version
        self.layout = Layout.of({})

    def prepare(self) -> None:
        """Begin anew whenever the set of trainable parameters changes.

        Raises:
            MisconfigurationException: if there is none, or a hook would see the estimate's parts.
        """
        parameters = trainable(self._module)
        if parameters and tuple(parameters) == self.layout.names:
            return
        if not parameters:
            raise MisconfigurationException(
                f"{type(self._module).__qualname__} has no trainable parameter: there is no gradient to predict. Set "
                "requires_grad=True on what should learn."
            )
        refuse_accumulation_hooks(parameters)
        self.layout = Layout.of(parameters)
        for fleet in self._fleets.values():
            fleet.close()
        self._fleets.clear()
        self._refreshed.clear()
        self._metering.restart()

    def ready(self, format: str) -> Fleet:
        """The format's fleet; every micro-batch of a batch is predicted with one version of the weights."""
        if format not in self._fleets:
            self._fleets[format] = self._make(format)
        fleet, version = self._fleets[format], self._version()
        if self._refreshed.get(format) != version:
            live, held = trainable(self._module), self._state.weights
            weights = live if held is None else {name: w.to(live[name].device) for name, w in held.items()}
            # Of the step they date from: a resumed run rounds stale weights as the uninterrupted one did.
            for account, work in fleet.refresh(weights, derive_seed(self._prediction.seed, version)).items():
                self._metering.charge(account, work)
            self._refreshed[format] = version
        return fleet

    def available(self) -> bool:
        """Whether there is a machine to predict the next batch."""
        return self._backend is None or self._backend.available()

    def forget_weights(self) -> None:
        """Send weights again: the machines that had them are gone."""
        self._refreshed.clear()

    def end_step(self, exact_flops: int) -> dict[str, float]:
        """A batch is done, whose exact passes took so many FLOPs; what to log of the machines."""
        return {} if self._backend is None else self._backend.end_step(exact_flops)

    def close(self) -> None:
        """Let the machines go."""
        backend, self._backend = self._backend, None
        self._fleets.clear()
        self._refreshed.clear()
        if backend is not None:
            backend.close()

    def _make(self, format: str) -> Fleet:
        p, metering = self._prediction, self._metering
        if self._backend is None:
            self._backend = p.fleet.open(self._module)
        recipe = PredictorRecipe(format, p.rounding, p.rotation, tuple(p.keep), p.engine, self._context)
        look = functools.partial(metering.look_at_prediction, format)
        uses = self._state.uses.setdefault(format, {})
        fleet = self._backend.fleet(recipe, self.layout, Observers(look, metering.charge_check, uses))
        metering.predicted[format] = fleet.work
        return fleet

    def _version(self) -> int:
        """The step that the weights in use date from; they are copied where they outlive it."""
        state, every = self._state, self._prediction.refresh_every
        if every == 1:
            state.weights, state.weights_at = None, state.steps
        else:
            live, due = trainable(self._module), state.steps - state.steps % every
            if state.weights is None or list(state.weights) != list(live) or state.weights_at < due:
                state.weights = {name: p.detach().clone().requires_grad_() for name, p in live.items()}
                state.weights_at = state.steps
        return state.weights_at
