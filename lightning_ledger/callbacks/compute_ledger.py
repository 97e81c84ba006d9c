"""Account what a training run spends."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ledger.callbacks.common import log_values, update_wandb_config, wandb_runs
from lightning_ledger.callbacks.meter import StepMeter
from lightning_ledger.callbacks.run_settings import run_settings
from lightning_ledger.callbacks.tuning import Tuning
from lightning_ledger.estimation.ranks import Ranks
from lightning_ledger.flops import UncountedWarning
from lightning_ledger.ledger import Ledger, by_tier
from lightning_ledger.microbatches import TokenWeights
from lightning_ledger.prices import PriceBook
from lightning_ledger.strategies import PredictedGradients
from lightning_ledger.work import SKIPPED

PACKAGES = ("lightning-ledger", "lightning", "torch", "torchmetrics", "wandb", "jsonargparse")


class ComputeLedger(pl.Callback):
    """Counts the work of every step and keeps it in ``ledger.jsonl``; changes nothing about the training.

    Under ``PredictedGradientStrategy`` the strategy charges what it runs; under any other one this callback meters the
    step from its hooks. FLOPs are counted once per input shape, in the real step, so that later steps cost nothing.

    Logged every step, in the price book's currency (forward-equivalents by default):

    ==============================  ================================================================================
    ``ledger/total``                everything spent
    ``ledger/scarce``               training GPU: forward, backward, validation, set-up checks
    ``ledger/fleet``                predictions
    ``ledger/transfer``             weights and gradients on the wire
    ``ledger/waste``                skipped steps, lost predictions, steps lost to a crash
    ``ledger/exact_equivalent``     what the samples trained on would have cost exactly
    ``ledger/saving``               1 - (total - validation) / exact_equivalent
    ==============================  ================================================================================

    Of several processes the first one writes and logs; its totals are the sums over all of them, seconds too.

    With a ``WandbLogger``, ``ledger/total`` becomes the x-axis of the validation metrics.

    Args:
        prices: the price book; simulated prices by default.
        dirpath: where ``ledger.jsonl`` goes; by default the logger's run directory, else ``default_root_dir``.
        microbatch_samples: samples in one forward-equivalent, the unit of cost. Set it alike in all runs that are to
            be compared; by default the unit is the first forward pass counted.
        label: the run's name in comparisons.
        tokens: counts valid targets under strategies other than ``PredictedGradientStrategy``.

    Example:
        >>> callback = ComputeLedger(prices=PriceBook(fleet_forward=0.05))
        >>> callback.ledger.totals(), callback.ledger.cost(callback.prices)
        ({}, 0.0)
    """

    def __init__(
        self,
        prices: PriceBook | None = None,
        dirpath: str | None = None,
        microbatch_samples: int | None = None,
        label: str | None = None,
        tokens: TokenWeights | None = None,
    ) -> None:
        if microbatch_samples is not None and microbatch_samples < 1:
            raise ValueError(f"microbatch_samples={microbatch_samples} must be at least 1.")
        self.prices = prices if prices is not None else PriceBook()
        self.dirpath = dirpath
        self.microbatch_samples = microbatch_samples
        self.label = label
        self.ledger = Ledger()
        self._tokens = tokens
        self._meter: StepMeter | None = None
        self._trainer: pl.Trainer | None = None
        self._foreign = True
        self._stepped = 0
        self._loss_scale = 0.0
        self._starting = False  # between set-up and the first batch, when a finder may run
        self._tuning: Tuning | None = None
        self._pending: tuple[pl.LightningModule, Any] | None = None  # the batch in training, until it is charged
        self._warn_uncounted = UncountedWarning()
        self._known_metrics: set[str] = set()
        self._ranks = Ranks()

    # ---------------------------------------------------------------------------------------------------------- set-up

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find out who runs the steps."""
        doubles = sum(isinstance(c, ComputeLedger) for c in trainer.callbacks)  # type: ignore[attr-defined]
        if doubles > 1:
            raise MisconfigurationException(
                f"{doubles} ComputeLedger callbacks are configured; each would charge the same work. Keep one: a "
                "fragment added with `callbacks+:` and the same callback in your own list make two."
            )
        self.prices.warn_if_stale()
        self._trainer = trainer
        self._ranks = Ranks.of(trainer.strategy)
        if self._ranks.size < trainer.world_size:
            rank_zero_warn(
                f"{type(trainer.strategy).__name__} runs {trainer.world_size} processes without torch.distributed: the "
                "ledger counts the work of the first one only."
            )
        self._foreign = not isinstance(trainer.strategy, PredictedGradients)
        if isinstance(trainer.strategy, PredictedGradients):
            trainer.strategy.charge_to(self.ledger, self.prices, self.microbatch_samples)
        self._meter = StepMeter(self.ledger, self._warn_uncounted, self._tokens)
        self._starting, self._tuning = stage == "fit", None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the file; a checkpoint was loaded by now, if there is one."""
        versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.ledger.attach(
                self._directory(trainer),
                header={
                    "label": self.label or "",
                    "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                    "versions": versions,
                    "prices": self.prices.to_dict(),
                    "settings": run_settings(trainer),
                },
            )
        if self._ranks.size > 1:  # the first may have found lost steps in its file
            state, *_ = self._ranks.gather(self.ledger.state_dict())
            if self._ranks.rank:
                self.ledger.load_state_dict(state)
        update_wandb_config(trainer, {"ledger/prices": self.prices.to_dict(), "ledger/versions": versions})
        for run in wandb_runs(trainer):
            run.define_metric("ledger/total")

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """No finder runs any more."""
        self._start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Loops are restored by now."""
        self._start()
        self._stepped, self._loss_scale = trainer.global_step, _loss_scale(trainer)

    def _start(self) -> None:
        if self._tuning is not None:
            self._tuning.end()
        self._starting, self._tuning = False, None

    def _directory(self, trainer: pl.Trainer) -> Path:
        if self.dirpath is not None:
            return Path(self.dirpath)
        if not trainer.loggers:
            return Path(trainer.default_root_dir)
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / version

    # -------------------------------------------------------------------------------------------------------- training

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start metering, if the strategy does not."""
        if self._foreign and self._meter is not None:
            self._pending = pl_module, batch
            self._meter.start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        """The forward pass is done."""
        if self._foreign and self._meter is not None:
            self._meter.before_backward()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The backward pass is done."""
        if self._foreign and self._meter is not None:
            self._meter.after_backward(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Charge the batch, close the step if the optimizer stepped, and log."""
        if self._pending is not None:
            self._charge_batch(pl_module, batch)
        self._close_step(trainer)
        log_values(pl_module, self.values())

    def _charge_batch(self, module: pl.LightningModule, batch: Any) -> None:
        assert self._meter is not None
        self._pending = None
        flops = self._meter.end(module, batch)
        if self.ledger.forward_flops is None and any(flops.forward.values()):
            self.ledger.forward_flops = flops.forward_equivalent(self._meter.samples(batch), self.microbatch_samples)

    def _close_step(self, trainer: pl.Trainer) -> None:
        # A real optimizer step, whatever the accumulation; several optimizers stepping in one batch are one.
        if trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            self._add_open()
            before, self._loss_scale = self._loss_scale, _loss_scale(trainer)
            if self._loss_scale < before:  # AMP's answer to gradients that overflowed: it did not step
                self.ledger.rebook(SKIPPED)
            self.ledger.end_step()

    def _add_open(self) -> None:
        """Make the open work that of all processes: a collective."""
        if self._ranks.together:
            self.ledger.add_open(self._ranks.gather(self.ledger.open_work()), self._ranks.rank)

    def _settle(self) -> None:
        """The same between steps, where nobody may add it a second time."""
        if self._ranks.together:
            self._add_open()
            self.ledger.flush()

    def values(self) -> dict[str, float]:
        """The ``ledger/*`` values as logged."""
        if self.ledger.forward_flops is None:
            return {}
        costs = self.ledger.costs(self.prices)
        tiers = by_tier(costs)
        total = sum(tiers.values())
        exact = self.prices.cost("scarce/forward", self.ledger.exact_equivalent, self.ledger.forward_flops)
        values = {
            "ledger/total": total,
            "ledger/scarce": sum(tiers.get(tier, 0.0) for tier in ("scarce", "validation", "setup")),
            "ledger/fleet": tiers.get("fleet", 0.0),
            "ledger/transfer": tiers.get("transfer", 0.0),
            "ledger/waste": tiers.get("waste", 0.0),
            "ledger/exact_equivalent": exact,
        }
        if exact > 0:
            values["ledger/saving"] = 1 - (total - costs.get("scarce/validation", 0.0)) / exact
        return values

    # ------------------------------------------------------------------------------------------------------ validation

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Start metering a validation batch."""
        if self._meter is not None:
            self._meter.start_validation(pl_module, batch)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Charge a validation batch."""
        if self._meter is not None:
            self._meter.end_validation(batch)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put ``ledger/total`` into the row of the validation metrics."""
        self._settle()
        values = self.values()
        if values and trainer.state.fn == "fit" and not trainer.sanity_checking:
            # On the module's device, where Lightning reduces it; MPS knows no double precision.
            device = pl_module.device
            dtype = torch.float32 if device.type == "mps" else torch.float64
            total = torch.tensor(values["ledger/total"], dtype=dtype, device=device)
            pl_module.log("ledger/total", total, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the metrics that exist: the new ones after it are the validation's."""
        self._known_metrics = set(trainer.callback_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark the metrics in the ledger, and make cost their x-axis in W&B."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.startswith(("ledger/", "gpcv/"))
        }
        self.ledger.mark(metrics)
        for run in wandb_runs(trainer):
            for name in metrics.keys() - self._known_metrics:
                run.define_metric(name, step_metric="ledger/total")

    # ---------------------------------------------------------------------------------------------------- end and state

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add up what no step closed."""
        self._settle()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let go of a batch that on_train_batch_start skipped."""
        self._pending = None
        if self._meter is not None:
            self._meter.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop counting, and close the file: Lightning tears no callback down after an error."""
        if self._meter is not None:
            self._meter.stop()
        self.ledger.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the file."""
        if self._meter is not None:
            self._meter.stop()
        self.ledger.close()

    def state_dict(self) -> dict[str, Any]:
        """The ledger: totals and steps, with each batch that Lightning will not run again, whichever callback saves."""
        if self._starting and self._trainer is not None:
            self._start()
            state = self.ledger.state_dict()
            meter = self._meter if self._foreign else None
            self._starting, self._tuning = True, Tuning(self._trainer, self.ledger, meter)
            return state
        if self._trainer is not None and self._trainer.training:
            progress = self._trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
            if self._pending is not None and progress["processed"] == progress["ready"]:
                self._charge_batch(*self._pending)
            self._close_step(self._trainer)
            self._settle()
        return self.ledger.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the totals of the checkpoint; those of a finder's own checkpoint are here already."""
        if self._tuning is not None:
            self._tuning.end()
            self._tuning = None
            return
        self.ledger.load_state_dict(state_dict)


def _loss_scale(trainer: pl.Trainer) -> float:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 0.0 if scaler is None else float(scaler.get_scale())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
