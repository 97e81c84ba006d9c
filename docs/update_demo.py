"""Put the comparison of the last `make demo` into the README and docs/: picture, JSON and table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "runs" / "demo"
MARKERS = ("<!-- demo -->", "<!-- /demo -->")  # where the README has the table


def main() -> None:
    """Put the comparison of a finished demo into the README and docs/: picture, JSON and table."""
    comparison = json.loads((DEMO / "compare.json").read_text())
    shutil.copyfile(DEMO / "compare.png", ROOT / "docs" / "demo.png")
    (ROOT / "docs" / "demo.json").write_text(json.dumps(comparison, indent=1) + "\n")
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    readme.write_text(before + MARKERS[0] + "\n" + markdown(comparison) + MARKERS[1] + after)
    print("wrote docs/demo.png, docs/demo.json and the table in README.md")


def markdown(comparison: Mapping[str, Any]) -> str:
    """Return the comparison as the README shows it."""
    lines = [
        "| run | steps | best `val_loss` | cost of training | of it fleet | cost to target | saving |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in comparison["rows"]:
        reached, saving = row["cost_to_target"], row["saving"]
        cells = (
            row["label"],
            f"{row['steps']}",
            f"{row['best']:.3f}",
            f"{row['total']:,.0f}",
            f"{row['tiers']['fleet']:,.0f}",
            "never" if reached is None else f"{reached:,.0f}",
            "-" if saving is None else f"{saving:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\nTarget: `val_loss` {comparison['target']:.3f}, {comparison['target_rule']}.\n"


if __name__ == "__main__":
    main()
