"""Micro-batches: split any batch, weigh the pieces, draw those that get an exact gradient."""

from lightning_ledger.microbatches.draws import draw_bernoulli, draw_control, draw_seeds, draw_systematic
from lightning_ledger.microbatches.splitting import Splitter, boundaries
from lightning_ledger.microbatches.trees import private_copy, shape_key, tensors_apart
from lightning_ledger.microbatches.weights import (
    MicroBatch,
    TokenWeights,
    WeightSpec,
    make_microbatches,
    total_amount,
    weigh,
)

__all__ = [
    "MicroBatch",
    "Splitter",
    "TokenWeights",
    "WeightSpec",
    "boundaries",
    "draw_bernoulli",
    "draw_control",
    "draw_seeds",
    "draw_systematic",
    "make_microbatches",
    "private_copy",
    "shape_key",
    "tensors_apart",
    "total_amount",
    "weigh",
]
