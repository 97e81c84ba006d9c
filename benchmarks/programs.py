"""Measure training steps side by side: exact, compiled, and as captured programs in each number format.

Every row is the forward and backward pass of one micro-batch, without optimizer. Rows of a model take turns, step by
step, in another order every round; ratios are taken round by round. A row's numbers:

- ms: of a step; median and quartiles over rounds.
- speed-ups: a reference's time over the row's, in the same round.
- matrix rate: the time that the step's FLOPs would take at the rate of large square products in the formats that they
  run in, over the time that the step takes.
- products: the time of the step's own matrix products, convolutions and attention, run operation by operation at
  their own shapes, over the time of the step. The rest is rounding, elementwise work, softmax, loss and overhead.
- memory: the most that the step's tensors take at a time, rounded weights included, from torch's profiler.
- native: the share of FLOPs that run in the machine's instructions for their format. What is emulated shows what a
  format does to gradients, not how fast it is.
- set-up: seconds until the first step is done, where something is captured or compiled, with nothing cached on disk.
- rounding: what a step with new weights takes longer, once for all micro-batches of a batch.
- apart: how far a program's gradient is from that of the eager predictor, which runs the same operations one by one.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.machine import machine, matrix_rates
from benchmarks.steps import (
    Model,
    Step,
    native_share,
    peak_bytes,
    prepare,
    products,
    refresh_seconds,
)

REFERENCES = {"over_exact_fp32": "exact fp32", "over_compiled_bf16": "torch.compile bf16-mixed"}
HEADINGS = {
    "row": "step of one micro-batch",
    "ms": "ms",
    "rate": "{unit}/s",
    "over_exact_fp32": "x exact fp32",
    "over_compiled_bf16": "x torch.compile bf16-mixed",
    "matrix_rate": "matrix rate",
    "products": "products",
    "peak_mb": "MB",
    "native": "native",
    "setup_seconds": "set-up s",
    "rounding_ms": "rounding ms",
    "apart": "apart",
}


@dataclass(frozen=True)
class Facts:
    """What is measured of a row beside its laps.

    Attributes:
        executed: FLOPs by the format of the kernels' operands.
        native: share of FLOPs in the machine's own instructions.
        product_seconds: of its matrix products alone.
        peak_bytes: of its tensors.
        setup_seconds: of the first step; None where nothing is captured or compiled.
        rounding_seconds: that new weights cost; None for an exact step.
        apart: from the eager predictor's gradient; None for an exact step.
    """

    executed: Mapping[str, int]
    native: float
    product_seconds: float
    peak_bytes: int
    setup_seconds: float | None
    rounding_seconds: float | None
    apart: float | None


def quartiles(numbers: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        [2.0, 3.0, 4.0]
    """
    return statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else [numbers[0]] * 3


def summary(
    row: str, items: int, laps: Mapping[str, Sequence[float]], facts: Facts, rates: Mapping[str, float]
) -> dict[str, Any]:
    """A row's numbers.

    Args:
        row: its name.
        items: tokens or samples in the micro-batch.
        laps: seconds of each round, of this row and of others.
        facts: about this row.
        rates: GFLOP/s of the machine by format.

    Returns:
        Quartiles for times and ratios, shares as numbers from 0 to 1; None for what there is nothing to say about.
    """
    own = laps[row]
    median = statistics.median(own)
    # At best each format's FLOPs take as long as in large square products.
    ideal = sum(1e-9 * flops / rates[name] if name in rates else float("nan") for name, flops in facts.executed.items())
    found: dict[str, Any] = {
        "row": row,
        "ms": [_short(1e3 * seconds) for seconds in quartiles(own)],
        "rate": _short(items / median),
        "gflops": _short(1e-9 * sum(facts.executed.values()) / median),
        "matrix_rate": _short(ideal / median) if ideal == ideal else None,
        "products": _short(facts.product_seconds / median),
        "peak_mb": round(facts.peak_bytes / 1e6),
        "native": _short(facts.native),
        "setup_seconds": None if facts.setup_seconds is None else _short(facts.setup_seconds),
        "rounding_ms": None if facts.rounding_seconds is None else _short(1e3 * facts.rounding_seconds),
        "apart": None if facts.apart is None else _short(facts.apart),
    }
    for key, reference in REFERENCES.items():
        others = laps.get(reference)
        ratios = [other / seconds for other, seconds in zip(others, own, strict=True)] if others else None
        found[key] = None if ratios is None else [_short(ratio) for ratio in quartiles(ratios)]
    return found


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def take_turns(
    runners: Mapping[str, Callable[[], float]], rounds: int, seconds: float, on_lap: Callable[[str], object]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Run everything in turn, in another order every round; what fails is left out from then on.

    Args:
        runners: by name; each returns the seconds that it took.
        rounds: at most.
        seconds: stop early once the laps took so long together, but not before three rounds.
        on_lap: called with the name of what comes next.

    Returns:
        The seconds by name, and for each that failed, why.
    """
    laps: dict[str, list[float]] = {name: [] for name in runners}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        names = list(laps)
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            on_lap(name)
            try:
                laps[name].append(runners[name]())
            except Exception as error:
                failed[name] = reason(error)
                del laps[name]
        if turn >= 2 and sum(map(sum, laps.values())) > seconds:
            break
    return laps, failed


def reason(error: BaseException) -> str:
    """An error's kind and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def measure(
    models: Mapping[str, Model], rows: Sequence[str], rounds: int, seconds: float, progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """Measure rows of models.

    Args:
        models: by name.
        rows: what ``prepare`` knows.
        rounds: of each model, at most.
        seconds: of the laps of each model, about.
        progress: shows how far it is.

    Yields:
        After each model, what was found so far, fit for JSON, ``table`` and ``markdown``.
    """
    with _nothing_cached():
        facts, rates = machine(), matrix_rates()
        measured: list[dict[str, Any]] = []
        for name, model in models.items():
            measured.append(_measure(name, model, rows, rounds, seconds, rates, progress))
            torch._dynamo.reset()
            gc.collect()
            yield {
                "machine": facts,
                "gflops": {name: round(rate, 1) for name, rate in rates.items()},
                "models": measured,
            }


def _measure(
    name: str,
    model: Model,
    rows: Sequence[str],
    rounds: int,
    seconds: float,
    rates: Mapping[str, float],
    progress: Progress | None,
) -> dict[str, Any]:
    task = progress.add_task(name, total=len(rows) * (rounds + 2)) if progress else None

    def show(row: str) -> None:
        if progress and task is not None:
            progress.update(task, advance=1, description=f"{name}: {row}")

    steps: dict[str, Step] = {}
    setup: dict[str, float] = {}
    failed: dict[str, str] = {}
    facts: dict[str, Facts] = {}
    try:
        module, batch = model.build()
    except Exception as error:
        failed = dict.fromkeys(rows, reason(error))
    for row in rows if not failed else ():
        show(row)
        start = time.perf_counter()
        try:
            step = prepare(row, module, batch)
            step.run()
        except Exception as error:
            failed[row] = reason(error)
            continue
        steps[row], setup[row] = step, time.perf_counter() - start
    laps, late = take_turns({row: step.lap for row, step in steps.items()}, rounds, seconds, show)
    for row in list(laps):
        show(row)
        try:
            facts[row] = _facts(steps[row], laps[row], None if row.startswith("exact") else setup[row])
        except Exception as error:
            late[row] = reason(error)
    failed |= late
    if progress and task is not None:
        progress.update(task, completed=len(rows) * (rounds + 2), description=name)
    return {
        "model": name,
        "items": model.items,
        "unit": model.unit,
        "rounds": min(map(len, laps.values()), default=0),
        "rows": [
            {"row": row, "failed": failed[row]} if row in failed else summary(row, model.items, laps, facts[row], rates)
            for row in rows
        ],
    }


def _facts(step: Step, laps: Sequence[float], setup: float | None) -> Facts:
    executed, seconds, _ = products(step)
    return Facts(
        executed=executed,
        native=native_share(step.formats or executed, executed),
        product_seconds=seconds,
        peak_bytes=peak_bytes(step),
        setup_seconds=setup,
        rounding_seconds=None if step.formats is None else refresh_seconds(step, laps),
        apart=step.apart,
    )


@contextmanager
def _nothing_cached() -> Iterator[None]:
    """An empty cache for what TorchInductor compiles, so that set-up times are those of a first run."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script.*` is deprecated")  # inductor's own use of it
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row as text, in the order of ``HEADINGS``; a row that cannot run says why."""
    if "failed" in row:
        return [f"{row['row']}: {row['failed']}", *[""] * (len(HEADINGS) - 1)]
    low, median, high = row["ms"]
    mark = "" if row["native"] > 0.995 else " (emulated)" if row["native"] < 0.5 else " (partly emulated)"
    shown = {
        "row": row["row"] + mark,
        "ms": f"{median:,.0f} ({low:,.0f} {high:,.0f})",
        "rate": f"{row['rate']:,.0f}",
        "over_exact_fp32": _ratio(row["over_exact_fp32"]),
        "over_compiled_bf16": _ratio(row["over_compiled_bf16"]),
        "matrix_rate": "" if row["matrix_rate"] is None else f"{row['matrix_rate']:.0%}",
        "products": f"{row['products']:.0%}",
        "peak_mb": f"{row['peak_mb']:,}",
        "native": f"{row['native']:.0%}",
        "setup_seconds": "" if row["setup_seconds"] is None else f"{row['setup_seconds']:.0f}",
        "rounding_ms": "" if row["rounding_ms"] is None else f"{row['rounding_ms']:.0f}",
        "apart": "" if row["apart"] is None else f"{row['apart']:.0e}",
    }
    return [shown[key] for key in HEADINGS]


def _ratio(found: Sequence[float] | None) -> str:
    return "" if found is None else "{1:.2f} ({0:.2f} {2:.2f})".format(*found)


def bounds(model: Mapping[str, Any]) -> list[str]:
    """What bounds each row: how its time divides between products and the rest."""
    lines = []
    for row in model["rows"]:
        if "failed" not in row:
            share = row["products"]
            verdict = "bound by products" if share >= 0.5 else "bound by what is no product"
            lines.append(f"{row['row']}: {share:.0%} products, {max(0.0, 1 - share):.0%} elsewhere: {verdict}")
    return lines


def headings(model: Mapping[str, Any]) -> list[str]:
    """The table's headings."""
    return [heading.format(unit=model["unit"]) for heading in HEADINGS.values()]


def title(model: Mapping[str, Any]) -> str:
    """What a table is of."""
    return f"{model['model']}, a micro-batch of {model['items']} {model['unit']}, {model['rounds']} rounds"


def table(model: Mapping[str, Any]) -> Table:
    """A model's rows for the terminal; what bounds them stands below."""
    shown = Table(title=title(model), caption="\n".join(bounds(model)), box=SIMPLE_HEAD, caption_justify="left")
    for place, heading in enumerate(headings(model)):
        shown.add_column(heading, justify="right" if place else "left", min_width=0 if place else 45)
    for row in model["rows"]:
        shown.add_row(*cells(row))
    return shown


def markdown(report: Mapping[str, Any]) -> str:
    """The tables of a report, and what bounds their rows, for a page of the documentation."""
    parts = []
    for model in report["models"]:
        heads = headings(model)
        lines = [f"### {title(model)}", "", "| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in model["rows"]]
        lines += ["", *(f"- {line}" for line in bounds(model))]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def progress_bar() -> Progress:
    """A bar on the terminal, gone when it is done."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, transient=True)
