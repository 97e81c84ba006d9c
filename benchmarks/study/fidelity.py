"""Part 1: how good predictions are, by model size, number format and training step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.study.records import ROOT, facts, write_csv, write_json
from lightning_ledger.control_variate import best_share

SHARED = ("configs/gpt2-124m.yaml", "configs/ladder/{rung}.yaml", "configs/study/short_window.yaml")


@dataclass(frozen=True)
class FidelityStudy:
    """What to measure.

    Args:
        rungs: of the ladder, as in configs/ladder.
        steps: exact optimizer steps before measuring; 0 is initialisation.
        formats: as for `plan`.
        roundings: as for `plan`.
        batches: of each point, at most.
        minutes: for each point's plan.
        options: further options of `plan` and `fit`.
    """

    rungs: Sequence[str]
    steps: Sequence[int]
    formats: str
    roundings: str
    batches: int
    minutes: float
    options: Sequence[str]

    @classmethod
    def read(cls, file: Path) -> FidelityStudy:
        """From a YAML file with these names."""
        return cls(**yaml.safe_load(file.read_text(encoding="utf-8")))

    def points(self) -> Iterator[tuple[str, int]]:
        """Every (rung, steps), small ones first."""
        return ((rung, steps) for rung in self.rungs for steps in self.steps)


def run(study: FidelityStudy, folder: Path, results: Path, command: str) -> None:
    """Measure what is not measured yet, and write ``fidelity.csv`` and ``fidelity.json`` after every point.

    Args:
        study: what to measure.
        folder: for checkpoints and plans.
        results: where the numbers go.
        command: that makes them again.
    """
    rows: list[dict[str, Any]] = []
    plans: list[dict[str, Any]] = []
    for rung, steps in study.points():
        plan = measured(study, rung, steps, folder)
        rows += rows_of(rung, steps, plan)
        plans.append(summary(rung, steps, plan))
        write_csv(results / "fidelity.csv", rows)
        write_json(results / "fidelity.json", {**facts(command), "points": plans})


def measured(study: FidelityStudy, rung: str, steps: int, folder: Path) -> dict[str, Any]:
    """The plan of one point, from the folder if the same options made it before."""
    shared = [f"--config={file.format(rung=rung)}" for file in SHARED] + list(study.options)
    asked = [
        f"--plan.formats={study.formats}",
        f"--plan.roundings={study.roundings}",
        f"--plan.batches={study.batches}",
        f"--plan.minutes={study.minutes}",
    ]
    file = folder / f"{rung}-{steps}.json"
    if file.exists():
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if kept["options"] == [*shared, *asked]:
            return dict(kept["plan"])
    start = [f"--ckpt_path={trained(shared, rung, steps, folder)}"] if steps else []
    fresh = folder / f"{rung}-{steps}.plan.json"
    fresh.parent.mkdir(parents=True, exist_ok=True)
    _ledger("plan", *shared, *asked, *start, f"--plan.json={fresh}")
    plan: dict[str, Any] = json.loads(fresh.read_text(encoding="utf-8"))
    write_json(file, {"options": [*shared, *asked], "plan": plan})
    fresh.unlink()
    return plan


def trained(shared: Sequence[str], rung: str, steps: int, folder: Path) -> Path:
    """A checkpoint after so many exact steps, from the folder if the same options made it before."""
    place = folder / f"{rung}-{steps}"
    checkpoint, made_by = place / "trained.ckpt", place / "options.json"
    if checkpoint.exists() and made_by.exists() and json.loads(made_by.read_text()) == list(shared):
        return checkpoint
    checkpoint.unlink(missing_ok=True)
    _ledger(
        "fit",
        *shared,
        f"--trainer.max_steps={steps}",
        f"--trainer.default_root_dir={place}",
        f"--trainer.logger.init_args.save_dir={place}",
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        f"--trainer.callbacks.dirpath={place}",
        f"--trainer.callbacks.filename={checkpoint.stem}",
        f"--trainer.callbacks.every_n_train_steps={steps}",
    )
    made_by.write_text(json.dumps(list(shared)))
    return checkpoint


def rows_of(rung: str, steps: int, plan: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each format and rounding."""
    for kind in plan["formats"]:
        prediction, delta, cost, price = (kind[k] for k in ("prediction", "delta", "relative_cost", "break_even"))
        yield {
            "rung": rung,
            "parameters": plan["memory"]["parameters"] // 4,  # 32 bits each
            "steps": steps,
            "format": prediction["format"],
            "rounding": prediction["rounding"],
            "delta": delta["value"],
            "delta_low": delta["low"],
            "delta_high": delta["high"],
            "bias": kind["bias"],
            "noise_scale": plan["noise_scale"],
            "best_share": best_share(delta["value"], prediction["w"]),
            "relative_cost": cost["value"],
            "relative_cost_low": cost["low"],
            "relative_cost_high": cost["high"],
            "break_even": price["value"],
            "break_even_low": price["low"],
            "break_even_high": price["high"],
        }


def summary(rung: str, steps: int, plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a point rests on."""
    kept = ("batches", "looked_at", "microbatches", "samples", "fleet_price", "seconds")
    return {"rung": rung, "steps": steps, **{name: plan[name] for name in kept}}


def _ledger(*arguments: str) -> None:
    code = subprocess.run([sys.executable, "-m", "lightning_ledger.cli", *arguments], cwd=ROOT).returncode
    if code not in (0, 1):  # 1: a plan that advises against predictions
        raise SystemExit(f"`lightning-ledger {arguments[0]}` ended with {code}")
