"""Captured programs in ONNX Runtime against the same programs in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import lightning.pytorch as pl
import onnx
import pytest
import torch
from torch import Tensor, nn

from lightning_ledger.engines.export import NotExportable
from lightning_ledger.engines.session import session
from lightning_ledger.precision import FORMATS, ROUNDINGS, get_format
from tests.onnx_graphs import Captured, apart, exported_function, in_onnxruntime, session_by_hand
from tests.program_cases import batch_of, denoiser, digits, gpt, hf_gpt2, integers, move, normal

Make = Callable[[], pl.LightningModule]

# fp32 sums in another order; where a rounded format follows, some numbers fall to the other neighbour.
FP32, ROUNDED = 1e-5, 2e-2

native_int8 = pytest.mark.skipif(not get_format("int8").is_native("cpu"), reason="torch multiplies no int8 here")


@pytest.mark.parametrize("make", [digits, gpt, hf_gpt2, denoiser])
def test_fp32_gradients_match_at_fresh_weights_on_one_and_on_many_threads(make: Make) -> None:
    captured = Captured(make())
    onnx.checker.check_model(captured.exported.model, full_check=True)
    runs = [session(captured.exported, threads) for threads in (1, 4)]
    for step in range(2):
        for seed in (1, 2):
            batch = batch_of(captured.module, seed)
            expected = captured.in_torch(batch, seed)
            for run in runs:
                found = [captured.in_onnxruntime(batch, seed, run) for _ in range(3)]
                assert apart(found[0], expected) < FP32, (step, seed)
                assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(found[0], again, strict=True))
        move(captured.module, seed=step)
        captured.lowering.refresh(captured.weights, step)


@functools.cache
def small_gpt() -> Captured:
    return Captured(gpt(layers=1))


def test_the_model_names_weights_gradients_and_random_numbers() -> None:
    captured = small_gpt()
    names = [value.name for value in captured.exported.model.graph.input]
    assert names[: len(captured.weights)] == list(captured.weights)
    assert names[len(captured.weights) :] == ["batch.0", "tangent", "random.0", "random.1", "random.2"]
    results = [value.name for value in captured.exported.model.graph.output]
    assert results == ["loss", *(f"{name}.grad" for name in captured.weights)]


@native_int8
@pytest.mark.parametrize(("make", "kept"), [(digits, 0), (lambda: gpt(layers=1), 6)])
def test_int8_products_are_onnxs_own(make: Make, kept: int) -> None:
    captured = Captured(make(), "int8")
    int_mm = [node for node in captured.program.graph.graph.nodes if node.target is torch.ops.aten._int_mm.default]
    operations = captured.exported.operations()
    assert operations["MatMulInteger"] == len(int_mm) > 0
    # Attention's six batched products are emulated in torch too; the embedding's gradient is a sum, in fp32.
    assert operations.get("MatMul", 0) == (kept + 1 if kept else 0)
    run = session(captured.exported, 2)
    for seed in (1, 2):
        batch = batch_of(captured.module, seed)
        found = captured.in_onnxruntime(batch, seed, run)
        assert apart(found, captured.in_torch(batch, seed)) < 1e-3
    fp32 = Captured(captured.module, "fp32", export=False).in_torch(batch, seed)
    assert apart(found, fp32) > 1e-3  # it is rounded


@pytest.mark.parametrize("length", [64, 1024])
def test_int8_products_are_exact_at_the_ends_of_the_range(length: int) -> None:
    a = torch.full((16, length), 127, dtype=torch.int8)
    a[1::2] = -127
    b = torch.full((length, 24), -127, dtype=torch.int8)
    b[:, ::3] = 127
    b[:, 1] = (integers(255, length) - 127).to(torch.int8)
    found = in_onnxruntime(torch._int_mm, a, b)
    assert torch.equal(found.long(), a.long() @ b.long())


@pytest.mark.parametrize(
    ("make", "fmt", "rounding"),
    [
        *((digits, fmt, rounding) for fmt in ("bf16", "int8", "nvfp4") for rounding in ROUNDINGS),
        *(pytest.param(gpt, fmt, rounding, marks=pytest.mark.slow) for fmt in FORMATS for rounding in ROUNDINGS),
    ],
)
def test_every_format_and_rounding_matches(make: Make, fmt: str, rounding: str) -> None:
    captured = Captured(make(), fmt, rounding)
    run = session(captured.exported, 2)
    batch = batch_of(captured.module, 3)
    expected = captured.in_torch(batch, 5)
    # As one vector: a single flipped number can be much of a small gradient.
    found = [torch.cat([x.flatten() for x in y]) for y in (captured.in_onnxruntime(batch, 5, run), expected)]
    assert apart(found[:1], found[1:]) < ROUNDED
    assert expected[1].dtype == torch.float32
    if fmt != "fp32":
        plain = Captured(captured.module, export=False).in_torch(batch, 5)
        assert apart([torch.cat([x.flatten() for x in plain])], found[1:]) > 1e-4


# ------------------------------------------------------------------------------------------ sums over repeated indices


class Bag(nn.Module):
    """An embedding of few rows that many tokens share, or of many rows that few do."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, gradient: Tensor, index: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.embedding_dense_backward(gradient, index, self.rows, -1, False)
        return result


@pytest.mark.parametrize(("rows", "tokens"), [(16, 1024), (2000, 1024)])
def test_an_embeddings_gradient_is_the_same_in_fifty_runs_on_many_threads(rows: int, tokens: int) -> None:
    gradient, index = normal(4, tokens // 4, 64), integers(min(rows, 16), 4, tokens // 4)
    bag = Bag(rows)
    exported = exported_function(bag, gradient, index)
    assert not any(a.s == b"add" for node in exported.model.graph.node for a in node.attribute)
    run = session(exported, 4)
    first = run(gradient, index)[0]
    assert all(torch.equal(run(gradient, index)[0], first) for _ in range(49))
    oracle = torch.zeros(rows, 64, dtype=torch.float64)
    oracle.index_add_(0, index.flatten(), gradient.double().flatten(0, 1))
    torch.testing.assert_close(first, oracle.float(), rtol=1e-5, atol=1e-4)


def test_a_whole_programs_gradients_are_the_same_in_fifty_runs_on_many_threads() -> None:
    captured = small_gpt()
    run = session(captured.exported, 4)
    batch = batch_of(captured.module, 0)
    first = captured.in_onnxruntime(batch, 1, run)
    for _ in range(49):
        assert all(torch.equal(a, b) for a, b in zip(captured.in_onnxruntime(batch, 1, run), first, strict=True))
    assert apart(first, captured.in_torch(batch, 1)) < FP32


# ------------------------------------------------------------------------------------------- what cannot be exported


class Odd(pl.LightningModule):
    """Two layers, each followed by an operation that ONNX has no form of here."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = torch.special.bessel_j0(self.first(batch[0].flatten(1)[:, :8]).detach()) + self.first.weight.sum()
        return torch.sort(self.second(x), dim=1).values.diff().square().mean()


def test_everything_that_cannot_be_exported_is_told_at_once_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = normal(4, 1, 8, 8)
    monkeypatch.setattr("tests.onnx_graphs.batch_of", lambda module, seed: (batch, integers(2, 4)))
    with pytest.raises(NotExportable) as told:
        Captured(Odd())
    message = str(told.value)
    assert "aten.special_bessel_j0.default (in first)" in message
    assert "aten.sort.default (in second)" in message


def test_a_model_can_be_run_with_no_option_of_ours() -> None:
    captured = Captured(digits())
    engine = session_by_hand(captured.exported.model.SerializeToString())
    batch = batch_of(captured.module, 0)
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        feed = captured.exported.feed(captured.inputs(batch, 1))
    found = [torch.from_numpy(x) for x in engine.run(None, feed)]
    assert apart(found, captured.in_torch(batch, 1)) < FP32
