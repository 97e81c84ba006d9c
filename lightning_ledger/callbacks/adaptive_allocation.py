"""Set the exact share while training, by what predictions have been worth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ledger.callbacks.common import checked_state, log_values, predicting_strategy, update_wandb_config
from lightning_ledger.callbacks.compute_ledger import ComputeLedger
from lightning_ledger.callbacks.control_variate import ControlVariate
from lightning_ledger.callbacks.gradient_prediction import GradientPrediction
from lightning_ledger.control_variate import Switch, watch
from lightning_ledger.estimation import Allocation, Centre, Correction, Evidence, allocate

C = TypeVar("C", bound=pl.Callback)


class AdaptiveAllocation(pl.Callback):
    """Every few steps, the exact share with the least variance times cost; no predictions at all where they don't pay.

        best share    k/n = sqrt(delta w / (1 - delta))        w = price of a prediction / price of an exact gradient

    rounded to the better whole k. delta comes from the running statistics of ``ControlVariate``, in the metric of an
    optimizer that has one, and w from the price book of ``ComputeLedger`` (simulated prices without it). A decision
    takes effect with the next batch and depends on earlier steps only, so the estimate stays unbiased. Training starts
    with ``GradientPrediction(exact=...)`` and goes on so until ten steps were observed.

    With ``fractional`` the share may fall below one micro-batch a batch: many batches then have no exact micro-batch,
    your ``training_step`` logs nothing in them, and a mean b of earlier residuals joins the estimate, one gradient set
    in memory. Such a draw is chosen only where the same statistics make it cheaper, b's own error included.
    ``"systematic"`` draws space exact micro-batches evenly. One random offset settles them all until the share changes,
    and within that time b and lam are not independent of the draws to come; ``"bernoulli"`` draws are, at a higher
    variance.

    With ``switch`` predictions stop once the upper end of R's 95% interval was above 1 for ``patience`` observations
    in a row, or at once where even perfect predictions cost more than exact gradients. Two predictions on one batch in
    ``probe_every``, under ``fleet/probe``, keep the statistics alive, and predictions come on again once that upper end
    is below ``1 - margin``.

    Logged with every step:

    =========================  =======================================================================================
    ``gpcv/allocated_share``   k/n as decided, or q where fewer than one in n are exact
    ``gpcv/predicting``        1 with predictions, 0 without
    =========================  =======================================================================================

    Every decision is also a mark in ``ledger.jsonl``: these two, and under ``gpcv/allocation_*`` what it rests on:
    ``delta`` with the ends of its interval ``delta_low`` and ``delta_high``, ``cost_ratio`` (w), ``relative_cost_low``
    and ``relative_cost_high``, and ``missed``, what b leaves of the mean residual, relative to V.

    Needs ``GradientPrediction`` and ``ControlVariate``, anywhere in the list of callbacks.

    Args:
        floor: least share of exact micro-batches.
        ceiling: greatest share while predicting; one micro-batch of a batch is always left to predictions.
        every: optimizer steps between decisions.
        fractional: allow fewer than one exact micro-batch a batch.
        draw: how to draw then: ``"systematic"`` or ``"bernoulli"``.
        switch: turn predictions off and on.
        patience: observations in a row that turn them off.
        margin: how far below 1 the upper end of R must be to turn them on again.
        probe_every: optimizer steps between probes; more where a prediction costs more than an exact gradient.
        exact_without: exact micro-batches of a batch while predictions are off; by default all.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> AdaptiveAllocation(every=5, fractional=True).draw
        'systematic'
    """

    KIND, SCHEMA = "lightning_ledger.AdaptiveAllocation", 1

    def __init__(
        self,
        floor: float = 0.01,
        ceiling: float = 1.0,
        every: int = 10,
        fractional: bool = False,
        draw: Literal["systematic", "bernoulli"] = "systematic",
        switch: bool = True,
        patience: int = 10,
        margin: float = 0.1,
        probe_every: int = 20,
        exact_without: int | None = None,
    ) -> None:
        if not 0 < floor <= ceiling <= 1:
            raise ValueError(f"floor={floor}, ceiling={ceiling}: pass 0 < floor <= ceiling <= 1, as shares k/n.")
        if draw not in ("systematic", "bernoulli"):
            raise ValueError(f"draw={draw!r} is unknown: pass 'systematic' or 'bernoulli'.")
        for name, value in (("every", every), ("probe_every", probe_every), ("exact_without", exact_without)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        self.floor, self.ceiling, self.every = floor, ceiling, every
        self.fractional, self.draw = fractional, draw
        self.switches = switch
        self.switch = self._fresh = Switch(patience=patience, margin=margin)
        self.probe_every, self.exact_without = probe_every, exact_without
        self._stepped: int | None = None
        self._observed = 0
        self._start: Allocation | None = None
        self._prediction: GradientPrediction | None = None
        self._correction: Correction | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: everything but the other callbacks."""
        return {**self.__dict__, "_prediction": None, "_correction": None}

    # ---------------------------------------------------------------------------------------------------------- set-up

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what leaves nothing to allocate; a checkpoint, loaded later, may know a better start."""
        if stage != "fit":
            return
        predicting_strategy(trainer, self)
        self._prediction, _ = _other(trainer, GradientPrediction), _other(trainer, ControlVariate)
        p = self._prediction.prediction
        if not 0 < p.exact < p.microbatches:
            raise MisconfigurationException(
                f"AdaptiveAllocation learns from batches with exact and predicted micro-batches, and "
                f"GradientPrediction(microbatches={p.microbatches}, exact={p.exact}) starts with none of one kind. "
                "Pass microbatches=2 or more and exact=1: where predictions do not pay they are turned off."
            )
        if self.ceiling * p.microbatches < 1 and not self.fractional:
            raise MisconfigurationException(
                f"ceiling={self.ceiling} is less than one in microbatches={p.microbatches}. Pass fractional=True, or a "
                f"ceiling of 1/{p.microbatches} or more."
            )
        if (self.exact_without or 0) > p.microbatches:
            raise MisconfigurationException(
                f"exact_without={self.exact_without} is more than microbatches={p.microbatches}: pass None for all."
            )
        self.switch, self._stepped, self._observed = self._fresh, None, 0
        self._start = Allocation(p.exact / p.microbatches, probe_every=self.probe_every)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the correction, when every callback is set up and restored; tell W&B what may be decided."""
        correction = self._correction = _other(trainer, ControlVariate).correction
        correction.allocation = self._start
        if not self.fractional:
            correction.centre = None
        elif correction.centre is None:
            correction.centre = Centre(decay=correction.decay)
        names = ("floor", "ceiling", "every", "fractional", "draw", "probe_every", "exact_without")
        settings = {name: getattr(self, name) for name in names}
        settings |= {"switch": self.switches, "patience": self.switch.patience, "margin": self.switch.margin}
        update_wandb_config(trainer, {f"gpcv/allocation_{name}": value for name, value in settings.items()})

    # -------------------------------------------------------------------------------------------------------- training

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Decide before the first batch of a step, when the ledger has closed the step before."""
        assert self._prediction is not None
        assert self._correction is not None
        steps = self._prediction.state.steps
        if steps == self._stepped:
            return
        self._stepped = steps
        evidence = self._correction.evidence()
        turned = self.switches and self._turned(self._correction, evidence)
        if turned or (self.switch.on and evidence is not None and steps % self.every == 0):
            self._decide(trainer, self._correction, evidence)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was allocated."""
        assert self._correction is not None
        log_values(pl_module, _values(self._correction.allocation))

    def _turned(self, correction: Correction, evidence: Evidence | None) -> bool:
        """Whether the switch turned, after at most one new observation."""
        before = self.switch
        hopeless = correction.cost_ratios[0] >= 1  # R = w for perfect predictions
        if before.on and hopeless:
            self.switch = replace(before, on=False, doubts=0)
        elif evidence is not None and correction.statistics is not None:
            observed = correction.statistics.steps
            if observed != self._observed:
                self._observed = observed
                self.switch = watch(before, evidence.relative_cost[1])
        return self.switch.on != before.on

    def _decide(self, trainer: pl.Trainer, correction: Correction, evidence: Evidence | None) -> None:
        assert self._prediction is not None
        n, before = self._prediction.prediction.microbatches, correction.allocation
        if self.switch.on:
            assert evidence is not None
            plan = allocate(evidence, n, self.floor, self.ceiling, self.draw if self.fractional else None)
            after = Allocation(plan.share, plan.draw, probe_every=self.probe_every)
        else:
            # However dear a prediction is, probes cost at most two exact gradients in probe_every steps.
            every = self.probe_every * math.ceil(max(1.0, correction.cost_ratios[0]))
            after = Allocation((self.exact_without or n) / n, predicting=False, probe_every=every)
        if after != before:
            # A new offset: what was decided depends on draws of the old one.
            self._prediction.state.phase = None
        correction.allocation = after
        numbers = {} if evidence is None else evidence.values()
        if not self.switch.on:
            numbers["cost_ratio"] = correction.cost_ratios[0]
        ledger = next((c for c in trainer.callbacks if isinstance(c, ComputeLedger)), None)  # type: ignore[attr-defined]
        if ledger is not None:
            ledger.ledger.mark(_values(after) | {f"gpcv/allocation_{name}": value for name, value in numbers.items()})
        if before is None or after.predicting != before.predicting:
            shown = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
            rank_zero_info(
                f"AdaptiveAllocation: predictions {'on' if after.predicting else 'off'} after step {self._stepped} "
                f"({shown})."
            )

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The switch, the allocation, and what was observed when they were decided."""
        allocation = self._correction.allocation if self._correction is not None else None
        return {
            "kind": self.KIND,
            "schema": self.SCHEMA,
            "on": self.switch.on,
            "doubts": self.switch.doubts,
            "stepped": self._stepped,
            "observed": self._observed,
            "allocation": None if allocation is None else dict(vars(allocation)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpoint was, within this run's own patience and margin."""
        state = checked_state(state_dict, self.KIND, self.SCHEMA)
        self.switch = replace(self.switch, on=state["on"], doubts=state["doubts"])
        self._stepped, self._observed = state["stepped"], state["observed"]
        if state["allocation"] is not None:
            self._start = Allocation(**state["allocation"])


def _values(allocation: Allocation | None) -> dict[str, float]:
    if allocation is None:
        return {}
    return {"gpcv/allocated_share": allocation.share, "gpcv/predicting": float(allocation.predicting)}


def _other(trainer: pl.Trainer, kind: type[C]) -> C:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, kind):
            return callback
    raise MisconfigurationException(
        f"AdaptiveAllocation divides the work of GradientPrediction and ControlVariate, and there is no "
        f"{kind.__name__} among the callbacks ({', '.join(type(callback).__name__ for callback in callbacks)}). Add "
        f"lightning_ledger.callbacks.{kind.__name__}(), or the fragment callbacks/adaptive.yaml."
    )
