"""Hugging Face's GPT-2, wrapped in a few lines. It knows nothing of `lightning_ledger`."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_with_min_lr_schedule_with_warmup


class HFGPT2(L.LightningModule):
    """GPT-2 with dropout and tied weights, from random weights, on bytes or tokens: nothing is downloaded.

    A batch is one integer tensor of shape (samples, positions), as `text.TextDataModule` makes it, of which at most
    `context` positions are read. GPT-2 shifts the labels itself, so that the labels are the inputs. All rows are
    equally long, so the loss is a mean over samples as well as over tokens.

    With 12 layers, 12 heads, width 768, context 1024 and a vocabulary of 50257 tokens it is GPT-2 124M, which had a
    dropout of 0.1; `configs/gpt2-124m-hf.yaml` trains it.

    Args:
        layers: transformer blocks.
        heads: attention heads.
        width: size of the residual stream.
        context: the longest sequence.
        dropout: in the embeddings, the attention weights and the residual updates.
        learning_rate: AdamW's peak learning rate.
        vocabulary: how many tokens there are; 256 for bytes.
        betas: AdamW's decay rates of the first and second moment.
        weight_decay: AdamW's, of every parameter.
        warmup_steps: of the cosine schedule: optimizer steps over which the learning rate rises linearly from zero.
        schedule: the peak learning rate throughout, or a warm-up and half a cosine down to a tenth of it at the
            Trainer's last step.
    """

    def __init__(
        self,
        layers: int = 3,
        heads: int = 4,
        width: int = 256,
        context: int = 129,
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
        vocabulary: int = 256,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        schedule: Literal["constant", "cosine"] = "constant",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary,
                n_positions=context,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def _loss(self, batch: Tensor) -> Tensor:
        tokens = batch[:, : self.hparams["context"]]
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> Any:
        chosen = self.hparams
        optimizer = torch.optim.AdamW(
            self.parameters(), chosen["learning_rate"], betas=chosen["betas"], weight_decay=chosen["weight_decay"]
        )
        if chosen["schedule"] == "constant":
            return optimizer
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, chosen["warmup_steps"], total, min_lr_rate=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
