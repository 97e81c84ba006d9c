"""Batches as trees: what kind of node something is, what is inside it, and how to rebuild it."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic, torch.Size)


class Kind(Enum):
    """What a node of a batch is."""

    SHARED = "shared"  # has no sample dimension: scalars, 0-dim tensors, strings, None
    ARRAY = "array"  # a dense tensor or array with at least one dimension
    RECORD = "record"  # its parts have names: mapping, dataclass, named tuple
    SEQUENCE = "sequence"  # a list or plain tuple: of parts, or of samples
    OPAQUE = "opaque"  # anything whose samples only its owner can find


def kind(node: Any) -> Kind:
    """Classify one node of a batch.

    >>> kind(torch.zeros(3)).value, kind(torch.tensor(3.0)).value, kind({"x": 1}).value, kind({1, 2}).value
    ('array', 'shared', 'record', 'opaque')
    """
    if isinstance(node, Tensor):
        if node.is_nested or node.layout is not torch.strided:
            return Kind.OPAQUE
        return Kind.ARRAY if node.dim() else Kind.SHARED
    if isinstance(node, np.ndarray):
        return Kind.ARRAY if node.ndim else Kind.SHARED
    if isinstance(node, _SCALARS):
        return Kind.SHARED
    if isinstance(node, PackedSequence):  # a named tuple whose rows are time steps, not samples
        return Kind.OPAQUE
    if _is_dataclass(node) or _is_namedtuple(node):
        return Kind.RECORD
    if isinstance(node, Mapping):
        return Kind.RECORD if _can_rebuild(node) else Kind.OPAQUE
    return Kind.SEQUENCE if isinstance(node, list | tuple) else Kind.OPAQUE


def children(node: Any) -> list[tuple[str, Any]]:
    """Parts of a record or a sequence, each with its step of the key path; of anything else, none.

    >>> children({"x": 1, "y": 2}), children((7, 8))
    ([("['x']", 1), ("['y']", 2)], [('[0]', 7), ('[1]', 8)])
    """
    if _is_dataclass(node):
        return [(f".{name}", value) for name, value in _attributes(node).items()]
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", node[key]) for key in node]
    if _is_namedtuple(node):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if isinstance(node, list | tuple):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    return []


def rebuild(node: Any, values: Sequence[Any]) -> Any:
    """A container of the type of ``node`` with ``values`` in the order of :func:`children`.

    A dataclass is copied and its attributes replaced, so ``__post_init__`` does not run again. A mapping is
    made by its constructor from a plain dict: what it keeps beside its keys (the tokenizer's encodings in a
    Hugging Face ``BatchEncoding``) describes the whole batch, would be wrong for a part, and is left
    behind.
    """
    if _is_dataclass(node):
        twin = copy.copy(node)
        frozen = type(node).__dataclass_params__.frozen
        for name, value in zip(_attributes(node), values, strict=True):
            (object.__setattr__ if frozen else setattr)(twin, name, value)
        return twin
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, dict(zip(node, values, strict=True)))
    return node._make(values) if _is_namedtuple(node) else type(node)(values)


def shape_key(tree: Any) -> Hashable:
    """A cache key for anything that depends on a batch's shapes alone, such as its FLOP count.

    Nested structure, keys, tensor shapes and dtypes take part; values do not. An object of a class of its own counts
    by the tensors among its attributes, other leaves by type.

    Args:
        tree: any batch.

    Returns:
        A hashable key, equal for batches of equal structure and shapes.

    >>> shape_key({"x": torch.zeros(2, 3)}) == shape_key({"x": torch.ones(2, 3)})
    True
    >>> shape_key({"x": torch.zeros(2, 3)}) == shape_key({"x": torch.zeros(2, 4)})
    False
    """
    if isinstance(tree, Tensor):
        return (Tensor, tree.dtype, tree.numel()) if tree.is_nested else (Tensor, tree.dtype, tree.shape)
    if isinstance(tree, _SCALARS):
        return (type(tree),)
    if isinstance(tree, dict) and not _is_dataclass(tree):
        return (type(tree), *[(key, shape_key(value)) for key, value in tree.items()])
    if isinstance(tree, list | tuple):
        return (type(tree), *[shape_key(value) for value in tree])
    if isinstance(tree, np.ndarray):
        return (np.ndarray, tree.dtype, tree.shape)
    parts = children(tree) or [
        (name, value) for name, value in getattr(tree, "__dict__", {}).items() if isinstance(value, Tensor | np.ndarray)
    ]
    return (type(tree), *[(label, shape_key(value)) for label, value in parts])


def tensors_apart(tree: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any], Hashable] | None:
    """A batch taken apart into its tensors and the rest.

    Args:
        tree: any batch.

    Returns:
        The tensors, leaf by leaf (one that occurs twice, twice); a function that puts others in their places; and a
        key of structure, shapes and everything that is no tensor. None where tensors hide in objects of their own
        classes or in arrays, or where a constant cannot be hashed.

    >>> tensors, put, key = tensors_apart({"x": torch.zeros(2), "scale": 3.0})
    >>> put([torch.ones(2)])
    {'x': tensor([1., 1.]), 'scale': 3.0}
    """
    found: list[Tensor] = []
    constants: list[Hashable] = []

    def collect(node: Any) -> bool:
        if isinstance(node, Tensor) and kind(node) is not Kind.OPAQUE:
            found.append(node)
            constants.append(node.stride())
            return True
        if isinstance(node, np.ndarray) or kind(node) is Kind.OPAQUE:
            return False
        if kind(node) is Kind.SHARED:
            constants.append(node)
        return all(collect(value) for _, value in children(node))

    def put(tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)

        def place(node: Any) -> Any:
            if isinstance(node, Tensor):
                return next(rest)
            if kind(node) is Kind.SHARED:
                return node
            return rebuild(node, [place(value) for _, value in children(node)])

        return place(tree)

    if not collect(tree):
        return None
    key = (shape_key(tree), tuple(constants))
    try:
        hash(key)
    except TypeError:
        return None
    return found, put, key


def private_copy(tree: Any) -> Any:
    """The same batch in containers and tensors of its own, for code that may write to it.

    Args:
        tree: any batch. Of an object of a class of its own, the tensors among its attributes are copied.

    >>> batch = {"x": torch.zeros(2)}
    >>> private_copy(batch).pop("x").add_(1)
    tensor([1., 1.])
    >>> batch
    {'x': tensor([0., 0.])}
    """
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, np.ndarray):
        return tree.copy()
    found = kind(tree)
    if found is Kind.SHARED:
        return tree
    if found is Kind.OPAQUE:
        twin = copy.copy(tree)
        for name, value in getattr(twin, "__dict__", {}).items():
            if isinstance(value, Tensor | np.ndarray):
                twin.__dict__[name] = private_copy(value)
        return twin
    return rebuild(tree, [private_copy(value) for _, value in children(tree)])


def _rebuild_mapping(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(node) is dict:
        return items
    if isinstance(node, defaultdict):
        twin = copy.copy(node)
        twin.update(items)
        return twin
    constructor: Any = type(node)
    return constructor(items)


def _can_rebuild(node: Mapping[Any, Any]) -> bool:
    """Whether the constructor takes a dict and keeps its keys, which ``Mapping`` does not promise."""
    if type(node) is dict:
        return True
    try:
        return list(_rebuild_mapping(node, dict(node))) == list(node)
    except Exception:  # whatever a foreign constructor raises, the answer is no
        return False


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _is_namedtuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _attributes(node: Any) -> dict[str, Any]:
    """Fields of a dataclass, and whatever else was set on it (``__post_init__``, cached properties)."""
    fields = {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if hasattr(node, f.name)}
    return fields | getattr(node, "__dict__", {})
