"""Number formats: what a tensor becomes in each, and how two such tensors are multiplied.

A matrix product contracts the last axis of its left operand with the second-to-last of its right one. Formats
that scale do so along that axis, with one scale per row of the left and per column of the right operand,
which then factors out of the sum (int8, fp8), or with one per block of 32 numbers (int4):

    x ~ q * s,   s = max|x| / largest q

Adding a format is adding one entry to ``FORMATS``.

Sources: row-wise int8 after Dettmers et al., arXiv 2208.07339; e4m3 after Micikevicius et al., arXiv
2209.05433; blocks of 32 as in the OCP Microscaling specification, here with fp32 scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_ledger.precision.rounding import Noise, round_to_bfloat16, round_to_floats_, round_to_integers_

Role = Literal["weight", "activation", "gradient"]
"""What an operand is: a parameter, something computed forward, or a gradient with respect to such a thing."""

# Keeps the scale of an all-zero row from being zero: 0 / tiny is 0, where 0 / 0 would be NaN.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Operand:
    """A tensor in some format: ``values``, or ``values * scale`` where there is a scale.

    Args:
        values: [..., M, K], in whatever dtype the format multiplies.
        scale: fp32, broadcasts against ``values``, size 1 along the contraction; None for no scale.
    """

    values: Tensor
    scale: Tensor | None = None

    def transpose(self) -> Operand:
        """The operand with its last two axes swapped."""
        return Operand(self.values.mT, None if self.scale is None else self.scale.mT)

    def dequantize(self) -> Tensor:
        """The numbers that the operand stands for."""
        return self.values if self.scale is None else self.values * self.scale


@dataclass(frozen=True)
class Format(ABC):
    """One number format.

    Args:
        name: the key in ``FORMATS``.
        bits: bits per number, scales not counted.
    """

    name: str
    bits: int

    @property
    def rounds_weights_once(self) -> bool:
        """Whether one rounded copy of a weight, made for the forward product, serves the backward one too."""
        return False

    def refuses(self, length: int) -> str:
        """Why a product that contracts ``length`` numbers cannot run in the format; empty where it can."""
        return ""

    def quantize(self, x: Tensor, dim: int, noise: Noise | None = None, role: Role = "activation") -> Operand:
        """Round ``x`` for a product that contracts ``dim``.

        Args:
            x: floating point, [..., M, K] or [..., K, N]; it is not changed.
            dim: the contracted axis: -1 for a left operand, -2 for a right one.
            noise: for stochastic rounding; None rounds to nearest.
            role: what ``x`` is, for formats that treat weights, activations and gradients differently.

        Returns:
            The operand. Zeros stay zeros. Where ``x`` is infinite or NaN, neither it nor what it is scaled
            with contributes anything finite to a product.

        Raises:
            ValueError: ``dim`` is neither -1 nor -2.

        Example:
            >>> get_format("int8").quantize(torch.tensor([[0.5, -127.0]]), dim=-1).dequantize()
            tensor([[   0., -127.]])
        """
        if dim not in (-1, -2):
            raise ValueError(
                f"dim={dim}: a matrix product contracts dim=-1 of its left or dim=-2 of its right operand; "
                "reshape the tensor so that the contracted axis is one of these."
            )
        # Elementwise work on a transposed view is several times slower, so round what it is a view of.
        if x.stride(-2) == 1 != x.stride(-1):
            return self._encode(x.mT, -3 - dim, noise, role).transpose()
        return self._encode(x, dim, noise, role)

    @abstractmethod
    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        """``quantize`` for a checked ``dim`` and a layout that is cheap to read."""

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        """The product of a left operand [..., M, K] and a right one [..., K, N], as fp32 [..., M, N]."""
        product = torch.matmul(a.values, b.values).float()
        for scale in (a.scale, b.scale):
            if scale is not None:
                product.mul_(scale)
        return product

    @abstractmethod
    def is_native(self, device: torch.device | str) -> bool:
        """Whether matrix products run in the machine's own instructions for this format."""

    @abstractmethod
    def describe(self, device: torch.device | str) -> str:
        """One line that says what the format is on this machine: native or emulated, and how."""


@dataclass(frozen=True)
class Identity(Format):
    """No rounding: lowered operations run unchanged."""

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        return Operand(x.float())

    def is_native(self, device: torch.device | str) -> bool:
        return True

    def describe(self, device: torch.device | str) -> str:
        return f"{self.name}: native (operations unchanged)"


@dataclass(frozen=True)
class BFloat16(Format):
    """Torch's own bfloat16 kernels: sums in fp32, results rounded to bfloat16 as those kernels do."""

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        return Operand(round_to_bfloat16(x, noise))

    def is_native(self, device: torch.device | str) -> bool:
        return _instructions(torch.device(device), "bf16") is not None

    def describe(self, device: torch.device | str) -> str:
        unit = _instructions(torch.device(device), "bf16")
        how = f"native (torch's bfloat16 kernels, {unit})" if unit else "emulated (torch's bfloat16 kernels)"
        return f"{self.name}: {how}"


@dataclass(frozen=True)
class RowInteger(Format):
    """Symmetric integers, one scale per row of the left and per column of the right operand.

    |x - q s| <= s / 2 for nearest rounding and < s for stochastic, s = max|x| / (2**(bits-1) - 1).

    Two matrices are multiplied by ``torch._int_mm`` wherever the machine has 8-bit dot products: with
    AVX512-VNNI it took a quarter of the fp32 product's time from 256x192x192 to 2048x768x3072, and was no
    slower from 16x64x64 on. Batches of matrices and convolutions multiply the same integers in fp32, which
    gives the same numbers while sums stay below 2**24 (a contraction of up to 1040 at 8 bits).
    """

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        limit = 2 ** (self.bits - 1) - 1
        y, scale = _scaled(x.float(), dim, limit)
        values = round_to_integers_(y, noise)
        # A longer sum of 8-bit products could overflow the kernel's int32.
        if x.dim() == 2 and x.shape[dim] * limit**2 < 2**31 and self.is_native(x.device):
            values = values.to(torch.int8)
        return Operand(values, scale)

    def multiply(self, a: Operand, b: Operand) -> Tensor:
        if a.values.dtype != torch.int8 or a.scale is None or b.scale is None:
            return super().multiply(a, b)
        product = int_product(a.values, b.values, padded=a.values.device.type != "cpu")
        return product.float().mul_(a.scale).mul_(b.scale)

    def is_native(self, device: torch.device | str) -> bool:
        return self.bits <= 8 and _instructions(torch.device(device), "int8") is not None

    def describe(self, device: torch.device | str) -> str:
        if self.is_native(device):
            unit = _instructions(torch.device(device), "int8")
            return f"{self.name}: native (torch._int_mm, {unit}; batched products and convolutions emulated)"
        return f"{self.name}: emulated (values rounded to {self.bits} bits, products in fp32)"


@dataclass(frozen=True)
class RowFloat(Format):
    """Small floating-point numbers, one scale per row of the left and column of the right operand; emulated.

    A row's largest magnitude is scaled to ``largest``. Scaled numbers y are rounded to within half a step,
    2**(max(floor(log2 |y|), min_exponent) - mantissa_bits), and multiplied in fp32.

    Args:
        mantissa_bits: explicit mantissa bits.
        min_exponent: exponent of the smallest normal number.
        largest: the largest finite number.
    """

    mantissa_bits: int
    min_exponent: int
    largest: float

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        y, scale = _scaled(x.float(), dim, self.largest)
        return Operand(round_to_floats_(y, self.mantissa_bits, self.min_exponent, noise), scale)

    def is_native(self, device: torch.device | str) -> bool:
        return False

    def describe(self, device: torch.device | str) -> str:
        rounded = f"values rounded to {self.mantissa_bits} mantissa bits"
        return f"{self.name}: emulated ({rounded}, products in fp32)"


@dataclass(frozen=True)
class BlockInteger(Format):
    """Symmetric integers, one scale per ``block`` numbers along the contraction; emulated.

    |x - q s| <= s / 2 for nearest rounding and < s for stochastic, s = max|block| / (2**(bits-1) - 1). A
    short last block is filled up with zeros. Scales do not factor out of the sum: the operand carries q s.

    Args:
        block: numbers that share a scale.
    """

    block: int

    def _encode(self, x: Tensor, dim: int, noise: Noise | None, role: Role) -> Operand:
        limit = 2 ** (self.bits - 1) - 1
        length = x.shape[dim]
        x = x.float()
        if missing := -length % self.block:
            x = pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))
        y, scale = _scaled(x.unflatten(dim, (-1, self.block)), dim, limit)
        values = round_to_integers_(y, noise).mul_(scale)
        return Operand(values.flatten(dim - 1, dim).narrow(dim, 0, length))

    def is_native(self, device: torch.device | str) -> bool:
        return False

    def describe(self, device: torch.device | str) -> str:
        return f"{self.name}: emulated (values rounded to {self.bits} bits, products in fp32)"


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Identity("fp32", bits=32),
        BFloat16("bf16", bits=16),
        RowInteger("int8", bits=8),
        RowFloat("fp8", bits=8, mantissa_bits=3, min_exponent=-6, largest=448.0),
        BlockInteger("int4", bits=4, block=32),
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


def _scaled(x: Tensor, dim: int, largest: float) -> tuple[Tensor, Tensor]:
    """Divide fp32 ``x`` by a scale that makes the largest magnitude along ``dim`` equal ``largest``.

    Returns:
        x / scale and scale. A scale is infinite or NaN where there is such a number to share it.
    """
    y = x.abs()
    scale = y.amax(dim, keepdim=True).div_(largest).clamp_(min=_SMALLEST_SCALE)
    # The magnitudes have served: their memory takes the quotient, since fresh pages cost more than dividing.
    return torch.div(x, scale, out=y), scale


# By kind of product: what a CPU must have, best first, with the name shown; and the least CUDA capability.
_CPU_FEATURES = {
    "bf16": {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"},
    "int8": {"amx_int8": "AMX", "avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI"},
}
_CUDA_CAPABILITY = {"bf16": (8, 0), "int8": (7, 5)}


@cache
def _instructions(device: torch.device, kind: str) -> str | None:
    """The name of the instructions in which the device multiplies matrices of this kind, or None."""
    if device.type == "cuda":
        return "CUDA" if torch.cuda.get_device_capability(device) >= _CUDA_CAPABILITY[kind] else None
    if device.type == "cpu":
        # A torch too old to say what its CPU can do gets the emulation.
        capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        return next((name for key, name in _CPU_FEATURES[kind].items() if capabilities.get(key)), None)
    return None
