"""Forecasting models of pytorch-forecasting train unmodified, with that package's own Trainer settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from tests.foreign_runs import BATCH, STEPS, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Of the products in .*, these stay in high precision"),
    pytest.mark.filterwarnings("ignore:Attribute '(loss|logging_metrics)' is an instance of `nn.Module`"),
    pytest.mark.filterwarnings("ignore:Only .* of a prediction's FLOPs run in"),
]

ENCODER, HORIZON = 12, 4


def data_set() -> Any:
    """The package's own artificial series: trend, season and noise."""
    forecasting = pytest.importorskip("pytorch_forecasting")
    from pytorch_forecasting.data.examples import generate_ar_data

    series = generate_ar_data(seasonality=10.0, timesteps=60, n_series=30, seed=0)
    return forecasting.TimeSeriesDataSet(
        series,
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=ENCODER,
        max_prediction_length=HORIZON,
        time_varying_unknown_reals=["value"],
        target_normalizer=forecasting.GroupNormalizer(groups=["series"]),
    )


# Its training step reads lengths out of the batch.
@pytest.mark.filterwarnings("ignore:Predictions run eagerly from now on:UserWarning")
def test_temporal_fusion_transformer(tmp_path: Path) -> None:
    forecasting = pytest.importorskip("pytorch_forecasting")
    data = data_set()
    torch.manual_seed(0)
    module = forecasting.TemporalFusionTransformer.from_dataset(
        data,
        learning_rate=0.03,
        hidden_size=16,
        attention_head_size=2,
        hidden_continuous_size=8,
        dropout=0.1,
        loss=forecasting.QuantileLoss(),
        log_interval=-1,
    )
    # As its tutorial has them: clipping, validation, early stopping, the learning rate on record.
    run = train(
        tmp_path,
        module,
        data.to_dataloader(train=True, batch_size=BATCH),
        {},
        validation=data.to_dataloader(train=False, batch_size=BATCH),
        gradient_clip_val=0.1,
        callbacks=[EarlyStopping(monitor="val_loss", patience=5), LearningRateMonitor()],
        logger=CSVLogger(tmp_path),
        val_check_interval=STEPS // 2,
        limit_val_batches=2,
        log_every_n_steps=1,
    )
    assert {"train_loss_step", "val_loss", "gpcv/loss"} <= run.callback_metrics.keys()
