"""End training when a budget is spent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ledger.callbacks.common import callback_of
from lightning_ledger.callbacks.compute_ledger import ComputeLedger
from lightning_ledger.ledger import by_tier
from lightning_ledger.prices import PriceBook
from lightning_ledger.work import TIERS

Tier = Literal["total", "scarce", "fleet", "transfer", "waste"]

_TIERS: dict[str, tuple[str, ...]] = {
    "total": TIERS,
    "scarce": ("scarce", "validation", "setup"),
    "fleet": ("fleet",),
    "transfer": ("transfer",),
    "waste": ("waste",),
}


class BudgetStopping(pl.Callback):
    """Ends training when the ledger's cost reaches a budget, and saves a checkpoint to go on from.

    The cost is what ``ComputeLedger`` logs as ``ledger/<tier>``, so validation counts in ``total`` and ``scarce``. It
    is looked at after each optimizer step: the step that reaches the budget is the last one, and the validation that
    Lightning ends with comes on top. ``min_steps`` and ``min_epochs`` of the Trainer go before the budget. What was
    spent before a resume counts, so a resumed run ends at once unless the budget was raised.

    The checkpoint is ``budget-step=N.ckpt``, beside those of the Trainer's checkpoint callback (which keeps to its own
    schedule), else in the run's directory.

    Needs ``ComputeLedger``, anywhere in the list of callbacks. On several processes each looks at its own ledger, and
    all stop when the first is done.

    Args:
        max_cost: the budget, in the price book's currency (forward-equivalents by default).
        tier: what it limits.
        prices: the price book; by default that of ``ComputeLedger``.

    Raises:
        ValueError: ``max_cost`` is not positive and finite, or ``tier`` is unknown.

    Example:
        >>> BudgetStopping(max_cost=5_000, tier="scarce").max_cost
        5000.0
    """

    def __init__(self, max_cost: float, tier: Tier = "total", prices: PriceBook | None = None) -> None:
        if isinstance(max_cost, bool) or not isinstance(max_cost, int | float) or not 0 < max_cost < math.inf:
            raise ValueError(
                f"max_cost={max_cost!r} must be a positive, finite number, such as 5000 forward-equivalents. To train "
                "without a budget, leave BudgetStopping out."
            )
        if tier not in get_args(Tier):
            raise ValueError(f"tier={tier!r} is unknown: pass {', '.join(map(repr, get_args(Tier)))}.")
        self.max_cost = float(max_cost)
        self.tier: Tier = tier
        self.prices = prices
        self._stepped = 0
        self._stopping = False
        self._saved = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the ledger, and come after it in the list of callbacks."""
        if stage != "fit":
            return
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        ledger = _ledger_of(trainer)
        self._stopping = self._saved = False
        if callbacks.index(ledger) > callbacks.index(self):
            # What its on_train_batch_end charges is what ours reads. A new list: Lightning is walking through the old.
            others = [callback for callback in callbacks if callback is not self]
            after = others.index(ledger) + 1
            trainer.callbacks = [*others[:after], self, *others[after:]]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Loops and ledger are restored by now; a budget spent before leaves nothing to train."""
        self._stepped = trainer.global_step
        if self._reached(trainer):
            self._stopping = self._saved = trainer.should_stop = True
            self._say(trainer, "Raise max_cost to go on from this checkpoint.")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Stop after the step that reaches the budget, never in the middle of an accumulation."""
        if self._stopping or trainer.global_step == self._stepped:
            return
        self._stepped = trainer.global_step
        if self._reached(trainer):
            self._stopping = trainer.should_stop = True
            if not _validates(trainer):
                self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save after the validation that training ends with, so that its cost is in the checkpoint too."""
        if self._stopping and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, if the validation never came."""
        if self._stopping:
            self._save(trainer)

    def spent(self, trainer: pl.Trainer) -> float:
        """The cost of the tier so far, in the price book's currency."""
        callback = _ledger_of(trainer)
        if callback.ledger.forward_flops is None:  # nothing was counted yet
            return 0.0
        tiers = by_tier(callback.ledger.costs(self.prices or callback.prices))
        return math.fsum(tiers[tier] for tier in _TIERS[self.tier])

    def _reached(self, trainer: pl.Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self.spent(trainer) >= self.max_cost, all=False)

    def _save(self, trainer: pl.Trainer) -> None:
        if self._saved:
            return
        self._saved = True
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._say(trainer, "A fast_dev_run saves no checkpoint.")
            return
        directory = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.log_dir
        path = Path(directory or trainer.default_root_dir) / f"budget-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        self._say(trainer, f"Saved {path}.")

    def _say(self, trainer: pl.Trainer, then: str) -> None:
        rank_zero_info(
            f"BudgetStopping: {self.spent(trainer):,.6g} of ledger/{self.tier} spent, with a budget of "
            f"{self.max_cost:,.6g}: training ends after step {trainer.global_step}. {then}"
        )


def _ledger_of(trainer: pl.Trainer) -> ComputeLedger:
    if (callback := callback_of(trainer, ComputeLedger)) is not None:
        return callback
    names = ", ".join(type(callback).__name__ for callback in trainer.callbacks)  # type: ignore[attr-defined]
    raise MisconfigurationException(
        "BudgetStopping reads what ComputeLedger counts, and there is none among the callbacks "
        f"({names}). Add "
        "lightning_ledger.callbacks.ComputeLedger(), or the fragment callbacks/ledger.yaml."
    )


def _validates(trainer: pl.Trainer) -> bool:
    """Whether Lightning ends with a validation if it is told to stop now."""
    every = trainer.check_val_every_n_epoch
    return trainer.enable_validation and (every is None or (trainer.current_epoch + 1) % every == 0)
