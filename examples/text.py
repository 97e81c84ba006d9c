"""Real text as batches of bytes: the Python standard library, any file or folder, or an HF dataset."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Installed packages are not the standard library, and its test suites are half its size and hardly prose.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class Windows(Dataset[Tensor]):
    """Windows of `length` bytes at given offsets into a text, each an integer tensor of shape (length,)."""

    def __init__(self, text: bytes, offsets: np.ndarray, length: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.offsets = offsets
        self.length = length

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.offsets[index])
        return self.text[start : start + self.length].long()


class TextDataModule(L.LightningDataModule):
    """Random windows of text for training, and a fixed set of windows of other documents for validation.

    A batch is one integer tensor of shape (batch_size, context + 1). The training windows are a fixed, seeded
    sequence that does not depend on `batch_size`: runs with different batch sizes read the same windows in
    the same order, in larger or smaller groups, so that equal numbers of samples mean equal data. Every epoch
    reads the sequence again.

    Documents are ordered by a hash of their names, and the first ones, until they hold `val_fraction` of all
    bytes, are for validation: no document is in both sets. A single file is cut in two instead.

    Args:
        path: a text file, or a folder (every file in it). None means the source of Python's standard library.
        dataset: the name or folder of a Hugging Face dataset, instead of `path`. It needs `datasets`.
        dataset_config: that dataset's configuration, where it has several.
        column: that dataset's text column; each row is a document.
        context: the model's input length in bytes.
        batch_size: windows per training batch.
        val_batch_size: windows per validation batch.
        val_fraction: share of all bytes that is kept for validation.
        val_windows: validation windows, spaced evenly over those bytes.
        epoch_windows: training windows per epoch. None means as many as would cover the text once.
        seed: of the training windows. The global random state is neither read nor changed.
    """

    def __init__(
        self,
        path: str | None = None,
        dataset: str | None = None,
        dataset_config: str | None = None,
        column: str = "text",
        context: int = 128,
        batch_size: int = 32,
        val_batch_size: int = 32,
        val_fraction: float = 0.05,
        val_windows: int = 256,
        epoch_windows: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if path is not None and dataset is not None:
            raise ValueError(f"path={path!r} and dataset={dataset!r} both name a text. Pass one of them.")
        if not 0.0 < val_fraction < 1.0:
            raise ValueError(f"val_fraction={val_fraction} must lie between 0 and 1, both excluded.")
        self.save_hyperparameters()
        self.train_text = b""
        self.val_text = b""

    def setup(self, stage: str) -> None:
        if self.train_text:
            return
        chosen = self.hparams
        if chosen["dataset"] is not None:
            documents = _dataset_documents(chosen["dataset"], chosen["dataset_config"], chosen["column"])
        else:
            documents = _file_documents(chosen["path"])
        self.train_text, self.val_text = _split(documents, chosen["val_fraction"])
        shortest = min(len(self.train_text), len(self.val_text))
        if shortest <= chosen["context"]:
            raise ValueError(
                f"context={chosen['context']} needs that many bytes of text and one more, for training and "
                f"for validation, but one of them has {shortest}. Give more text or a shorter context."
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        length, size = self.hparams["context"] + 1, len(self.train_text)
        count = self.hparams["epoch_windows"] or size // length
        generator = np.random.default_rng(self.hparams["seed"])
        offsets = generator.integers(size - length + 1, size=count)
        return DataLoader(Windows(self.train_text, offsets, length), self.hparams["batch_size"])

    def val_dataloader(self) -> DataLoader[Tensor]:
        length, size = self.hparams["context"] + 1, len(self.val_text)
        offsets = np.linspace(0, size - length, num=self.hparams["val_windows"], dtype=np.int64)
        return DataLoader(Windows(self.val_text, offsets, length), self.hparams["val_batch_size"])


def _split(documents: dict[str, bytes], fraction: float) -> tuple[bytes, bytes]:
    """Split documents by name into (training, validation) text."""
    total = sum(len(text) for text in documents.values())
    if len(documents) == 1:
        (text,) = documents.values()
        cut = total - round(total * fraction)
        return text[:cut], text[cut:]
    ordered = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    validation: list[str] = []
    size = 0
    while len(ordered) > 1 and size < total * fraction:
        validation.append(ordered.pop(0))
        size += len(documents[validation[-1]])
    return b"\n".join(documents[n] for n in ordered), b"\n".join(documents[n] for n in validation)


def _file_documents(path: str | None) -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    if root.is_file():
        return {root.name: root.read_bytes()}
    if not root.is_dir():
        raise FileNotFoundError(f"path={path!r} is neither a file nor a folder.")
    files = _python_sources(root) if path is None else (f for f in root.rglob("*") if f.is_file())
    documents = {file.relative_to(root).as_posix(): file.read_bytes() for file in files}
    if not documents:
        raise FileNotFoundError(f"path={path!r} holds no file to read.")
    return documents


def _python_sources(root: Path) -> Iterator[Path]:
    return (f for f in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(f.relative_to(root).parts))


def _dataset_documents(name: str, config: str | None, column: str) -> dict[str, bytes]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"dataset={name!r} needs the `datasets` package: pip install datasets") from error
    rows = load_dataset(name, config, split="train")
    if column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise ValueError(f"column={column!r} is not in dataset {name!r}, which has {columns}.")
    return {str(index): text.encode() for index, text in enumerate(rows[column])}
