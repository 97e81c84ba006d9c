"""Measure every number format on a briefly trained GPT, and put the table into docs/formats.md.

The demo's model is trained exactly for 100 steps; `lightning-ledger plan` then compares, from its checkpoint, exact and
predicted gradients on the demo's micro-batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "formats"
PAGE = ROOT / "docs" / "formats.md"
MARKERS = ("<!-- fidelity -->", "<!-- /fidelity -->")
STEPS, BATCHES = 100, 4
FORMATS = (
    "bf16,int8,fp8,fp8_tensor,mxfp8,mxfp6,mxfp4,nvfp4,int4,w8a16,w4a16,w4a8,int8:attention=bf16,int4:grad_weight=bf16"
)


def main() -> None:
    """Train, measure, write the table."""
    RUNS.mkdir(parents=True, exist_ok=True)
    if not (checkpoint := RUNS / "trained.ckpt").exists():
        train(checkpoint)
    plan = RUNS / "plan.json"
    run(
        "plan",
        "--config=configs/demo.yaml",
        "--config=configs/demo/gpcv-int8.yaml",
        f"--ckpt_path={checkpoint}",
        f"--plan.formats={FORMATS}",
        f"--plan.batches={BATCHES}",
        "--plan.minutes=60",
        f"--plan.json={plan}",
    )
    before, _, rest = PAGE.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    PAGE.write_text(before + MARKERS[0] + "\n" + markdown(json.loads(plan.read_text())) + MARKERS[1] + after)
    print(f"wrote the fidelity table in {PAGE.relative_to(ROOT)}")


def train(checkpoint: Path) -> None:
    """The demo's model, trained exactly."""
    run(
        "fit",
        "--config=configs/demo.yaml",
        f"--trainer.max_steps={STEPS}",
        "--trainer.enable_checkpointing=true",
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        f"--trainer.callbacks.dirpath={checkpoint.parent}",
        f"--trainer.callbacks.filename={checkpoint.stem}",
        f"--trainer.logger.init_args.save_dir={RUNS}",
        "--model.init_args.learning_rate=1e-3",
    )


def run(*arguments: str) -> int:
    """Run `lightning-ledger`; its exit code, if it is an answer."""
    code = subprocess.run([sys.executable, "-m", "lightning_ledger.cli", *arguments], cwd=ROOT).returncode
    if code not in (0, 1):
        raise SystemExit(f"`lightning-ledger {arguments[0]}` ended with {code}")
    return code


def markdown(plan: Mapping[str, Any]) -> str:
    """The table, one row for each format and rounding."""
    lines = ["| format | rounding | delta at lam = 1 | rho2 at lam* | bias |", "|---|---|--:|--:|--:|"]
    for row in plan["formats"]:
        prediction = row["prediction"]
        bias = "-" if row["bias"] is None else f"{row['bias']:.3f}"
        kind, delta, rho2 = prediction["rounding"], f"{row['delta_at_one']:.2g}", f"{row['rho2']:.4f}"
        lines.append(f"| `{prediction['format']}` | {kind} | {delta} | {rho2} | {bias} |")
    noise = plan["noise_scale"]
    told = "no mean gradient can be told from the noise" if noise is None else f"noise scale {noise:.1f} micro-batches"
    return (
        "\n".join(lines)
        + f"\n\nThe demo's GPT of 2.5M parameters after {STEPS} exact steps, {plan['batches']} batches of "
        + f"{plan['microbatches']} micro-batches, {told}. Made by `make formats`; `bias` is "
        + "`||mean(g - h)|| / ||mean g||` with its sampling error removed.\n"
    )


if __name__ == "__main__":
    main()
