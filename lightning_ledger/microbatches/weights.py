"""The share each micro-batch has in what the user's loss averages over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_ledger.microbatches.splitting import Splitter
from lightning_ledger.microbatches.trees import children


@dataclass(frozen=True)
class TokenWeights:
    """Weights for a loss that is a mean over tokens: the number of targets that are not ignored.

    Args:
        key: where the targets are: a key or attribute (``"labels"``), a position (``1``), or a dotted path
            (``"1.labels"``).
        ignore_index: the target value that the loss leaves out.
        shift: the model shifts the labels itself, as Hugging Face's causal models do. It then predicts
            ``labels[:, 1:]``, so the first position along dimension 1 is not a target.

    >>> labels = torch.tensor([[5, 6, -100], [-100, 7, 8]])
    >>> TokenWeights().count({"labels": labels}), TokenWeights(shift=True).count({"labels": labels})
    (4, 3)
    """

    key: str | int = "labels"
    ignore_index: int = -100
    shift: bool = False

    def count(self, microbatch: Any) -> int:
        """Number of targets in one micro-batch that the loss does not ignore.

        Raises:
            ValueError: nothing is found at ``key``, or ``shift`` is set and the targets have no dimension 1.
            TypeError: what is found is not a tensor or array of integers.
        """
        return self.counts([microbatch])[0]

    def counts(self, microbatches: Sequence[Any]) -> tuple[int, ...]:
        """As :meth:`count`, for several micro-batches; waits for the device only once."""
        valid = [(self._targets(part) != self.ignore_index).sum() for part in microbatches]
        return tuple(torch.stack(valid).tolist())

    def _targets(self, microbatch: Any) -> Tensor:
        found = _find(microbatch, self.key)
        integers = isinstance(found, np.ndarray) and found.dtype.kind in "biu"
        if isinstance(found, Tensor):
            integers = not (found.is_floating_point() or found.is_complex())
        if not integers:
            what = getattr(found, "dtype", type(found).__name__)
            raise TypeError(
                f"TokenWeights(key={self.key!r}) found {what}; it counts integer targets in a tensor. Name "
                "the tensor of class indices in key, or pass a callable as weights."
            )
        # Signed, since torch wraps an ignore_index of -100 round to 156 when the labels are bytes.
        targets = found.long() if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.int64)
        if not self.shift:
            return targets
        if targets.dim() < 2:
            raise ValueError(
                f"TokenWeights(key={self.key!r}, shift=True) found targets of shape {tuple(targets.shape)}; "
                "shifting drops the first position along dimension 1, which they lack. Set shift=False."
            )
        return targets[:, 1:]


WeightSpec = Literal["samples", "sum"] | TokenWeights | Callable[[Any], float]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One piece of a batch.

    Attributes:
        data: what the user's ``training_step`` gets.
        index: position among the micro-batches of its batch.
        samples: number of samples; 0 where a ``split_fn`` made it and its samples cannot be counted.
        tokens: targets not ignored, with :class:`TokenWeights`; otherwise 0.
        weight: w_i, the factor of its loss and gradient in those of the batch.
    """

    data: Any
    index: int
    samples: int
    tokens: int
    weight: float


def weigh(microbatches: Sequence[Any], spec: WeightSpec, splitter: Splitter) -> tuple[float, ...]:
    """Weights w_i with which micro-batch losses add up to the loss of the whole batch.

    For a loss averaged over samples, tokens, or whatever a callable counts, ``w_i = c_i / sum_j c_j`` with
    ``c_i`` the count in micro-batch i; for a loss that sums (``"sum"``) every ``w_i`` is 1. If there is
    nothing to average over in any micro-batch, the weights are equal: the user's own loss is undefined
    there as well.

    Args:
        microbatches: the pieces of one batch.
        spec: ``"samples"``, ``"sum"``, a :class:`TokenWeights`, or a function from micro-batch to count.
        splitter: counts samples.

    Returns:
        One weight per micro-batch.

    Raises:
        ValueError: an unknown ``spec``, or a count that is negative or not finite.
        TypeError: a count that is not a number, or samples that cannot be counted.

    >>> splitter = Splitter()
    >>> weigh(splitter.split(torch.zeros(4, 2), 3), "samples", splitter)
    (0.5, 0.25, 0.25)
    """
    if isinstance(spec, TokenWeights):
        return _shares(spec.counts(microbatches))
    if callable(spec):
        return _shares([_amount(spec, part) for part in microbatches])
    if spec == "samples":
        return _shares(_samples(microbatches, spec, splitter))
    if spec == "sum":
        return (1.0,) * len(microbatches)
    raise ValueError(f"weights={spec!r} is unknown: pass 'samples', 'sum', TokenWeights(...), or a callable.")


def make_microbatches(batch: Any, n: int, splitter: Splitter, spec: WeightSpec) -> tuple[MicroBatch, ...]:
    """Split a batch and weigh the pieces.

    A micro-batch of weight 0 is dropped, and the rest renumbered: a mean over no tokens is NaN, while its
    share of the batch's gradient is zero. If all weights would be 0, all are kept, with equal weights.

    Args:
        batch: what the DataLoader yields.
        n: micro-batches wanted, at least 1.
        splitter: splits and counts samples.
        spec: what the user's loss averages over, see :func:`weigh`.

    Returns:
        At least one and at most ``n`` micro-batches.

    Raises:
        ValueError: the batch cannot be split or weighed.
        TypeError: the batch holds types that cannot be split or weighed.

    >>> batch = {"labels": torch.tensor([[1, 2], [3, -100], [-100, -100]])}
    >>> parts = make_microbatches(batch, 3, Splitter(), TokenWeights())
    >>> [(part.tokens, round(part.weight, 3)) for part in parts]
    [(2, 0.667), (1, 0.333)]
    """
    pieces = splitter.split(batch, n)
    samples = _samples(pieces, spec, splitter)
    tokens = spec.counts(pieces) if isinstance(spec, TokenWeights) else (0,) * len(pieces)
    if isinstance(spec, TokenWeights):  # counted already, and counting waits for the device
        weights = _shares(tokens)
    else:
        weights = _shares(samples) if spec == "samples" else weigh(pieces, spec, splitter)
    kept = [row for row in zip(pieces, samples, tokens, weights, strict=True) if row[3] > 0]
    return tuple(MicroBatch(row[0], index, *row[1:]) for index, row in enumerate(kept))


def total_amount(microbatches: Sequence[MicroBatch], spec: WeightSpec) -> float:
    """How much of what the user's loss averages over is in these micro-batches; 0 where it sums.

    Args:
        microbatches: of one batch.
        spec: what the loss averages over.

    >>> parts = make_microbatches(torch.zeros(5, 2), 2, Splitter(), "samples")
    >>> total_amount(parts, "samples"), total_amount(parts, len)
    (5.0, 5.0)
    """
    if isinstance(spec, TokenWeights):
        return float(sum(part.tokens for part in microbatches))
    if callable(spec):
        return math.fsum(_amount(spec, part.data) for part in microbatches)
    return 0.0 if spec == "sum" else float(sum(part.samples for part in microbatches))


def _shares(counts: Sequence[float]) -> tuple[float, ...]:
    total = math.fsum(counts)
    return tuple(count / total for count in counts) if total else (1 / len(counts),) * len(counts)


def _samples(pieces: Sequence[Any], spec: WeightSpec, splitter: Splitter) -> list[int]:
    try:
        return [splitter.batch_size(part) for part in pieces]
    except (TypeError, ValueError) as error:
        if spec != "samples":
            return [0] * len(pieces)
        raise TypeError(
            "weights='samples' needs the number of samples in each micro-batch, which cannot be found in "
            f"what split_fn returned ({error}) Pass a callable as weights: micro-batch -> number of "
            "samples."
        ) from error


def _amount(spec: Callable[[Any], float], part: Any) -> float:
    amount = spec(part)
    name = getattr(spec, "__qualname__", type(spec).__qualname__)
    try:
        number = float(amount)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"weights callable {name} returned {amount!r}; it must return one number.") from error
    if not 0 <= number < math.inf:
        raise ValueError(
            f"weights callable {name} returned {number}; it must return how much of what the loss averages "
            "over is in the micro-batch: finite, and at least 0."
        )
    return number


def _find(batch: Any, key: str | int) -> Any:
    """What is at a key path; a key that contains dots is tried whole first."""
    if isinstance(batch, Mapping) and key in batch:
        return batch[key]
    node = batch
    for step in key.split(".") if isinstance(key, str) else [key]:
        position = int(step) if str(step).isdecimal() else None
        if isinstance(node, Mapping) and (step in node or position in node):
            node = node[step if step in node else position]
        elif isinstance(node, list | tuple) and position is not None and position < len(node):
            node = node[position]
        elif isinstance(step, str) and not isinstance(node, Mapping) and hasattr(node, step):
            node = getattr(node, step)
        else:
            present = ", ".join(_keys(node)) or "none"
            where = "the micro-batch" if node is batch else f"a {type(node).__name__} inside it"
            raise ValueError(
                f"TokenWeights(key={key!r}): no {step!r} in {where}; keys present: {present}. Name the "
                "targets in key, with dots for nesting ('1.labels')."
            )
    return node


def _keys(node: Any) -> list[str]:
    labels = [label for label, _ in children(node)] or sorted(vars(node) if hasattr(node, "__dict__") else ())
    return [label.strip("[].") for label in labels]
