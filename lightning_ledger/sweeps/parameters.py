"""The parameters of a W&B sweep file: which values each can take, and how to draw one."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DISTRIBUTIONS = ("constant", "categorical", "int_uniform", "uniform", "q_uniform", "log_uniform_values")


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: as it is passed on; of a nested parameter its path, joined by dots.
        distribution: one of ``DISTRIBUTIONS``.
        values: what a grid goes through, in this order; None where there is no end of them.
        draw: a value, from a random generator.

    Example:
        >>> rate = parse("rate", {"min": 1e-4, "max": 1e-2, "distribution": "log_uniform_values"})
        >>> rate.values is None, 1e-4 <= rate.draw(random.Random(0)) <= 1e-2
        (True, True)
    """

    name: str
    distribution: str
    values: Sequence[Any] | None
    draw: Callable[[random.Random], Any]

    @property
    def varies(self) -> bool:
        """Whether it can take more than one value."""
        return self.values is None or len(self.values) > 1


def parse_all(given: Mapping[str, Any], prefix: str = "") -> Iterator[Parameter]:
    """Every parameter, in the order of W&B's own search: by name, level by level.

    Args:
        given: the file's ``parameters``.
        prefix: of nested ones, what stands before them.

    Raises:
        ValueError: a parameter is none.
    """
    for name, config in sorted(given.items()):
        path = f"{prefix}{name}"
        if not isinstance(config, Mapping):
            raise ValueError(f"parameters.{path}={config!r} is no mapping. Write `{path}: {{value: {config!r}}}`.")
        if "parameters" in config:
            yield from parse_all(config["parameters"], f"{path}.")
        else:
            yield parse(path, config)


def parse(name: str, config: Mapping[str, Any]) -> Parameter:
    """One parameter, with W&B's defaults.

    Without ``distribution`` it is ``constant`` where there is a ``value``, ``categorical`` where there are ``values``,
    and between ``min`` and ``max`` ``int_uniform`` if both are whole numbers, else ``uniform``.

    Args:
        name: its name.
        config: what the file says of it.

    Raises:
        ValueError: the distribution is not one of ``DISTRIBUTIONS``, or its arguments are missing or senseless.

    Example:
        >>> parse("layers", {"min": 1, "max": 3}).values
        [1, 2, 3]
    """
    kind = config.get("distribution") or _default(config)
    if kind not in DISTRIBUTIONS:
        raise ValueError(
            f"parameters.{name} has no value, values, or min and max, or a distribution {kind!r} that is not known "
            f"here. Known are {', '.join(DISTRIBUTIONS)}."
        )
    if kind == "constant":
        value = _of(name, config, "value")
        return Parameter(name, kind, [value], lambda generator: value)
    if kind == "categorical":
        values = _of(name, config, "values")
        if not isinstance(values, list) or not values:
            raise ValueError(f"parameters.{name}.values={values!r} is no list of values. Write `values: [1, 2]`.")
        return Parameter(name, kind, values, _categorical(name, values, config.get("probabilities")))
    low, high = _of(name, config, "min"), _of(name, config, "max")
    numbers = all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high))
    if not numbers or low > high or (kind == "log_uniform_values" and low <= 0):
        raise ValueError(
            f"parameters.{name}: min={low!r} and max={high!r} are no range for {kind}. YAML reads 1e-4 as text: "
            "write 1.0e-4. A logarithmic range begins above 0."
        )
    if kind == "int_uniform":
        return Parameter(name, kind, list(range(low, high + 1)), lambda generator: generator.randint(low, high))
    if kind == "uniform":
        return Parameter(name, kind, None, lambda generator: generator.uniform(low, high))
    if kind == "log_uniform_values":
        ends = math.log(low), math.log(high)
        return Parameter(name, kind, None, lambda generator: math.exp(generator.uniform(*ends)))
    q = config.get("q", 1)
    if not isinstance(q, int | float) or q <= 0:
        raise ValueError(f"parameters.{name}.q={q!r} must be a positive number.")
    steps = math.ceil((high - low) / q)
    return Parameter(
        name, kind, [low + i * q for i in range(steps)], lambda generator: round(generator.uniform(low, high) / q) * q
    )


def grid(parameters: Sequence[Parameter]) -> Iterator[dict[str, Any]]:
    """Every combination of values, in W&B's order: that of the parameters, the last one changing fastest.

    A ``q_uniform`` goes from its ``min`` in steps of ``q`` and stops short of its ``max``, as there.

    Raises:
        ValueError: a parameter has no end of values, or probabilities.
    """
    if endless := [parameter for parameter in parameters if parameter.values is None]:
        raise ValueError(
            f"method=grid: parameters.{endless[0].name} is {endless[0].distribution}, which has no end of values. "
            "List `values`, give it a `q`, or use method=random."
        )
    names = [parameter.name for parameter in parameters]
    for values in itertools.product(*(parameter.values or () for parameter in parameters)):
        yield dict(zip(names, values, strict=True))


def drawn(parameters: Sequence[Parameter], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Independent draws; a longer list begins with the shorter one of the same seed.

    Args:
        parameters: what to draw.
        count: how many times.
        seed: of the generator. (W&B's own has none that could be set.)
    """
    generator = random.Random(seed)
    for _ in range(count):
        yield {parameter.name: parameter.draw(generator) for parameter in parameters}


def _default(config: Mapping[str, Any]) -> str | None:
    if "value" in config:
        return "constant"
    if "values" in config:
        return "categorical"
    if {"min", "max"} <= config.keys():
        return "int_uniform" if all(type(config[end]) is int for end in ("min", "max")) else "uniform"
    return None


def _of(name: str, config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"parameters.{name} lacks its {key!r}.")
    return config[key]


def _categorical(name: str, values: list[Any], weights: list[float] | None) -> Callable[[random.Random], Any]:
    if weights is None:
        return lambda generator: values[generator.randrange(len(values))]
    if len(weights) != len(values) or min(weights) < 0 or not math.isclose(math.fsum(weights), 1.0):
        raise ValueError(f"parameters.{name}.probabilities={weights} must be one for each value, and sum to 1.")
    sums = list(itertools.accumulate(weights))
    return lambda generator: values[min(bisect.bisect(sums, generator.random()), len(values) - 1)]
