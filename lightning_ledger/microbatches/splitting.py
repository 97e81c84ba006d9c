"""Split any batch into micro-batches by one boundary plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_ledger.microbatches.plans import Plan, Reading, ambiguous, lines, match, read, take


def boundaries(samples: int, microbatches: int) -> tuple[int, ...]:
    """Sizes of the micro-batches of a batch: balanced, the larger ones first, none empty.

    With m = min(samples, microbatches), piece i holds ``samples // m`` samples, and one more if
    ``i < samples % m``.

    Args:
        samples: samples in the batch, at least 1.
        microbatches: micro-batches wanted, at least 1.

    Returns:
        One size per micro-batch, fewer than asked for where there are too few samples.

    Raises:
        ValueError: either number is below 1.

    >>> boundaries(10, 3), boundaries(2, 8)
    ((4, 3, 3), (1, 1))
    """
    if samples < 1:
        raise ValueError(f"samples={samples}: an empty batch cannot be split; drop it in the DataLoader.")
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: a batch is split into at least 1 micro-batch.")
    pieces = min(samples, microbatches)
    small, extra = divmod(samples, pieces)
    return tuple(small + (index < extra) for index in range(pieces))


class Splitter:
    """Splits batches, and remembers which leaf was which.

    Tensors and NumPy arrays are split along dimension 0, as views. Lists and tuples of scalars or strings
    have one item per sample. Scalars, strings, ``None`` and 0-dim tensors are shared by all micro-batches.
    Mappings, dataclasses, named tuples, lists and tuples are descended into and come back as the same type.

    A list or tuple of tensors is a container of columns, such as ``[x, y]``, if its members agree on the
    batch size. If its length is the batch size too (``[x, y]`` of two samples), it could as well be a list
    of samples. Such a batch is refused, unless an earlier batch of the same structure has shown which it
    is. A list of unequal tensors, or of dicts, is a list of samples only where another leaf fixes the batch
    size.

    Args:
        split_fn: splits batches of any other type: ``split_fn(batch, n)`` returns at least one and at most
            ``n`` micro-batches.

    >>> import torch
    >>> splitter = Splitter()
    >>> parts = splitter.split({"x": torch.arange(5), "name": list("abcde"), "scale": 2.0}, 2)
    >>> parts[1]
    {'x': tensor([3, 4]), 'name': ['d', 'e'], 'scale': 2.0}
    >>> print(splitter.describe())
    batch['x']: per sample (Tensor, torch.int64, 1-dimensional)
    batch['name']: per sample (list)
    batch['scale']: shared
    """

    def __init__(self, split_fn: Callable[[Any, int], Sequence[Any]] | None = None) -> None:
        if split_fn is not None and not callable(split_fn):
            raise TypeError(f"split_fn={split_fn!r} is not callable; pass (batch, n) -> micro-batches.")
        self.split_fn = split_fn
        self._learned: dict[Plan, None] = {}
        self._last: Plan | None = None

    def split(self, batch: Any, n: int) -> list[Any]:
        """Split a batch into at most ``n`` micro-batches, none of them empty.

        Args:
            batch: what the DataLoader yields.
            n: micro-batches wanted, at least 1; a batch of fewer samples gives one per sample.

        Returns:
            The micro-batches, in the batch's order; tensors are views of the batch's.

        Raises:
            ValueError: sizes disagree, the batch is empty or has no samples, or it can be read in two ways.
            TypeError: the batch holds a type whose samples cannot be found, and there is no ``split_fn``.
        """
        if n < 1:
            raise ValueError(f"n={n}: a batch is split into at least 1 micro-batch.")
        if self.split_fn is not None:
            return _checked(self.split_fn(batch, n), n)
        size, plan, doubts = self._read(batch)
        sizes = boundaries(size, n)
        if not doubts:
            self._learned[plan] = None
        elif len(sizes) > 1:  # one piece is the whole batch in every reading
            raise ambiguous(doubts)
        self._last = plan
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [take(batch, plan, start, length) for start, length in zip(starts, sizes, strict=True)]

    def batch_size(self, batch: Any) -> int:
        """Number of samples in a batch.

        Raises:
            ValueError: sizes disagree, or the batch has no samples.
            TypeError: the batch holds a type whose samples cannot be found.

        >>> import torch
        >>> Splitter().batch_size((torch.zeros(3, 4), torch.zeros(3)))
        3
        """
        return self._read(batch).size

    def describe(self) -> str:
        """One line per leaf of the batch split last: its key path, and whether it is per sample or shared."""
        if self.split_fn is not None:
            name = getattr(self.split_fn, "__qualname__", type(self.split_fn).__qualname__)
            return f"batch: split by split_fn ({name})"
        return "batch: none split yet" if self._last is None else "\n".join(lines(self._last))

    def _read(self, batch: Any) -> Reading:
        known = [(size, plan) for plan in self._learned if (size := match(batch, plan)) is not None]
        return Reading(*known[0], doubts=[]) if len(known) == 1 else read(batch)


def _checked(pieces: Any, n: int) -> list[Any]:
    if not isinstance(pieces, Sequence) or isinstance(pieces, str | bytes):
        raise TypeError(
            f"split_fn returned a {type(pieces).__name__}; it must return a list or tuple of micro-batches "
            "(wrap a generator in list(...))."
        )
    if not 1 <= len(pieces) <= n:
        raise ValueError(f"split_fn returned {len(pieces)} micro-batches; for n={n} it must return 1 to {n}.")
    return list(pieces)
