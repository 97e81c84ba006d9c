"""A captured program gives the eager predictor's numbers, bit for bit: examples' modules, every format and rounding."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import pytest

from lightning_ledger.precision import FORMATS, ROUNDINGS
from tests.program_cases import Pair, batch_of, denoiser, digits, gpt, hf_gpt2, move

# Each of these formats in one rounding with one transformer, in the other with the other; the rest is slow.
QUICK = {
    digits: [(fmt, rounding) for fmt in FORMATS for rounding in ROUNDINGS],
    denoiser: [(fmt, rounding) for fmt in ("bf16", "int8", "int4", "mxfp4", "w4a16") for rounding in ROUNDINGS],
    gpt: [
        ("bf16", "nearest"),
        ("int8", "stochastic"),
        ("int4", "nearest"),
        ("mxfp4", "stochastic"),
        ("w4a16", "nearest"),
    ],
    hf_gpt2: [
        ("bf16", "stochastic"),
        ("int8", "nearest"),
        ("int4", "stochastic"),
        ("mxfp4", "nearest"),
        ("w4a16", "stochastic"),
    ],
}


def cases() -> list[object]:
    """Every module in every format and rounding."""
    return [
        pytest.param(
            make,
            fmt,
            rounding,
            marks=[] if (fmt, rounding) in quick else pytest.mark.slow,
            id=f"{make.__name__}-{fmt}-{rounding}",
        )
        for make, quick in QUICK.items()
        for fmt in FORMATS
        for rounding in ROUNDINGS
    ]


@pytest.mark.parametrize(("make", "fmt", "rounding"), cases())
def test_functorch1046_a_program_gives_the_eager_bits_at_fresh_weights(
    make: Callable[[], pl.LightningModule], fmt: str, rounding: str
) -> None:
    pair = Pair(make(), fmt, rounding)
    pair.warm_up(batch_of(pair.module, seed=0))
    for step in range(2):
        for batch in (1, 2):
            for seed in (7, 8):
                assert pair.agree(batch_of(pair.module, batch), seed), (step, batch, seed)
        move(pair.module, seed=step)
        pair.refresh(seed=step)
    # Uses 3 to 10: those that are powers of two run the training step for comparison, the others the program alone.
    assert pair.ran == [False, True, False, False, False, True, False, False]
    assert pair.program.captures == 1
    assert pair.program.engine == "captured"
