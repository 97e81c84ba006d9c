"""The dry run inside Lightning: set up, restored and fed as `fit` would be, and over before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from rich.progress import Progress, TimeElapsedColumn

from lightning_ledger.callbacks import ComputeLedger, GradientPrediction
from lightning_ledger.planning.forecast import Forecast
from lightning_ledger.planning.measure import DryRun
from lightning_ledger.planning.settings import PlanSettings
from lightning_ledger.prices import PriceBook
from lightning_ledger.strategies import PredictedGradientStrategy


class PlanStrategy(PredictedGradientStrategy):
    """Measures where training would begin, and lets nothing train.

    All refusals of training hold. The module's own ``on_train_start`` has run; no batch hook does.

    Args:
        options: what to measure.
        format: of the user's own predictions, tried first.
        prices: the user's own price book.
        device: as in the base class.
    """

    def __init__(
        self,
        options: PlanSettings | None = None,
        format: str | None = None,
        prices: PriceBook | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(device)
        self._options = options or PlanSettings()
        self._format = format
        self._book = prices
        self.forecast: Forecast | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as for training, without its limits: a finished run's checkpoint can be planned from."""
        super().setup(trainer)
        loop = trainer.fit_loop
        loop.max_epochs, loop.epoch_loop.max_steps = -1, -1
        loop.min_epochs, loop.epoch_loop.min_steps = 0, None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is stepped, so the optimizer's memory is not asked for."""

    def on_train_start(self) -> None:
        """Measure, then stop."""
        super().on_train_start()
        module, trainer = self.lightning_module, self.lightning_module.trainer  # type: ignore[union-attr]
        assert module is not None
        assert self._prediction is not None
        trainer.should_stop = True
        with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True) as progress:
            task = progress.add_task("Exact gradients and predictions", total=1.0)
            run = DryRun(
                module,
                self._prediction[0],
                self._options,
                self._format,
                self._book,
                trainer.accumulate_grad_batches,
                self.precision_plugin.train_step_context,
                lambda share: progress.update(task, completed=share),
            )
            self.forecast = run.run(_batches(trainer, module), trainer.global_step)


def _batches(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Training batches on the device, through the Trainer's hooks, with what else ``training_step`` takes."""
    data = getattr(trainer, "datamodule", None)
    owner = data if data is not None and is_overridden("on_before_batch_transfer", data) else module
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    # Of several loaders a short one starts again, as in training.
    for batch, index, _ in CombinedLoader(trainer.train_dataloader, "max_size_cycle"):
        batch = owner.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
        yield trainer.strategy.batch_to_device(batch), (index,) if takes_index else ()


class PlanTrainer(pl.Trainer):
    """A Trainer that can plan; its strategy is :class:`PlanStrategy`."""

    def plan(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Forecast:
        """Measure on your model and data what predicted gradients would be worth, without training.

        Args:
            model: as for ``fit``. Its weights, buffers and attributes are left as they are, or as the checkpoint's.
            datamodule: the data.
            ckpt_path: a checkpoint whose weights to plan from.
            weights_only: as for ``fit``.

        Returns:
            The forecast.
        """
        strategy = self.strategy
        assert isinstance(strategy, PlanStrategy)
        with isolate_rng(), warnings.catch_warnings():
            # The callbacks of the run are left out on purpose.
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            self.fit(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only)
        if strategy.forecast is None:
            raise ValueError(
                "The training DataLoader gave no batch: limit_train_batches=0, or an empty data set. Give it one."
            )
        return strategy.forecast


def planning_trainer(options: PlanSettings, **configured: Any) -> PlanTrainer:
    """The Trainer of a configuration, fit for a dry run.

    Kept are precision, accelerator, data options, accumulation, what ``GradientPrediction`` and ``ComputeLedger`` say,
    and callbacks that choose what is trained (``BaseFinetuning``). Loggers, checkpoints and other callbacks are left
    out, and it is one device that measures.

    Args:
        options: what to measure.
        **configured: the user's Trainer arguments.

    Returns:
        The Trainer.

    Example:
        >>> trainer = planning_trainer(PlanSettings(batches=2), accelerator="cpu", max_steps=10)
        >>> [type(callback).__name__ for callback in trainer.callbacks]
        ['GradientPrediction']
    """
    given = configured.get("callbacks") or []
    callbacks = list(given) if isinstance(given, Sequence) else [given]
    own = [callback for callback in callbacks if isinstance(callback, GradientPrediction)]
    book = next((callback.prices for callback in callbacks if isinstance(callback, ComputeLedger)), None)
    kept = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    devices = configured.get("devices")
    changed: dict[str, Any] = {
        "strategy": PlanStrategy(options, own[0].prediction.format if own else None, book),
        "callbacks": [*kept, *(own or [GradientPrediction()])],
        "devices": devices if isinstance(devices, list) and len(devices) == 1 else 1,
        "num_nodes": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "fast_dev_run": False,
        "profiler": None,
        "enable_autolog_hparams": False,
    }
    if configured.get("max_epochs") is None and configured.get("max_steps", -1) == -1:
        changed["max_epochs"] = 1000  # Lightning's own default, which it warns of
    return PlanTrainer(**{**configured, **changed})


class PlanCLI(LightningCLI):
    """`lightning-ledger plan`: LightningCLI with one command of its own."""

    def __init__(self) -> None:
        super().__init__(
            trainer_class=PlanTrainer, save_config_callback=None, subclass_mode_model=True, subclass_mode_data=True
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"plan": {"model", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # Its group would have the name of the method's.
        parser.add_class_arguments(PlanSettings, "plan", as_group=False)

    def instantiate_trainer(self, **kwargs: Any) -> PlanTrainer:
        return planning_trainer(self.options, **{**self._get(self.config_init, "trainer", default={}), **kwargs})

    @property
    def options(self) -> PlanSettings:
        """The options after ``--plan.``."""
        return PlanSettings(**vars(self._get(self.config_init, "plan")))

    @property
    def forecast(self) -> Forecast:
        """The result."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, PlanStrategy)
        assert strategy.forecast is not None
        return strategy.forecast
