"""A small model with every lowered operation, and its training step inside a lowering."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightning_ledger.precision import Lowering
from tests.precision_oracle import rand


class Block(nn.Module):
    """Convolution, attention and linear layers; every contraction is a multiple of 32, so that no format refuses it.

    Args:
        fused: attention in torch's fused kernel, else in its parts.
    """

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv1d(32, 64, 3, padding=1)
        self.qkv = nn.Linear(64, 192, bias=False)
        self.out = nn.Linear(64, 32)
        self.backend = SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).mT
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backend):
            y: Tensor = scaled_dot_product_attention(q, k, v, is_causal=True)
        loss: Tensor = self.out(x + y.transpose(1, 2).flatten(2)).square().mean()
        return loss


def make_block(fused: bool = False) -> Block:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Block(fused)


def inputs(model: nn.Module) -> Tensor:
    return rand(2, 32, 32).to(next(model.parameters()))


def step(model: nn.Module, lowering: Lowering | None, seed: int = 0) -> list[Tensor]:
    """The loss and the gradients of one training step."""
    if lowering is None:
        loss = model(inputs(model))
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    with lowering.mode(seed):
        loss = model(inputs(model))
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rounded_weight(lowering: Lowering, w: Tensor, seed: int = 0) -> Tensor:
    """``w`` as the mode sees it: rows of the identity are exact in every format."""
    with lowering.mode(seed):
        return torch.eye(w.shape[0]) @ w
