"""What a real W&B run file holds after an offline run: read back record by record, as the server would get it."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from wandb.proto.wandb_internal_pb2 import Record

from lightning_ledger import PriceBook
from lightning_ledger.callbacks import ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.ledger import read_ledger
from tests.lightning_runs import trainer as quiet_trainer

LEDGER_KEYS = {
    "ledger/total",
    "ledger/scarce",
    "ledger/fleet",
    "ledger/transfer",
    "ledger/waste",
    "ledger/exact_equivalent",
    "ledger/saving",
}
GPCV_KEYS = {
    "gpcv/loss",
    "gpcv/cosine",
    "gpcv/rho2",
    "gpcv/delta",
    "gpcv/coefficient",
    "gpcv/relative_cost",
    "gpcv/break_even_price",
    "gpcv/noise_scale",
    "gpcv/exact_share",
    "gpcv/bias_z",
    "gpcv/bias",
    "gpcv/effective_batch",
    "gpcv/optimal_share",
    "gpcv/break_even_low",
    "gpcv/break_even_high",
    "gpcv/noise_scale_samples",
}
PRICES = PriceBook(fleet_forward=0.03, fleet_formats={"int4": 0.01})
# 7 batches an epoch in windows of 2: 4 optimizer steps, the last on a single batch.
BATCHES, EPOCHS, STEPS = 7, 2, 8
BLOCK = 2**15


class Model(L.LightningModule):
    """A user's module: its metrics, and a row of its own in W&B, which moves W&B's step ahead of the Trainer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layer(batch) - 1).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.logger.experiment.log({"user/batch": batch_idx})

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        error = self.layer(batch) - 1
        self.log_dict({"val_loss": error.pow(2).mean(), "val_error": error.abs().mean()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Recorder(DummyLogger):
    """Keeps every row that Lightning sends to its loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({**metrics, "trainer/global_step": step})


class RunFile(NamedTuple):
    """What a .wandb file tells."""

    rows: list[dict[str, Any]]
    step_metrics: dict[str, str]
    config: dict[str, Any]


def records(path: Path) -> Iterator[Record]:
    """Every record of a .wandb file: a LevelDB log of protocol buffers, cut into fragments at 32 KiB blocks."""
    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    position, data = 7, b""
    while position < len(raw):
        if (left := BLOCK - position % BLOCK) < 7:  # too short for a fragment's header: padding
            position += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", raw, position)
        fragment = raw[position + 7 : position + 7 + length]
        assert zlib.crc32(fragment, zlib.crc32(bytes([kind]))) == checksum
        position += 7 + length
        full, first, last = 1, 2, 4
        data = fragment if kind in (full, first) else data + fragment
        if kind in (full, last):
            yield Record.FromString(data)


def read_run(directory: Path) -> RunFile:
    """The only run in a directory."""
    close()
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    found = RunFile([], {}, {})
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found.rows.append(items(record.history.item))
        elif kind == "metric":
            found.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "config":
            found.config.update(items(record.config.update))
    return found


def items(pairs: Any) -> dict[str, Any]:
    return {pair.key or "/".join(pair.nested_key): json.loads(pair.value_json) for pair in pairs}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Real W&B, never a network; a run left open by a failed test would swallow the next one's rows."""
    for name, value in {"MODE": "offline", "DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    close()


def close() -> None:
    """End the run, and wait for W&B's writing process: it completes the file only after ``finish`` has returned."""
    wandb.finish()
    wandb.teardown()


def fit(directory: Path, *callbacks: L.Callback, strategy: str = "predicted_gradients") -> tuple[RunFile, Recorder]:
    """Train under W&B; what its file holds, and what Lightning logged."""
    L.seed_everything(0, verbose=False)
    data = torch.randn(BATCHES * 8, 5, generator=torch.Generator().manual_seed(1))
    recorder = Recorder()
    logger = WandbLogger(project="ledgers", save_dir=directory)
    trainer = quiet_trainer(
        directory,
        *callbacks,
        strategy=strategy,
        logger=[logger, recorder],
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=8), DataLoader(data[:6], batch_size=3))
    assert trainer.global_step == STEPS
    return read_run(directory), recorder


def gpcv(exact: int = 2) -> list[L.Callback]:
    return [
        ComputeLedger(prices=PRICES),
        GradientPrediction(format="int4", microbatches=4, exact=exact, seed=3),
        ControlVariate(),
    ]


def training_rows(run: RunFile) -> list[dict[str, Any]]:
    return [row for row in run.rows if "train_loss" in row]


def validation_rows(run: RunFile) -> list[dict[str, Any]]:
    return [row for row in run.rows if "val_loss" in row]


def test_one_row_per_optimizer_step_holds_the_users_loss_and_every_key(tmp_path):
    run, recorder = fit(tmp_path, *gpcv())
    rows = training_rows(run)
    assert [row["trainer/global_step"] for row in rows] == list(range(STEPS))
    # Two exact micro-batches a batch show every variance at once, so that nothing is missing from the first row.
    assert [(LEDGER_KEYS | GPCV_KEYS) - row.keys() for row in rows] == [set()] * STEPS
    assert {key for row in run.rows for key in row if key.startswith(("ledger/", "gpcv/"))} == LEDGER_KEYS | GPCV_KEYS
    # No other row carries them: the step's values stand where the user's loss stands.
    assert [row for row in run.rows if "gpcv/loss" in row] == rows
    # A row's numbers are Lightning's to the last bit: W&B would not lose a double, and nor do we.
    logged = [row for row in recorder.rows if "train_loss" in row]
    assert [{key: row[key] for key in sent} for row, sent in zip(rows, logged, strict=True)] == logged
    assert all(row["gpcv/exact_share"] == 0.5 for row in rows)


def test_validation_rows_carry_the_cost_so_far(tmp_path):
    callbacks = gpcv()
    run, _ = fit(tmp_path, *callbacks)
    rows = validation_rows(run)
    assert len(rows) == EPOCHS
    assert [set(row) - {"_step", "_runtime", "_timestamp"} for row in rows] == [
        {"val_loss", "val_error", "ledger/total", "epoch", "trainer/global_step"}
    ] * EPOCHS
    # In double precision: nothing is spent after the last validation.
    assert rows[-1]["ledger/total"] == callbacks[0].ledger.cost(PRICES)
    # The ledger's own marks tell the same costs, from exact counts.
    (path,) = tmp_path.glob("ledgers/*/ledger.jsonl")
    history = read_ledger(path)
    marks = [sum(PRICES.costs(mark.totals, history.forward_flops).values()) for mark in history.marks]
    assert [row["ledger/total"] for row in rows] == pytest.approx(marks, rel=1e-12)
    assert [row["val_loss"] for row in rows] == [mark.metrics["val_loss"] for mark in history.marks]


def test_cost_is_the_declared_axis_of_validation_metrics_only(tmp_path):
    run, _ = fit(tmp_path, *gpcv())
    assert "ledger/total" in run.step_metrics
    assert {n for n, axis in run.step_metrics.items() if axis == "ledger/total"} == {"val_loss", "val_error"}
    # The user's training metrics keep the axis that Lightning gives to everything else.
    assert run.step_metrics["*"] == "trainer/global_step"


def test_config_says_what_was_run(tmp_path):
    run, _ = fit(tmp_path, *gpcv())
    assert PriceBook(**run.config["ledger/prices"]) == PRICES
    expected = {"format": "int4", "rounding": "nearest", "microbatches": 4, "exact": 2, "refresh_every": 1, "seed": 3}
    assert {key: run.config[f"gpcv/{key}"] for key in expected} == expected
    assert run.config["gpcv/format_kind"].startswith("int4: emulated")
    versions = run.config["ledger/versions"]
    assert versions.keys() >= {"lightning-ledger", "lightning", "torch", "wandb", "python"}
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions["wandb"] == wandb.__version__


def test_pl5405_no_row_is_dropped_though_step_counters_differ(tmp_path):
    run, recorder = fit(tmp_path, *gpcv())
    own = [row for row in run.rows if "user/batch" in row]
    assert len(own) == BATCHES * EPOCHS
    assert len(recorder.rows) == STEPS + EPOCHS
    assert len(run.rows) == len(recorder.rows) + len(own)
    assert [row["_step"] for row in run.rows] == list(range(len(run.rows)))
    # The case at hand: W&B counts the user's rows too, and is ahead of the Trainer.
    last = training_rows(run)[-1]
    assert last["_step"] > last["trainer/global_step"]


def test_wb1507_a_dropped_row_would_be_seen(tmp_path):
    run = wandb.init(project="ledgers", dir=tmp_path)
    for step in (5, 3, 7):
        run.log({"value": step}, step=step)
    found = read_run(tmp_path)
    assert [row["value"] for row in found.rows] == [5, 7]
    assert found.rows[-1]["_step"] == 7


def test_a_ledger_alone_logs_its_keys_under_any_strategy(tmp_path):
    run, _ = fit(tmp_path, ComputeLedger(prices=PRICES), strategy="auto")
    rows = training_rows(run)
    assert [{key for key in row if "/" in key} - {"trainer/global_step"} for row in rows] == [LEDGER_KEYS] * STEPS
    assert run.step_metrics["val_loss"] == "ledger/total"
    assert not any(key.startswith("gpcv/") for key in run.config)
    # Exact training saves nothing; validation is left out of the comparison.
    assert [row["ledger/saving"] for row in rows] == pytest.approx([0.0] * STEPS, abs=1e-12)
