"""Which machines predict, as an argument that a configuration file can hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet.base import Fleet
from lightning_ledger.fleet.in_process import InProcessFleet
from lightning_ledger.fleet.recipe import PredictorRecipe
from lightning_ledger.flops import FlopCounter, StepFlops


class Observers:
    """Whom predictors tell what they did.

    Args:
        on_counted: called with the counter of the first prediction of each shape, and with why products stayed in high
            precision, by layer and product.
        on_checked: called with the work of every pass that serves to capture or to compare a program, and whether a
            restart made it necessary.
        uses: how often each shape was predicted, carried over restarts.
    """

    def __init__(
        self,
        on_counted: Callable[[FlopCounter, Mapping[tuple[str, str], str]], None] = lambda counter, unlowered: None,
        on_checked: Callable[[StepFlops, bool], None] = lambda flops, restarted: None,
        uses: dict[int, int] | None = None,
    ) -> None:
        self.on_counted = on_counted
        self.on_checked = on_checked
        self.uses = {} if uses is None else uses


class FleetBackend(ABC):
    """The machines of one run: a fleet for each number format, sharing them."""

    @abstractmethod
    def fleet(self, recipe: PredictorRecipe, layout: Layout, observers: Observers) -> Fleet:
        """A fleet that predicts so."""

    def available(self) -> bool:
        """Whether there is a machine to predict the next batch; asked once a step, so that machines may come back."""
        return True

    def end_step(self, exact_flops: int) -> dict[str, float]:
        """A batch is done, whose exact passes took so many FLOPs; what to log of the machines."""
        return {}

    def close(self) -> None:  # noqa: B027  in process there is nothing to do
        """Let the machines go, and leave nothing running."""


class FleetSettings(ABC):
    """Which machines predict: ``GradientPrediction(fleet=...)``."""

    @abstractmethod
    def open(self, module: pl.LightningModule) -> FleetBackend:
        """The machines, for one run that trains this module."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({shown})"


class InProcessSettings(FleetSettings):
    """Predictions are made by the training process itself, one after another: fleet work, done here.

    Example:
        >>> InProcessSettings()
        InProcessSettings()
    """

    def open(self, module: pl.LightningModule) -> FleetBackend:
        return _InProcess(module)


class _InProcess(FleetBackend):
    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module

    def fleet(self, recipe: PredictorRecipe, layout: Layout, observers: Observers) -> Fleet:
        return InProcessFleet(make_predictor(self._module, recipe, observers), layout)


def make_predictor(module: pl.LightningModule, recipe: PredictorRecipe, observers: Observers) -> Any:
    """The predictor of a recipe, in this process."""
    return recipe.make(
        module,
        lambda lowering, counter: observers.on_counted(counter, lowering.unlowered),
        observers.on_checked,
        observers.uses,
    )


class RaySettings(FleetSettings):
    """Predictions are made by worker processes on a Ray cluster.

    Args:
        workers: processes, each of which predicts one chunk of every batch.
        address: of a running cluster, ``"host:port"`` or ``"auto"``; by default one is started on this machine, which
            listens on 127.0.0.1 only and ends with the run.
        threads: of each worker; bit-identical to predictions in process with as many.
        deadline: seconds that a worker may take for a chunk, capture and compilation included; one that takes longer
            is ended, and its chunk predicted elsewhere.
        retry_every: after the loss of the whole fleet, seconds between two attempts to come back.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> RaySettings(workers=4).workers
        4
    """

    def __init__(
        self,
        workers: int = 2,
        address: str | None = None,
        threads: int = 1,
        deadline: float = 600.0,
        retry_every: float = 30.0,
    ) -> None:
        for name, value in (("workers", workers), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        for name, seconds in (("deadline", deadline), ("retry_every", retry_every)):
            if not seconds > 0:
                raise ValueError(f"{name}={seconds!r} must be a positive number of seconds.")
        self.workers = workers
        self.address = address
        self.threads = threads
        self.deadline = deadline
        self.retry_every = retry_every

    def open(self, module: pl.LightningModule) -> FleetBackend:
        """Reach or start the cluster.

        Raises:
            ModuleNotFoundError: if Ray is not installed.
            ConnectionError: if there is no cluster at ``address``.
        """
        from lightning_ledger.fleet.ray import RayBackend

        return RayBackend.start(self, module)


def fleet_settings(fleet: FleetSettings | str) -> FleetSettings:
    """The settings that a short name stands for.

    Args:
        fleet: "in_process", "ray" or "simulated", each with its defaults, or settings.

    Raises:
        ValueError: if the name is unknown.

    Example:
        >>> fleet_settings("in_process")
        InProcessSettings()
    """
    if isinstance(fleet, FleetSettings):
        return fleet
    from lightning_ledger.fleet.simulated import SimulatedSettings

    known: dict[str, type[FleetSettings]] = {
        "in_process": InProcessSettings,
        "ray": RaySettings,
        "simulated": SimulatedSettings,
    }
    if fleet not in known:
        raise ValueError(
            f"fleet={fleet!r} is unknown: pass {', '.join(map(repr, known))}, or settings such as "
            "lightning_ledger.fleet.RaySettings(workers=4)."
        )
    return known[fleet]()
