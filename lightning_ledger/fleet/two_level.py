"""A fine predictor whose sum over a batch is itself estimated, from a coarse one's."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_ledger.control_variate import Gradients, Observation, WeightedSum
from lightning_ledger.fleet.base import Fleet, Job, Predictions
from lightning_ledger.flops import StepFlops
from lightning_ledger.ledger import Work


class TwoLevelFleet(Fleet):
    """Predicts one batch with a fine format, most of it by way of a coarse one.

        sum_i w_i h_i  ~  sum_i w_i h'_i  +  (n/m) sum_{i in M} w_i (h_i - h'_i)

    with h the fine predictions, h' the coarse ones and M a uniform draw of m micro-batches, none of them in C. Averaged
    over M the right side is the left one. On C every prediction is a fine one, so that the exact gradients correct h:
    the three levels telescope (``control_variate/multilevel.py``), with draws that are apart instead of independent,
    which adds ``-(2/n) Cov`` between the two differences to the variance.

    Args:
        coarse: predicts every micro-batch.
        fine: predicts those of M and C.
        members: M, as indices of micro-batches.

    Attributes:
        between: after :meth:`gather`, what this batch shows of fine against coarse predictions, if observed.
    """

    def __init__(self, coarse: Fleet, fine: Fleet, members: Collection[int]) -> None:
        self._coarse = coarse
        self._fine = fine
        self._members = frozenset(members)
        self._jobs: Sequence[Job] = ()
        self._observe = False
        self.between: Observation | None = None

    def refresh(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Work]:
        """Both have weights of their own."""
        raise NotImplementedError("refresh the coarse and the fine fleet: this one lives for a single batch")

    def submit(self, jobs: Sequence[Job], arguments: Sequence[Any], observe: bool) -> None:
        self._jobs, self._observe = jobs, observe
        members = self._members
        self._coarse.submit([replace(j, control=j.microbatch.index in members) for j in jobs], arguments, observe)
        fine = [replace(j, sample=True) for j in jobs if j.control or j.microbatch.index in members]
        self._fine.submit(fine, arguments, observe)

    def run_eagerly(self, reason: str) -> bool:
        coarse, fine = (fleet.run_eagerly(reason) for fleet in (self._coarse, self._fine))
        return coarse or fine

    def work(self, shape: Hashable) -> StepFlops | None:
        """Each has its own."""
        raise NotImplementedError("ask the coarse or the fine fleet: they count apart")

    def gather(self) -> Predictions:
        coarse, fine = self._coarse.gather(), self._fine.gather()
        work: dict[str, Work] = {}
        for account, done in (*coarse.work.items(), *fine.work.items()):
            # The coarse fleet's "control" is M, and none of M is exact.
            if done is coarse.work.get(account) and account == "fleet/control":
                account = "fleet/prediction"
            work[account] = work.get(account, Work()) + done
        skipped = sorted({*coarse.skipped, *fine.skipped})
        if skipped:
            return Predictions(work=work, skipped=skipped)
        n, m = len(self._jobs), len(self._members)
        if self._observe:
            self.between = self._compare(coarse, fine, n, m)
        # Outside C the batch is worth the whole estimate less what C has in it.
        terms: list[tuple[Gradients, float]] = [
            (coarse.rest, 1.0),
            (coarse.control, 1 - n / m),
            (fine.rest, n / m),
        ]
        rest = WeightedSum()
        for gradients, factor in terms:
            rest.add(gradients, factor)
        rest.add(fine.control, -1.0)
        return Predictions(
            control=fine.control,
            rest=rest.total,
            losses=coarse.losses,  # one predictor's for all: each exact loss corrects that of its own micro-batch
            squared_norms=torch.zeros(n, 0) if self._observe else None,  # few of h are known
            samples={i: sample for i, sample in fine.samples.items() if i not in self._members},
            work=work,
        )

    def _compare(self, coarse: Predictions, fine: Predictions, n: int, m: int) -> Observation:
        assert coarse.squared_norms is not None
        members = sorted(self._members)
        # Each fleet scales its samples by its own number of jobs.
        jobs = len(fine.losses)
        residuals = [n / jobs * fine.samples[i] - coarse.samples[i] for i in members]
        for i, sample in fine.samples.items():
            fine.samples[i] = n / jobs * sample
        return Observation(
            exact=fine.rest,
            control=coarse.control,
            rest=coarse.rest,
            squared_norms=coarse.squared_norms,
            residuals=torch.stack(residuals),
            loss_scale=m / n,
        )
