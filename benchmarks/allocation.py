"""What `AdaptiveAllocation` and the statistics behind it are worth, on the demo's model, data and prices.

`python -m benchmarks.allocation settle` compares the logged delta with that of gradients computed at frozen weights,
and the variance times cost that training really has with R; `price` trains at a price at which nothing pays, and says
what that cost beside plain exact training; `bias` watches `gpcv/bias_z` of the corrected and of the mixed estimate.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_ledger import PriceBook
from lightning_ledger.callbacks import AdaptiveAllocation, ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import best_share, optimal_coefficient, relative_cost
from lightning_ledger.microbatches import Splitter, make_microbatches
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import EagerPredictor
from lightning_ledger.program import ShadowBuffers, trainable, training_step_gradients
from lightning_ledger.strategies import PredictedGradientStrategy

MODEL = {"layers": 3, "heads": 4, "width": 256, "context": 128, "warmup_steps": 10}
SAMPLES = 2  # of a micro-batch
VALIDATION = "scarce/validation"
Row = dict[str, float | str]


class Rows(pl.Callback):
    """Keeps what every step logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Frozen(pl.Callback):
    """At some steps, gradients of other batches at the weights as they are: the truth that the log is held to.

    Args:
        steps: after which to look.
        format: of the predictions.
        batches: to look at.
        correction: for lam as training has it.
    """

    def __init__(self, steps: Sequence[int], format: str, batches: Sequence[Tensor], variate: ControlVariate) -> None:
        self.steps, self.format, self.batches = set(steps), format, batches
        self.variate = variate
        self.rows: list[Row] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        if trainer.global_step not in self.steps:
            return
        statistics = self.variate.correction.statistics
        assert statistics is not None
        lam = dict(zip(statistics.layers, optimal_coefficient(statistics).tolist(), strict=True))
        logged = trainer.callback_metrics
        optimizer = trainer.optimizers[0]
        weights = trainable(pl_module)
        roots = torch.cat([_root(optimizer, weight).flatten() for weight in weights.values()])
        by_layer = torch.cat(
            [torch.full((w.numel(),), lam[name.rpartition(".")[0] or name]) for name, w in weights.items()]
        )
        found: dict[str, list[tuple[float, float]]] = {"": [], "adam/": []}
        for batch in self.batches:
            g, h = self._gradients(pl_module, batch)
            residual = g - by_layer * h
            for metric, scale in (("", 1.0), ("adam/", 1 / roots)):
                found[metric].append(
                    tuple(float((x * scale).var(0, correction=1).double().sum()) for x in (g, residual))  # type: ignore[arg-type]
                )
        n, w = len(g), self.variate.correction.cost_ratios[0]
        for metric, pairs in found.items():
            exact, left = (sum(column) for column in zip(*pairs, strict=True))
            delta, told = left / exact, float(logged[f"gpcv/{metric}delta"])
            k = round(float(logged["gpcv/allocated_share"]) * n)
            real = (1 + delta * (n / k - 1)) * (w + k / n)
            self.rows.append(
                {
                    "step": trainer.global_step,
                    "metric": "Adam's" if metric else "plain",
                    "logged delta": told,
                    "frozen delta": delta,
                    "k": k,
                    "best k": best_share(delta, w) * n,
                    "R": relative_cost(told, w),
                    "variance x cost": real,
                    "ratio": real / relative_cost(told, w),
                }
            )

    def _gradients(self, module: pl.LightningModule, batch: Tensor) -> tuple[Tensor, Tensor]:
        """[n, P] exact gradients and predictions."""
        weights, buffers = trainable(module), ShadowBuffers(module)
        predictor = EagerPredictor(module, Lowering(self.format, module=module))
        predictor.refresh(weights)
        exact: list[Tensor] = []
        predicted: list[Tensor] = []
        for part in make_microbatches(batch, len(batch) // SAMPLES, Splitter(), "samples"):
            for rows, found in (
                (exact, training_step_gradients(module, weights, (part.data, 0), 0, buffers)),
                (predicted, predictor.predict(part.data, 0, 0)),
            ):
                assert found is not None
                rows.append(torch.cat([g.flatten() for g in found[1].values() if g is not None]))
        return torch.stack(exact), torch.stack(predicted)


def _root(optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensor:
    """Adam's divisor of each coordinate."""
    group = next(group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
    state = optimizer.state[weight]
    root: Tensor = (state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
    return root


def fit(folder: Path, steps: int, n: int, seed: int, rate: float, *callbacks: pl.Callback) -> pl.Trainer:
    """Train the demo's model."""
    pl.seed_everything(seed, verbose=False)
    trainer = pl.Trainer(
        strategy=PredictedGradientStrategy(),
        callbacks=list(callbacks),
        accelerator="cpu",
        max_epochs=-1,
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(GPT(**MODEL, learning_rate=rate), _data(n, seed))  # type: ignore[arg-type]
    return trainer


def _data(n: int, seed: int) -> TextDataModule:
    return TextDataModule(context=MODEL["context"], batch_size=SAMPLES * n, seed=seed)


def settle(folder: Path, steps: int, seed: int, price: float = 0.05, format: str = "int4") -> list[Row]:
    """The logged delta and R against gradients at frozen weights."""
    n = 16
    other = _data(n, seed + 1000)
    other.setup("fit")
    loader = iter(other.train_dataloader())
    variate = ControlVariate()
    looks = [at for at in (50, 100, 150, 200, 300, 400) if at <= steps]
    frozen = Frozen(looks, format, [next(loader) for _ in range(6)], variate)
    fit(
        folder,
        steps,
        n,
        seed,
        5e-4,
        ComputeLedger(prices=PriceBook(fleet_forward=price)),
        GradientPrediction(format, microbatches=n, exact=1),
        variate,
        AdaptiveAllocation(),
        frozen,
    )
    return frozen.rows


def price(folder: Path, steps: int, seed: int, price: float = 3.0, format: str = "int4") -> list[Row]:
    """What a run costs whose predictions do not pay."""
    n, rows = 16, Rows()
    ledger = ComputeLedger(prices=PriceBook(fleet_forward=price))
    fit(
        folder,
        steps,
        n,
        seed,
        5e-4,
        ledger,
        GradientPrediction(format, microbatches=n, exact=1),
        ControlVariate(),
        AdaptiveAllocation(),
        rows,
    )
    costs = dict(ledger.ledger.costs(ledger.prices))
    costs.pop(VALIDATION, None)
    exact = ledger.values()["ledger/exact_equivalent"]
    on = [row.get("gpcv/predicting", 1.0) for row in rows.rows]
    found: Row = {"price": price, "steps": steps, "steps with predictions": sum(on), "cost / exact": 0.0}
    found["cost / exact"] = sum(costs.values()) / exact
    found |= {name: cost / exact for name, cost in costs.items()}
    return [found]


def bias(folder: Path, steps: int, seed: int, format: str = "int4") -> list[Row]:
    """The greatest ``|gpcv/bias_z|`` of the corrected and of the mixed estimate, and when 3 was passed."""
    found: list[Row] = []
    arms: dict[str, list[pl.Callback]] = {"corrected": [ControlVariate()], "mixed": []}
    for name, correction in arms.items():
        rows = Rows()
        fit(folder / name, steps, 8, seed, 5e-4, GradientPrediction(format, microbatches=8, exact=1), *correction, rows)
        z = [row.get("gpcv/bias_z", 0.0) for row in rows.rows]
        outside = [step for step, value in enumerate(z, 1) if abs(value) > 3]
        found.append(
            {
                "estimate": name,
                "seed": seed,
                "greatest |z|": max(map(abs, z)),
                "last z": z[-1],
                "steps with |z| > 3": len(outside),
                "first of them": outside[0] if outside else "-",
            }
        )
    return found


MEASURES: dict[str, Callable[..., list[Row]]] = {"settle": settle, "price": price, "bias": bias}


def main(arguments: list[str] | None = None) -> None:
    """Train, print, write."""
    parser = ArgumentParser(prog="python -m benchmarks.allocation", description=__doc__)
    parser.add_argument("what", type=Literal["settle", "price", "bias"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--price", type=float, help="of a forward-equivalent on the fleet; .05 to settle, 3 for price")
    parser.add_argument("--format", type=str, default="int4")
    parser.add_argument("--json", type=str, help="where the numbers go")
    chosen = parser.parse_args(arguments)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for advice in ("does not have many workers", "treespec"):
        warnings.filterwarnings("ignore", f".*{advice}")
    options = {} if chosen.price is None or chosen.what == "bias" else {"price": chosen.price}
    rows: list[Row] = []
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory() as folder:
            rows += MEASURES[chosen.what](Path(folder), chosen.steps, seed, format=chosen.format, **options)
    Console().print(table(rows))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=2) + "\n")


def table(rows: Sequence[Row]) -> Table:
    """All rows."""
    shown = Table(box=SIMPLE_HEAD)
    for name in rows[0]:
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(*(value if isinstance(value, str) else f"{value:.4g}" for value in row.values()))
    return shown


if __name__ == "__main__":
    main()
