"""Set the exact share while training, by what predictions have been worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ledger.callbacks.common import (
    C,
    callback_of,
    checked_state,
    log_values,
    predicting_strategy,
    update_wandb_config,
)
from lightning_ledger.callbacks.compute_ledger import ComputeLedger
from lightning_ledger.callbacks.control_variate import ControlVariate
from lightning_ledger.callbacks.gradient_prediction import GradientPrediction
from lightning_ledger.control_variate import Switch, watch
from lightning_ledger.estimation import Allocation, Centre, Correction, Evidence, Levels, allocate, allocate_levels
from lightning_ledger.estimation.allocation import least_cost
from lightning_ledger.prices import PriceBook

# How often `probe_every` goes into the longest time between two probes.
LONGEST = 8


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

    Of a list of formats, ``GradientPrediction(format=["int8", "int4"])``, that with the least R is used, each at its
    own price (``PriceBook(fleet_formats=...)``). The others are probed: two predictions of each on some batches, under
    ``fleet/probe``, at every step until as much is known of them as it takes to choose, and on every
    ``probe_every``-th step from then on, in turn. Another format must promise an R lower by ``margin`` to be chosen.

    With ``multilevel``, and two formats, the coarser first, a batch may also be spent on three levels: the coarser
    format predicts every micro-batch, the finer one corrects it on m of them, and exact gradients correct that on k
    (see ``control_variate/multilevel.py``). They are used where their R, with the best m and k, is lower than that of
    either format alone. Until the difference between the formats was measured it counts as the worst that their own
    errors allow, ``tr Cov(h - h') <= (sqrt(D) + sqrt(D'))^2``.

    With ``switch`` predictions stop once the upper end of R's 95% interval was above 1 for ``patience`` observations
    in a row; of several formats, in every one. Probes keep the statistics alive, and predictions come on again once
    that upper end is below ``1 - margin``. They never start where even perfect predictions, with the least exact share,
    cost more than exact gradients (w + 1/n >= 1); then nothing is probed either.

    Logged with every step:

    =========================  =======================================================================================
    ``gpcv/allocated_share``   k/n as decided, or q where fewer than one in n are exact
    ``gpcv/predicting``        1 with predictions, 0 without
    ``gpcv/format_index``      which of several formats predicts, counted from 0
    ``gpcv/between_share``     m/n, with ``multilevel``; 0 where one format predicts alone
    =========================  =======================================================================================

    Every decision is also a mark in ``ledger.jsonl``: these, and under ``gpcv/allocation_*`` what it rests on:
    ``delta`` with the ends of its interval ``delta_low`` and ``delta_high``, ``cost_ratio`` (w), ``relative_cost_low``
    and ``relative_cost_high``, and ``missed``, what b leaves of the mean residual, relative to V. Of several formats
    they are those of the one decided for; ``relative_cost_0``, ``relative_cost_1``, ... are R of each at its best
    share, and ``relative_cost_levels`` that of three levels, with ``between_delta``, the variance of their difference
    relative to V.

    Needs ``GradientPrediction`` and ``ControlVariate``, anywhere in the list of callbacks.

    Args:
        floor: least share of exact micro-batches.
        ceiling: greatest share while predicting; one micro-batch of a batch is always left to predictions.
        every: optimizer steps between decisions.
        fractional: allow fewer than one exact micro-batch a batch.
        draw: how to draw then: ``"systematic"`` or ``"bernoulli"``.
        switch: turn predictions off and on.
        patience: observations in a row that turn them off.
        margin: how far below 1 the upper end of R must be to turn them on again, and by what part R of another format
            must be lower to change to it.
        probe_every: optimizer steps between probes. Without predictions each that speaks against them doubles it, up
            to eight times.
        exact_without: exact micro-batches of a batch while predictions are off; by default all.
        multilevel: allow three levels of two formats, the coarser one first.

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
        multilevel: bool = False,
    ) -> None:
        if not 0 < floor <= ceiling <= 1:
            raise ValueError(f"floor={floor}, ceiling={ceiling}: pass 0 < floor <= ceiling <= 1, as shares k/n.")
        if draw not in ("systematic", "bernoulli"):
            raise ValueError(f"draw={draw!r} is unknown: pass 'systematic' or 'bernoulli'.")
        for name, value in (("every", every), ("probe_every", probe_every), ("exact_without", exact_without)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        self.floor, self.ceiling, self.every = floor, ceiling, every
        self.fractional, self.draw, self.multilevel = fractional, draw, multilevel
        self.switches = switch
        self.switch = self._fresh = Switch(patience=patience, margin=margin)
        self.probe_every, self.exact_without = probe_every, exact_without
        self._stepped: int | None = None
        self._observed = 0
        self._start: Allocation | None = None
        self._prices: dict[str, float] = {}
        self._prediction: GradientPrediction | None = None
        self._correction: Correction | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: everything but the other callbacks."""
        return {**self.__dict__, "_prediction": None, "_correction": None}

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments."""
        names = ("floor", "ceiling", "every", "fractional", "draw", "probe_every", "exact_without", "multilevel")
        settings = {name: getattr(self, name) for name in names}
        return settings | {"switch": self.switches, "patience": self.switch.patience, "margin": self.switch.margin}

    # ---------------------------------------------------------------------------------------------------------- set-up

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what leaves nothing to allocate; a checkpoint, loaded later, may know a better start."""
        if stage != "fit":
            return
        predicting_strategy(trainer, self).choose_formats()
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
        if self.multilevel and (len(p.formats) != 2 or p.microbatches < 3):
            raise MisconfigurationException(
                f"multilevel=True spends a batch on two formats and exact gradients, and GradientPrediction("
                f"format={list(p.formats)}, microbatches={p.microbatches}) leaves no room for that. Pass "
                "format=[coarser, finer], such as ['int4', 'int8'], and microbatches=3 or more."
            )
        if self.fractional and trainer.world_size > 1:
            raise MisconfigurationException(
                f"fractional=True on {trainer.world_size} processes: where one of them draws no exact micro-batch it "
                "runs no training_step, and the others' self.log(..., sync_dist=True) would wait for it for ever. Pass "
                "fractional=False."
            )
        if (self.exact_without or 0) > p.microbatches:
            raise MisconfigurationException(
                f"exact_without={self.exact_without} is more than microbatches={p.microbatches}: pass None for all."
            )
        self.switch, self._stepped, self._observed = self._fresh, None, 0
        self._start = Allocation(p.format, p.exact / p.microbatches, probe_every=self.probe_every)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the correction, when every callback is set up and restored; tell W&B what may be decided."""
        correction = self._correction = _other(trainer, ControlVariate).correction
        assert self._start is not None
        self._reprice(correction, trainer)
        correction.allocate(self._start)
        if not self.fractional:
            correction.centre = None
        elif correction.centre is None:
            correction.centre = Centre(decay=correction.decay)
        update_wandb_config(trainer, {f"gpcv/allocation_{name}": value for name, value in self.settings.items()})

    def _reprice(self, correction: Correction, trainer: pl.Trainer) -> None:
        """What predictions are expected to cost; what a checkpoint knows of that is brought to this run's prices."""
        assert self._prediction is not None
        assert self._start is not None
        ledger = callback_of(trainer, ComputeLedger)
        book = PriceBook() if ledger is None else ledger.prices
        before, self._prices = self._prices, {f: least_cost(book, f) for f in self._prediction.prediction.formats}
        if before and before != self._prices:
            for name, price in self._prices.items():
                known = correction if name == self._start.format else correction.others.get(name)
                if known is not None and before.get(name):
                    known.cost_ratios = known.cost_ratios[0] * price / before[name], known.cost_ratios[1]
            self._start = replace(self._start, probe_every=self.probe_every)

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
        evidence = self._evidence(self._correction)
        turned = self.switches and self._turned(self._correction, evidence)
        if turned or (self.switch.on and evidence and steps % self.every == 0):
            self._decide(trainer, self._correction, evidence)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was allocated."""
        assert self._correction is not None
        log_values(pl_module, self._values(self._correction.allocation))

    def _values(self, allocation: Allocation | None) -> dict[str, float]:
        assert self._prediction is not None
        if allocation is None:
            return {}
        values = {"gpcv/allocated_share": allocation.share, "gpcv/predicting": float(allocation.predicting)}
        formats = self._prediction.prediction.formats
        if len(formats) > 1:
            values["gpcv/format_index"] = float(formats.index(allocation.format))
        if self.multilevel:
            values["gpcv/between_share"] = allocation.between
        return values

    def _evidence(self, correction: Correction) -> dict[str, Evidence]:
        """What is known of the format in use, and of the others where that is comparable: in the same metric."""
        assert self._prediction is not None
        active = correction.evidence()
        if active is None:
            return {}
        found: dict[str, Evidence] = {}
        for name in self._prediction.prediction.formats:
            of_format = correction.of(name)
            seen = active if of_format is correction else of_format.evidence()
            if seen is not None and of_format.in_metric == correction.in_metric:
                found[name] = seen
        return found

    def _turned(self, correction: Correction, evidence: Mapping[str, Evidence]) -> bool:
        """Whether the switch turned, after at most one new observation; a no to a probe defers the next one."""
        before, allocation = self.switch, correction.allocation
        assert allocation is not None
        if self._hopeless(correction):
            self.switch = replace(before, on=False, doubts=0)
        elif evidence:
            known = [correction.of(name).statistics for name in evidence]
            observed = sum(statistics.steps for statistics in known if statistics is not None)
            if observed != self._observed:
                self._observed = observed
                self.switch = watch(before, min(seen.relative_cost[1] for seen in evidence.values()))
                if not (before.on or self.switch.on):
                    every = min(2 * allocation.probe_every, LONGEST * self.probe_every)
                    correction.allocate(replace(allocation, probe_every=every))
        return self.switch.on != before.on

    def _hopeless(self, correction: Correction) -> bool:
        """Whether even perfect predictions in the cheapest format, corrected least, cost more than exact gradients."""
        assert self._prediction is not None
        least = self.floor if self.fractional else max(self.floor, 1 / self._prediction.prediction.microbatches)
        return least + min(correction.of(f).cost_ratios[0] or price for f, price in self._prices.items()) >= 1

    def _levels(self, correction: Correction, evidence: Mapping[str, Evidence]) -> tuple[Levels | None, float]:
        """The best of three levels, and the variance between the two formats, relative to V."""
        assert self._prediction is not None
        p = self._prediction.prediction
        if not self.multilevel or not set(p.formats) <= evidence.keys():
            return None, math.nan
        coarse, fine = (evidence[name] for name in p.formats)
        residuals = [seen.residual / seen.variance for seen in (coarse, fine)]
        delta = sum(math.sqrt(max(residual, 0.0)) for residual in residuals) ** 2
        between = correction.between
        if between is not None and between.in_metric == correction.in_metric:
            between.cost_ratios = correction.of(p.formats[0]).cost_ratios
            seen = between.evidence()
            if seen is not None:
                delta = max(seen.residual, 0.0) / fine.variance
        costs = coarse.cost, fine.cost
        return allocate_levels(delta, residuals[1], costs, p.microbatches, self.floor, self.ceiling), delta

    def _decide(self, trainer: pl.Trainer, correction: Correction, evidence: Mapping[str, Evidence]) -> None:
        assert self._prediction is not None
        p, before = self._prediction.prediction, correction.allocation
        assert before is not None
        numbers: dict[str, float] = {}
        if self.switch.on:
            draw, ceiling = self.draw if self.fractional else None, self.ceiling
            if self.switches:  # n w + k > n would buy less than n exact gradients, for more
                ceiling = min(ceiling, 1 - min(seen.cost for seen in evidence.values()))
            found = allocate(evidence, before.format, p.microbatches, self.floor, ceiling, draw, self.switch.margin)
            plan = next(iter(found.values()))
            after = Allocation(plan.name, plan.share, plan.draw, probe_every=self.probe_every)
            levels, between = self._levels(correction, evidence)
            if levels is not None:
                numbers |= {"relative_cost_levels": levels.relative_cost, "between_delta": between}
                favoured = (1 - self.switch.margin) ** (1 if before.below else -1)
                if levels.relative_cost * favoured < plan.relative_cost:
                    coarse, fine = p.formats
                    after = Allocation(fine, levels.share, "uniform", True, self.probe_every, coarse, levels.between)
            if p.others:
                numbers |= {f"relative_cost_{p.formats.index(x.name)}": x.relative_cost for x in found.values()}
        else:
            every, share = 0 if self._hopeless(correction) else self.probe_every, self.exact_without or p.microbatches
            after = Allocation(before.format, share / p.microbatches, predicting=False, probe_every=every)
            numbers["cost_ratio"] = correction.cost_ratios[0] or self._prices[before.format]
        if after != before:
            # A new offset: what was decided depends on draws of the old one.
            self._prediction.state.phase = None
        correction.allocate(after)
        if after.format in evidence:
            numbers = evidence[after.format].values() | numbers
        if (ledger := callback_of(trainer, ComputeLedger)) is not None:
            decided = {f"gpcv/allocation_{name}": value for name, value in numbers.items()}
            ledger.ledger.mark(self._values(after) | decided)
        changed = [name for name in ("predicting", "format", "below") if getattr(after, name) != getattr(before, name)]
        if changed:
            shown = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
            formats = " over ".join(filter(None, (after.format, after.below)))
            what = f"predictions in {formats}" if after.predicting else "predictions off"
            rank_zero_info(f"AdaptiveAllocation: {what} after step {self._stepped} ({shown}).")

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
            "prices": self._prices,
            "allocation": None if allocation is None else dict(vars(allocation)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpoint was, within this run's own patience and margin."""
        state = checked_state(state_dict, self.KIND, self.SCHEMA)
        self.switch = replace(self.switch, on=state["on"], doubts=state["doubts"])
        self._stepped, self._observed = state["stepped"], state["observed"]
        self._prices = dict(state.get("prices", {}))
        if state["allocation"] is not None:
            assert self._prediction is not None
            start = self._prediction.prediction.format  # an earlier version knew one format
            saved = Allocation(**{"format": start, **state["allocation"]})
            if {saved.format, saved.below} - {""} <= set(self._prediction.prediction.formats):
                self._start = replace(saved, probe_every=self.probe_every) if saved.predicting else saved


def _other(trainer: pl.Trainer, kind: type[C]) -> C:
    if (callback := callback_of(trainer, kind)) is not None:
        return callback
    names = ", ".join(type(callback).__name__ for callback in trainer.callbacks)  # type: ignore[attr-defined]
    raise MisconfigurationException(
        f"AdaptiveAllocation divides the work of GradientPrediction and ControlVariate, and there is no "
        f"{kind.__name__} among the callbacks ({names}). Add "
        f"lightning_ledger.callbacks.{kind.__name__}(), or the fragment callbacks/adaptive.yaml."
    )
