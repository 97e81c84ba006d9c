"""Rotation: orthonormal, without effect on exact products, and of use against outliers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ledger.precision import FORMATS
from lightning_ledger.precision.rotation import _constants, block_size, rotate
from tests.precision_oracle import close, every_device, rand

ROTATED = [8, 16, 24, 40, 128, 384, 1000]


@pytest.mark.parametrize("length", ROTATED)
def test_the_rotation_is_the_same_orthonormal_matrix_on_both_sides(length: int) -> None:
    identity = torch.eye(length, dtype=torch.float64)
    rotation = rotate(identity, -1)
    assert torch.allclose(rotation @ rotation.mT, identity, atol=1e-14)
    assert torch.equal(rotate(identity, -2), rotation.mT)
    # Each number goes to all the places of its block and to no other, in equal shares, with either sign.
    block = block_size(length)
    blocks = torch.block_diag(*[torch.ones(block, block)] * (length // block)).bool()
    assert torch.equal(rotation != 0, blocks)
    assert torch.allclose(rotation[blocks].abs(), torch.tensor(block**-0.5, dtype=torch.float64))
    assert 0.3 < (rotation[blocks] > 0).double().mean() < 0.7


@every_device
@pytest.mark.parametrize("length", ROTATED)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_products_are_preserved(device: str, length: int, batch: tuple[int, ...]) -> None:
    a, b = rand(*batch, 5, length, device=device), rand(*batch, length, 7, seed=1, device=device)
    left, right = rotate(a, -1), rotate(b, -2)
    assert left.shape == a.shape
    assert right.shape == b.shape
    assert not torch.allclose(left, a)
    close(left @ right, a.double() @ b.double(), length)
    close(rotate(a.mT, -2), left.mT, length)


@pytest.mark.parametrize("length", [1, 7, 12, 20, 33])
def test_lengths_without_a_block_of_eight_are_left_alone(length: int) -> None:
    x = rand(3, length)
    assert rotate(x, -1) is x
    assert rotate(x.mT, -2).data_ptr() == x.data_ptr()


def test_dtypes_are_kept() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert rotate(rand(4, 16).to(dtype), -1).dtype == dtype


@pytest.mark.parametrize(("name", "factor"), [("int8", 5), ("int4", 2), ("mxfp4", 1.5)])
def test_rounding_errors_fall_where_there_are_outliers(name: str, factor: float) -> None:
    # Standard normal numbers, one in 128 of them twenty times as large.
    x = rand(64, 512)
    x[:, 5::128] *= 20

    def error(x: Tensor) -> float:
        return float((FORMATS[name].quantize(x, -1).dequantize() - x).norm())

    assert error(x) > factor * error(rotate(x, -1))


def test_the_rotation_depends_on_the_length_alone() -> None:
    x = rand(2, 64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before, state = rotate(x, -1), torch.get_rng_state()
        _constants.cache_clear()
        torch.manual_seed(2)
        assert torch.equal(rotate(x, -1), before)
        torch.manual_seed(1)
        assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(rotate(rand(2, 128)[:, :64].contiguous(), -1), rotate(rand(2, 128), -1)[:, :64])


@pytest.mark.parametrize("known", [False, True])
def test_a_trace_holds_the_rotation_as_a_constant(known: bool) -> None:
    _constants.cache_clear()
    x, y = rand(3, 64), rand(3, 64, seed=1)
    if known:
        with torch.inference_mode():  # whose tensors autograd would refuse
            rotate(x, -1)
    program = make_fx(lambda x: rotate(x, -1))(x)
    operations = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("rand" in name or "kron" in name for name in operations)
    assert torch.equal(program(y), rotate(y, -1))
    assert not rotate(y, -1).is_inference()
    rotate(y.requires_grad_(), -1).sum().backward()
