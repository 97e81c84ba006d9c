"""Rounding and products as ``make_fx`` and inductor see them: torch operations, and noise as an input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ledger.precision import Format
from lightning_ledger.precision.formats import Role
from tests.precision_oracle import ALL_FORMATS, every_case, every_rounding, generator, product, rand

Program = Callable[[Tensor, Tensor, list[Tensor]], Tensor]


def noise_for(fmt: Format, a: Tensor, b: Tensor, roles: tuple[Role, Role]) -> list[Tensor]:
    """The noise that a product of stochastically rounded operands draws, in order."""
    noise = generator("stochastic")
    assert noise is not None
    drawn: list[Tensor] = []

    def record(like: Tensor) -> Tensor:
        drawn.append(noise(like))
        return drawn[-1]

    product(fmt, a, b, record, roles)
    return drawn


def program(fmt: Format, rounding: str, roles: tuple[Role, Role]) -> Program:
    """The product as a function of its operands and its noise."""

    def run(a: Tensor, b: Tensor, drawn: list[Tensor]) -> Tensor:
        rest = iter(drawn)
        return product(fmt, a, b, None if rounding == "nearest" else lambda like: next(rest), roles)

    return run


@every_case
@every_rounding
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_traced_product_gives_the_same_bits_on_other_operands(
    fmt: Format, role: Role, rounding: str, batch: tuple[int, ...]
) -> None:
    roles: tuple[Role, Role] = ("gradient", role)
    a, b = rand(*batch, 5, 64), rand(*batch, 64, 7, seed=1)
    run = program(fmt, rounding, roles)
    traced = make_fx(run)(a, b, noise_for(fmt, a, b, roles))
    for scale in (1.0, 1e-3, 0.0):
        c, d = scale * rand(*batch, 5, 64, seed=2), rand(*batch, 64, 7, seed=3)
        drawn = noise_for(fmt, c, d, roles)
        assert torch.equal(traced(c, d, drawn), run(c, d, drawn))


# Importing inductor, torch warns of its own use of torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")
@pytest.mark.slow
@every_rounding
def test_inductor_gives_the_bits_of_eager_rounding(rounding: str) -> None:
    a, b = rand(20, 96), rand(96, 40, seed=1)
    roles: list[Role] = ["weight", "gradient"]
    cases = [(fmt, role) for fmt in ALL_FORMATS for role in roles]
    noise = {(fmt, role): noise_for(fmt, a, b, (role, role)) for fmt, role in cases}

    def run(a: Tensor, b: Tensor) -> list[Tensor]:
        results = []
        for fmt, role in cases:
            drawn = iter(noise[fmt, role])
            source = None if rounding == "nearest" else lambda like, drawn=drawn: next(drawn)
            results += [fmt.quantize(a, -1, source, role).dequantize(), fmt.quantize(b, -2, source, role).dequantize()]
        return results

    traced = make_fx(run)(a, b)
    compiled = torch.compile(traced, fullgraph=True)
    expected = run(a, b)
    for (fmt, role), actual, wanted in zip(
        [case for case in cases for _ in "ab"], compiled(a, b), expected, strict=True
    ):
        assert torch.equal(actual, wanted), (fmt.name, role)
