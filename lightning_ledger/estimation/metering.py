"""Meters what a step runs: FLOPs counted once per shape, and charged to a ledger."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ledger.flops import FlopCounter, Phase, StepFlops, UncountedWarning
from lightning_ledger.ledger import Ledger, Work
from lightning_ledger.microbatches import MicroBatch, shape_key
from lightning_ledger.prices import PriceBook
from lightning_ledger.program import Context, count_in_shadow, is_compiled

# Below this share of lowered FLOPs a format's figures are no longer about that format.
LOWERED_SHARE = 0.8


class StepMetering:
    """The FLOPs of every micro-batch shape, and the ledger they are charged to.

    Args:
        module: the user's module.
        ledger: charged if given; without one the counts still serve the cost ratios.
        unit_samples: samples in one forward-equivalent; by default those of the first micro-batch.
        context: the Trainer's precision context.

    Attributes:
        predicted: FLOPs of a prediction by shape, once counted, for each number format in use.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        ledger: Ledger | None,
        unit_samples: int | None,
        context: Context,
    ) -> None:
        self._module = module
        self._ledger = ledger
        self._unit_samples = unit_samples
        self._context = context
        self._exact: dict[Hashable, StepFlops] = {}
        self._told_share: set[str] = set()
        self._told_unlowered: set[tuple[str, str, str]] = set()
        self._warn_uncounted = UncountedWarning()
        self.predicted: dict[str, Callable[[Hashable], StepFlops | None]] = {}

    def restart(self) -> None:
        """Forget the counts: another set of trainable parameters has another backward pass."""
        self._exact.clear()
        self.predicted.clear()

    def counter(self, part: MicroBatch, arguments: Sequence[Any]) -> FlopCounter | None:
        """A counter to run the exact pass in, on the first of each shape; a compiled module is counted apart."""
        shape = shape_key(part.data)
        if shape in self._exact:
            return None
        if not is_compiled(self._module):
            return FlopCounter()
        shadow = count_in_shadow(self._module, (part.data, *arguments), self._context)
        self.keep(part, shadow)
        self.charge("setup/checks", shadow.counts().work())
        return None

    def keep(self, part: MicroBatch, counter: FlopCounter) -> None:
        """Remember what a finished pass took."""
        self._exact[shape_key(part.data)] = counter.counts()
        self._warn_uncounted(counter.uncounted)

    def exact(self, part: MicroBatch) -> StepFlops | None:
        """FLOPs of an exact gradient on such a micro-batch; a prediction multiplies the same shapes."""
        shape = shape_key(part.data)
        found = (self._exact.get(shape), *(count(shape) for count in self.predicted.values()))
        return next((flops for flops in found if flops), None)

    def charge(self, account: str, work: Work) -> None:
        """Charge the ledger, if there is one."""
        if self._ledger is not None and work:
            self._ledger.charge(account, work)

    def charge_check(self, flops: StepFlops, restarted: bool) -> None:
        """Charge a pass that served to capture or to compare a program; once more after a restart, it is waste."""
        self.charge("waste/lost_steps" if restarted else "setup/checks", flops.work())

    def charge_exact(
        self, account: str, phase: Phase, part: MicroBatch, counter: FlopCounter | None, seconds: float
    ) -> None:
        """Charge one phase of an exact pass; samples and tokens are counted with its forward."""
        flops = counter.counts() if counter is not None else self._exact[shape_key(part.data)]
        counts = {"passes": 1, "samples": part.samples, "tokens": part.tokens} if phase == "forward" else {}
        self.charge(account, flops.work(phase, seconds=seconds, **counts))

    def charge_equivalent(self, microbatches: Iterable[MicroBatch]) -> None:
        """Book what these micro-batches would have cost exactly, and fix the unit on the first of them."""
        if self._ledger is None:
            return
        for part in microbatches:
            flops = self.exact(part)
            if flops is None:
                continue
            if self._ledger.forward_flops is None and any(flops.forward.values()):
                self._ledger.forward_flops = flops.forward_equivalent(part.samples, self._unit_samples)
            self._ledger.charge_exact_equivalent(flops.work(samples=part.samples, tokens=part.tokens, passes=1))

    def cost_ratios(self, part: MicroBatch, prices: PriceBook, format: str) -> tuple[float, float]:
        """w = price of one prediction / price of one exact gradient: at these prices, and at a fleet price of 1."""
        count = self.predicted.get(format)
        exact, predicted = self.exact(part), count(shape_key(part.data)) if count else None
        if exact is None or predicted is None or not exact.total:
            return 0.0, 0.0
        unit = sum(exact.forward.values())
        scarce = prices.cost("scarce/forward", exact.work(), unit)
        work = predicted.work(passes=1)
        now, at_one = (
            book.cost("fleet/prediction", work, unit) / scarce if scarce else 0.0
            for book in (prices, prices.with_fleet_price(1.0))
        )
        return now, at_one

    def look_at_prediction(self, format: str, counter: FlopCounter, unlowered: Mapping[tuple[str, str], str]) -> None:
        """Name what a prediction left uncounted, and what of it stayed out of its number format.

        LSTM layers and transposed convolutions are no operations that a format lowers, and a format may refuse a shape.
        Where these are most of the work, a "low-precision" prediction is nearly an exact one, and its statistics
        flatter the format.

        Args:
            format: number format of the prediction.
            counter: of one prediction.
            unlowered: why products stayed in high precision, by layer and product.
        """
        self._warn_uncounted(counter.uncounted)
        refused = {place: why for place, why in unlowered.items() if (format, *place) not in self._told_unlowered}
        self._told_unlowered |= {(format, *place) for place in unlowered}
        if refused := {place: why for place, why in refused.items() if "keep=" not in why}:
            shown = "; ".join(
                f"{layer or 'training_step'} {product} {why}" for (layer, product), why in refused.items()
            )
            rank_zero_warn(
                f"Of the products in {format}, these stay in high precision and are priced as such: {shown}. "
                "Pad the layer, or choose a format without blocks for it, such as int8."
            )
        counts = counter.counts().by_format()
        share = counter.lowered / max(1, sum(counts.values()))
        if share < LOWERED_SHARE and format not in self._told_share:
            self._told_share.add(format)
            shown = ", ".join(f"{name} {n:,}" for name, n in counts.items())
            rank_zero_warn(
                f"Only {share:.0%} of a prediction's FLOPs run in {format} (by format: {shown}): LSTM layers, "
                "transposed convolutions and what keep= names stay in high precision, and so does attention in fused "
                "GPU kernels (select math attention to lower it). The gradients are right, but delta, R and the fleet "
                "price describe a mixture; price it with PriceBook(fleet_formats=...)."
            )
