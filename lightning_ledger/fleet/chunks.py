"""A batch's predictions cut into chunks, one for each worker, and put together again.

Which jobs are a chunk depends on their number alone, never on which worker is fast, busy or alive. A chunk's sums
therefore are the same numbers whoever computes them and however often, and so is their total.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from lightning_ledger.control_variate import WeightedSum
from lightning_ledger.fleet.base import Predictions
from lightning_ledger.microbatches import tensors_apart
from lightning_ledger.work import add_to

T = TypeVar("T")


def chunks(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Contiguous pieces whose lengths differ by at most one; none is empty.

    Args:
        items: to cut.
        count: of pieces, if there are so many items.

    Example:
        >>> chunks(range(5), 2), chunks(range(2), 4)
        ([range(0, 3), range(3, 5)], [range(0, 1), range(1, 2)])
    """
    count = min(count, len(items))
    ends = [-(-len(items) * i // count) for i in range(count + 1)] if count else [0]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def tensor_bytes(data: Any) -> int:
    """Bytes of the tensors in a batch, whatever holds them; 0 if it cannot be taken apart.

    Example:
        >>> tensor_bytes({"tokens": torch.zeros(2, 3), "name": "a"})
        24
    """
    apart = tensors_apart(data)
    return 0 if apart is None else sum(tensor.nbytes for tensor in apart[0])


def merge(parts: Sequence[Predictions]) -> Predictions:
    """The predictions of a batch from those of its chunks, summed in their order.

    Args:
        parts: of consecutive chunks.

    Returns:
        Their total. Up to the order of float additions it is what one worker returns for the whole batch, and for one
        chunk it is that chunk.
    """
    if len(parts) == 1:
        return parts[0]
    control, rest = WeightedSum(), WeightedSum()
    total = Predictions(control=control.total, rest=rest.total)
    norms = []
    for part in parts:
        control.add(part.control, 1.0)
        rest.add(part.rest, 1.0)
        total.losses.update(part.losses)
        total.samples.update(part.samples)
        total.skipped.extend(part.skipped)
        add_to(total.work, part.work.items())
        if part.squared_norms is not None:
            norms.append(part.squared_norms)
    if parts and len(norms) == len(parts) and not total.skipped:
        total.squared_norms = torch.cat(norms)
    return total
