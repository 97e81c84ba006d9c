"""Small modules whose FLOPs are worked out by hand, shared by the tests of counting. A multiply-add is two FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """6 -> 5 -> 1. Not a Sequential: compiled in place, that one stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 5)
        self.out = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class Perceptron(pl.LightningModule):
    """Its loss is the square of what the net returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validated(Perceptron):
    """The same, validated."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()


# Per sample, forward: 2*6*5 + 2*5*1 = 70. Backward: weight gradients 2*6*5 and 2*5*1 = 70, and the gradient of the
# hidden layer, 2*5*1 = 10; the batch itself needs none.
FORWARD, BACKWARD = 70, 80


class Attention(pl.LightningModule):
    """One causal attention block: qkv projection, fused attention, output projection."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Per sample of 5 positions, width 8, two heads of depth 4. Forward:
#   qkv        2 * 5 * 8 * 24          = 1920
#   attention  q k' and p v: 2 * (2 heads * 5 * 5 * 4) * 2 = 800
#   out        2 * 5 * 8 * 8           =  640
# Backward: qkv and out need a weight gradient each, out also an input gradient: 1920 + 640 + 640. The fused backward
# multiplies five times (scores again, grad_v, grad_p, grad_q, grad_k) where its forward does twice: 800 * 5/2.
# Convention: what the causal mask leaves out is counted, as PyTorch's own formulas do.
ATTENTION_FORWARD = 1920 + 800 + 640
ATTENTION_BACKWARD = 1920 + 640 + 640 + 2000


@contextmanager
def opaque_product() -> Iterator[Any]:
    """A custom operation: a product that no table of FLOPs knows, and its derivative."""

    @torch.library.custom_op("lightning_ledger_tests::opaque", mutates_args=())
    def opaque(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad

    opaque.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    try:
        yield opaque
    finally:
        opaque._lib._destroy()


class Opaque(Perceptron):
    """Its first product is the opaque one."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.product = product

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([self.product(batch[0], self.weight)], batch_idx)
