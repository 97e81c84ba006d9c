"""Finished runs as their ledgers tell them: their kinds and settings, and which of them are seeds of one arm."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from lightning_ledger.history import LedgerHistory, Mark, read_ledger
from lightning_ledger.work import Work, account_of

__all__ = [
    "Kind",
    "Mode",
    "Settings",
    "arms_of",
    "best_of",
    "default_target",
    "kind_of",
    "labels_of",
    "marks_of",
    "reaches",
    "read_runs",
]

Mode = Literal["min", "max"]
Kind = Literal["exact", "predictions only", "corrected", "mixed"]

_SEED = re.compile(r"(^|[-_.])seed[-_=]?\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """What a run was set to, as far as its ledger tells.

    Args:
        batch: Samples per optimizer step; None before the first one.
        exact_share: Samples with an exact gradient over all trained on; None without any.
        format: The number format with most of the fleet's FLOPs; None without fleet work.
        rounding: Of predictions; None where it is not recorded, or nothing was predicted.
        learning_rate: Of the first parameter group, before any schedule; None where it is not recorded.
    """

    batch: float | None
    exact_share: float | None
    format: str | None
    rounding: str | None
    learning_rate: float | None

    @classmethod
    def of(cls, history: LedgerHistory) -> Settings:
        """From the accounts' totals, and from what ``ComputeLedger`` put into the header."""
        recorded = history.header.get("settings", {})
        exact = _work(history, "scarce/forward").samples
        samples = exact + _work(history, "fleet/prediction").samples
        rates = [rate for optimizer in recorded.get("optimizers", ()) for rate in optimizer["learning_rates"]]
        return cls(
            batch=samples / history.steps if history.steps and samples else None,
            exact_share=exact / samples if samples else None,
            format=_fleet_format(history.totals),
            rounding=(recorded.get("prediction") or {}).get("rounding"),
            learning_rate=float(rates[0]) if rates else None,
        )

    @classmethod
    def common(cls, settings: Sequence[Settings]) -> Settings:
        """What all of them agree on; None in the rest."""
        values = {entry.name: {getattr(one, entry.name) for one in settings} for entry in fields(cls)}
        return cls(**{name: next(iter(found)) if len(found) == 1 else None for name, found in values.items()})


def kind_of(totals: Mapping[str, Work]) -> Kind:
    """What a run did, from the accounts it charged.

    ===================  ===============================================================
    exact                the fleet did nothing
    corrected            the fleet predicted exact micro-batches too: a control variate
    predictions only     no exact pass of training
    mixed                the rest: exact and predicted gradients, uncorrected
    ===================  ===============================================================

    Example:
        >>> kind_of({"scarce/forward": Work(flops=1), "fleet/prediction": Work(flops=1)})
        'mixed'
    """
    if all(account_of(account).hardware == "scarce" for account in totals):
        return "exact"
    if totals.get("fleet/control"):
        return "corrected"
    if not any(totals.get(account) for account in ("scarce/forward", "scarce/backward")):
        return "predictions only"
    return "mixed"


def labels_of(runs: Sequence[str | os.PathLike[str]], histories: Sequence[LedgerHistory]) -> list[str]:
    """The runs' labels; equal ones are told apart by their paths."""
    labels = [history.label for history in histories]
    return [
        f"{label} ({Path(run).as_posix()})" if labels.count(label) > 1 else label
        for run, label in zip(runs, labels, strict=True)
    ]


def arms_of(
    runs: Sequence[str | os.PathLike[str]], histories: Sequence[LedgerHistory], groups: Sequence[str] = ()
) -> dict[str, list[int]]:
    """Runs that differ in their seed alone, as indices into ``runs`` under the arm's name.

    A run belongs to the first of ``groups`` that its path matches. Else runs are one arm if they were given the same
    ``label``, or if their paths differ in ``seed-N`` alone: a folder of that name (``gpcv/seed-1``), or the end of one
    (``gpcv-seed-1``). Runs of different kinds share no arm. Any other run is an arm by itself.

    Args:
        runs: Run directories, or ``ledger.jsonl`` files.
        histories: What they hold.
        groups: Shell patterns of paths as given in ``runs``, as ``GLOB`` or ``NAME=GLOB``.

    Raises:
        ValueError: A group matches no run, or runs of different kinds.
    """
    globs = dict(_named(group) for group in groups)
    members: dict[tuple[str, ...], list[int]] = {}
    for index, (run, history) in enumerate(zip(runs, histories, strict=True)):
        path, kind = Path(run).as_posix(), kind_of(history.totals)
        key: tuple[str, ...]
        if group := next((name for name, glob in globs.items() if fnmatchcase(path, glob)), None):
            key = (group, "group")
        elif label := history.header.get("label"):
            key = (str(label), "label", kind)
        elif arm := _without_seed(Path(run)):
            key = (Path(arm).name or history.label, arm, kind)
        else:
            key = (history.label, str(index))
        members.setdefault(key, []).append(index)
    for name, glob in globs.items():
        _check_group(name, glob, [histories[index] for index in members.get((name, "group"), [])])
    names = [key[0] for key in members]
    return {
        f"{name} ({Path(runs[indices[0]]).as_posix()})" if names.count(name) > 1 else name: indices
        for name, indices in zip(names, members.values(), strict=True)
    }


def read_runs(runs: Sequence[str | os.PathLike[str]], metric: str, mode: Mode) -> list[LedgerHistory]:
    """The runs' histories, once what is asked of them makes sense.

    Raises:
        FileNotFoundError: A run has no ledger.
        ValueError: No runs, an unknown mode, or a damaged ledger.
    """
    if not runs:
        raise ValueError("runs is empty: pass at least one run directory.")
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r} is unknown: 'min' if a lower {metric} is better, else 'max'.")
    return [read_ledger(run) for run in runs]


def marks_of(run: str | os.PathLike[str], history: LedgerHistory, metric: str) -> list[Mark]:
    """The marks that hold the metric.

    Raises:
        ValueError: There is none; the message lists the metrics that there are.
    """
    marks = [mark for mark in history.marks if metric in mark.metrics]
    if not marks:
        found = sorted({name for mark in history.marks for name in mark.metrics})
        known = f"Its marks hold: {', '.join(found)}." if found else "It has no marks: nothing was validated."
        raise ValueError(f"{run} has no mark with metric={metric!r}. {known}")
    return marks


def default_target(bests: Sequence[tuple[str, bool, float]], mode: Mode) -> tuple[float, str]:
    """The value that every exact run reached, or every run if none is exact; and where it comes from, in words.

    Args:
        bests: Of each run its label, whether it is exact, and the best value it reached.
        mode: Which way is better.

    Raises:
        ValueError: No run has a finite value.
    """
    finite = [run for run in bests if math.isfinite(run[2])]
    exact = [run for run in finite if run[1]]
    if not finite:
        raise ValueError("No run has a finite value of the metric, so there is no target: pass target=...")
    label, _, target = (max if mode == "min" else min)(exact or finite, key=lambda run: run[2])
    kind = "exact run" if exact else "run (none is exact)"
    return target, f"which every {kind} reached: the best of {label!r}, that got least far"


def reaches(value: float, target: float, mode: Mode) -> bool:
    """Whether ``value`` is at or beyond ``target``; NaN never is."""
    return value <= target if mode == "min" else value >= target


def best_of(values: Sequence[float], mode: Mode) -> float:
    """The best finite value, or the first if none is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return values[0]
    return min(finite) if mode == "min" else max(finite)


def _without_seed(run: Path) -> str | None:
    """The path with its seed taken out, a whole folder or the end of a folder's name; None if it names none.

    >>> [_without_seed(Path(run)) for run in ("runs/gpcv/seed-1", "runs/seed_2/gpcv", "runs/gpcv-seed3", "runs/gpcv")]
    ['runs/gpcv', 'runs/gpcv', 'runs/gpcv', None]
    """
    folder = run.parent if run.suffix == ".jsonl" else run
    parts = tuple(_SEED.sub("", part) for part in folder.parts)
    return None if parts == folder.parts else Path(*filter(None, parts)).as_posix()


def _named(group: str) -> tuple[str, str]:
    name, equals, glob = group.partition("=")
    if not equals or "/" in name:  # a path may hold an equals sign, a name no slash
        name = glob = Path(group).as_posix()
    return name, Path(glob).as_posix()


def _check_group(name: str, glob: str, histories: Sequence[LedgerHistory]) -> None:
    if not histories:
        raise ValueError(
            f"The group {name!r} matches no run: {glob!r} must match a whole path as given, such as "
            "'runs/gpcv-*', and an earlier group takes a run first."
        )
    kinds = sorted({kind_of(history.totals) for history in histories})
    if len(kinds) > 1:
        raise ValueError(f"The group {name!r} holds runs of different kinds ({', '.join(kinds)}): no seeds of one arm.")


def _fleet_format(totals: Mapping[str, Work]) -> str | None:
    flops: dict[str, int] = {}
    for account, work in totals.items():
        if account_of(account).hardware == "fleet":
            for name, count in work.flops_by_format.items():
                flops[name] = flops.get(name, 0) + count
    return max(flops, key=lambda name: flops[name], default=None)


def _work(history: LedgerHistory, account: str) -> Work:
    return history.totals.get(account, Work())
