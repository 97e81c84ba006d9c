"""Loggers beyond CSV and W&B: the same values at the same steps. Comet, Neptune and LitLogger need their services."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

from tests.settings_runs import Model, fresh, stack, trainer

Curves = dict[str, dict[int, float]]  # key -> step -> value

OURS = {"ledger/total", "ledger/fleet", "ledger/saving", "gpcv/loss", "gpcv/exact_share", "gpcv/delta"}


def curves(path: Path, logger: Any) -> Curves:
    """What a CSVLogger beside this logger was told."""
    table = CSVLogger(path / "csv")
    runner = trainer(path, *stack(format="int8", seed=1), logger=[logger, table], max_epochs=3)
    runner.fit(fresh(Model))
    found: Curves = defaultdict(dict)
    with (Path(table.log_dir) / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if key != "step" and value:
                    found[key][int(row["step"])] = float(value)
    assert found.keys() >= OURS | {"train_loss", "val_loss", "epoch"}
    assert len(found["ledger/total"]) == 12
    return found


def check_same(found: Curves, expected: Curves) -> None:
    assert found.keys() == expected.keys()
    for key, curve in expected.items():
        assert found[key] == pytest.approx(curve, rel=1e-6), key  # TensorBoard keeps float32


def test_tensorboard_has_every_value(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    expected = curves(tmp_path, logger)
    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0})
    events.Reload()
    found = {key: {e.step: e.value for e in events.Scalars(key)} for key in events.Tags()["scalars"]}
    found.pop("hp_metric", None)
    check_same(found, expected)
    assert (Path(logger.log_dir) / "ledger.jsonl").exists()


def test_mlflow_has_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs the package mlflow or mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store without a database
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path / 'mlruns'}")
    expected = curves(tmp_path, logger)
    client = logger.experiment
    keys = client.get_run(logger.run_id).data.metrics
    found = {key: {m.step: m.value for m in client.get_metric_history(logger.run_id, key)} for key in keys}
    check_same(found, expected)
