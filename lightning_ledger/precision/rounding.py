"""Rounding: the nearest number of a grid, or a random neighbour whose expectation is the number itself.

Stochastic rounding is written as *dither*: add noise, uniform over half a grid step to either side, then
round to nearest. A number at fraction f between two neighbours goes up with probability f, so E[round(x)] = x
for every x in range (Gupta et al., arXiv 1502.02551). Numbers already on the grid, zero among them, never
move.

What draws at all draws only from the noise it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

ROUNDINGS = ("nearest", "stochastic")

Noise = Callable[[Tensor], Tensor]
"""Gives one uniform random int16 for each element of its argument, in the argument's shape and on its device."""


@dataclass(frozen=True)
class FloatType:
    """A small floating-point type, subnormals included.

    Args:
        name: e, exponent bits, m, mantissa bits.
        mantissa_bits: explicit ones.
        min_exponent: exponent of the smallest normal number.
        largest: the largest finite number.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    largest: float


# The two of eight bits after Micikevicius et al., arXiv 2209.05433; all after the OCP Microscaling specification.
E4M3 = FloatType("e4m3", mantissa_bits=3, min_exponent=-6, largest=448.0)
E5M2 = FloatType("e5m2", mantissa_bits=2, min_exponent=-14, largest=57344.0)
E2M3 = FloatType("e2m3", mantissa_bits=3, min_exponent=0, largest=7.5)
E2M1 = FloatType("e2m1", mantissa_bits=1, min_exponent=0, largest=6.0)

_DITHER_UNIT = 2.0**-16
_FP32_EXPONENT = 0x7F800000
_FP32_MANTISSA_BITS = 23
_BFLOAT16_CUT = 0xFFFF


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part, the same in every process.

    Deriving keeps streams apart: two uses that share a user's seed (dropout masks and rounding noise, say)
    must not draw the same numbers.

    Args:
        parts: anything with a stable ``repr``, such as strings, integers and tuples of them.

    Example:
        >>> derive_seed("weight", 7, 0) == derive_seed("weight", 7, 0)
        True
        >>> derive_seed("weight", 7, 0) == derive_seed("weight", 70)
        False
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def noise_from(generator: Generator) -> Noise:
    """Noise that advances ``generator``.

    Drawing is the dearest step of rounding, so that one 64-bit draw serves four elements.

    Args:
        generator: on the device of what will be rounded.

    Example:
        >>> noise = noise_from(Generator().manual_seed(0))
        >>> noise(torch.zeros(3)).dtype
        torch.int16
    """

    def draw(like: Tensor) -> Tensor:
        count = like.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64, device=like.device)
        draws.random_(-(2**63), None, generator=generator)
        return draws.view(torch.int16)[:count].view(like.shape)

    return draw


def dither(like: Tensor, noise: Noise) -> Tensor:
    """Draw one odd int16 per element of ``like``: uniform noise in (-1/2, 1/2) in units of 2**-16.

    Odd numbers are symmetric about zero and never reach a half, so the mean is exactly zero and grid points
    stay put, even where a division left them an ulp away. The price is a resolution of 2**-15: expectations
    are met to within 2**-16 of a grid step.

    Args:
        like: gives the shape and the device.
        noise: what to draw from.
    """
    return noise(like) | 1


def round_to_integers_(y: Tensor, noise: Noise | None) -> Tensor:
    """Round ``y`` to integers in place.

    Args:
        y: fp32, any shape.
        noise: for stochastic rounding; None for nearest (ties to even).

    Returns:
        ``y`` itself.

    Example:
        >>> round_to_integers_(torch.tensor([0.4, -1.6, 2.5]), noise=None)
        tensor([ 0., -2.,  2.])
    """
    if noise is not None:
        y.add_(dither(y, noise), alpha=_DITHER_UNIT)
    return y.round_()


def round_to_floats_(y: Tensor, element: FloatType, noise: Noise | None) -> Tensor:
    """Round ``y`` in place to a small floating-point type, subnormals included.

    The grid step at y is 2**(max(floor(log2 |y|), min_exponent) - mantissa_bits). Adding and subtracting
    1.5 * 2**23 steps makes fp32 itself round to that step, ties to even.

    Args:
        y: fp32, any shape, no larger than the largest finite number of the type.
        element: the type.
        noise: for stochastic rounding; None for nearest.

    Returns:
        ``y`` itself. Infinite and NaN elements become NaN.

    Example:
        >>> round_to_floats_(torch.tensor([1.06, -300.0, 0.003]), E4M3, noise=None)
        tensor([ 1.0000e+00, -2.8800e+02,  3.9062e-03])
    """
    power = floor_power_of_two(y).clamp_(min=2.0**element.min_exponent)
    if noise is not None:
        y.addcmul_(power, dither(y, noise), value=_DITHER_UNIT * 2.0**-element.mantissa_bits)
    shift = power.mul_(1.5 * 2.0 ** (_FP32_MANTISSA_BITS - element.mantissa_bits))
    return y.add_(shift).sub_(shift)


def round_to_bfloat16(x: Tensor, noise: Noise | None) -> Tensor:
    """Round to ``torch.bfloat16``, whose numbers are those of fp32 with the last 16 bits zero.

    Stochastic rounding adds 16 random bits to the last 16 and cuts these off: a carry rounds up.
    The expectation is exact.

    Args:
        x: any floating-point tensor; it is not changed.
        noise: for stochastic rounding; None for nearest.

    Returns:
        A bfloat16 tensor of the same shape; not finite where ``x`` is not.

    Example:
        >>> round_to_bfloat16(torch.tensor([1.003]), noise=None)
        tensor([1.], dtype=torch.bfloat16)
    """
    if noise is None or x.dtype == torch.bfloat16:
        return x.to(torch.bfloat16)
    x = x.float()
    bits = noise(x).to(torch.int32).bitwise_and_(_BFLOAT16_CUT)
    rounded = bits.add_(x.view(torch.int32)).bitwise_and_(~_BFLOAT16_CUT).view(torch.float32)
    # A carry can turn the bits of a NaN into those of a number; x - x is zero unless x is not finite.
    return rounded.add_(x - x).to(torch.bfloat16)


def floor_power_of_two(y: Tensor) -> Tensor:
    """2**floor(log2 |y|) of an fp32 tensor, read off its bits.

    Returns:
        fp32; 0 for zero and subnormal elements, infinity for infinite and NaN ones.

    Example:
        >>> floor_power_of_two(torch.tensor([0.75, -8.0]))
        tensor([0.5000, 8.0000])
    """
    return (y.view(torch.int32) & _FP32_EXPONENT).view(torch.float32)
