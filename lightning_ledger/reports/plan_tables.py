"""A dry run's forecast as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_ledger.reports.tables import _print_notes, _table, _terminal, amount

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console
    from rich.table import Table

    from lightning_ledger.planning.forecast import Forecast, FormatForecast, Interval
    from lightning_ledger.planning.ways import Way

__all__ = ["render_plan"]


def render_plan(forecast: Forecast, console: Console | None = None) -> None:
    """Prints the forecast and its verdict. It is made to read well at 110 columns.

    Args:
        forecast: What the dry run found.
        console: Where to print; by default the terminal.
    """
    console = console or _terminal()
    console.print(_statistics(forecast))
    console.print(_costs(forecast))
    console.print(_ways(forecast))
    best = forecast.verdict.best
    name = f"{best.kind} ({best.label})" if best.label else best.kind
    answer = "Predictions are expected to pay" if forecast.verdict.pays else "Predictions are not expected to pay"
    console.print(f"{answer}. Take: {name}, {_size(best)}.", style="bold", highlight=False, markup=False)
    _print_notes(console, [*(f"- {reason}" for reason in forecast.verdict.reasons), "", *_notes(forecast)])


def _statistics(forecast: Forecast) -> Table:
    where = f"at step {forecast.step:,}" if forecast.step else "at its first weights"
    table = _table(f"{forecast.module} {where}: predictions against exact gradients")
    table.add_column("prediction", overflow="fold")
    for name in ("delta at 1", "at lam*", "bias", "R", "pays below", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in forecast.formats:
        table.add_row(
            kind.prediction.label,
            f"{kind.delta_at_one:.2g}",
            _interval(kind.delta),
            "-" if kind.bias is None else f"{kind.bias:.2g}",
            _interval(kind.relative_cost),
            _interval(kind.break_even),
            f"{kind.prediction.seconds:.3g}",
        )
    return table


def _costs(forecast: Forecast) -> Table:
    table = _table("What one of them takes")
    table.add_column("gradient", overflow="fold")
    for name in ("FLOPs, by format", "price", "rho2", "rounded weights", "run"):
        table.add_column(name, justify="right")
    table.add_row("exact", _flops(forecast.exact_flops), "1", "-", "-", "-")
    for kind in forecast.formats:
        made = kind.prediction
        table.add_row(
            made.label, _flops(made.flops), f"{made.w:.3g}", f"{kind.rho2:.4f}", _bytes(made.weight_bytes), made.engine
        )
    return table


def _ways(forecast: Forecast) -> Table:
    table = _table(f"Ways to spend, at the variance of {forecast.verdict.target} exact micro-batches (expected)")
    table.add_column("way", overflow="fold", min_width=16)
    table.add_column("predictions", overflow="fold")
    for name in ("micro-batches", "exact", "steps", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for way in forecast.verdict.ways:
        table.add_row(
            way.kind,
            way.label or "-",
            f"{way.microbatches}",
            f"{way.exact}",
            f"{way.steps:.3g}",
            "-" if way.cost is None else f"{way.cost:.3g}",
            way.note,
            style="bold" if way is forecast.verdict.best else None,
        )
    return table


def _notes(forecast: Forecast) -> list[str]:
    scale, samples = forecast.noise_scale, forecast.noise_scale_samples
    if scale is None:
        noise = "Gradient noise scale: not to be told from these batches."
    else:
        in_samples = f", {samples:.0f} samples" if samples is not None else ""
        noise = f"Gradient noise scale: {scale:.1f} micro-batches{in_samples}. That is the batch size it suggests."
    memory, whole = forecast.memory, forecast.batches * forecast.microbatches
    batches = f"{forecast.batches} batches of {forecast.microbatches} micro-batches"
    if forecast.looked_at < whole:
        batches = f"{forecast.looked_at} of {whole} micro-batches, for lack of time,"
    batches += f" of {forecast.samples:.4g} samples" if forecast.samples else ""
    forwards = sum(forecast.work.values()) / forecast.forward_flops
    measured = f"Measured on {batches}, {forecast.accumulated} a step, in {forecast.seconds:.0f} s and {forwards:,.0f} "
    measured += "forward-equivalents, which no ledger was charged for. Nothing was trained."
    prices = f"Fleet price {forecast.fleet_price:g} of a scarce forward. An exact gradient took "
    prices += f"{forecast.exact_seconds:.3g} s. Seconds are this machine's; emulated formats' say nothing of a fleet."
    parameters, gradients, sketches = (_bytes(memory[name]) for name in ("parameters", "gradient_set", "sketches"))
    sizes = f"Memory: parameters {parameters}, one gradient set {gradients}, sketches {sketches}; besides these, "
    sizes += "activations and the rounded weights of one kind."
    chosen = "by layer at lam*" if forecast.batches > 1 else "with one batch at lam = 1"
    words = f"delta: variance that predictions leave, of the exact gradients' (D/V), {chosen}. bias: of the mean "
    words += "gradient, sampling error removed. R: variance x cost against exact, in large batches. Costs in the ways "
    words += "are expected, to equal mean square error of a step. In brackets: 95%, by the jackknife."
    notes = [noise, measured, prices, sizes, words]
    return [*notes, *_per_format(forecast)]


def _per_format(forecast: Forecast) -> list[str]:
    """What is told once for each format, however it rounds."""
    said: dict[str, None] = {}
    for kind in forecast.formats:
        said.setdefault(f"{kind.prediction.kind}.")
        if kind.prediction.why_eager:
            said.setdefault(f"{kind.prediction.format} ran eagerly: {kind.prediction.why_eager}.")
        if refused := _refused(kind):
            said.setdefault(f"{kind.prediction.format} did not lower {refused}.")
    return list(said)


def _refused(kind: FormatForecast, shown: int = 6) -> str:
    places = [f"{place} ({why})" for place, why in kind.prediction.unlowered.items()]
    more = f" and {len(places) - shown} more" if len(places) > shown else ""
    return ", ".join(places[:shown]) + more


def _size(way: Way) -> str:
    return f"{way.exact} exact of {way.microbatches} micro-batches a step"


def _interval(value: Interval) -> str:
    """
    >>> from types import SimpleNamespace
    >>> _interval(SimpleNamespace(value=0.1234, low=0.1, high=0.15))
    '0.12 [0.1, 0.15]'
    """
    shown = f"{value.value:.2g}"
    return shown if value.low is None else f"{shown} [{value.low:.2g}, {value.high:.2g}]"


def _flops(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {amount(n / 1e6)}M" for name, n in counts.items())


def _bytes(n: int) -> str:
    """
    >>> _bytes(1_500), _bytes(498_000_000)
    ('1.5 kB', '498 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"
