"""Which layer of a module an operation belongs to: the one whose forward runs, or the one that owns its weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Layers:
    """The paths of a module's layers, while it runs.

    Args:
        module: whose layers; None for operations outside of any module.

    Example:
        >>> layers = Layers(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))))
        >>> layers.matching("1", "1.0"), layers.matching("*.0", "1.0"), layers.matching("0", "1.0")
        (True, True, False)
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._paths = {} if module is None else {id(m): path for path, m in module.named_modules()}
        # torch.compile would see the hooks: of compiled modules only weights tell.
        self._watches = module is not None and not any(
            hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in module.modules()
        )
        self._owners: dict[str, list[str]] = {}
        self._stack: list[str] = []
        first: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False) if module is not None else ():
            name_of_all = first.setdefault(id(parameter), name)
            self._owners.setdefault(name_of_all, []).append(name.rpartition(".")[0])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow which layer's forward runs."""
        if not self._watches:
            yield
            return

        def enter(layer: nn.Module, *_: Any) -> None:
            if (path := self._paths.get(id(layer))) is not None:
                self._stack.append(path)

        def leave(layer: nn.Module, *_: Any) -> None:
            if id(layer) in self._paths and self._stack:
                self._stack.pop()

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._stack.clear()

    @property
    def current(self) -> str:
        """The innermost layer whose forward runs; empty outside of all."""
        return self._stack[-1] if self._stack else ""

    def owners(self, name: str) -> Sequence[str]:
        """Every layer that has the parameter of this name: several where it is tied."""
        return self._owners.get(name, ())

    def unmatched(self, globs: Sequence[str]) -> list[str]:
        """The globs that match no layer at all."""
        return [glob for glob in globs if not any(self.matching(glob, path) for path in self._paths.values())]

    @staticmethod
    def matching(glob: str, path: str) -> bool:
        """Whether a glob matches a layer, or one that the layer is inside of."""
        parts = path.split(".")
        return any(fnmatchcase(".".join(parts[: n + 1]), glob) for n in range(len(parts)))
