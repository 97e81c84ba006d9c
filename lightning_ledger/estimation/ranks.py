"""The processes that train one model together, each on its own part of a batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_ledger.microbatches import WeightSpec
from lightning_ledger.precision import derive_seed

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """What one of them must know of the others. Every method is a collective: all ranks call it, in the same order.

    Attributes:
        rank: of this process.
        size: how many there are.
        device: where the process group's backend wants its tensors.

    Example:
        >>> Ranks().mean({"loss": torch.ones(1)}, {"loss": 1, "other": 2})
        {'loss': tensor([1.])}
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, strategy: Strategy) -> Ranks:
        """The processes of a strategy whose environment is set up; only this one where they do not use torch's groups.

        Args:
            strategy: any of Lightning's.
        """
        if not isinstance(strategy, ParallelStrategy) or strategy.world_size == 1:
            return cls()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        return cls(strategy.global_rank, strategy.world_size, strategy.root_device)

    def seed(self, seed: int) -> int:
        """A seed of this rank's own; rank 0 keeps the given one."""
        return derive_seed("rank", seed, self.rank) if self.rank else seed

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a small CPU tensor over the ranks."""
        if self.size == 1:
            return values
        total = values.to(self.device, copy=True)
        torch.distributed.all_reduce(total)
        return total.cpu()

    @property
    def together(self) -> bool:
        """Whether there are others, and they do what this process does: one that handles an error does it alone."""
        return self.size > 1 and sys.exc_info()[0] is None

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank; a picklable one, with its tensors on the CPU."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def mean(self, values: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The mean of each value over the ranks that have it, by one all-reduce.

        Args:
            values: vectors by name; a rank may lack any of them.
            sizes: the length of every value that there can be.

        Returns:
            The means in double precision; a value that no rank has is absent.
        """
        if self.size == 1:
            return dict(values)
        parts = []
        for name, size in sizes.items():
            value = values.get(name)
            held = torch.zeros(size) if value is None else value.detach().cpu().reshape(size)
            parts.append(torch.cat([held.double(), torch.tensor([float(value is not None)], dtype=torch.float64)]))
        totals = self.sum(torch.cat(parts)).split([size + 1 for size in sizes.values()])
        return {name: t[:-1] / t[-1] for name, t in zip(sizes, totals, strict=True) if t[-1]}

    def compare(
        self, module: pl.LightningModule, skipped: bool, amount: float, weights: WeightSpec, weigh: bool
    ) -> float:
        """What the processes must know of one another before any gradient is averaged.

        Args:
            module: the user's module.
            skipped: whether its training step returned None here.
            amount: what the loss averages over, of this process's batch.
            weights: what that is.
            weigh: whether batches count by it, not all alike.

        Returns:
            What this process's gradient is multiplied by for the mean over processes.

        Raises:
            MisconfigurationException: if the training step returned None on some of them only.
        """
        if self.size == 1:
            return 1.0
        count, amounts = self.sum(torch.tensor([float(skipped), amount], dtype=torch.float64)).tolist()
        if 0 < count < self.size:
            raise MisconfigurationException(
                f"{type(module).__qualname__}.training_step returned {'None' if skipped else 'a loss'} on rank "
                f"{self.rank}, and None on {count:.0f} of {self.size} ranks: the others would wait for their gradients "
                "for ever. Return a loss on every rank (0 * loss to ignore a batch)."
            )
        if not weigh:
            return 1.0
        if weights == "sum":
            return float(self.size)
        return self.size * amount / amounts if amounts else 1.0
