"""Write docs/results.md from the study's numbers under results/: the answer first, then each part with its command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.records import RESULTS, ROOT, read_csv
from benchmarks.study.windows import PRICES

PAGE = ROOT / "docs" / "results.md"

Cells = Sequence[Mapping[str, str]]


def main() -> None:
    """Write the page, if there is a result."""
    if text := page(RESULTS):
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    else:
        print(f"no results in {RESULTS}: run `make study-fidelity` or `make study-windows` first")


def page(results: Path) -> str:
    """The whole page; the parts that have no results are left out, and without any it is empty.

    Args:
        results: the folder of the study's CSV and JSON files.
    """
    parts = {"windows": windows, "fidelity": fidelity, "breakeven": map_of_prices}
    found = {name: render for name, render in parts.items() if (results / f"{name}.csv").exists()}
    if not found:
        return ""
    head = "\n".join(f"- {line}" for line in answers(results))
    sections = "\n".join(render(results) for render in found.values())
    return f"# Does it pay, and where does it fail?\n\n{head}\n\n{sections}"


def answers(results: Path) -> Iterator[str]:
    """One line for each thing that the numbers say, failures first."""
    if (results / "windows.csv").exists():
        arms = read_csv(results / "windows.csv")
        if failed := [row["arm"] for row in arms if int(row["reached"]) < int(row["seeds"])]:
            yield f"Failed to reach the target in at least one seed: {', '.join(failed)}."
        if crashed := _json(results / "windows.json")["failed"]:
            yield f"Ended with an error: {', '.join(crashed)}."
        prices = read_csv(results / "windows_prices.csv")
        yield f"Cheapest to the target, and its saving against the cheapest exact run: {'; '.join(cheapest(prices))}."
    if (results / "fidelity.csv").exists():
        rows = [row for row in read_csv(results / "fidelity.csv") if row["rounding"] == "nearest"]
        for name in dict.fromkeys(row["format"] for row in rows):
            ends = sorted(float(row["break_even"]) for row in rows if row["format"] == name)
            yield f"`{name}`, to nearest, breaks even at fleet prices of {span(ends, '.2f')} over sizes and steps."


def cheapest(prices: Cells) -> Iterator[str]:
    """At each fleet price, the arm that reached the target at the least mean cost."""
    reached = [row for row in prices if row["censored"] == "False"]
    for price in PRICES:
        key = f"cost at {price:g}"
        best = min(reached, key=lambda row: float(row[key]), default=None)
        exact = next((row for row in reached if row["verdict"] == "yardstick"), None)
        if best is None or exact is None:
            yield f"at {price:g} unknown"
        else:
            yield f"at {price:g} {best['arm']} ({1 - float(best[key]) / float(exact[key]):.0%})"


def windows(results: Path) -> str:
    """The training windows."""
    rows, facts = read_csv(results / "windows.csv"), _json(results / "windows.json")
    columns = ("arm", "batch", "learning rate", "seeds", "best", "cost to target", "saving", "R", "bound")
    lines = []
    for row in rows:
        cost = f"{float(row['cost_to_target']):,.0f}" if row["cost_to_target"] else f"never ({row['reached']} seeds)"
        cost += f" ± {float(row['half_width']):,.0f}" if row["half_width"] else ""
        relative = float(row["relative_cost"]) if row["relative_cost"] else None
        lines.append(
            (
                row["arm"],
                f"{float(row['batch']):g}" if row["batch"] else "-",
                row["learning_rate"] + (" (edge)" if row["at_edge"] == "True" else ""),
                row["seeds"],
                f"{float(row['best']):.3f}",
                cost,
                f"{float(row['saving']):.0%}" if row["saving"] else "-",
                "-" if relative is None else f"{relative:.2f}",
                "-" if relative is None else f"{max(0.0, 1 - relative):.0%}",
            )
        )
    lines.sort(key=lambda line: line[0])
    told = (
        f"Target: `{facts['metric']}` {facts['target']:.3f}, {facts['target_rule']}. Fleet price "
        f"{facts['fleet_price']:g}; costs in forward-equivalents, with 95% intervals over seeds, which differ in the "
        "initial weights. Every arm's learning rate is the best of those tried at the first seed; `edge` where that "
        "was the largest or the smallest. Savings are against the cheapest exact arm. R is the median that the runs "
        "logged, and the bound 1 - R what a variance-limited run can save."
    )
    picture = (
        "![Cost to the target over the fleet price, the cheapest arm of each way to spend](../results/windows.png)"
    )
    return _section("Training windows", _table(columns, lines), told, picture, _made(facts))


def fidelity(results: Path) -> str:
    """The ladder."""
    columns = ("rung", "steps", "format", "rounding", "delta", "bias", "noise scale", "best share", "R", "break-even")
    lines = [
        (
            row["rung"],
            row["steps"],
            f"`{row['format']}`",
            row["rounding"],
            f"{float(row['delta']):.2g}",
            f"{float(row['bias']):.2f}" if row["bias"] else "-",
            f"{float(row['noise_scale']):.1f}" if row["noise_scale"] else "-",
            f"{float(row['best_share']):.3f}",
            _interval(row, "relative_cost", ".2f"),
            _interval(row, "break_even", ".2f"),
        )
        for row in read_csv(results / "fidelity.csv")
    ]
    facts = _json(results / "fidelity.json")
    parts = sorted({f"{point['looked_at']}" for point in facts["points"]}, key=int)
    price = sorted({f"{point['fleet_price']:g}" for point in facts["points"]})
    told = (
        f"Each row rests on {' or '.join(parts)} micro-batches. Noise scale in micro-batches; best share and R at a "
        f"fleet price of {' or '.join(price)}; 95% intervals in brackets, by the jackknife, where there is one. What "
        "the columns mean: [plan.md](plan.md)."
    )
    return _section("Fidelity ladder", _table(columns, lines), told, _made(facts))


def map_of_prices(results: Path) -> str:
    """The picture of break-even prices."""
    told = (
        "Below a line predictions in that format promise a lower variance for the same money than exact gradients "
        "alone; the numbers are the ladder's."
    )
    picture = "![Break-even fleet price against model size, by format](../results/breakeven.png)"
    return _section("Break-even prices", picture, told, _made(_json(results / "breakeven.json")))


def span(values: Sequence[float], form: str) -> str:
    """
    >>> span([0.1, 0.25, 0.3], ".2f"), span([0.5], ".2f")
    ('0.10 to 0.30', '0.50')
    """
    ends = dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values)))
    return " to ".join(ends)


def _interval(row: Mapping[str, str], name: str, form: str) -> str:
    value = f"{float(row[name]):{form}}"
    ends = [row[f"{name}_low"], row[f"{name}_high"]]
    return f"{value} [{float(ends[0]):{form}}, {float(ends[1]):{form}}]" if all(ends) else value


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---", *["--:"] * (len(columns) - 1)], *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _section(title: str, *blocks: str) -> str:
    return "\n\n".join([f"## {title}", *(block.strip() for block in blocks)]) + "\n"


def _made(facts: Mapping[str, Any]) -> str:
    here = facts["machine"]
    return (
        f"Made by `{facts['command']}` on {facts['date']}, commit {facts['commit']}, {here['cpu']} with "
        f"{here['cores']} cores, torch {here['torch']}."
    )


def _json(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


if __name__ == "__main__":
    main()
