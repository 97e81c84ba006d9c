"""Which leaf of a batch has samples along its first dimension, and which belongs to all samples.

A *plan* is one reading of a batch: a tree of roles. Tensors have one row per sample, scalars and strings
are shared, and a list of scalars or strings has one item per sample. Only a list (or tuple) of larger
things has two readings: a container of columns, as in ``[x, y]``, or a list of samples. :func:`read` tries
both against every batch size found in the batch, and keeps those under which all leaves agree. It never
chooses between two: it reports the doubt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ledger.microbatches.trees import Kind, children, kind, rebuild

SPLIT_FN = "pass split_fn, a function (batch, n) -> sequence of at most n micro-batches"


@dataclass(frozen=True, slots=True)
class Shared:
    """A leaf that every micro-batch gets whole."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor or array, one row per sample."""

    type: type
    dtype: object
    ndim: int


@dataclass(frozen=True, slots=True)
class Items:
    """A list or tuple, one item per sample; ``plain`` when no item has a size of its own."""

    type: type
    plain: bool


@dataclass(frozen=True, slots=True)
class Container:
    """A node whose parts have roles of their own."""

    type: type
    labels: tuple[str, ...]
    parts: tuple[Plan, ...]


Plan = Shared | Rows | Items | Container


class Reading(NamedTuple):
    """Batch size, one plan that fits it, and the key paths at which another plan would fit as well."""

    size: int
    plan: Plan
    doubts: list[str]


class _Leaf(NamedTuple):
    path: str
    size: int
    depth: int  # how many lists are above it


def read(batch: Any) -> Reading:
    """Find the batch size and the role of each leaf.

    Raises:
        ValueError: sizes disagree, several batch sizes are possible, or nothing in the batch has samples.
        TypeError: the batch holds something whose samples cannot be found.
    """
    leaves = list(_leaves(batch, "batch", 0))
    found: list[Reading] = []
    unsure: list[str] = []
    for size in dict.fromkeys(leaf.size for leaf in leaves):
        doubts: list[str] = []
        plan = _plan(batch, size, "batch", doubts)
        if plan is None:
            continue
        if _anchored(plan):
            found.append(Reading(size, plan, doubts))
        elif isinstance(plan, Container):
            unsure.extend(_sample_like(plan, "batch"))
    if len(found) == 1:
        return found[0]
    if found:
        sizes = " or ".join(str(reading.size) for reading in found)
        raise ValueError(f"the batch can be read as {sizes} samples, and nothing decides: {SPLIT_FN}.")
    if unsure:
        raise ambiguous(unsure)
    raise _explain(batch, leaves)


def ambiguous(paths: list[str]) -> ValueError:
    """The error for lists that are containers of columns in one reading and lists of samples in another."""
    return ValueError(
        f"{', '.join(dict.fromkeys(paths))} can be read as a container of columns, like [x, y], and as a "
        "list of samples, and nothing else in the batch decides. Return a dict or a named tuple from the "
        f"collate function, or {SPLIT_FN}."
    )


def match(batch: Any, plan: Plan) -> int | None:
    """Batch size under a plan made for another batch, or None where the plan does not fit."""
    sizes: set[int] = set()
    return sizes.pop() if _matches(batch, plan, sizes) and len(sizes) == 1 else None


def take(node: Any, plan: Plan, start: int, length: int) -> Any:
    """Samples ``start`` to ``start + length`` under a plan; tensors and arrays are views of the original."""
    if isinstance(plan, Shared):
        return node
    if isinstance(plan, Rows):
        return node[start : start + length]
    if isinstance(plan, Items):
        rows = node[start : start + length]
        return rows if type(rows) is plan.type else rebuild(node, rows)
    pairs = zip(children(node), plan.parts, strict=True)
    return rebuild(node, [take(child, part, start, length) for (_, child), part in pairs])


def lines(plan: Plan, path: str = "batch") -> Iterator[str]:
    """One line per leaf, saying whether it is split or shared."""
    if isinstance(plan, Container):
        for label, part in zip(plan.labels, plan.parts, strict=True):
            yield from lines(part, path + label)
    elif isinstance(plan, Rows):
        yield f"{path}: per sample ({plan.type.__name__}, {plan.dtype}, {plan.ndim}-dimensional)"
    elif isinstance(plan, Items):
        yield f"{path}: per sample ({plan.type.__name__})"
    else:
        yield f"{path}: shared"


def _plan(node: Any, size: int, path: str, doubts: list[str]) -> Plan | None:
    """A plan under which every leaf of ``node`` has ``size`` samples; None where there is none."""
    what = kind(node)
    if what is Kind.SHARED:
        return Shared()
    if what is Kind.ARRAY:
        return Rows(type(node), node.dtype, node.ndim) if len(node) == size else None
    if what is Kind.OPAQUE:
        return None
    if what is Kind.SEQUENCE and _is_plain(node):
        return Items(type(node), plain=True) if len(node) == size else None

    below: list[str] = []
    labelled = children(node)
    parts = [_plan(child, size, path + label, below) for label, child in labelled]
    fitting = tuple(part for part in parts if part is not None)
    is_samples = what is Kind.SEQUENCE and len(node) == size
    if len(fitting) < len(parts):
        return Items(type(node), plain=False) if is_samples else None
    container = Container(type(node), tuple(label for label, _ in labelled), fitting)
    # Things as unlike as (tensor, None) or (dict, tensor) are no list of samples.
    if is_samples and (all(isinstance(part, Rows) for part in fitting) or _looks_like_samples(container)):
        doubts.append(path)
    doubts.extend(below)
    return container


def _matches(node: Any, plan: Plan, sizes: set[int]) -> bool:
    if isinstance(plan, Shared):
        return kind(node) is Kind.SHARED
    node_type: type = type(node)
    if node_type is not plan.type:
        return False
    if isinstance(plan, Rows):
        if kind(node) is not Kind.ARRAY or node.dtype != plan.dtype or node.ndim != plan.ndim:
            return False
        sizes.add(len(node))
        return True
    if isinstance(plan, Items):
        sizes.add(len(node))
        return _is_plain(node) is plan.plain
    labelled = children(node)
    return tuple(label for label, _ in labelled) == plan.labels and all(
        _matches(child, part, sizes) for (_, child), part in zip(labelled, plan.parts, strict=True)
    )


def _is_plain(node: Any) -> bool:
    """Whether a list holds only things without any size: then it can but be a list of samples."""
    return all(_is_sizeless(item) for item in node)


def _is_sizeless(node: Any) -> bool:
    what = kind(node)
    return what is Kind.SHARED or (what is Kind.RECORD and all(_is_sizeless(c) for _, c in children(node)))


def _looks_like_samples(plan: Container) -> bool:
    """Whether this is a list of alike containers, as an identity collate function makes of samples."""
    if not _is_sequence(plan):
        return False
    if all(isinstance(part, Container | Items) and _is_sequence(part) for part in plan.parts):
        return True
    outlines = {(p.type, p.labels) if isinstance(p, Container) else None for p in plan.parts}
    return len(outlines) == 1 and None not in outlines


def _is_sequence(plan: Container | Items) -> bool:
    return issubclass(plan.type, list | tuple) and not hasattr(plan.type, "_fields")


def _anchored(plan: Plan) -> bool:
    """Whether a leaf fixes the batch size: nothing inside what is, or looks like, a list of samples can."""
    if isinstance(plan, Container):
        return not _looks_like_samples(plan) and any(_anchored(part) for part in plan.parts)
    return isinstance(plan, Rows) or (isinstance(plan, Items) and plan.plain)


def _sample_like(plan: Plan, path: str) -> Iterator[str]:
    if isinstance(plan, Items):
        yield path
    elif isinstance(plan, Container):
        if _looks_like_samples(plan):
            yield path
        else:
            yield from chain.from_iterable(
                _sample_like(part, path + label) for label, part in zip(plan.labels, plan.parts, strict=True)
            )


def _leaves(node: Any, path: str, depth: int) -> Iterator[_Leaf]:
    """Every leaf that has a size, taking lists of anything but scalars for containers."""
    what = kind(node)
    if what is Kind.ARRAY or (what is Kind.SEQUENCE and _is_plain(node)):
        yield _Leaf(path, len(node), depth)
    elif what in (Kind.RECORD, Kind.SEQUENCE):
        for label, child in children(node):
            yield from _leaves(child, path + label, depth + (what is Kind.SEQUENCE))


def _explain(batch: Any, leaves: list[_Leaf]) -> Exception:
    """Why no plan fits: what first differs from the size of most leaves, those inside lists aside."""
    if not leaves:
        return _find_opaque(batch, "batch") or ValueError(
            "the batch has no leaf with one entry per sample: it holds scalars, strings or None only. Return "
            f"tensors or lists from the collate function, or {SPLIT_FN}."
        )
    top = [leaf for leaf in leaves if leaf.depth == min(leaf.depth for leaf in leaves)]
    expected = Counter(leaf.size for leaf in top).most_common(1)[0][0]
    witness = next(leaf for leaf in top if leaf.size == expected)
    return _find_fault(batch, "batch", witness) or ValueError(
        "nothing fixes the batch size: the batch holds lists that may be lists of samples, but no tensor "
        f"beside them. Return a stacked tensor from the collate function, or {SPLIT_FN}."
    )


def _find_fault(node: Any, path: str, witness: _Leaf, above: str = "") -> Exception | None:
    what = kind(node)
    if what is Kind.OPAQUE:
        return _opaque(node, path)
    parts = children(node)
    only_samples = what is Kind.SEQUENCE and (
        _is_plain(node) or (path != "batch" and all(kind(child) is Kind.OPAQUE for _, child in parts))
    )
    if what is Kind.ARRAY or only_samples:
        return ValueError(
            f"{path} has {len(node)} samples where {witness.size} were expected, as in "
            f"{witness.path}{above}: whatever has one entry per sample needs the batch's size along its "
            f"first dimension. Repair the collate function; if dimension 0 is not the sample, {SPLIT_FN}."
        )
    if what is Kind.SEQUENCE:
        above = f" ({path}, read as a list of samples, has {len(node)})"
    for label, child in parts:
        if _plan(child, witness.size, path, []) is None:
            return _find_fault(child, path + label, witness, above)
    return None


def _find_opaque(node: Any, path: str) -> Exception | None:
    if kind(node) is Kind.OPAQUE:
        return _opaque(node, path)
    faults = (_find_opaque(child, path + label) for label, child in children(node))
    return next((fault for fault in faults if fault is not None), None)


def _opaque(node: Any, path: str) -> TypeError:
    name = f"{type(node).__module__}.{type(node).__qualname__}"
    if isinstance(node, Tensor):
        name += f" ({'nested' if node.is_nested else node.layout})"
    return TypeError(
        f"{path} is a {name}, and nothing says how to split it: that is known for dense tensors, arrays, "
        "lists, tuples, dataclasses, scalars, and mappings that their constructor makes from a dict. For "
        f"this batch type {SPLIT_FN}."
    )
