"""What the machine multiplies in its own instructions."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

# By kind of product: what a CPU must have, best first, with the name shown; and the least CUDA capability.
_CPU_FEATURES = {
    "bf16": {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"},
    "int8": {"amx_int8": "AMX", "avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI"},
}
_CUDA_CAPABILITY = {"bf16": (8, 0), "int8": (7, 5)}


@cache
def instructions(device: torch.device, kind: str) -> str | None:
    """The name of the instructions in which the device multiplies matrices of this kind, or None."""
    if device.type == "cuda":
        return "CUDA" if torch.cuda.get_device_capability(device) >= _CUDA_CAPABILITY[kind] else None
    if device.type == "cpu":
        # A torch too old to say what its CPU can do gets the emulation.
        capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        return next((name for key, name in _CPU_FEATURES[kind].items() if capabilities.get(key)), None)
    return None


def int_product(a: Tensor, b: Tensor, padded: bool) -> Tensor:
    """The exact int32 product of two int8 matrices, by ``torch._int_mm``.

    Args:
        a: int8, [M, K].
        b: int8, [K, N].
        padded: fill up with zeros, and trim, the shapes that CUDA's kernel rejects: 16 rows or fewer, and a K
            or N that is no multiple of 8.

    Returns:
        int32, [M, N].

    Example:
        >>> a = torch.tensor([[1, -2, 3]], dtype=torch.int8)
        >>> int_product(a, a.mT, padded=True)
        tensor([[14]], dtype=torch.int32)
    """
    if not padded:
        return torch._int_mm(a, b)
    (m, k), n = a.shape, b.shape[1]
    a = pad(a, (0, -k % 8, 0, max(0, 17 - m)))
    b = pad(b, (0, -n % 8, 0, -k % 8))
    return torch._int_mm(a, b)[:m, :n]
