"""A GPT as an ordinary LightningModule. It knows nothing of `lightning_ledger`."""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a four times wider perceptron."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map a residual stream of shape (samples, positions, width) to one of the same shape."""
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self._drop(self.attention_out(mixed.transpose(1, 2).flatten(2)))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x)), approximate="tanh")))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(L.LightningModule):
    """A GPT over bytes or other tokens, of GPT-2's architecture and initialisation.

    A batch is one integer tensor of shape (samples, positions + 1): the model reads all but the last token of
    each row and predicts all but the first. The loss is the mean cross-entropy in nats per token.

    With 12 layers, 12 heads, width 768, context 1024 and a vocabulary of 50257 tokens it is GPT-2 124M;
    `configs/gpt2-124m.yaml` trains it.

    Args:
        layers: transformer blocks.
        heads: attention heads; must divide `width`.
        width: size of the residual stream.
        context: the longest sequence, in tokens.
        dropout: probability of dropping an attention weight or a residual update.
        tied: share the embedding with the output layer.
        learning_rate: AdamW's peak learning rate.
        weight_decay: applied to matrices, not to biases and norms.
        warmup_steps: optimizer steps over which the learning rate rises linearly from near zero.
        schedule: what follows the warm-up: the peak rate throughout, or half a cosine down to a tenth of it
            at the Trainer's last step.
        vocabulary: how many tokens there are; 256 for bytes.
        betas: AdamW's decay rates of the first and second moment.

    Raises:
        ValueError: if `heads` does not divide `width`.

    Example:
        >>> model = GPT(layers=1, heads=2, width=8, context=4)
        >>> model(torch.zeros(3, 4, dtype=torch.long)).shape
        torch.Size([3, 4, 256])
    """

    def __init__(
        self,
        layers: int = 3,
        heads: int = 4,
        width: int = 256,
        context: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        schedule: Literal["constant", "cosine"] = "constant",
        vocabulary: int = 256,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}. Choose a multiple of it.")
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)
        if tied:
            self.head.weight = self.embedding.weight

    def _initialise(self, layers: int) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.blocks.named_parameters():
            # Two residual updates per block: keep the variance of their sum independent of the depth.
            if name.endswith(("attention_out.weight", "mlp_out.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (samples, positions, vocabulary) for tokens of shape (samples, positions)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.size(1)]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"], betas=self.hparams["betas"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate(self, step: int) -> float:
        """Return the share of the peak learning rate at a step."""
        warmup: int = self.hparams["warmup_steps"]
        if step < warmup:
            return (step + 1) / warmup
        if self.hparams["schedule"] == "constant":
            return 1.0
        total = int(self.trainer.estimated_stepping_batches)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))
