"""What reaches Lightning's other loggers, and where the ledger's file goes."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ledger import PriceBook
from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import report
from lightning_ledger.ledger import verify_ledger
from tests.lightning_runs import trainer as quiet_trainer

OURS = ("ledger/", "gpcv/")
# 7 batches in windows of 2: 4 optimizer steps.
BATCHES, STEPS = 7, 4


class Model(L.LightningModule):
    """Logs in every way there is: a step value, an epoch mean, both of one key, a dict, and for validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        error = self.layer(batch) - 1
        loss = error.pow(2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_error", error.abs().mean(), on_step=False, on_epoch=True)
        self.log_dict({"train_largest": error.abs().max()}, reduce_fx="max")
        self.log_dict({"train_smallest": error.abs().min()}, reduce_fx="min")
        return {"loss": loss, "error": error.detach()}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.layer(batch) - 1).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(directory: Path, *callbacks: L.Callback, strategy: str = "auto", logger: object = False) -> L.Trainer:
    L.seed_everything(0, verbose=False)
    data = torch.randn(BATCHES * 8, 5, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(
        directory,
        *callbacks,
        strategy=strategy,
        logger=logger,
        max_epochs=1,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=8), DataLoader(data[:6], batch_size=3))
    assert trainer.global_step == STEPS
    return trainer


def gpcv(exact: int = 2) -> list[L.Callback]:
    return [ComputeLedger(), GradientPrediction(microbatches=4, exact=exact), ControlVariate()]


def rows(directory: Path) -> list[dict[str, str]]:
    """The rows that a CSVLogger wrote, empty cells left out."""
    (path,) = directory.rglob("metrics.csv")
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


def occurrences(found: list[dict[str, str]]) -> Counter[str]:
    """In how many rows each of the user's keys stands."""
    return Counter(key for row in found for key in row if not key.startswith(OURS))


def documented() -> set[str]:
    """The keys that the callbacks' docstrings promise."""
    texts = (ComputeLedger.__doc__, GradientPrediction.__doc__, ControlVariate.__doc__, report.__doc__)
    return {key for text in texts for key in re.findall(r"``((?:ledger|gpcv)/\w+)``", text or "")}


def test_pl4100_the_users_keys_are_unchanged(tmp_path):
    fit(tmp_path / "stock", logger=CSVLogger(tmp_path / "stock"))
    stock = rows(tmp_path / "stock")
    assert occurrences(stock).keys() >= {"train_loss_step", "train_loss_epoch", "train_error", "val_loss"}
    for name, strategy, callbacks in (
        ("ledger", "auto", [ComputeLedger()]),
        ("mixed", "predicted_gradients", gpcv()[:2]),
        ("gpcv-1", "predicted_gradients", gpcv(exact=1)),
        ("gpcv-2", "predicted_gradients", gpcv(exact=2)),
    ):
        fit(tmp_path / name, *callbacks, strategy=strategy, logger=CSVLogger(tmp_path / name))
        found = rows(tmp_path / name)
        assert any(key.startswith(OURS) for row in found for key in row)
        # The same keys in as many rows: none renamed, none doubled, no row added.
        assert (name, occurrences(found), len(found)) == (name, occurrences(stock), len(stock))


def test_the_users_values_are_those_of_the_whole_batch(tmp_path):
    """With every micro-batch exact, each value is logged as stock Lightning logs it, whatever its reduction."""
    fit(tmp_path / "stock", logger=CSVLogger(tmp_path / "stock"))
    callbacks = [GradientPrediction(microbatches=4, exact=4)]
    fit(tmp_path / "split", *callbacks, strategy="predicted_gradients", logger=CSVLogger(tmp_path / "split"))
    for stock, split in zip(rows(tmp_path / "stock"), rows(tmp_path / "split"), strict=True):
        users = {key: float(value) for key, value in split.items() if not key.startswith(OURS)}
        # float32 sums in another order, over four steps of training on them.
        assert users == pytest.approx({key: float(value) for key, value in stock.items()}, rel=1e-5)


def test_the_documented_keys_are_the_logged_ones(tmp_path):
    fit(tmp_path, *gpcv(), strategy="predicted_gradients", logger=CSVLogger(tmp_path))
    logged = [{key for key in row if key.startswith(OURS)} for row in rows(tmp_path) if "train_loss_step" in row]
    assert len(documented()) == 23
    assert logged == [documented()] * STEPS


def test_our_keys_never_become_step_and_epoch_twins(tmp_path):
    trainer = fit(tmp_path, *gpcv(), strategy="predicted_gradients")
    ours = {key for key in trainer.callback_metrics if key.startswith(OURS)}
    assert ours == documented()


def test_pl11386_costs_are_logged_in_double_precision(tmp_path):
    # Odd multiples of 2^24 + 1 need more than float32's 24 bits.
    prices = PriceBook(scarce_forward=2.0**24 + 1)
    ledger = ComputeLedger(prices=prices)
    fit(tmp_path, ledger, logger=CSVLogger(tmp_path))
    total = ledger.ledger.cost(prices)
    assert total != float(torch.tensor(total, dtype=torch.float32))
    found = rows(tmp_path)
    (validation,) = (row for row in found if "val_loss" in row)
    assert float(validation["ledger/total"]) == total
    # Each step spends two batches of 8 samples, in units of the first batch: 2 x (1 forward + 1 backward: the only
    # layer's input needs no gradient); the last step one batch. Validation adds 2 x 3/8, sanity check as much before.
    exact = [float(row["ledger/exact_equivalent"]) for row in found if "train_loss_step" in row]
    assert exact == [count * (2.0**24 + 1) for count in (4, 8, 12, 14)]
    assert total == (14 + 2 * 2 * 3 / 8) * (2.0**24 + 1)


def test_callback_metrics_are_doubles(tmp_path):
    trainer = fit(tmp_path, *gpcv(), strategy="predicted_gradients")
    kinds = {key: value.dtype for key, value in trainer.callback_metrics.items() if key.startswith(OURS)}
    assert kinds == dict.fromkeys(documented(), torch.float64)


@pytest.mark.parametrize("strategy", ["auto", "predicted_gradients"])
def test_the_ledgers_file_is_beside_the_loggers_own(tmp_path, strategy):
    callbacks = gpcv() if strategy == "predicted_gradients" else [ComputeLedger()]
    logger = CSVLogger(tmp_path, name="runs", version="first")
    fit(tmp_path, *callbacks, strategy=strategy, logger=logger)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("ledger.jsonl")] == [Path("runs/first/ledger.jsonl")]
    assert (Path(logger.log_dir) / "metrics.csv").is_file()
    assert verify_ledger(logger.log_dir).ok


def test_versions_without_a_name_get_a_directory_each(tmp_path):
    for _ in range(2):
        fit(tmp_path, ComputeLedger(), logger=CSVLogger(tmp_path))
    found = sorted(path.parent for path in tmp_path.rglob("ledger.jsonl"))
    assert [path.name for path in found] == ["version_0", "version_1"]
    assert all((path / "metrics.csv").is_file() for path in found)


def test_without_a_logger_the_file_is_in_the_root_directory(tmp_path):
    fit(tmp_path, ComputeLedger())
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("ledger.jsonl")] == [Path("ledger.jsonl")]


def test_dirpath_decides_where_it_is_given(tmp_path):
    fit(tmp_path, ComputeLedger(dirpath=str(tmp_path / "here")), logger=CSVLogger(tmp_path))
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("ledger.jsonl")] == [Path("here/ledger.jsonl")]


def test_several_loggers_get_the_same_rows(tmp_path):
    loggers = [CSVLogger(tmp_path / name) for name in ("a", "b")]
    fit(tmp_path, *gpcv(), strategy="predicted_gradients", logger=loggers)
    first, second = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert first == second
    assert [path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("ledger.jsonl")] == ["a"]
