"""Number formats: what a tensor becomes in each, and how two such tensors are multiplied.

A matrix product contracts the last axis of its left operand with the second-to-last of its right one. Formats
that scale do so along that axis: by row or by tensor (``rows``), or by block (``blocks``). Weight-only formats
(``weight_only``) join one format for weights to another for the rest.

Adding a format is adding one entry to ``FORMATS``.
"""

from __future__ import annotations

from difflib import get_close_matches

import torch

from lightning_ledger.precision.formats.base import Format, Operand, Role
from lightning_ledger.precision.formats.blocks import NVFP4, BlockInteger, Microscaled
from lightning_ledger.precision.formats.native import int_product
from lightning_ledger.precision.formats.plain import BFloat16, Identity
from lightning_ledger.precision.formats.rows import RowInteger, ScaledFloat
from lightning_ledger.precision.formats.weight_only import WeightOnly
from lightning_ledger.precision.rounding import E2M1, E2M3, E4M3, E5M2

__all__ = [
    "FORMATS",
    "NVFP4",
    "BFloat16",
    "BlockInteger",
    "Format",
    "Identity",
    "Microscaled",
    "Operand",
    "Role",
    "RowInteger",
    "ScaledFloat",
    "WeightOnly",
    "get_format",
    "int_product",
]

_BF16 = BFloat16("bf16", bits=16)
_INT8 = RowInteger("int8", bits=8)
_INT4_GROUPS = BlockInteger("int4 groups", bits=4, block=128)

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Identity("fp32", bits=32),
        _BF16,
        _INT8,
        ScaledFloat("fp8", bits=8, element=E4M3, gradient_element=E5M2),
        ScaledFloat("fp8_tensor", bits=8, element=E4M3, gradient_element=E5M2, per_tensor=True),
        Microscaled("mxfp8", bits=8, element=E4M3, block=32),
        Microscaled("mxfp6", bits=6, element=E2M3, block=32),
        Microscaled("mxfp4", bits=4, element=E2M1, block=32),
        NVFP4("nvfp4", bits=4),
        BlockInteger("int4", bits=4, block=32),
        WeightOnly("w8a16", bits=8, weights=_INT8, activations=_BF16, dtype=torch.bfloat16),
        WeightOnly("w4a16", bits=4, weights=_INT4_GROUPS, activations=_BF16, dtype=torch.bfloat16),
        WeightOnly("w4a8", bits=4, weights=_INT4_GROUPS, activations=_INT8, dtype=torch.float32),
    )
}
"""Every format by name."""


def get_format(name: str | Format) -> Format:
    """Return the format of that name; a ``Format`` is returned as it is.

    Raises:
        ValueError: there is no such format.

    Example:
        >>> get_format("int4").bits
        4
    """
    if isinstance(name, Format):
        return name
    if name in FORMATS:
        return FORMATS[name]
    near = get_close_matches(str(name).lower(), FORMATS, n=1, cutoff=0.4)
    hint = f" Did you mean format={near[0]!r}?" if near else ""
    raise ValueError(f"format={name!r} is not a number format.{hint} Known formats: {', '.join(FORMATS)}.")
