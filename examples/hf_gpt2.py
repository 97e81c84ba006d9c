"""Hugging Face's GPT-2, wrapped in a few lines. It knows nothing of `lightning_ledger`."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel


class HFGPT2(L.LightningModule):
    """GPT-2 with dropout and tied weights, from random weights, on bytes: nothing is downloaded.

    A batch is one integer tensor of shape (samples, positions), as `text.TextDataModule` makes it. GPT-2
    shifts the labels itself, so that the labels are the inputs. All rows are equally long, so the loss is a
    mean over samples as well as over tokens.

    Args:
        layers: transformer blocks.
        heads: attention heads.
        width: size of the residual stream.
        context: the longest sequence.
        dropout: in the embeddings, the attention weights and the residual updates.
        learning_rate: AdamW's.
    """

    def __init__(
        self,
        layers: int = 3,
        heads: int = 4,
        width: int = 256,
        context: int = 129,
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
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
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
