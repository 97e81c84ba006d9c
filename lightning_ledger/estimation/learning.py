"""What a batch teaches, by whichever process, about the predictions: statistics and cost ratios."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ledger.control_variate import Layout, Observation
from lightning_ledger.estimation.batch import Batch
from lightning_ledger.estimation.correction import Correction
from lightning_ledger.estimation.metering import StepMetering
from lightning_ledger.estimation.observing import mixed_drift, observation, observe_mixed
from lightning_ledger.estimation.ranks import Ranks
from lightning_ledger.estimation.settings import PredictionState
from lightning_ledger.fleet import Predictions
from lightning_ledger.fleet.two_level import TwoLevelFleet
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import trainable


class Learning:
    """Folds batches into the statistics; all processes do so at the same batches, whatever their draws show.

    Args:
        module: the user's module.
        state: keeps the drift of an uncorrected mix.
        correction: keeps all other statistics; None for the mix.
        metering: knows what passes took.
        prices: what that costs.
        ranks: the processes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        state: PredictionState,
        correction: Correction | None,
        metering: StepMetering,
        prices: PriceBook,
        ranks: Ranks,
    ) -> None:
        self._module = module
        self._state = state
        self._correction = correction
        self._metering = metering
        self._prices = prices
        self._ranks = ranks

    def observe(
        self,
        step: Batch,
        layout: Layout,
        captured: Mapping[int, Mapping[str, Tensor]],
        predictions: Predictions | None,
        probed: Predictions | None,
        scale: float,
    ) -> None:
        """Fold one batch in.

        Args:
            step: the batch.
            layout: names, layers and sampled coordinates.
            captured: exact gradients, scaled, by micro-batch.
            predictions: of the batch, if there are any; with norms and samples if it is to be observed.
            probed: of the two micro-batches of a probe, if there was one.
            scale: of the loss.
        """
        draw = step.draw
        if draw.probed:
            seen = None
            if probed is not None and scale and not probed.skipped:
                first = draw.probe[:1]
                seen = observation(layout, first, [captured[first[0]]], probed, scale * step.gain)
            self._learn(step, layout, seen, draw.probed, probe=True)
        if not step.due:
            return
        observed = predictions is not None and step.observing and scale
        exact = [captured[i] for i in step.control] if observed else []
        if self._correction is None:
            drift = None
            if predictions is not None and observed:
                drift = mixed_drift(layout, exact, predictions.rest, step.n, scale)
            self._state.mixed = observe_mixed(self._state.mixed, layout, drift, self._ranks)
            return
        seen = None
        if predictions is not None and observed:
            seen = observation(layout, step.control, exact, predictions, scale * step.gain)
        self._learn(step, layout, seen, draw.format)
        between, allocation = self._correction.between, self._correction.allocation
        if between is not None and allocation is not None and allocation.below:
            compared = step.fleet.between if isinstance(step.fleet, TwoLevelFleet) and observed else None
            if compared is not None or self._ranks.size > 1:
                between.optimizer = self._correction.optimizer
                lam = between.now(layout)
                between.observe(layout, compared, lam, trainable(self._module), ranks=self._ranks)

    def _learn(self, step: Batch, layout: Layout, seen: Observation | None, format: str, probe: bool = False) -> None:
        assert self._correction is not None
        if seen is None and self._ranks.size == 1:
            return
        correction = self._correction.of(format)
        lam = correction.now(layout)  # as at the beginning of the step: nothing was learned since
        correction.observe(layout, seen, lam, trainable(self._module), probe, self._ranks)
        if probe:
            self.keep_ratios(step, correction, format)

    def keep_ratios(self, step: Batch, correction: Correction, format: str) -> None:
        """What a prediction costs of an exact gradient, from this batch: the mean over processes.

        Args:
            step: the batch.
            correction: keeps it.
            format: of the predictions.
        """
        ratios = self._metering.cost_ratios(step.microbatches[0], self._prices, format)
        found = {"ratios": torch.tensor(ratios, dtype=torch.float64)} if ratios[1] > 0 else {}
        means = self._ranks.mean(found, {"ratios": 2})
        if "ratios" in means:
            now, at_one = means["ratios"].tolist()
            correction.cost_ratios = now, at_one
