"""A W&B sweep file: its runs, their names and their commands."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_ledger.sweeps.parameters import Parameter, drawn, grid, parse_all

INTERPRETER = "${interpreter}"
COMMAND = ("${env}", INTERPRETER, "${program}", "${args}")  # W&B's default
SEEDS = ("seed", "seed_everything")  # a parameter whose last part is one of these tells seeds apart
LOGGER = "CSVLogger"

_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: of its folder.
        parameters: their values.
        words: its command as the file has it, its macros filled in but for ``${interpreter}``.
    """

    name: str
    parameters: Mapping[str, Any]
    words: Sequence[str]

    @property
    def is_fit(self) -> bool:
        """Whether it is the `fit` of a LightningCLI, as far as the command tells."""
        return "fit" in self.words

    def command(self, folder: Path) -> list[str]:
        """The command to run in this machine's folder.

        A ``fit`` is told to keep everything there, under a logger that needs no service, and continues from its
        ``checkpoints/last.ckpt`` where there is one.

        Args:
            folder: the run's own.
        """
        words = [sys.executable if word == INTERPRETER else word for word in self.words]
        if not self.is_fit:
            return words
        place = {
            "trainer.default_root_dir": folder,
            "trainer.logger": LOGGER,
            "trainer.logger.save_dir": folder,
            "trainer.logger.name": "",
            "trainer.logger.version": "",
        }
        if (last := checkpoint(folder)).exists():
            place["ckpt_path"] = last
        return [*words, *(f"--{name}={value}" for name, value in place.items())]


def checkpoint(folder: Path) -> Path:
    """Where a run with ``ModelCheckpoint(save_last=True)`` keeps what it can continue from."""
    return folder / "checkpoints" / "last.ckpt"


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Attributes:
        name: the file's ``name``, or its own name.
        method: "grid" or "random".
        parameters: in W&B's order.
        command: with its macros.
        program: what ``${program}`` stands for.
        run_cap: at most so many runs.
    """

    name: str
    method: str
    parameters: Sequence[Parameter]
    command: Sequence[str]
    program: str
    run_cap: int | None = None

    @classmethod
    def read(cls, file: str | Path) -> Sweep:
        """Read a sweep file.

        Args:
            file: YAML, as for `wandb sweep`.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no sweep file, or asks for what only W&B's server can do.
        """
        try:
            given = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is no YAML: {error}") from None
        if not isinstance(given, dict) or not isinstance(given.get("parameters"), dict):
            raise ValueError(f"{file} is no W&B sweep file: it has no mapping `parameters`.")
        if (method := given.get("method")) not in ("grid", "random"):
            raise ValueError(f"{file}: method={method!r} is not run here. Use grid or random.")
        command, program = given.get("command", list(COMMAND)), given.get("program", "")
        if not isinstance(command, list) or not command:
            raise ValueError(f"{file}: command={command!r} is no list. Write it word by word, as W&B documents.")
        if "${program}" in command and not program:
            raise ValueError(f"{file} has no `program`, which its command names.")
        parameters = list(parse_all(given["parameters"]))
        name, words = given.get("name") or Path(file).stem, [str(word) for word in command]
        return cls(name, method, parameters, words, program, given.get("run_cap"))

    def runs(self, count: int | None = None, seed: int = 0) -> list[Run]:
        """Its runs, in order.

        Args:
            count: at most so many; a random sweep needs it, or the file's ``run_cap``.
            seed: of a random sweep's draws.

        Raises:
            ValueError: a grid has no end, or a random sweep none.
        """
        limit = min((number for number in (count, self.run_cap) if number is not None), default=None)
        if self.method == "grid":
            chosen = list(grid(self.parameters))[:limit]
        elif limit is None:
            raise ValueError("method=random goes on for ever: add `run_cap` to the file, or --count.")
        else:
            chosen = list(drawn(self.parameters, limit, seed))
        names = _names(self.parameters, chosen, numbered=self.method == "random")
        return [Run(name, values, self._words(values)) for name, values in zip(names, chosen, strict=True)]

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        macros = {
            "env": ["/usr/bin/env"] if os.name == "posix" else [],
            "interpreter": [INTERPRETER],
            "program": [self.program],
            **arguments(values),
        }
        words: list[str] = []
        for word in self.command:
            # A variable that is not set leaves its name behind, as under W&B's agent.
            word = _VARIABLE.sub(lambda match: os.environ.get(match[1], match[1]), word)
            if word.startswith("${") and word.endswith("}"):
                if word[2:-1] not in macros:
                    raise ValueError(f"command: {word} is no macro known here. Known are {', '.join(macros)}.")
                words += macros[word[2:-1]]
            else:
                words.append(word)
        return words


def arguments(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """What W&B's argument macros stand for.

    Example:
        >>> arguments({"model.width": 8, "tied": True})["args_no_boolean_flags"]
        ['--model.width=8', '--tied']
    """
    pairs = [f"{name}={value}" for name, value in values.items()]
    switches = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in values.items() if value is not False
    ]
    return {
        "args": [f"--{pair}" for pair in pairs],
        "args_no_equals": [word for name, value in values.items() for word in (f"--{name}", str(value))],
        "args_no_hyphens": pairs,
        "args_no_boolean_flags": switches,
        "args_json": [json.dumps(dict(values))],
        "args_append_hydra": [f"+{pair}" for pair in pairs],
        "args_override_hydra": [f"++{pair}" for pair in pairs],
    }


def _names(parameters: Sequence[Parameter], chosen: Sequence[Mapping[str, Any]], numbered: bool) -> list[str]:
    """Folder names that tell what varies, the seed last, where `compare` looks for it."""
    varying = [parameter.name for parameter in parameters if parameter.varies]
    seeds = [name for name in varying if name.rpartition(".")[2] in SEEDS][-1:]
    rest = [name for name in varying if name not in seeds]
    short = _shortest(rest)

    def name(values: Mapping[str, Any], number: int, distinct: bool) -> str:
        parts = [f"{number:04d}"] if numbered else []
        parts += [
            _slug(values[key]) if short[key] == "config" else f"{short[key]}-{_slug(values[key])}" for key in rest
        ]
        if not distinct or len("-".join(parts)) > 160:
            parts = ["-".join(parts)[:160], _digest([values[key] for key in rest])]
        parts += [f"seed-{_slug(values[key])}" for key in seeds]
        return "-".join(parts) or "run"

    names = [name(values, number, True) for number, values in enumerate(chosen)]
    if len(set(names)) == len(names):
        return names
    return [name(values, number, names.count(names[number]) == 1) for number, values in enumerate(chosen)]


def _shortest(names: Iterable[str]) -> dict[str, str]:
    """The last parts of dotted names that tell them apart.

    >>> _shortest(["model.rate", "model.width", "data.width"])
    {'model.rate': 'rate', 'model.width': 'model.width', 'data.width': 'data.width'}
    """
    names = list(names)
    last = [name.rpartition(".")[2] for name in names]
    return {name: end if last.count(end) == 1 else name for name, end in zip(names, last, strict=True)}


def _slug(value: Any) -> str:
    """A value as part of a folder's name: of a configuration file the stem, of a number six digits."""
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    if text.endswith((".yaml", ".yml")):
        text = Path(text).stem
    return re.sub(r"[^\w.+-]+", "_", text)


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]
