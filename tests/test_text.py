"""Text comes as windows of bytes or tokens that are always the same ones."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from examples.text import TextDataModule

ROOT = Path(__file__).resolve().parent.parent


def corpus(folder: Path, documents: int = 40, size: int = 300) -> Path:
    """Write documents in which every byte tells which one it is."""
    for index in range(documents):
        (folder / f"{index}.txt").write_bytes(bytes([index + 32]) * size)
    return folder


def test_text_windows_do_not_depend_on_the_batch_size(tmp_path):
    def windows(batch_size: int) -> torch.Tensor:
        data = TextDataModule(str(corpus(tmp_path)), context=16, batch_size=batch_size, epoch_windows=24)
        data.setup("fit")
        return torch.cat(list(data.train_dataloader()))

    small, large = windows(2), windows(12)
    assert small.shape == (24, 17)
    assert torch.equal(small, large)


def test_text_keeps_documents_whole_and_on_one_side(tmp_path):
    data = TextDataModule(str(corpus(tmp_path)), context=16, val_fraction=0.25, val_windows=50)
    data.setup("fit")
    train, val = set(data.train_text) - {ord("\n")}, set(data.val_text) - {ord("\n")}
    assert not train & val
    assert train | val == {index + 32 for index in range(40)}
    assert len(val) == 10  # a quarter of 40 equal documents


def test_text_validates_on_the_same_windows_every_time(tmp_path):
    data = TextDataModule(str(corpus(tmp_path)), context=16, val_windows=9)
    data.setup("fit")
    first, second = (torch.cat(list(data.val_dataloader())) for _ in range(2))
    assert first.shape == (9, 17)
    assert torch.equal(first, second)


def test_text_cuts_a_single_file_in_two(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(200)))
    data = TextDataModule(str(file), context=8, val_fraction=0.1)
    data.setup("fit")
    assert data.train_text + data.val_text == bytes(range(200))
    assert len(data.val_text) == 20


def test_text_reads_the_standard_library_by_default():
    data = TextDataModule(batch_size=4)
    data.setup("fit")
    assert len(data.train_text) > 5_000_000
    assert next(iter(data.train_dataloader())).shape == (4, 129)
    assert 0.05 <= len(data.val_text) / (len(data.train_text) + len(data.val_text)) < 0.1


def test_text_leaves_the_global_random_state_alone(tmp_path):
    before = torch.get_rng_state()
    data = TextDataModule(str(corpus(tmp_path)), context=16)
    data.setup("fit")
    data.train_dataloader(), data.val_dataloader()
    assert torch.equal(before, torch.get_rng_state())


def test_text_errors_teach(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="both name a text"):
        TextDataModule(path="a", dataset="b")
    with pytest.raises(ValueError, match="val_fraction=1"):
        TextDataModule(val_fraction=1.0)
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        TextDataModule(str(tmp_path / "none")).setup("fit")
    with pytest.raises(FileNotFoundError, match="holds no file"):
        TextDataModule(str(tmp_path)).setup("fit")
    with pytest.raises(ValueError, match="context=128 needs"):
        TextDataModule(str(corpus(tmp_path, documents=2, size=100))).setup("fit")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as Python marks a module that cannot be imported
    with pytest.raises(ImportError, match="pip install datasets"):
        TextDataModule(dataset="any").setup("fit")


# Byte-pair encoding.


@pytest.fixture
def prose(tmp_path) -> Path:
    """Real text of 17 kB, which holds something beyond ASCII."""
    file = tmp_path / "prose.txt"
    file.write_text("Grüße, 你好! " * 20 + (ROOT / "README.md").read_text() + (ROOT / "LICENSE").read_text())
    return file


def byte_pairs(path: Path, cache: Path, vocabulary: int = 400, **settings) -> TextDataModule:
    data = TextDataModule(str(path), context=16, vocabulary=vocabulary, cache=str(cache), **settings)
    data.setup("fit")
    return data


def saved_tokenizer(cache: Path) -> Tokenizer:
    (file,) = cache.glob("*/tokenizer.json")
    return Tokenizer.from_file(str(file))


def test_tokens_hold_all_of_the_text(prose, tmp_path):
    data = byte_pairs(prose, tmp_path / "cache")
    tokenizer = saved_tokenizer(tmp_path / "cache")
    assert tokenizer.decode(list(data.train_tokens)) == data.train_text.decode()
    assert tokenizer.decode(list(data.val_tokens)) == data.val_text.decode()
    assert len(data.train_tokens) < 0.7 * len(data.train_text)
    assert data.train_tokens.max() < 400
    assert data.train_tokens.dtype == np.uint16


def test_tokens_are_learned_from_the_training_text_alone(tmp_path):
    file = tmp_path / "two.txt"
    file.write_text("to be or not to be " * 90 + "zyx " * 45)
    data = byte_pairs(file, tmp_path / "cache", val_fraction=0.1)
    vocabulary = saved_tokenizer(tmp_path / "cache").get_vocab()
    assert b"zyx" not in data.train_text
    assert "\u0120not" in vocabulary  # byte-level encodings write a space so
    assert not any("zy" in token for token in vocabulary)


def test_token_windows_are_rows_of_the_encoded_text(prose, tmp_path):
    def windows(batch_size: int) -> torch.Tensor:
        data = byte_pairs(prose, tmp_path / "cache", batch_size=batch_size, epoch_windows=24)
        return torch.cat(list(data.train_dataloader()))

    small, large = windows(2), windows(12)
    assert torch.equal(small, large)
    tokens = torch.from_numpy(byte_pairs(prose, tmp_path / "cache").train_tokens.astype(np.int64))
    assert all((tokens.unfold(0, 17, 1) == row).all(1).any() for row in small)


def test_a_cached_encoding_is_read_and_equals_a_fresh_one(prose, tmp_path):
    first = byte_pairs(prose, tmp_path / "cache")
    other = byte_pairs(prose, tmp_path / "other")
    assert np.array_equal(first.train_tokens, other.train_tokens)
    (written,) = (tmp_path / "cache").glob("*/train.npy")
    before = written.stat().st_mtime_ns
    again = byte_pairs(prose, tmp_path / "cache")
    assert np.array_equal(first.train_tokens, again.train_tokens)
    assert written.stat().st_mtime_ns == before
    byte_pairs(prose, tmp_path / "cache", vocabulary=300)
    prose.write_text(prose.read_text() + "more")
    byte_pairs(prose, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 3  # another size and another text have folders of their own


def test_the_cache_is_the_users_by_default(prose, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    TextDataModule(str(prose), context=16, vocabulary=300).setup("fit")
    assert len(list((tmp_path / "home" / "lightning-ledger").glob("bpe-300-*/train.npy"))) == 1


def test_a_short_text_says_how_many_tokens_it_yields(prose, tmp_path, caplog):
    with caplog.at_level("INFO"):
        data = byte_pairs(prose, tmp_path / "cache", vocabulary=70_000)
    found = saved_tokenizer(tmp_path / "cache").get_vocab_size()
    assert 1000 < found < 70_000
    assert f"{found} different tokens, for a vocabulary of 70000" in caplog.text
    assert data.train_tokens.dtype == np.uint32


def test_bits_per_byte_compare_vocabularies(prose, tmp_path):
    data = byte_pairs(prose, tmp_path / "cache")
    # A uniform guess among 2^k tokens costs k bits a token.
    ratio = len(data.val_tokens) / len(data.val_text)
    assert data.bits_per_byte(5 * math.log(2)) == pytest.approx(5 * ratio)
    in_bytes = TextDataModule(str(prose), context=16)
    in_bytes.setup("fit")
    assert in_bytes.bits_per_byte(math.log(256)) == pytest.approx(8.0)


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("Grüße ".encode("latin-1") * 400)
    data = byte_pairs(file, tmp_path / "cache")
    text = saved_tokenizer(tmp_path / "cache").decode(list(data.train_tokens))
    assert text.startswith("Gr\ufffd\ufffde Gr\ufffd")


def test_byte_pair_errors_teach(prose, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="vocabulary=255 cannot hold every byte"):
        TextDataModule(vocabulary=255)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as Python marks a module that cannot be imported
    with pytest.raises(ImportError, match="vocabulary=400 needs the `tokenizers` package: pip install"):
        byte_pairs(prose, tmp_path / "cache")
