"""The command `lightning-ledger`: train through Lightning's own CLI, compare runs, verify their ledgers.

Only the training commands import torch and Lightning; the others read files, and answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

    from lightning_ledger.prices import PriceBook

PROGRAM = "lightning-ledger"
TRAINING = ("fit", "validate", "test", "predict")
HELP = f"""\
usage: {PROGRAM} COMMAND [options]

What would a PyTorch Lightning run cost if most of its gradients came from idle inference hardware?

Train any LightningModule and LightningDataModule by class path (this is Lightning's own CLI):
  fit           train
  validate      run the validation loop on a checkpoint
  test          run the test loop on a checkpoint
  predict       run the prediction loop on a checkpoint

Read the ledgers that runs leave behind (needs no torch):
  compare       set runs side by side: metric, cost by tier, cost to reach a target
  verify        check that a run's ledger is complete and unaltered

Examples:
  {PROGRAM} fit --config configs/demo.yaml --config configs/demo/gpcv-int8.yaml
  {PROGRAM} fit --model my.Model --data my.Data --config callbacks/gpcv.yaml
  {PROGRAM} compare runs/demo/*/ --fleet-price 0.05 --png compare.png
  {PROGRAM} verify runs/demo/*/

`{PROGRAM} COMMAND --help` lists a command's options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command and its options; the process's own where None.

    Returns:
        The exit code: 0; 1 where a ledger that was to be verified is broken; 2 after a mistake in the
        arguments or in the files they name, told on one line of stderr.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] == "--version":
        print(f"{PROGRAM} {version(PROGRAM)}")
        return 0
    command, *options = arguments
    if command in TRAINING:
        train(arguments)
        return 0
    if command not in READING:
        return _fail(_unknown(command))
    try:
        return READING[command](options)
    except (argparse.ArgumentError, OSError, ValueError) as error:
        return _fail(f"{command}: {' '.join(str(error).split())}")


def train(arguments: Sequence[str]) -> LightningCLI:
    """Run one of LightningCLI's commands in this process.

    Classes may be named from modules in the current folder. The strategies and callbacks of this package are
    registered, so that `strategy: predicted_gradients` works, and so does a callback's bare class name.

    Args:
        arguments: the command and its options, such as `["fit", "--config", "run.yaml"]`.

    Returns:
        The LightningCLI, with the finished `trainer`, `model` and `datamodule`.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script's path lacks it

    from lightning.pytorch.cli import LightningCLI

    for module in ("callbacks", "strategies"):
        import_module(f"lightning_ledger.{module}")

    # LightningCLI, and each process that a launcher starts from it, reads sys.argv.
    own_argv = sys.argv
    sys.argv = [PROGRAM, *arguments]
    try:
        return LightningCLI(
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
        )
    finally:
        sys.argv = own_argv


def _compare(options: Sequence[str]) -> int:
    parser = _parser("compare", "Set finished or running runs side by side by what they cost.")
    add = parser.add_argument
    add("runs", nargs="+", help="run folders, or their ledger.jsonl files")
    add("--metric", type=str, default="val_loss", help="a validation metric of every run")
    add("--mode", choices=["min", "max"], default="min", help="which way is better")
    add("--target", type=float, help="the metric to reach; by default one that follows from the exact runs")
    add(
        "--fleet-price",
        type=float,
        metavar="PRICE",
        help="price of one forward-equivalent on the fleet, whatever its format; 0.05 by default",
    )
    add("--fleet-billing", choices=["per_forward_equivalent", "per_gradient"], help="what that price buys")
    add("--prices", type=str, metavar="FILE", help="a price book in YAML; the two options above override it")
    add(
        "--json",
        type=str,
        metavar="FILE",
        help="write the comparison there; - prints it instead of the table",
    )
    add("--png", type=str, metavar="FILE", help="plot the metric against the cost there")
    chosen = parser.parse_args(list(options))

    from lightning_ledger import reports

    comparison = reports.compare(
        chosen.runs, metric=chosen.metric, mode=chosen.mode, target=chosen.target, prices=_prices(chosen)
    )
    if chosen.png is not None:
        reports.plot(comparison, chosen.png)
    if chosen.json == "-":
        print(json.dumps(comparison.to_dict(), indent=2))
        return 0
    if chosen.json is not None:
        Path(chosen.json).parent.mkdir(parents=True, exist_ok=True)
        Path(chosen.json).write_text(json.dumps(comparison.to_dict(), indent=2) + "\n", encoding="utf-8")
    reports.render(comparison)
    return 0


def _prices(chosen: Namespace) -> PriceBook:
    from lightning_ledger.prices import PriceBook

    prices = PriceBook() if chosen.prices is None else PriceBook.from_yaml(chosen.prices)
    if chosen.fleet_billing is not None:
        prices = replace(prices, fleet_billing=chosen.fleet_billing)
    return prices if chosen.fleet_price is None else prices.with_fleet_price(chosen.fleet_price)


def _verify(options: Sequence[str]) -> int:
    parser = _parser("verify", "Check the hash chain of each run's ledger; exit with 1 if one is broken.")
    parser.add_argument("runs", nargs="+", help="run folders, or their ledger.jsonl files")
    chosen = parser.parse_args(list(options))

    from lightning_ledger.ledger import verify_ledger

    checks = [(run, verify_ledger(run)) for run in chosen.runs]
    for run, check in checks:
        print(f"ok      {run}: {check.lines} lines" if check.ok else f"broken  {run}: {check.problem}")
    return 0 if all(check.ok for _, check in checks) else 1


READING: dict[str, Callable[[Sequence[str]], int]] = {"compare": _compare, "verify": _verify}


def _parser(command: str, description: str) -> ArgumentParser:
    return ArgumentParser(prog=f"{PROGRAM} {command}", description=description, exit_on_error=False)


def _unknown(command: str) -> str:
    near = difflib.get_close_matches(command, [*TRAINING, *READING], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else f" Known are {', '.join([*TRAINING, *READING])}."
    return f"no command {command!r}.{hint}"


def _fail(message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
