"""Replace most gradients by predictions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ledger.callbacks.common import (
    checked_state,
    log_values,
    predicting_strategy,
    update_wandb_config,
)
from lightning_ledger.control_variate import Statistics
from lightning_ledger.estimation import PredictionSettings, PredictionState
from lightning_ledger.estimation.ranks import Ranks
from lightning_ledger.fleet import FleetSettings, fleet_settings
from lightning_ledger.microbatches import WeightSpec
from lightning_ledger.precision import derive_seed, parse_formats
from lightning_ledger.predictors import ENGINES, Engine


class GradientPrediction(pl.Callback):
    """Each batch is cut into micro-batches; ``exact`` of them get an exact gradient, the others a predicted one.

    Alone it trains on the mix ``sum_C w_i g_i + sum_notC w_i h_i``, which is as biased as the predictor; add
    ``ControlVariate`` to correct it. Needs ``PredictedGradientStrategy``.

    It logs ``gpcv/loss`` (the estimate of the full-batch loss) and ``gpcv/exact_share`` (k/n). Without
    ``ControlVariate``, where a batch has micro-batches of both kinds, it also logs ``gpcv/bias_z`` of the mix: how far
    it drifts from the exact gradients, near 0 for an unbiased predictor and growing with the steps for a biased one.

    Args:
        format: number format of the predictions' matrix products: see ``lightning_ledger.precision.FORMATS``. Products
            can be set apart: ``"int8:grad_weight=bf16,attention=bf16"``; the others are ``output`` and ``grad_input``.
            Of a list of formats, ``AdaptiveAllocation`` chooses; training begins with the first.
        rounding: ``"nearest"``, or ``"stochastic"``: unbiased rounding, where the hardware has it.
        rotation: rotate operands by a random Hadamard matrix before rounding, which spreads outliers.
        keep: globs of layers that stay in high precision, such as ``["head", "blocks.0"]``.
        engine: ``"captured"``: predictions run a graph of the training step, captured once per input shape;
            ``"compiled"``: that graph compiled by TorchInductor, which takes minutes once and pays on long runs;
            ``"onnxruntime"``: that graph in ONNX Runtime; ``"eager"``: the training step itself.
        microbatches: n, micro-batches a batch is cut into (fewer where a batch has fewer samples).
        exact: k, how many of them get an exact gradient; 0 trains on predictions only, ``microbatches`` as stock
            Lightning does. Exact passes alone log, update metrics and return extras: with 0 there are none of these,
            and ``gpcv/loss`` is the loss to watch.
        refresh_every: optimizer steps between refreshes of the predictor's weights; above 1 predictions are stale.
        seed: of the private generator that draws C, dropout and rounding seeds.
        weights: what the loss averages over: ``"samples"``, ``TokenWeights(...)``, a function of a micro-batch, or
            ``"sum"`` for a loss that is summed.
        split_fn: ``(batch, n) -> micro-batches``, for batches that cannot be split leaf by leaf.
        check_separable: compare, on the first batch, the loss of larger and smaller pieces, and refuse if they differ.
        allow_batchnorm: train BatchNorm in training mode all the same, each micro-batch normalised by itself.
        fleet: where predictions run: ``"in_process"``; ``"ray"``, on the workers of a Ray cluster; ``"simulated"``, in
            process and on a virtual clock; or one of these with settings, ``RaySettings(workers=4)``.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> GradientPrediction(format="int8", microbatches=8, exact=1).prediction.exact
        1
    """

    KIND, SCHEMA = "lightning_ledger.GradientPrediction", 1

    def __init__(
        self,
        format: list[str] | str = "int8",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        rotation: bool = False,
        keep: Sequence[str] = (),
        engine: Engine = "captured",
        microbatches: int = 8,
        exact: int = 1,
        refresh_every: int = 1,
        seed: int = 0,
        weights: WeightSpec = "samples",
        split_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        check_separable: bool = True,
        allow_batchnorm: bool = False,
        fleet: FleetSettings | Literal["in_process", "ray", "simulated"] = "in_process",
    ) -> None:
        formats = [format] if isinstance(format, str) else list(format)
        if not formats or len(set(formats)) < len(formats):
            raise ValueError(f"format={format!r} must be a format, or a list of different ones.")
        for name in formats:
            parse_formats(name)
        if engine not in ENGINES:
            raise ValueError(f"engine={engine!r} is unknown: pass one of {', '.join(map(repr, ENGINES))}.")
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={rounding!r} is unknown: pass 'nearest' or 'stochastic'.")
        for argument, value, least in (
            ("microbatches", microbatches, 1),
            ("exact", exact, 0),
            ("refresh_every", refresh_every, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{argument}={value!r} must be an integer of at least {least}.")
        if exact > microbatches:
            raise ValueError(
                f"exact={exact} is more than microbatches={microbatches}: only micro-batches of the batch can be "
                "exact. Raise microbatches, or set exact=microbatches for exact training."
            )
        self.prediction = PredictionSettings(
            format=formats[0],
            others=tuple(formats[1:]),
            rounding=rounding,
            rotation=rotation,
            keep=tuple(keep),
            engine=engine,
            microbatches=microbatches,
            exact=exact,
            refresh_every=refresh_every,
            seed=seed,
            weights=weights,
            split_fn=split_fn,
            check_separable=check_separable,
            allow_batchnorm=allow_batchnorm,
            fleet=fleet_settings(fleet),
        )
        self.state = PredictionState(torch.Generator().manual_seed(seed))
        self._module: weakref.ref[pl.LightningModule] | None = None
        self._ranks = Ranks()

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: everything but the reference to the module."""
        return {**self.__dict__, "_module": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Configure the strategy."""
        if stage == "fit":
            strategy = predicting_strategy(trainer, self)
            ranks = self._ranks = strategy.ranks
            new = ranks.rank > 0 if self._module is None else self._module() is not pl_module
            if new:  # another module, another run; and every process draws for itself
                self.state = PredictionState(torch.Generator().manual_seed(ranks.seed(self.prediction.seed)))
            self._module = weakref.ref(pl_module)
            self.state.checked = False  # data and loss may be others; a checkpoint, loaded later, may say better
            strategy.predict_with(self.prediction, self.state)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell W&B what is predicted."""
        p = self.prediction
        kinds = dict.fromkeys(kind for name in p.formats for kind in parse_formats(name).distinct)
        update_wandb_config(
            trainer,
            {
                "gpcv/format": ", ".join(p.formats),
                "gpcv/format_kind": "; ".join(f.describe(trainer.strategy.root_device) for f in kinds),
                "gpcv/rounding": p.rounding,
                "gpcv/rotation": p.rotation,
                "gpcv/keep": list(p.keep),
                "gpcv/engine": p.engine,
                "gpcv/fleet": repr(p.fleet),
                "gpcv/microbatches": p.microbatches,
                "gpcv/exact": p.exact,
                "gpcv/refresh_every": p.refresh_every,
                "gpcv/seed": p.seed,
                "gpcv/weights": repr(p.weights),
            },
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Name what a resumed run does not train any more."""
        trained = {p for optimizer in trainer.optimizers for p, state in optimizer.state.items() if state}
        frozen = [name for name, p in pl_module.named_parameters() if p in trained and not p.requires_grad]
        if frozen:
            rank_zero_warn(
                f"{', '.join(frozen[:5])}{' ...' if len(frozen) > 5 else ''} are frozen, and the optimizer holds state "
                "of an earlier training of them. They are not trained, and not predicted: Lightning's BaseFinetuning "
                "freezes its layers anew when a run is resumed. If they should be trained, unfreeze them in "
                "on_train_start."
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the loss estimate, the exact share, and the drift of a mix."""
        log_values(pl_module, predicting_strategy(trainer, self).loss_values)

    def state_dict(self) -> dict[str, Any]:
        """The private generator, all counts, where systematic draws stand, and stale weights if there are any.

        What every process has for itself is gathered: a checkpoint is written by one of them.
        """
        state = self.state
        own = {
            "generator": state.generator.get_state(),
            "phase": state.phase,
            "uses": {name: dict(uses) for name, uses in state.uses.items()},
        }
        ranks = {"ranks": self._ranks.gather(own)} if self._ranks.together else {}
        return {
            "kind": self.KIND,
            "schema": self.SCHEMA,
            **own,
            **ranks,
            "steps": state.steps,
            "checked": state.checked,
            "weights": None if state.weights is None else dict(state.weights),
            "weights_at": state.weights_at,
            "mixed": None if state.mixed is None else state.mixed.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpoint was."""
        state = checked_state(state_dict, self.KIND, self.SCHEMA)
        saved = state.get("ranks", [state])
        if self._ranks.rank < len(saved):
            own = saved[self._ranks.rank]
            self.state.generator.set_state(own["generator"].cpu())
        else:  # of more processes, the new ones begin a stream
            own = {"uses": saved[0].get("uses", {})}
            self.state.generator.manual_seed(self._ranks.seed(derive_seed(self.prediction.seed, state["steps"])))
        self.state.steps, self.state.checked = state["steps"], state["checked"]
        weights = state["weights"]
        self.state.weights = None if weights is None else {n: w.requires_grad_() for n, w in weights.items()}
        self.state.weights_at = state.get("weights_at", state["steps"] - state["steps"] % self.prediction.refresh_every)
        mixed = state.get("mixed")
        self.state.phase = own.get("phase")
        uses = own.get("uses", {})
        if not all(isinstance(counts, dict) for counts in uses.values()):  # of an earlier version: of one format
            uses = {self.prediction.format: uses}
        self.state.uses = {name: dict(counts) for name, counts in uses.items()}
        self.state.mixed = None if mixed is None else Statistics.from_state_dict(mixed)
