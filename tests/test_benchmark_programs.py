"""The benchmark of programs: its arithmetic on made-up laps, its clocks on known work, and a tiny model all through."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import programs
from benchmarks.__main__ import main, parse
from benchmarks.machine import matrix_rates
from benchmarks.programs import HEADINGS, Facts, bounds, cells, markdown, measure, summary, take_turns
from benchmarks.steps import (
    MODELS,
    ROWS,
    Step,
    gpt,
    native_share,
    peak_bytes,
    prepare,
    products,
    refresh_seconds,
)
from lightning_ledger.precision import get_format

TINY = gpt(layers=1, heads=2, width=32, context=16, samples=2)
LAPS = {"exact fp32": [4.0, 8.0, 6.0], "torch.compile bf16-mixed": [2.0, 2.0, 2.0], "compiled int8": [1.0, 2.0, 1.0]}


def facts(executed: dict[str, int], native: float = 1.0) -> Facts:
    return Facts(
        executed=executed,
        native=native,
        product_seconds=0.3,
        peak_bytes=5_000_000,
        setup_seconds=7.0,
        rounding_seconds=0.25,
        apart=0.01,
    )


def int8_row(**changes: Any) -> dict[str, Any]:
    executed = {"int8": 40_000_000_000, "fp32": 10_000_000_000}
    return summary("compiled int8", 100, LAPS, facts(executed), {"int8": 200.0, "fp32": 50.0}) | changes


def test_a_row_is_summed_up_from_its_laps_and_those_of_the_same_rounds() -> None:
    assert int8_row() == {
        "row": "compiled int8",
        "ms": [1000.0, 1000.0, 1500.0],  # of 1, 1, 2
        "rate": 100.0,
        "gflops": 50.0,
        "matrix_rate": 0.4,  # 40 / 200 s + 10 / 50 s, of 1 s
        "products": 0.3,
        "peak_mb": 5,
        "native": 1.0,
        "setup_seconds": 7.0,
        "rounding_ms": 250.0,
        "apart": 0.01,
        "over_exact_fp32": [4.0, 4.0, 5.0],  # 4/1, 8/2, 6/1
        "over_compiled_bf16": [1.5, 2.0, 2.0],  # 2/1, 2/2, 2/1
    }


def test_what_there_is_nothing_to_compare_with_stays_empty() -> None:
    alone = summary("compiled int8", 1, {"compiled int8": [1.0]}, facts({"fp64": 10}), {"fp32": 50.0})
    assert alone["ms"] == [1000.0, 1000.0, 1000.0]
    assert alone["over_exact_fp32"] is alone["over_compiled_bf16"] is alone["matrix_rate"] is None
    assert dict(zip(HEADINGS, cells(alone), strict=True))["over_exact_fp32"] == ""


def test_rows_take_turns_in_an_order_that_rotates_and_one_that_fails_is_left_out() -> None:
    seen: list[str] = []

    def lap(name: str) -> float:
        if name == "b" and seen.count("b") == 2:
            raise MemoryError("no more\nsecond line")
        return 1.0

    runners = {name: (lambda name=name: lap(name)) for name in "abc"}
    laps, failed = take_turns(runners, rounds=4, seconds=60.0, on_lap=seen.append)
    assert "".join(seen) == "abc" + "bca" + "ac" + "ca"
    assert laps == {"a": [1.0] * 4, "c": [1.0] * 4}
    assert failed == {"b": "MemoryError: no more"}


def test_turns_stop_when_their_time_is_up_but_not_before_three_rounds() -> None:
    laps, _ = take_turns({"a": lambda: 10.0}, rounds=50, seconds=1.0, on_lap=len)
    assert len(laps["a"]) == 3


def test_emulated_work_is_no_native_work() -> None:
    assert native_share({"fp32": 100}, {"fp32": 100}) == 1.0
    assert native_share({"mxfp4": 75, "fp32": 25}, {"fp32": 100}) == 0.25
    # Of 80 declared, 60 run in integers: the rest is emulated in fp32, which is not what 40 of fp32 were declared for.
    has_int8 = get_format("int8").is_native("cpu")
    assert native_share({"int8": 80, "fp32": 20}, {"int8": 60, "fp32": 40}) == (0.8 if has_int8 else 0.2)


def test_tables_mark_emulated_rows_say_what_bounds_and_why_a_row_is_missing() -> None:
    rows = [
        int8_row(),
        int8_row(row="compiled int4", native=0.1),
        int8_row(row="part", native=0.9, products=0.7),
        {"row": "compiled bf16", "failed": "NotCompilable: no compiler"},
    ]
    model = {"model": "toy", "items": 100, "unit": "tokens", "rounds": 3, "rows": rows}
    names = [cells(row)[0] for row in rows]
    assert names == [
        "compiled int8",
        "compiled int4 (emulated)",
        "part (partly emulated)",
        "compiled bf16: NotCompilable: no compiler",
    ]
    assert cells(rows[0])[1:5] == ["1,000 (1,000 1,500)", "100", "4.00 (4.00 5.00)", "2.00 (1.50 2.00)"]
    assert bounds(model)[0] == "compiled int8: 30% products, 70% elsewhere: bound by what is no product"
    assert bounds(model)[2] == "part: 70% products, 30% elsewhere: bound by products"
    lines = [line for line in markdown({"models": [model]}).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {len(HEADINGS) + 1}


def test_clock_counter_and_memory_of_a_known_step() -> None:
    a = torch.randn(300, 300)

    def work() -> torch.Tensor:
        first = torch.empty(1000, 1000)
        second = torch.empty(2000, 1000)  # with the first: 12 MB
        del first, second
        return (a @ a).sin_().cos_()

    step = Step(work, work)
    found = products(step)
    assert (found.flops, found.calls) == ({"fp32": 2 * 300**3}, 1)
    assert 0 < found.seconds < 1
    assert 12_000_000 <= peak_bytes(step) < 12_001_000
    assert refresh_seconds(step, [1e9]) == 0.0


def test_the_clock_sees_the_products_of_every_engine() -> None:
    """Inside a lowering they arrive as parts of composite operations, which a dispatch mode can miss."""
    module, batch = TINY.build()
    exact = products(prepare("exact fp32", module, batch))
    assert exact.calls == 3 * 5 + 2  # of five layers one forward, two backward; attention is one operation each way
    lowered = products(prepare("captured bf16", module, batch))
    assert (lowered.calls, lowered.flops) == (exact.calls, {"bf16": exact.flops["fp32"]})


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row='exact int8' is not one of 'exact fp32', .* nor 'captured FORMAT'"):
        prepare("exact int8", *TINY.build())


@pytest.fixture
def quiet() -> Iterator[None]:
    """``main`` sets threads and log levels, for a process of its own."""
    threads = torch.get_num_threads()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    yield
    torch.set_num_threads(threads)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("quiet")
def test_a_tiny_model_all_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODELS, "tiny", TINY)
    monkeypatch.setattr(programs, "matrix_rates", functools.partial(matrix_rates, size=128))
    file = tmp_path / "deep" / "bench.json"
    rows = ["exact fp32", "exact bf16-mixed", "captured fp32", "captured mxfp4", "captured int9"]
    chosen = ["--models", json.dumps(["tiny"]), "--rows", json.dumps(rows), "--rounds", "3", "--threads", "1"]
    main(["programs", *chosen, "--json", str(file)])
    report = json.loads(file.read_text())["programs"]
    assert set(report["gflops"]) == {"fp32", "bf16", "int8"}
    assert min(report["gflops"].values()) > 0
    (model,) = report["models"]
    assert (model["model"], model["items"], model["rounds"]) == ("tiny", 32, 3)
    found = {row["row"]: row for row in model["rows"]}
    assert list(found) == rows
    assert "int9" in found.pop("captured int9")["failed"]
    # Per token and pass: 12 width^2 in the block, 256 width in the head; three products of each, of 2 FLOPs. Attention
    # has 2 products forward and 5 backward, of 2 context width.
    flops = 32 * (6 * (12 * 32**2 + 256 * 32) + 7 * 2 * 16 * 32)
    exact = found["exact fp32"]
    assert exact["gflops"] * exact["ms"][1] == pytest.approx(1e-6 * flops, rel=2e-3)
    assert exact["over_exact_fp32"] == [1.0, 1.0, 1.0]
    assert (exact["native"], found["captured fp32"]["native"]) == (1.0, 1.0)
    assert (found["captured fp32"]["apart"], exact["apart"], exact["setup_seconds"]) == (0.0, None, None)
    assert found["captured mxfp4"]["native"] < 0.1
    assert all(0 < row["products"] < 1 and row["matrix_rate"] > 0 for row in found.values())
    assert "captured mxfp4 (emulated)" in capsys.readouterr().out


# Importing inductor, torch warns of its own use of torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_every_row_runs_compiled_ones_too() -> None:
    *_, report = measure({"tiny": TINY}, ROWS, rounds=3, seconds=60.0)
    (model,) = report["models"]
    assert [row.get("failed") for row in model["rows"]] == [None] * len(ROWS)
    assert all(row["apart"] < 0.05 for row in model["rows"] if row["apart"] is not None)


def test_quick_takes_the_smallest_model_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--quick"]).models == ["gpt 10M"]
    assert parse([]).what == "all"
    with pytest.raises(SystemExit):
        parse(["--models", '["gpt 11M"]'])
    assert "gpt 11M is not one of gpt 10M, gpt 33M" in capsys.readouterr().err


def test_the_page_shows_the_committed_numbers() -> None:
    docs = Path(__file__).parents[1] / "docs"
    report = json.loads((docs / "performance.json").read_text())["programs"]
    assert markdown(report).strip() in (docs / "performance.md").read_text()
