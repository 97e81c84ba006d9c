"""Private random draws: which micro-batches get an exact gradient, and the dropout seed of each."""

from __future__ import annotations

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
