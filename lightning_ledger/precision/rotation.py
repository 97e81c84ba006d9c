"""Rotation: spread an outlier over its neighbours before rounding, and leave exact products as they are.

A scale is set by the largest number that shares it, so that one outlier costs all its neighbours their
precision. An orthogonal matrix Q mixes them, and cancels between the two operands of a product:

    (a Q) (Q' b) = a b

Q is a random sign for each number, then a Hadamard matrix for each block. Source: Chee et al. (QuIP), arXiv
2307.13304, and Ashkboos et al. (QuaRot), arXiv 2404.00456.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ledger.precision.rounding import derive_seed

LARGEST_BLOCK = 128
SMALLEST_BLOCK = 8
"""Rotating fewer numbers than these would spread an outlier too little to pay for itself."""


def rotate(x: Tensor, dim: int) -> Tensor:
    """Rotate ``x`` along the axis that a matrix product contracts.

    x Q for dim=-1 and Q' x for dim=-2, where Q = diag(signs) (I kron H / sqrt(b)) is orthogonal, H is
    Sylvester's Hadamard matrix of size b, and b is the largest power of two, at most 128, that divides the
    length. The signs are random, but fixed: they depend on the length alone.

    Args:
        x: floating point, [..., M, K] or [..., K, N]; it is not changed.
        dim: -1 for a left operand, -2 for a right one.

    Returns:
        Of the shape and dtype of ``x``. Where b is below 8, ``x`` itself: no rotation.

    Example:
        >>> a, b = torch.ones(1, 16), torch.arange(16.0).view(16, 1)
        >>> torch.allclose(rotate(a, -1) @ rotate(b, -2), a @ b)
        True
    """
    length = x.shape[dim]
    block = block_size(length)
    if block < SMALLEST_BLOCK:
        return x
    signs, hadamard = _constants(length, x.device, x.dtype)
    if dim == -1:
        rows: Tensor = (x * signs).unflatten(-1, (-1, block))
        return rows.matmul(hadamard).flatten(-2)
    columns: Tensor = (x * signs.unsqueeze(-1)).unflatten(-2, (-1, block))
    return hadamard.matmul(columns).flatten(-3, -2)


def block_size(length: int) -> int:
    """The largest power of two, at most 128, that divides ``length``.

    Example:
        >>> [block_size(length) for length in (1024, 48, 7)]
        [128, 16, 1]
    """
    return min(LARGEST_BLOCK, length & -length)


@cache
def _constants(length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The signs, [length], and H / sqrt(b), [b, b]."""
    # Plain tensors, whoever asks first: a trace must find them as constants, not record how they are made.
    with _disable_current_modes(), torch.inference_mode(False):
        noise = Generator().manual_seed(derive_seed("rotation", length))
        signs = torch.randint(2, (length,), generator=noise).mul_(2).sub_(1)
        hadamard = torch.ones(1, 1, dtype=torch.float64)
        while len(hadamard) < block_size(length):
            hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
        hadamard = hadamard / len(hadamard) ** 0.5
        return signs.to(device, dtype), hadamard.to(device, dtype)
