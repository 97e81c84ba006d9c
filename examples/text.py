"""Real text as batches of bytes or tokens: the Python standard library, any file or folder, or an HF dataset."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Installed packages are not the standard library, and its test suites are half its size and hardly prose.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
BYTES = 256  # how many byte values there are
PIECE = 1 << 16  # characters that are encoded as one
GROUP = 64  # pieces that are encoded in parallel


class Windows(Dataset[Tensor]):
    """Windows of `length` tokens at given offsets into a text, each an integer tensor of shape (length,)."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, length: int) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.length = length

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.offsets[index])
        return torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))


class TextDataModule(L.LightningDataModule):
    """Random windows of text for training, and a fixed set of windows of other documents for validation.

    A batch is one integer tensor of shape (batch_size, context + 1). The training windows are a fixed, seeded
    sequence that does not depend on `batch_size`: runs with different batch sizes read the same windows in
    the same order, in larger or smaller groups, so that equal numbers of samples mean equal data. Every epoch
    reads the sequence again.

    Documents are ordered by a hash of their names, and the first ones, until they hold `val_fraction` of all
    bytes, are for validation: no document is in both sets. A single file is cut in two instead.

    A token is a byte, unless `vocabulary` is larger: then it is an entry of a byte-level byte-pair encoding that
    is learned from the training text, in which bytes that are not UTF-8 count as a replacement character. The
    vocabulary and the encoded text are kept on disk and found again. A loss is in nats per token, so losses under
    different vocabularies compare only as `bits_per_byte`.

    Args:
        path: a text file, or a folder (every file in it). None means the source of Python's standard library.
        dataset: the name or folder of a Hugging Face dataset, instead of `path`. It needs `datasets`.
        dataset_config: that dataset's configuration, where it has several.
        column: that dataset's text column; each row is a document.
        context: the model's input length in tokens.
        batch_size: windows per training batch.
        val_batch_size: windows per validation batch.
        val_fraction: share of all bytes that is kept for validation.
        val_windows: validation windows, spaced evenly over those tokens.
        epoch_windows: training windows per epoch. None means as many as would cover the text once.
        seed: of the training windows. The global random state is neither read nor changed.
        vocabulary: how many tokens there are at most; 256 means bytes. A short text yields fewer than that, and the
            last token ids then never occur. More than 256 needs `tokenizers`.
        cache: folder for vocabularies and encoded texts. None means `lightning-ledger` in the user's cache folder.

    Raises:
        ValueError: if two texts are named, a number is out of range, or there is too little text.
        FileNotFoundError: if `path` holds no file.
        ImportError: if a package that the text or the vocabulary needs is missing.

    Example:
        >>> data = TextDataModule(context=8, batch_size=2)
        >>> data.setup("fit")
        >>> next(iter(data.train_dataloader())).shape, data.bits_per_byte(math.log(256))
        (torch.Size([2, 9]), 8.0)
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
        vocabulary: int = BYTES,
        cache: str | None = None,
    ) -> None:
        super().__init__()
        if path is not None and dataset is not None:
            raise ValueError(f"path={path!r} and dataset={dataset!r} both name a text. Pass one of them.")
        if not 0.0 < val_fraction < 1.0:
            raise ValueError(f"val_fraction={val_fraction} must lie between 0 and 1, both excluded.")
        if vocabulary < BYTES:
            raise ValueError(f"vocabulary={vocabulary} cannot hold every byte value. Pass {BYTES}, bytes, or more.")
        self.save_hyperparameters()
        self.train_text = b""
        self.val_text = b""
        self.train_tokens = self.val_tokens = np.empty(0, dtype=np.uint8)

    def prepare_data(self) -> None:
        """Fill the cache in one process, so that the others find it full."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        if self.train_text:
            return
        chosen = self.hparams
        if chosen["dataset"] is not None:
            documents = _dataset_documents(chosen["dataset"], chosen["dataset_config"], chosen["column"])
        else:
            documents = _file_documents(chosen["path"])
        self.train_text, self.val_text = _split(documents, chosen["val_fraction"])
        self.train_tokens, self.val_tokens = self._encoded()
        shortest = min(len(self.train_tokens), len(self.val_tokens))
        if shortest <= chosen["context"]:
            raise ValueError(
                f"context={chosen['context']} needs that many tokens of text and one more, for training and "
                f"for validation, but one of them has {shortest}. Give more text or a shorter context."
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        length, size = self.hparams["context"] + 1, len(self.train_tokens)
        count = self.hparams["epoch_windows"] or size // length
        generator = np.random.default_rng(self.hparams["seed"])
        offsets = generator.integers(size - length + 1, size=count)
        return DataLoader(Windows(self.train_tokens, offsets, length), self.hparams["batch_size"])

    def val_dataloader(self) -> DataLoader[Tensor]:
        length, size = self.hparams["context"] + 1, len(self.val_tokens)
        offsets = np.linspace(0, size - length, num=self.hparams["val_windows"], dtype=np.int64)
        return DataLoader(Windows(self.val_tokens, offsets, length), self.hparams["val_batch_size"])

    @property
    def tokens_per_byte(self) -> float:
        """Tokens per byte of the validation text."""
        return len(self.val_tokens) / len(self.val_text)

    def bits_per_byte(self, loss: float) -> float:
        """Return a validation loss, in nats per token, as bits per byte: loss / ln 2 * tokens / bytes."""
        return loss / math.log(2) * self.tokens_per_byte

    def _encoded(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the (training, validation) text as token ids."""
        texts = self.train_text, self.val_text
        vocabulary, cache = self.hparams["vocabulary"], self.hparams["cache"]
        if vocabulary == BYTES:
            train, val = (np.frombuffer(text, dtype=np.uint8) for text in texts)
            return train, val
        folder = _cache_folder() if cache is None else Path(cache)
        return _byte_pairs(*texts, vocabulary, folder)


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


def _byte_pairs(train: bytes, val: bytes, vocabulary: int, cache: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (training, validation) token ids in a byte-pair encoding of the training text, from the cache if there."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"vocabulary={vocabulary} needs the `tokenizers` package: pip install tokenizers. "
            f"A vocabulary of {BYTES}, bytes, does without."
        ) from error
    parts = (train, val, str(vocabulary).encode(), tokenizers.__version__.encode())
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    folder = cache / f"bpe-{vocabulary}-{key[:16]}"
    if not folder.exists():
        rank_zero_info(f"Learning {vocabulary} tokens from {len(train) / 1e6:.1f} MB of text, once, for {folder}")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as partial:
            fresh = Path(partial) / "fresh"
            fresh.mkdir()
            _write_byte_pairs(train, val, vocabulary, fresh)
            try:
                fresh.rename(folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    ids, val_ids = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "val"))
    rank_zero_info(
        f"Text: {found} different tokens, for a vocabulary of {vocabulary}; {len(ids)} tokens for training and "
        f"{len(val_ids)} for validation, of {len(val) / max(1, len(val_ids)):.2f} bytes each"
    )
    return ids, val_ids


def _write_byte_pairs(train: bytes, val: bytes, vocabulary: int, folder: Path) -> None:
    """Learn a byte-pair encoding from the training text; write it and both encoded texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(train), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    smallest = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    for name, text in (("train", train), ("val", val)):
        pieces = _pieces(text)
        groups = (pieces[start : start + GROUP] for start in range(0, len(pieces), GROUP))
        encodings = (encoding for group in groups for encoding in tokenizer.encode_batch_fast(group))
        np.save(folder / f"{name}.npy", np.concatenate([np.array(e.ids, dtype=smallest) for e in encodings]))


def _pieces(text: bytes) -> list[str]:
    characters = text.decode("utf-8", errors="replace")
    return [characters[start : start + PIECE] for start in range(0, len(characters) or 1, PIECE)]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-ledger"
