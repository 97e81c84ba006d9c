"""The README shows what the demo's committed comparison says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.update_demo import MARKERS, markdown

ROOT = Path(__file__).resolve().parent.parent


def test_the_readmes_table_is_that_of_the_committed_comparison() -> None:
    comparison = json.loads((ROOT / "docs" / "demo.json").read_text())
    shown = (ROOT / "README.md").read_text().partition(MARKERS[0])[2].partition(MARKERS[1])[0]
    assert shown.strip() == markdown(comparison).strip()
    labels = {row["label"] for row in comparison["rows"]}
    assert {"exact-1", "exact-4", "exact-16", "predicted-int4", "mixed-int4", "gpcv-int8", "gpcv-int4"} == labels


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")  # Lightning's advice on its default logger
def test_the_readmes_python_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    snippet = readme.partition("```python\n")[2].partition("```")[0]
    scope: dict[str, object] = {}
    exec(compile(snippet, "README.md", "exec"), scope)
    names = {type(c).__name__ for c in scope["trainer"].callbacks}  # type: ignore[attr-defined]
    assert names >= {"ComputeLedger", "GradientPrediction", "ControlVariate"}
