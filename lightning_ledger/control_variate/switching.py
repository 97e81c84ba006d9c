"""Whether to predict at all, decided by what predicting has been worth."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Switch:
    """Whether predictions are on, and what speaks against it so far; :func:`watch` returns the next state.

    Attributes:
        on: whether to predict.
        doubts: observations in a row that did not show that predicting pays.
        patience: how many of them turn predictions off.
        margin: predictions come on again once R is below ``1 - margin``; in between nothing changes.
    """

    on: bool = True
    doubts: int = 0
    patience: int = 20
    margin: float = 0.1

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience={self.patience}: it takes at least 1 observation to turn predictions off.")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin}: pass 0 or more and less than 1; no R is below 0.")


def watch(switch: Switch, relative_cost: float | None) -> Switch:
    """The switch after one observation of R.

        on   and R > 1 for ``patience`` observations in a row    off
        off  and R < 1 - margin                                  on

    Args:
        switch: the state before.
        relative_cost: the upper end of R's interval (:func:`relative_cost_interval`): of the running statistics while
            predictions are on, of a probe while they are off. None, or not a number, where there is none: no change.

    Returns:
        The state after.

    Example:
        >>> switch = watch(watch(Switch(patience=2), 1.2), 1.1)
        >>> switch.on, watch(switch, 0.95).on, watch(switch, 0.85).on
        (False, False, True)
    """
    if relative_cost is None or relative_cost != relative_cost:
        return switch
    if not switch.on:
        return replace(switch, on=True, doubts=0) if relative_cost < 1 - switch.margin else switch
    doubts = switch.doubts + 1 if relative_cost > 1 else 0
    return replace(switch, on=False, doubts=0) if doubts >= switch.patience else replace(switch, doubts=doubts)
