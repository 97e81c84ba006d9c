"""Private random draws: which micro-batches get an exact gradient, and the dropout seed of each."""

from __future__ import annotations

import math

import torch


def draw_control(n: int, k: int, generator: torch.Generator) -> tuple[int, ...]:
    """Draw the set C of micro-batches whose gradient is computed exactly.

    Every set of ``k`` out of ``n`` is equally likely, whatever the data: this makes the estimate unbiased.

    Args:
        n: number of micro-batches.
        k: how many get an exact gradient, 0 to ``n``.
        generator: the private CPU generator; the global one is neither read nor advanced.

    Returns:
        ``k`` distinct indices below ``n``, in increasing order.

    Raises:
        ValueError: ``k`` is not within 0 to ``n``.

    >>> draw_control(4, 4, torch.Generator().manual_seed(0))
    (0, 1, 2, 3)
    """
    if not 0 <= k <= n:
        raise ValueError(f"k={k}: between 0 and n={n} of the micro-batches can get an exact gradient.")
    return tuple(sorted(torch.randperm(n, generator=generator)[:k].tolist()))


def draw_bernoulli(n: int, share: float, generator: torch.Generator) -> tuple[int, ...]:
    """Draw each micro-batch into C independently, with the same probability.

    Args:
        n: number of micro-batches.
        share: q, the probability of each.
        generator: the private CPU generator; the global one is neither read nor advanced.

    Returns:
        Between none and ``n`` indices below ``n``, in increasing order.

    Raises:
        ValueError: ``share`` is not within 0 to 1.

    >>> draw_bernoulli(3, 1.0, torch.Generator().manual_seed(0))
    (0, 1, 2)
    """
    _check_share(share)
    chosen = torch.rand(n, generator=generator, dtype=torch.float64) < share
    return tuple(chosen.nonzero().flatten().tolist())


def draw_systematic(n: int, share: float, phase: float) -> tuple[tuple[int, ...], float]:
    """Draw every (1/q)-th micro-batch into C, in a count that runs on from batch to batch.

    Micro-batch i is in C if a whole number lies in ``(phase + i q, phase + (i + 1) q]``. Where the first phase is drawn
    uniformly from 0 to 1, each one is in C with probability exactly q, and two members are never fewer than
    ``floor(1/q)`` apart. The first phase settles all later draws: a coefficient or a centre that follows from earlier
    draws is not independent of this one, as it would be of a Bernoulli draw.

    Args:
        n: number of micro-batches.
        share: q, the probability of each.
        phase: where the count stands, from 0 up to but not 1; the first one is uniform.

    Returns:
        The indices, in increasing order, and the phase of the next batch.

    Raises:
        ValueError: ``share`` is not within 0 to 1, or ``phase`` is out of range.

    >>> draw_systematic(4, 0.25, 0.5)
    ((1,), 0.5)
    """
    _check_share(share)
    if not 0 <= phase < 1:
        raise ValueError(f"phase={phase}: pass the first one from 0 up to but not 1, then what the last draw returned.")
    passed = [math.floor(phase + i * share) for i in range(n + 1)]
    return tuple(i for i in range(n) if passed[i + 1] > passed[i]), (phase + n * share) % 1.0


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}: the probability of an exact gradient is between 0 and 1.")


def draw_seeds(n: int, generator: torch.Generator) -> tuple[int, ...]:
    """Draw one seed per micro-batch, shared by its exact and its predicted pass.

    Args:
        n: number of micro-batches.
        generator: the private CPU generator; the global one is neither read nor advanced.

    Returns:
        ``n`` integers, uniform over 0 to 2^63 - 2.

    >>> len(draw_seeds(3, torch.Generator().manual_seed(0)))
    3
    """
    return tuple(torch.randint(2**63 - 1, (n,), generator=generator).tolist())
