"""Language models of other packages train unmodified, or are refused with the documented message."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger.microbatches import TokenWeights
from lightning_ledger.strategies import PredictedGradientStrategy
from tests.foreign_runs import STEPS, loader, predicted, train, windows
from tests.lightning_runs import trainer, weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Of the products in .*, these stay in high precision"),
]

LENGTH, BYTES, MASK = 32, 256, 256


class Wrapped(pl.LightningModule):
    """A Hugging Face model with a head, as their documentation puts it into Lightning."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def tokenized(tokens: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    """Samples as their tokenizers make them, with a mask of what is no padding."""
    return [
        {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": y} for x, y in zip(tokens, labels, strict=True)
    ]


def next_byte() -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in windows(LENGTH)]


def masked_bytes() -> list[dict[str, Tensor]]:
    """One byte in seven is to be told from the others; how many there are differs from row to row."""
    rows = windows(LENGTH)
    masked = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) < 1 / 7
    masked[:, 0] = True
    labels = rows.masked_fill(~masked, -100)
    return tokenized(rows.masked_fill(masked, MASK), labels)


def indented() -> list[dict[str, Tensor]]:
    """Whether most of a window's bytes are spaces or line ends."""
    rows = windows(LENGTH)
    share = ((rows == ord(" ")) | (rows == ord("\n"))).float().mean(1)
    return tokenized(rows, (share > share.median()).long())


def gpt2() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=BYTES, loss_type="ForCausalLMLoss", **size))


def bert(head: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=BYTES + 1, max_position_embeddings=LENGTH, **size)
    return getattr(transformers, head)(config)


@pytest.mark.parametrize(
    ("make", "data", "weights"),
    [
        (gpt2, next_byte, TokenWeights(key="labels", shift=True)),
        (lambda: bert("BertForMaskedLM"), masked_bytes, TokenWeights(key="labels")),
        (lambda: bert("BertForSequenceClassification"), indented, "samples"),
    ],
    ids=["GPT2LMHeadModel", "BertForMaskedLM", "BertForSequenceClassification"],
)
def test_hugging_face_heads(
    make: Callable[[], torch.nn.Module], data: Callable[[], list[Any]], weights: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    train(tmp_path, Wrapped(make()), loader(data()), {"weights": weights})


def test_a_masked_mean_asks_for_token_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Wrapped(bert("BertForMaskedLM"))
    with pytest.raises(MisconfigurationException, match=r"not separable over samples.*TokenWeights"):
        train(tmp_path, module, loader(masked_bytes()), {})


def test_litgpts_gpt(tmp_path: Path) -> None:
    litgpt = pytest.importorskip("litgpt")
    from litgpt.utils import chunked_cross_entropy

    class LitGPT(pl.LightningModule):
        """As litgpt's documentation has it: grouped queries, rotary positions, RMSNorm, a gated perceptron."""

        def __init__(self) -> None:
            super().__init__()
            size = {"n_layer": 2, "n_head": 4, "n_query_groups": 2, "n_embd": 64, "intermediate_size": 128}
            kind = {"rotary_percentage": 1.0, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False}
            config = litgpt.Config(block_size=LENGTH, vocab_size=BYTES, padded_vocab_size=BYTES, **size, **kind)
            self.model = litgpt.GPT(config)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            logits = self.model(batch[:, :-1])
            loss: Tensor = chunked_cross_entropy(logits, batch[:, 1:].contiguous(), chunk_size=0)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(0)
    train(tmp_path, LitGPT(), loader(windows(LENGTH + 1)), {})


@pytest.fixture
def wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WikiText2:
    """The demos' own data set, over a text that is here: its file is found where they would download it to."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/wikitext-2.txt").write_text(inspect.getsource(argparse) * 2)
    return WikiText2()


# PyTorch looks into the mask for whether it is causal.
@pytest.mark.filterwarnings("ignore:Predictions run eagerly from now on:UserWarning")
def test_lightnings_transformer(wikitext: WikiText2, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = LightningTransformer(vocab_size=wikitext.vocab_size)
    train(tmp_path, module, DataLoader(wikitext, batch_size=4), {})


def test_lightnings_lstm_goes_on_from_batch_to_batch_and_is_refused(wikitext: WikiText2, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = LightningLSTM(vocab_size=wikitext.vocab_size)
    before = weights(module)
    run = trainer(tmp_path, *predicted(), strategy=PredictedGradientStrategy(), max_steps=STEPS)
    with pytest.raises(MisconfigurationException, match=r"LightningLSTM\.training_step carries state in attributes"):
        run.fit(module)
    assert torch.equal(weights(module), before)


def test_lightnings_manual_optimization_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, *predicted(), strategy=PredictedGradientStrategy(), max_steps=STEPS)
    with pytest.raises(MisconfigurationException, match="ManualOptimBoringModel uses manual optimization"):
        run.fit(ManualOptimBoringModel())
