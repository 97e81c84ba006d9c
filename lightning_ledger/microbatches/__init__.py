"""Micro-batches: split any batch, weigh the pieces, draw those that get an exact gradient."""

from lightning_ledger.microbatches.draws import draw_control, draw_seeds
from lightning_ledger.microbatches.splitting import Splitter, boundaries
from lightning_ledger.microbatches.trees import private_copy, shape_key
from lightning_ledger.microbatches.weights import (
    MicroBatch,
    TokenWeights,
    WeightSpec,
    make_microbatches,
    weigh,
)

__all__ = [
    "MicroBatch",
    "Splitter",
    "TokenWeights",
    "WeightSpec",
    "boundaries",
    "draw_control",
    "draw_seeds",
    "make_microbatches",
    "private_copy",
    "shape_key",
    "weigh",
]
