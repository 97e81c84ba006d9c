"""Micro-batches: splitting against a slow oracle, weights against hand arithmetic, and the private draws."""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_ledger.microbatches import (
    Splitter,
    TokenWeights,
    WeightSpec,
    boundaries,
    draw_control,
    draw_seeds,
    make_microbatches,
    shape_key,
    weigh,
)


class Pair(NamedTuple):
    x: Any
    mask: Any


@dataclass
class Record:
    x: Any
    mask: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    mask: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    mask: Any


class Batch:
    """A graph batch as graph libraries lay it out: dimension 0 of ``x`` counts nodes, not graphs."""

    def __init__(self, graphs: Sequence[tuple[Tensor, int]]) -> None:
        self.x = torch.cat([nodes for nodes, _ in graphs])
        self.batch = torch.repeat_interleave(torch.tensor([len(nodes) for nodes, _ in graphs]))
        self.y = torch.tensor([label for _, label in graphs])


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, dtype and value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Record | Frozen | Slotted):
        return same(a.x, b.x) and same(a.mask, b.mask)
    if isinstance(a, Mapping | UserDict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# ---------------------------------------------------------------------------------------------- boundaries


@given(samples=st.integers(1, 200), microbatches=st.integers(1, 64))
def test_boundaries_cover_the_batch_in_balanced_pieces(samples: int, microbatches: int) -> None:
    sizes = boundaries(samples, microbatches)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, microbatches)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_pyg829_balanced_tail() -> None:
    # Pieces of ceil(9 / 4) = 3 would be 3, 3, 3 and nothing; 17 samples by fours would leave one alone.
    assert boundaries(9, 4) == (3, 2, 2, 2)
    assert boundaries(17, 4) == (5, 4, 4, 4)
    assert min(boundaries(17, 4)) > 1


@pytest.mark.parametrize(("samples", "microbatches", "name"), [(0, 2, "samples=0"), (2, 0, "microbatches=0")])
def test_boundaries_refuse_nothing_to_split(samples: int, microbatches: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        boundaries(samples, microbatches)


# ------------------------------------------------------------------------------- splitting against an oracle
# A blueprint builds the batch that consists of the given rows of an imagined data set. So the micro-batch of
# samples 3 to 5 must equal what the blueprint builds from rows 3 to 5: an oracle that never slices.

Blueprint = Callable[[Sequence[int]], Any]
ROWS = 12
TABLE = torch.arange(ROWS * 6).reshape(ROWS, 6)


def constant(value: Any) -> Blueprint:
    return lambda rows: value


LEAVES: list[Blueprint] = [
    lambda rows: TABLE[list(rows)],
    lambda rows: TABLE[list(rows), 0].to(torch.bfloat16),
    lambda rows: TABLE[list(rows)].reshape(len(rows), 3, 2).double(),
    lambda rows: TABLE[list(rows)].numpy(),
    lambda rows: [f"text {row}" for row in rows],
    lambda rows: tuple(float(row) for row in rows),
    lambda rows: [{"id": row, "name": None} for row in rows],
    lambda rows: [torch.full((1 + row % 3, 2), row) for row in rows],
    lambda rows: [{"boxes": torch.full((1 + row % 3, 4), row)} for row in rows],
    lambda rows: [[row] * (row % 4) for row in rows],
    lambda rows: [torch.tensor(row) for row in rows],
]
SHARED: list[Blueprint] = [
    constant(value) for value in (None, 3, 2.5, True, "text", b"bytes", torch.tensor(7), np.float32(2), torch.Size([4]))
]


def listing(make: Callable[[list[Any]], Any], parts: list[Blueprint]) -> Blueprint:
    # The leading tensor keeps the list from being one of scalars, which would be a list of samples.
    return lambda rows: make([TABLE[list(rows)], *(part(rows) for part in parts)])


def keyed(make: Callable[[dict[Any, Any]], Any], parts: dict[Any, Blueprint]) -> Blueprint:
    return lambda rows: make({key: part(rows) for key, part in parts.items()})


def paired(make: Callable[[Any, Any], Any], first: Blueprint, second: Blueprint) -> Blueprint:
    return lambda rows: make(first(rows), second(rows))


MAPPINGS: list[Callable[[dict[Any, Any]], Any]] = [
    dict,
    OrderedDict,
    UserDict,
    MappingProxyType,
    lambda items: defaultdict(list, items),
]


def containers(inner: st.SearchStrategy[Blueprint]) -> st.SearchStrategy[Blueprint]:
    names = st.sampled_from(["x", "labels", "a.b"])
    keys = st.one_of(names, st.integers(0, 3))
    return st.one_of(
        st.builds(listing, st.sampled_from([list, tuple]), st.lists(inner, max_size=2)),
        st.builds(keyed, st.sampled_from(MAPPINGS), st.dictionaries(keys, inner, max_size=3)),
        st.builds(keyed, st.just(BatchEncoding), st.dictionaries(names, inner, max_size=3)),
        st.builds(paired, st.sampled_from([Pair, Record, Frozen, Slotted]), inner, inner),
    )


blueprints = st.recursive(st.sampled_from(LEAVES + SHARED), containers, max_leaves=8)


@settings(max_examples=300, deadline=None)
@given(blueprint=blueprints, samples=st.integers(5, ROWS), n=st.integers(1, 8))
def test_micro_batches_equal_batches_built_from_their_rows(blueprint: Blueprint, samples: int, n: int) -> None:
    def build(rows: Sequence[int]) -> dict[str, Any]:
        return {"anchor": TABLE[list(rows)], "tree": blueprint(rows)}

    splitter = Splitter()
    batch = build(range(samples))
    pieces = splitter.split(batch, n)
    ends = list(itertools.accumulate(boundaries(samples, n)))
    oracle = [build(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]
    assert splitter.batch_size(batch) == samples
    assert len(pieces) == len(oracle)
    assert all(map(same, pieces, oracle))
    assert torch.equal(torch.cat([piece["anchor"] for piece in pieces]), batch["anchor"])
    # What was learned serves a ragged last batch just as well, and the pieces themselves.
    assert all(map(same, splitter.split(build(range(3)), 2), [build(range(2)), build(range(2, 3))]))
    assert [splitter.batch_size(piece) for piece in pieces] == list(boundaries(samples, n))


def test_slices_are_views_of_the_batch() -> None:
    batch: dict[str, Any] = {"x": torch.zeros(6, 2), "a": np.zeros(6)}
    last = Splitter().split(batch, 3)[-1]
    last["x"] += 1
    last["a"] += 1
    assert batch["x"][:, 0].tolist() == batch["a"].tolist() == [0, 0, 0, 0, 1, 1]


def test_aliased_leaves_stay_equal() -> None:
    ids = torch.arange(10).reshape(5, 2)
    for piece in Splitter().split({"input_ids": ids, "labels": ids}, 2):
        assert torch.equal(piece["input_ids"], piece["labels"])


def test_dataclass_attributes_beside_its_fields_are_split_and_post_init_does_not_run_again() -> None:
    @dataclass
    class Doubled:
        x: Tensor
        half: Tensor = field(init=False)

        def __post_init__(self) -> None:
            self.half = self.x
            self.x = self.x * 2
            self.length = self.x + 1

    batch = Doubled(torch.arange(4))
    piece = Splitter().split(batch, 2)[1]
    assert (piece.x.tolist(), piece.half.tolist(), piece.length.tolist()) == ([4, 6], [2, 3], [5, 7])
    assert batch.x.tolist() == [0, 2, 4, 6]


def test_a_dataclass_that_is_a_mapping_stays_both() -> None:
    piece = Splitter().split(CausalLMOutput(logits=torch.arange(4.0), loss=torch.tensor(1.0)), 2)[0]
    assert isinstance(piece, CausalLMOutput)
    assert piece["logits"] is piece.logits
    assert same(piece.logits, torch.tensor([0.0, 1.0]))
    assert piece.loss == 1


# --------------------------------------------------------------------------------------------- field cases


def test_rlinf1500_lists_and_tensors_share_one_boundary_plan() -> None:
    pieces = Splitter().split({"x": torch.arange(10), "names": list("abcdefghij")}, 3)
    assert [len(piece["x"]) for piece in pieces] == [len(piece["names"]) for piece in pieces] == [4, 3, 3]
    assert "".join(name for piece in pieces for name in piece["names"]) == "abcdefghij"


@pytest.mark.parametrize(
    ("batch", "path", "found", "expected"),
    [
        ({"x": torch.zeros(10), "labels": torch.zeros(9)}, r"batch\['labels'\]", 9, 10),
        ({"x": torch.zeros(10), "names": ["a"] * 9}, r"batch\['names'\]", 9, 10),
        ((torch.zeros(4), Pair(torch.zeros(4), mask=torch.zeros(3))), r"batch\[1\]\.mask", 3, 4),
        ([torch.zeros(8), torch.zeros(6)], r"batch\[1\]", 6, 8),
        ([torch.zeros(4), torch.zeros(2)], r"batch\[1\]", 2, 4),
        ({"a": torch.zeros(1, 8), "b": torch.zeros(8), "c": [0] * 8}, r"batch\['a'\]", 1, 8),
        ({"x": torch.zeros(8), "im": [torch.zeros(3, 5)] * 7}, r"batch\['im'\]\[0\]", 3, 8),
        ({"x": torch.zeros(8), "im": [torch.zeros(3, 5)] * 7}, r"batch\['im'\], read as .* has", 7, 8),
        ({"x": torch.zeros(8), "files": [object()] * 7}, r"batch\['files'\]", 7, 8),
        ({"x": torch.zeros(8), "size": (224, 224)}, r"batch\['size'\]", 2, 8),
    ],
)
def test_rlinf1500_length_mismatch_names_the_key_path(batch: Any, path: str, found: int, expected: int) -> None:
    with pytest.raises(ValueError, match=rf"{path}.* {found}\b.*split_fn") as error:
        Splitter().split(batch, 2)
    assert f"where {expected} were expected" in str(error.value)


@pytest.mark.parametrize("make", [list, tuple])
@pytest.mark.parametrize("columns", [2, 3])
def test_composer_pr833_columns_and_samples_are_never_confused(
    make: Callable[[list[Tensor]], Any], columns: int
) -> None:
    def batch(samples: int) -> Any:
        return make([torch.arange(samples * 3).reshape(samples, 3) + column for column in range(columns)])

    fresh = Splitter()
    with pytest.raises(ValueError, match=r"batch can be read as .* split_fn"):
        fresh.split(batch(columns), 2)
    assert fresh.batch_size(batch(columns)) == columns  # both readings agree on that

    taught = Splitter()
    taught.split(batch(8), 2)
    pieces = taught.split(batch(columns), columns)
    assert all(same(piece, make([c[i : i + 1] for c in batch(columns)])) for i, piece in enumerate(pieces))

    more_columns = [*batch(columns + 1), torch.zeros(columns + 1)]
    other_dtype = [column.double() for column in batch(columns)]
    fewer_dimensions = [column[:, 0] for column in batch(columns)]
    for untaught in (more_columns, other_dtype, fewer_dimensions):
        with pytest.raises(ValueError, match="can be read as"):
            taught.split(make(untaught), 2)


def test_composer_pr833_what_a_samples_batch_taught_does_not_make_it_a_container() -> None:
    def batch(sizes: Sequence[int]) -> dict[str, Any]:
        return {"y": torch.zeros(len(sizes)), "images": [torch.zeros(size) for size in sizes]}

    splitter = Splitter()
    splitter.split(batch([4, 5, 6]), 2)
    assert [len(piece["images"]) for piece in splitter.split(batch([2, 2]), 2)] == [1, 1]

    splitter.split({"y": torch.zeros(3), "images": [torch.zeros(3), torch.zeros(3)]}, 2)  # now a container
    with pytest.raises(ValueError, match=r"batch\['images'\] can be read as"):
        splitter.split(batch([2, 2]), 2)


def test_composer_pr833_a_single_piece_needs_no_reading() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2)
    assert same(Splitter().split([x, y], 1), [[x, y]])
    assert same(Splitter().split([x[:1]], 4), [[x[:1]]])


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(5), torch.zeros(3), torch.zeros(7)],
        {"images": [torch.zeros(5), torch.zeros(3)], "n": 2},
        ([torch.zeros(3, 8), torch.zeros(4, 8)], [{"box": torch.zeros(2, 4)}, {"box": torch.zeros(1, 4)}]),
        [{"x": torch.zeros(5)}] * 3,
        [(torch.zeros(3, 8), 1), (torch.zeros(3, 8), 0), (torch.zeros(3, 8), 4)],
        [("a", 0), ("b", 1), ("c", 1)],
        {"a": [torch.zeros(3)] * 5, "b": [torch.zeros(5)] * 3},
    ],
)
def test_composer_pr833_lists_of_samples_without_a_batch_size_are_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="split_fn"):
        Splitter().split(batch, 2)


@pytest.mark.parametrize("other", [None, 3, "text", {"mask": torch.zeros(2)}])
def test_composer_pr833_unlike_things_are_no_list_of_samples(other: Any) -> None:
    pieces = Splitter().split((torch.zeros(2, 3), other), 2)
    assert [len(x) for x, _ in pieces] == [1, 1]


def test_composer_pr1906_lists_of_strings_are_split_and_shared_values_repeated() -> None:
    batch = {
        "text": ["a", "b", "c"],
        "y": torch.arange(3),
        "scale": 0.5,
        "task": "nli",
        "none": None,
        "temperature": torch.tensor(2.0),
        "meta": [{"id": 1}, {"id": 2}, {"id": 3}],
    }
    splitter = Splitter()
    assert splitter.describe() == "batch: none split yet"
    first, second = splitter.split(batch, 2)
    assert (first["text"], second["text"]) == (["a", "b"], ["c"])
    assert second["meta"] == [{"id": 3}]
    for piece in (first, second):
        assert [piece[key] for key in ("scale", "task", "none")] == [0.5, "nli", None]
        assert piece["temperature"] is batch["temperature"]
    assert splitter.describe().splitlines() == [
        "batch['text']: per sample (list)",
        "batch['y']: per sample (Tensor, torch.int64, 1-dimensional)",
        "batch['scale']: shared",
        "batch['task']: shared",
        "batch['none']: shared",
        "batch['temperature']: shared",
        "batch['meta']: per sample (list)",
    ]


def test_hf23138_batch_encoding_is_sliced_by_key_and_keeps_its_type() -> None:
    ids = torch.arange(20).reshape(5, 4)
    encoding = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    pieces = Splitter().split(encoding, 2)
    assert [type(piece) for piece in pieces] == [BatchEncoding, BatchEncoding]
    assert torch.equal(torch.cat([piece.input_ids for piece in pieces]), ids)
    assert list(pieces[0]) == ["input_ids", "attention_mask"]
    assert pieces[1].to("cpu")["attention_mask"].shape == (2, 4)
    assert list(encoding) == ["input_ids", "attention_mask"]
    assert encoding.input_ids is ids
    assert TokenWeights(key="input_ids", ignore_index=0).count(pieces[0]) == 11


def test_pyg9829_graph_batches_are_refused_by_name_and_split_by_split_fn() -> None:
    graphs = [(torch.randn(nodes, 4), nodes % 2) for nodes in (3, 1, 5)]
    with pytest.raises(TypeError, match=r"batch\[0\] is a .*\.Batch,.*split_fn"):
        Splitter().split((Batch(graphs), torch.zeros(9)), 2)

    def by_graph(batch: Batch, n: int) -> list[Batch]:
        parts = [(batch.x[batch.batch == graph], int(label)) for graph, label in enumerate(batch.y)]
        ends = list(itertools.accumulate(boundaries(len(parts), n)))
        return [Batch(parts[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    splitter = Splitter(by_graph)
    with pytest.raises(TypeError, match="weights='samples' needs the number of samples"):
        make_microbatches(Batch(graphs), 2, splitter, "samples")
    made = make_microbatches(Batch(graphs), 2, splitter, lambda part: len(part.y))
    assert [len(part.data.x) for part in made] == [4, 5]
    assert [part.weight for part in made] == [2 / 3, 1 / 3]
    assert [part.samples for part in made] == [0, 0]
    assert "by_graph" in splitter.describe()


class Closed(UserDict[str, Any]):
    """A mapping that its constructor does not make from a dict."""

    def __init__(self, *, x: Tensor) -> None:
        super().__init__({"x": x})


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        (pack_sequence([torch.zeros(2), torch.zeros(1)]), "PackedSequence"),
        (torch.eye(3).to_sparse(), r"Tensor \(torch.sparse_coo\)"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged), r"\(nested\)"),
        ({1, 2, 3}, "set"),
        (Batch([(torch.zeros(2, 4), 1)]), "Batch"),
        (Closed(x=torch.zeros(3)), "Closed"),
    ],
)
def test_types_of_unknown_layout_are_refused_by_name(leaf: Any, name: str) -> None:
    for batch in ({"y": torch.zeros(3), "in": {"x": leaf}}, {"in": {"x": leaf}}):
        with pytest.raises(TypeError, match=rf"batch\['in'\]\['x'\] is a .*{name}.*split_fn"):
            Splitter().split(batch, 2)
    # As items of a per-sample list they need not be looked into.
    assert len(Splitter().split({"y": torch.zeros(3), "x": [leaf] * 3}, 3)) == 3


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "no leaf with one entry per sample"),
        ({"scale": 2.0, "t": torch.tensor(1)}, "no leaf with one entry per sample"),
        (None, "no leaf with one entry per sample"),
        ("text", "no leaf with one entry per sample"),
        (torch.zeros(0, 3), "samples=0: an empty batch"),
        ({"x": torch.zeros(0), "names": []}, "samples=0: an empty batch"),
    ],
)
def test_batches_without_samples_are_refused(batch: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Splitter().split(batch, 2)


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ([], ValueError, "split_fn returned 0 micro-batches"),
        ([1, 2, 3], ValueError, "split_fn returned 3 micro-batches; for n=2"),
        (iter([1]), TypeError, r"split_fn returned a list_iterator.*list\(\.\.\.\)"),
        (None, TypeError, "split_fn returned a NoneType"),
        ("ab", TypeError, "split_fn returned a str"),
    ],
)
def test_split_fn_results_are_checked(returned: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Splitter(lambda batch, n: returned).split(torch.zeros(4), 2)


def test_split_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="n=0"):
        Splitter().split(torch.zeros(4), 0)
    with pytest.raises(TypeError, match="split_fn='rows' is not callable"):
        Splitter("rows")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- weights


def test_token_counts_by_hand() -> None:
    #                        kept: 5 6       7       and, shifted: 6       7
    labels = torch.tensor([[5, 6, -100], [-100, 7, -100]])
    assert TokenWeights().count({"labels": labels}) == 3
    assert TokenWeights(shift=True).count({"labels": labels}) == 2
    assert TokenWeights(ignore_index=7).count({"labels": labels}) == 5
    # Bytes cannot hold -100, and 156 is not it.
    assert TokenWeights().count({"labels": torch.tensor([156, 3], dtype=torch.uint8)}) == 2


@pytest.mark.parametrize(
    ("key", "wrap"),
    [
        ("labels", lambda y: {"labels": y}),
        ("labels", lambda y: {"labels": y.numpy()}),
        ("mask", lambda y: Record(None, y)),
        ("mask", lambda y: Pair(None, y)),
        (1, lambda y: (None, y)),
        (1, lambda y: {1: y}),
        ("1.labels", lambda y: (None, {"labels": y})),
        ("batch.1", lambda y: {"batch": [None, y]}),
        ("batch.x.1", lambda y: {"batch": Frozen({1: y}, None)}),
        ("text.labels", lambda y: {"text.labels": y, "text": {"labels": None}}),
    ],
)
def test_token_weights_find_their_key(key: str | int, wrap: Callable[[Tensor], Any]) -> None:
    assert TokenWeights(key).count(wrap(torch.tensor([1, -100, 2]))) == 2


@pytest.mark.parametrize(
    ("weights", "batch", "error", "words"),
    [
        (TokenWeights(), {"x": 1, "target": 2}, ValueError, r"key='labels'.*keys present: 'x', 'target'"),
        (TokenWeights(2), (1, 2), ValueError, r"key=2.*keys present: 0, 1"),
        (TokenWeights("1.y"), (1, {"z": 2}), ValueError, r"no 'y' in a dict inside it; keys present: 'z'"),
        (TokenWeights("y"), Record(1, 2), ValueError, "keys present: x, mask"),
        (TokenWeights("z"), Batch([(torch.zeros(2, 4), 1)]), ValueError, "keys present: batch, x, y"),
        (TokenWeights(), {"labels": [1, 2]}, TypeError, "key='labels'.*found list"),
        (TokenWeights(), {"labels": torch.zeros(2)}, TypeError, "found torch.float32"),
        (TokenWeights(shift=True), {"labels": torch.zeros(2).long()}, ValueError, r"shape \(2,\)"),
    ],
)
def test_token_weights_teach(weights: TokenWeights, batch: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        weights.count(batch)


@pytest.mark.parametrize("shift", [False, True])
def test_hf38448_token_counts_per_microbatch_and_window(shift: bool) -> None:
    labels = torch.randint(10, (7, 5), generator=torch.Generator().manual_seed(0))
    labels[labels < 4] = -100
    spec = TokenWeights(shift=shift)
    window = spec.count({"labels": labels})
    made = make_microbatches({"labels": labels}, 3, Splitter(), spec)
    assert sum(part.tokens for part in made) == window
    assert [part.weight for part in made] == [part.tokens / window for part in made]
    assert [part.samples for part in made] == [3, 2, 2]


@pytest.mark.parametrize("shift", [False, True])
def test_pl20350_token_weighted_gradients_add_up_to_the_full_batch_gradient(shift: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(4, 6).double()
    x = torch.randn(5, 7, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(6, (5, 7), generator=generator)
    for row, length in enumerate((7, 2, 5, 1, 3)):
        labels[row, length:] = -100

    def gradient(batch: dict[str, Tensor]) -> Tensor:
        logits, targets = model(batch["x"]), batch["labels"]
        if shift:
            logits, targets = logits[:, :-1], targets[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return torch.autograd.grad(loss, model.weight)[0]

    def split(spec: WeightSpec) -> Tensor:
        made = make_microbatches(batch, 3, Splitter(), spec)
        return torch.stack([part.weight * gradient(part.data) for part in made]).sum(0)

    batch = {"x": x, "labels": labels}
    full = gradient(batch)
    torch.testing.assert_close(split(TokenWeights(shift=shift)), full)
    # Neither samples nor wrongly shifted tokens are what this loss averages over.
    for wrong in ("samples", TokenWeights(shift=not shift)):
        assert (split(wrong) - full).norm() > 0.01 * full.norm()


def test_micro_batches_without_tokens_are_dropped_unless_all_are() -> None:
    labels = torch.tensor([[1, 2], [-100, -100], [3, -100]])
    made = make_microbatches({"labels": labels, "row": torch.arange(3)}, 3, Splitter(), TokenWeights())
    assert [(part.index, part.tokens, part.weight) for part in made] == [(0, 2, 2 / 3), (1, 1, 1 / 3)]
    assert [int(part.data["row"]) for part in made] == [0, 2]

    nothing = make_microbatches({"labels": torch.full((3, 2), -100)}, 3, Splitter(), TokenWeights())
    assert [part.weight for part in nothing] == [1 / 3] * 3
    assert [part.tokens for part in nothing] == [0] * 3


def test_weights_of_each_kind() -> None:
    splitter = Splitter()
    batch = {"labels": torch.tensor([[1, 1], [1, -100], [1, 1]]), "x": torch.arange(3.0)}
    pieces = splitter.split(batch, 2)
    assert weigh(pieces, "samples", splitter) == (2 / 3, 1 / 3)
    assert weigh(pieces, "sum", splitter) == (1.0, 1.0)
    assert weigh(pieces, TokenWeights(), splitter) == (3 / 5, 2 / 5)
    assert weigh(pieces, lambda part: part["x"].sum(), splitter) == (1 / 3, 2 / 3)
    assert weigh(pieces, lambda part: 0, splitter) == (0.5, 0.5)


@given(samples=st.integers(1, 60), n=st.integers(1, 16))
def test_sample_weights_sum_to_one(samples: int, n: int) -> None:
    made = make_microbatches(torch.zeros(samples), n, Splitter(), "samples")
    assert math.fsum(part.weight for part in made) == pytest.approx(1, abs=1e-15)
    assert sum(part.samples for part in made) == samples
    assert [part.index for part in made] == list(range(min(n, samples)))


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (lambda part: -1, ValueError, "returned -1.0"),
        (lambda part: math.nan, ValueError, "returned nan"),
        (lambda part: math.inf, ValueError, "returned inf"),
        (lambda part: None, TypeError, "returned None; it must return one number"),
        (lambda part: torch.ones(2), TypeError, "must return one number"),
        ("tokens", ValueError, "weights='tokens' is unknown"),
    ],
)
def test_bad_weights_are_refused(spec: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_microbatches(torch.zeros(4), 2, Splitter(), spec)


# --------------------------------------------------------------------------------------------------- draws


def test_draws_are_private_and_reproducible() -> None:
    before = torch.get_rng_state()
    first, second = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    draws = [(draw_control(8, 3, first), draw_seeds(8, first)) for _ in range(4)]
    assert draws == [(draw_control(8, 3, second), draw_seeds(8, second)) for _ in range(4)]
    assert len(set(draws)) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_every_control_set_is_equally_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = 6000
    counts = Counter(draw_control(5, 2, generator) for _ in range(draws))
    assert set(counts) == set(itertools.combinations(range(5), 2))
    # Each count is binomial(6000, 1/10): mean 600, standard deviation 23.2; five of those are generous.
    assert all(abs(count - 600) < 5 * math.sqrt(draws * 0.1 * 0.9) for count in counts.values())


def test_draw_edges() -> None:
    generator = torch.Generator().manual_seed(0)
    assert draw_control(4, 0, generator) == ()
    assert draw_control(4, 4, generator) == (0, 1, 2, 3)
    for k in (-1, 5):
        with pytest.raises(ValueError, match=rf"k={k}: .* n=4"):
            draw_control(4, k, generator)
    seeds = draw_seeds(200, generator)
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # all 63 bits are in use
    torch.Generator().manual_seed(max(seeds))


# ----------------------------------------------------------------------------------------------- shape keys


def test_shape_keys_see_structure_shapes_and_dtypes_only() -> None:
    def batch(fill: float = 0.0, rows: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        x = torch.full((rows, 3), fill, dtype=dtype)
        return {"x": x, "deep": (Record(x, None), [x.numpy(), f"text {fill}"]), "scale": fill}

    key = shape_key(batch())
    assert hash(key) == hash(shape_key(batch(fill=1.0)))
    assert key == shape_key(batch(fill=1.0))
    different = [batch(rows=3), batch(dtype=torch.float64), batch() | {"scale": None}, batch() | {"y": 1}]
    different.append(OrderedDict(batch()))
    assert len({key, *map(shape_key, different)}) == 6
    for make in (BatchEncoding, lambda items: CausalLMOutput(logits=items["x"])):
        assert shape_key(make({"x": torch.zeros(2)})) != shape_key(make({"x": torch.zeros(3)}))
    assert hash(shape_key(torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)))
    assert hash(shape_key(Batch([(torch.zeros(2, 4), 1)])))
