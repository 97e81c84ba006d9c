"""Small runs with hand-countable work, shared by the ledger's tests."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lightning_ledger.ledger import Ledger, Work, read_ledger, verify_ledger

EXACT = Work(flops=600, samples=4, tokens=40, passes=1)
PREDICTED = Work(flops_by_format={"int8": 600}, samples=4, tokens=40, passes=1)
VALIDATION = Work(flops=1_000, samples=10)

counts = st.integers(0, 2**70)
works = st.builds(
    Work,
    flops_by_format=st.dictionaries(st.sampled_from(["int8", "int4", "unlabelled"]), counts, max_size=2),
    bytes=counts,
    samples=st.integers(0, 9),
    passes=st.integers(0, 3),
    seconds=st.floats(0, 10),
)
"""Any work, counts beyond 64 bits included."""


def train(ledger: Ledger, steps: int) -> None:
    """Steps as GPCV has them: one exact micro-batch, one predicted."""
    for _ in range(steps):
        ledger.charge("scarce/forward", EXACT)
        ledger.charge("fleet/prediction", PREDICTED)
        ledger.charge("transfer/gradients", Work(bytes=8))
        ledger.charge_exact_equivalent(EXACT * 2)
        ledger.end_step()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_file_tells(path: Path, ledger: Ledger) -> None:
    history = read_ledger(path)
    assert history.totals == ledger.totals()
    assert history.exact_equivalent == ledger.exact_equivalent
    assert (history.steps, history.forward_flops) == (ledger.steps, ledger.forward_flops)
    assert verify_ledger(path).ok


def checkpoint_after(directory: Path, steps: int, beyond: int) -> dict[str, Any]:
    """A run killed ``beyond`` steps after the checkpoint it leaves."""
    ledger = Ledger()
    ledger.forward_flops = 200
    ledger.attach(directory)
    train(ledger, steps)
    ledger.mark({"val_loss": 3.0})
    state = copy.deepcopy(ledger.state_dict())
    train(ledger, beyond)
    if beyond:
        ledger.charge("scarce/validation", VALIDATION)
        ledger.mark({"val_loss": 2.0})
    return state


def resume(state: dict[str, Any], directory: Path) -> Ledger:
    ledger = Ledger()
    ledger.load_state_dict(state)
    ledger.attach(directory)
    return ledger


def uninterrupted(steps: int) -> Ledger:
    ledger = Ledger()
    ledger.forward_flops = 200
    train(ledger, steps)
    return ledger
