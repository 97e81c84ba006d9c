"""The command `lightning-ledger`: train through Lightning's own CLI, plan, compare, reprice and verify runs.

Only the commands that run a model import torch and Lightning; the others read files, and answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

    from lightning_ledger.prices import PriceBook

PROGRAM = "lightning-ledger"
TRAINING = ("fit", "validate", "test", "predict")
PLANNING = "plan"
EXPORTING = "export"
SWEEPING = "sweep"
HELP = f"""\
usage: {PROGRAM} COMMAND [options]

What would a PyTorch Lightning run cost if most of its gradients came from idle inference hardware?

Train any LightningModule and LightningDataModule by class path (this is Lightning's own CLI):
  fit           train
  validate      run the validation loop on a checkpoint
  test          run the test loop on a checkpoint
  predict       run the prediction loop on a checkpoint

Ask first (takes the same options as fit, and trains nothing):
  plan          measure on your model and data whether predicted gradients would pay
  export        write the program that predicts, for engines without autograd, as an ONNX model

Train many times:
  sweep         run a W&B sweep file on this machine, each run in a folder; a killed sweep goes on

Read the ledgers that runs leave behind (needs no torch):
  compare       set runs side by side: cost by tier, cost to reach a target, rival ways to spend
  reprice       what finished runs would have cost at other fleet prices, and where they break even
  verify        check that a run's ledger is complete and unaltered

Examples:
  {PROGRAM} fit --config configs/demo.yaml --config configs/demo/gpcv-int8.yaml
  {PROGRAM} fit --model my.Model --data my.Data --config callbacks/gpcv.yaml
  {PROGRAM} plan --config configs/demo.yaml --plan.formats int8,int4 --plan.png plan.png
  {PROGRAM} sweep configs/sweeps/demo.yaml --jobs 2
  {PROGRAM} compare runs/demo/*/ --fleet-price 0.05 --png compare.png
  {PROGRAM} reprice runs/demo/*/ --fleet-price 0.01,0.05,0.2 --png reprice.png
  {PROGRAM} verify runs/demo/*/

`{PROGRAM} COMMAND --help` lists a command's options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command and its options; the process's own where None.

    Returns:
        The exit code: 0; 1 where a ledger that was to be verified is broken, where a plan says that predictions do
        not pay, or where a run of a sweep failed; 2 after a mistake in the arguments or in the files they name, told
        on stderr, and where a plan cannot be made.
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
        try:
            train(arguments)
        except argparse.ArgumentError as error:
            return _fail(f"{command}: {error}\n{_repair(str(error))}")
        return 0
    if command == PLANNING:
        return _plan(arguments)
    if command == EXPORTING:
        return _export(options)
    run = _sweep if command == SWEEPING else READING.get(command)
    if run is None:
        return _fail(_unknown(command))
    try:
        return run(options)
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

    Raises:
        argparse.ArgumentError: If the options or a configuration cannot be read.
    """
    with _as_process(arguments):
        from lightning.pytorch.cli import LightningCLI

        return LightningCLI(
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"exit_on_error": False, **{command: {"exit_on_error": False} for command in TRAINING}},
        )


def _repair(error: str) -> str:
    """What to write instead, on one line."""
    if 'key "trainer.strategy"' in error:
        return (
            "Fix: a Trainer has one strategy. Write `strategy: predicted_gradients`, or `strategy: {class_path: "
            "lightning_ledger.strategies.PredictedGradientStrategy}`, and no list."
        )
    if 'key "trainer.callbacks"' in error:
        return (
            "Fix: `--trainer.callbacks.ARGUMENT=VALUE` sets the callback added last; add it with "
            "`--trainer.callbacks+=NAME` right before, or write the list in a YAML file."
        )
    return f"`{PROGRAM} COMMAND --help` lists the options."


def _plan(arguments: Sequence[str]) -> int:
    """A dry run: exit with 0 if predictions are expected to pay, 1 if not, 2 if it cannot be told."""
    with _as_process(arguments):
        from lightning.pytorch.utilities.exceptions import MisconfigurationException

        from lightning_ledger.planning.trainer import PlanCLI

        try:
            cli = PlanCLI()
        except (MisconfigurationException, OSError, TypeError, ValueError) as error:
            return _fail(f"{PLANNING}: {' '.join(str(error).split())}")
    from lightning_ledger.reports.plan_plots import plot_plan
    from lightning_ledger.reports.plan_tables import render_plan

    forecast, options = cli.forecast, cli.options
    if options.png is not None:
        plot_plan(forecast, options.png)
    if _write_json(forecast.to_dict(), options.json):
        render_plan(forecast)
    return 0 if forecast.verdict.pays else 1


def _export(options: Sequence[str]) -> int:
    """Write a captured program as an ONNX model."""
    from lightning_ledger.engines import require_onnx

    try:
        require_onnx()
    except ModuleNotFoundError as error:
        return _fail(f"{EXPORTING}: {error}")
    from lightning_ledger import exporting
    from lightning_ledger.program import NotCapturable
    from lightning_ledger.program.compilation import NotCompilable

    output, rest = exporting.output_of(options)
    if {"-h", "--help"} & {*rest}:
        print(exporting.HELP, end="")
        return 0
    with _as_process(rest):
        try:
            print(exporting.export(output))
        except (NotCapturable, NotCompilable, OSError, TypeError, ValueError) as error:
            return _fail(f"{EXPORTING}: {' '.join(str(error).split())}")
    return 0


def _sweep(options: Sequence[str]) -> int:
    """Run a sweep file here: exit with 0 if every run succeeded, else with 1."""
    from lightning_ledger.sweeps import command

    parser = _parser(SWEEPING, command.DESCRIPTION, command.EXAMPLE)
    command.add_options(parser)
    return command.sweep(parser.parse_args(list(options)))


@contextlib.contextmanager
def _as_process(arguments: Sequence[str]) -> Iterator[None]:
    """LightningCLI, and each process that a launcher starts from it, reads sys.argv; classes are named by path."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script's path lacks it
    for module in ("callbacks", "strategies"):
        import_module(f"lightning_ledger.{module}")
    own_argv = sys.argv
    sys.argv = [PROGRAM, *arguments]
    try:
        yield
    finally:
        sys.argv = own_argv


def _compare(options: Sequence[str]) -> int:
    parser = _parser(
        "compare",
        "Set finished or running runs side by side by what they cost.",
        "runs/demo/*/ --fleet-price 0.05 --png compare.png",
    )
    _add_reading(parser, "the comparison", "the metric against the cost")
    parser.add_argument(
        "--fleet-price",
        type=float,
        metavar="PRICE",
        help="price of one forward-equivalent on the fleet, whatever its format; 0.05 by default",
    )
    chosen = parser.parse_args(list(options))

    from lightning_ledger import reports

    prices = _prices(chosen)
    if chosen.fleet_price is not None:
        prices = prices.with_fleet_price(chosen.fleet_price)
    comparison = reports.compare(prices=prices, **_asked(chosen))
    if chosen.png is not None:
        reports.plot(comparison, chosen.png)
    if _write_json(comparison.to_dict(), chosen.json):
        reports.render(comparison)
    return 0


def _reprice(options: Sequence[str]) -> int:
    parser = _parser(
        "reprice",
        "What finished runs would have cost to reach a target at other fleet prices, without running them again; and "
        "the price at which each breaks even with the cheapest exact run.",
        "runs/demo/*/ --fleet-price 0.01,0.05,0.2 --target 2.0 --png reprice.png",
    )
    _add_reading(parser, "the costs", "the cost to the target against the fleet price")
    parser.add_argument(
        "--fleet-price",
        type=str,
        metavar="PRICE,...",
        help="prices of one forward-equivalent on the fleet, whatever its format; from 0.001 to 1 by default",
    )
    chosen = parser.parse_args(list(options))

    from lightning_ledger import reports

    fleet_prices = reports.FLEET_PRICES if chosen.fleet_price is None else _numbers(chosen.fleet_price)
    repricing = reports.reprice(fleet_prices=fleet_prices, prices=_prices(chosen), **_asked(chosen))
    if chosen.png is not None:
        reports.plot_repricing(repricing, chosen.png)
    if _write_json(repricing.to_dict(), chosen.json):
        reports.render_repricing(repricing)
    return 0


def _add_reading(parser: ArgumentParser, result: str, picture: str) -> None:
    """The options that reports on runs share."""
    add = parser.add_argument
    add("runs", nargs="+", help="run folders, or their ledger.jsonl files")
    add("--metric", type=str, default="val_loss", help="a validation metric of every run")
    add("--mode", choices=["min", "max"], default="min", help="which way is better")
    add("--target", type=float, help="the metric to reach; by default one that follows from the exact runs")
    add(
        "--group",
        type=str,
        action="append",
        metavar="[NAME=]GLOB",
        help="runs whose paths match are seeds of one arm; may be repeated. By default runs are if they have the same "
        "label, or paths that differ in seed-N alone",
    )
    add("--fleet-billing", choices=["per_forward_equivalent", "per_gradient"], help="what the fleet price buys")
    add("--prices", type=str, metavar="FILE", help="a price book in YAML; the options override it")
    add("--json", type=str, metavar="FILE", help=f"write {result} there; - prints that instead of the table")
    add("--png", type=str, metavar="FILE", help=f"plot {picture} there")


def _asked(chosen: Namespace) -> dict[str, Any]:
    named = {name: chosen[name] for name in ("runs", "metric", "mode", "target")}
    return {**named, "groups": chosen.group or ()}


def _write_json(data: Mapping[str, Any], file: str | None) -> bool:
    """Writes the data where asked; says whether the terminal is still free for a table."""
    text = json.dumps(data, indent=2)
    if file == "-":
        print(text)
        return False
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text + "\n", encoding="utf-8")
    return True


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--fleet-price={text!r} is no list of prices: write them as 0.01,0.05,0.2.") from None


def _prices(chosen: Namespace) -> PriceBook:
    from lightning_ledger.prices import PriceBook

    prices = PriceBook() if chosen.prices is None else PriceBook.from_yaml(chosen.prices)
    return prices if chosen.fleet_billing is None else replace(prices, fleet_billing=chosen.fleet_billing)


def _verify(options: Sequence[str]) -> int:
    parser = _parser(
        "verify", "Check the hash chain of each run's ledger; exit with 1 if one is broken.", "runs/demo/*/"
    )
    parser.add_argument("runs", nargs="+", help="run folders, or their ledger.jsonl files")
    chosen = parser.parse_args(list(options))

    from lightning_ledger.ledger import verify_ledger

    checks = [(run, verify_ledger(run)) for run in chosen.runs]
    for run, check in checks:
        print(f"ok      {run}: {check.lines} lines" if check.ok else f"broken  {run}: {check.problem}")
    return 0 if all(check.ok for _, check in checks) else 1


READING: dict[str, Callable[[Sequence[str]], int]] = {"compare": _compare, "reprice": _reprice, "verify": _verify}


def _parser(command: str, description: str, example: str) -> ArgumentParser:
    program = f"{PROGRAM} {command}"
    example = f"example: {program} {example}"
    return ArgumentParser(prog=program, description=description, epilog=example, exit_on_error=False)


def _unknown(command: str) -> str:
    known = [*TRAINING, PLANNING, EXPORTING, SWEEPING, *READING]
    near = difflib.get_close_matches(command, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else f" Known are {', '.join(known)}."
    return f"no command {command!r}.{hint}"


def _fail(message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
