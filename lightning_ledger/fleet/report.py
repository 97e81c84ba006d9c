"""How long steps take on declared machines, as a table:

python -m lightning_ledger.fleet.report --bandwidth 1.25e9
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace

from lightning_ledger.fleet.latency import Machines, StepLoad, step_time, workers_to_hide

PARAMETERS = (124e6, 774e6, 7e9)
WORKERS = (10, 100, 1000, 10_000)


def table(machines: Machines, exact: int = 1, microbatches: int = 512, tokens: int = 8192) -> str:
    """What a step takes with GPU and fleet, by model size and number of workers, and with the GPU alone.

    Args:
        machines: declared; their number of workers is shown besides the usual ones.
        exact: k.
        microbatches: n.
        tokens: in one micro-batch.

    Returns:
        Lines for print.
    """
    head = (
        "parameters",
        "sums return",
        "hidden by",
        "workers",
        "exact s",
        "fleet s",
        "GPU idle",
        "busy",
        "GPU alone s",
    )
    rows = [head]
    for parameters in PARAMETERS:
        load = StepLoad.of_language_model(parameters, microbatches, exact, tokens)
        alone = microbatches * load.flops / machines.gpu_flops
        for tree in (False, True):
            hidden = workers_to_hide(replace(machines, tree=tree), load)
            for workers in sorted({*WORKERS, machines.workers}):
                time = step_time(replace(machines, tree=tree, workers=workers), load)
                busy = time.busy * min(workers, microbatches) / workers
                rows.append(
                    (
                        f"{parameters / 1e6:,.0f}M",
                        "by a tree" if tree else "straight",
                        "none" if hidden is None else f"{hidden:,}",
                        f"{workers:,}",
                        f"{time.exact:,.2f}",
                        f"{time.fleet:,.1f}",
                        f"{time.gpu_idle:.0%}",
                        f"{busy:.0%}",
                        f"{alone:,.1f}",
                    )
                )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    m = machines
    return "\n".join(
        [
            f"{microbatches} micro-batches of {tokens:,} tokens, {exact} exact; 4 bytes a weight and a gradient.",
            f"A worker: {m.worker_flops:.3g} FLOP/s, {m.bandwidth:.3g} B/s, {m.latency:g} s away.",
            f"The trainer: {m.gpu_flops:.3g} FLOP/s, {m.trainer_bandwidth:.3g} B/s.",
            "",
            *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what a step takes with GPU and fleet, on machines declared here."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ledger.fleet.report", description=main.__doc__)
    for field in fields(Machines):
        if field.name != "tree":
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    for name, default in (("exact", 1), ("microbatches", 512), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args(arguments))
    step = {name: given.pop(name) for name in ("exact", "microbatches", "tokens")}
    print(table(Machines(**given), **step))


if __name__ == "__main__":
    main()
