"""The strategy for one device."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_ledger.strategies.predicted_gradients import PredictedGradients


class PredictedGradientStrategy(PredictedGradients, SingleDeviceStrategy):
    """Trains on one device from predicted gradients; the Trainer's accelerator chooses the device.

    In Python ``Trainer(strategy=PredictedGradientStrategy())`` or ``strategy="predicted_gradients"``; in YAML

        strategy:
          class_path: lightning_ledger.strategies.PredictedGradientStrategy

    Args:
        device: only for use without a Trainer's accelerator; the Trainer overrides it.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy=PredictedGradientStrategy(), accelerator="cpu", logger=False)
        >>> trainer.strategy.root_device
        device(type='cpu')
    """

    strategy_name = "predicted_gradients"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device=device)
        self._devices: list[torch.device] = []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices that Lightning's connector chose: one."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        # The connector assigns its choice to a strategy that has this attribute and has no devices of its own.
        devices = list(devices or [])
        if len(devices) > 1:
            raise MisconfigurationException(
                f"{type(self).__name__} trains on one device, and the Trainer chose {len(devices)} ({devices}). Pass "
                "Trainer(devices=1)."
            )
        self._devices = devices
        if devices:
            self._root_device = devices[0]
