"""FLOPs of a training step, against arithmetic done by hand. A multiply-add is two FLOPs throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.microbatches import shape_key
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import EagerPredictor
from tests.counted_modules import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    BACKWARD,
    FORWARD,
    Attention,
    Opaque,
    Perceptron,
    opaque_product,
)


def count(loss_of: Callable[[], Tensor], counter: FlopCounter | None = None) -> StepFlops:
    """Count a loss and its backward pass; every heavy operation in it must have a formula."""
    counter = counter or FlopCounter()
    with counter:
        loss = loss_of()
        counter.phase = "backward"
        loss.backward()
    assert counter.uncounted == set()
    return counter.counts()


# ------------------------------------------------------------------------------------------------------ hand arithmetic


def test_perceptron_equals_hand_arithmetic() -> None:
    model, x = Perceptron(), torch.randn(4, 6)
    assert count(lambda: model.training_step([x], 0)) == StepFlops({"fp32": 4 * FORWARD}, {"fp32": 4 * BACKWARD})


def test_a_frozen_layer_needs_no_weight_gradient() -> None:
    model, x = Perceptron(), torch.randn(4, 6)
    model.net.hidden.requires_grad_(False)  # then nothing below the output layer needs a gradient: only its own 2*5*1
    assert count(lambda: model.training_step([x], 0)) == StepFlops({"fp32": 4 * FORWARD}, {"fp32": 4 * 10})


def test_pt134804_attention_is_counted_once() -> None:
    model, x = Attention(), torch.randn(3, 5, 8)
    expected = StepFlops({"fp32": 3 * ATTENTION_FORWARD}, {"fp32": 3 * ATTENTION_BACKWARD})
    assert count(lambda: model.training_step([x], 0)) == expected


def test_attention_with_unequal_head_sizes() -> None:
    # Two heads, 3 queries, 7 keys, depth 4 for queries and keys, 6 for values.
    q, k, v = (torch.randn(1, 2, *shape, requires_grad=True) for shape in ((3, 4), (7, 4), (7, 6)))
    counted = count(lambda: F.scaled_dot_product_attention(q, k, v).sum())
    # Forward 2 * 2*3*7 * (4 + 6). On such shapes torch falls back to plain products, whose backward has two products
    # for each of the forward's, and no scores to recompute.
    assert counted == StepFlops({"fp32": 840}, {"fp32": 1680})


def test_math_attention_counts_as_its_products() -> None:
    q, k, v = (torch.randn(3, 2, 5, 4, requires_grad=True) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        counted = count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum())
    assert counted == StepFlops({"fp32": 3 * 800}, {"fp32": 3 * 1600})


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers(layer: type[nn.RNNBase], gates: int) -> None:
    # Each of 2 samples, each of 7 steps: the input (3) and the state (5) are multiplied into `gates` gates of 5.
    x = torch.randn(7, 2, 3, requires_grad=True)
    forward = 7 * 2 * 2 * (3 + 5) * gates * 5
    # Backward: the gradients of weights and of input and state. The first state needs no gradient, which the fused
    # LSTM kernel computes all the same.
    first_state = 0 if layer is nn.LSTM else 2 * 2 * 5 * gates * 5
    model = layer(3, 5)
    counted = count(lambda: model(x)[0].sum())
    assert counted == StepFlops({"fp32": forward}, {"fp32": 2 * forward - first_state})


def test_lstm_in_two_directions_and_layers() -> None:
    model, x = nn.LSTM(3, 5, num_layers=2, bidirectional=True), torch.randn(7, 2, 3)
    # Layer 1 reads 3 inputs, layer 2 both directions of layer 1; two directions each.
    assert count(lambda: model(x)[0].sum()).forward == {"fp32": 7 * 2 * 2 * 20 * 2 * ((3 + 5) + (10 + 5))}


def test_convolution() -> None:
    conv = nn.Conv2d(4, 6, kernel_size=3, stride=2, padding=1, groups=2)
    x = torch.randn(2, 4, 8, 8)
    # Output 4 x 4; each of its 6 channels contracts 2 channels of a 3 x 3 window. The batch needs no gradient.
    forward = 2 * (2 * 4 * 4 * 6) * (2 * 3 * 3)
    assert count(lambda: conv(x).sum()) == StepFlops({"fp32": forward}, {"fp32": forward})


def test_integer_products_and_matrix_vector_products() -> None:
    with FlopCounter() as counter:
        torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8))
        torch.ones(3, 4) @ torch.ones(4)
        torch.addmv(torch.ones(3), torch.ones(3, 4), torch.ones(4))
    assert counter.counts().forward == {"int8": 2 * 32 * 16 * 8, "fp32": 2 * (2 * 3 * 4)}


def test_convolutions_and_products_under_autocast_carry_its_format() -> None:
    model, x = Perceptron(), torch.randn(4, 6)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.training_step([x], 0)

    assert count(loss) == StepFlops({"bf16": 4 * FORWARD}, {"bf16": 4 * BACKWARD})


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_composite_operations_are_counted_without_autograd(context: Callable[[], Any]) -> None:
    model, recurrent = Attention(), nn.LSTM(3, 5)
    with context(), FlopCounter() as counter:
        model(torch.randn(3, 5, 8))
        recurrent(torch.randn(7, 2, 3))
        torch.einsum("ij,kj->ik", torch.ones(2, 3), torch.ones(4, 3))
    assert counter.counts().forward == {"fp32": 3 * ATTENTION_FORWARD + 7 * 2 * 2 * 8 * 20 + 2 * 2 * 3 * 4}
    assert counter.uncounted == set()


def test_counting_changes_no_value() -> None:
    model, x = Attention(), torch.randn(3, 5, 8)
    plain = torch.autograd.grad(model.training_step([x], 0), list(model.parameters()))
    with FlopCounter() as counter:
        counted = torch.autograd.grad(model.training_step([x], 0), list(model.parameters()))
    assert counter.counts().total > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))


# ----------------------------------------------------------------------------------------------------- number formats


def count_lowered(format: str, model: Perceptron | Attention, x: Tensor) -> tuple[StepFlops, FlopCounter]:
    lowering = Lowering(format)
    lowering.refresh(model.parameters(), seed=0)
    counter = FlopCounter(lowering.formats_of)
    with lowering.mode(seed=0):
        return count(lambda: model.training_step([x], 0), counter), counter


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "fp8", "fp8_tensor", "int4", "w8a16", "w4a16", "w4a8"])
def test_lowered_products_are_counted_unpadded_under_their_format(format: str) -> None:
    # Neither 6 nor 5 is a multiple of int4's blocks of 32 or of what integer kernels want.
    counted, counter = count_lowered(format, Perceptron(), torch.randn(4, 6))
    assert counted == StepFlops({format: 4 * FORWARD}, {format: 4 * BACKWARD})
    assert counter.lowered == 4 * (FORWARD + BACKWARD)
    counted, _ = count_lowered(format, Attention(), torch.randn(3, 5, 8))
    assert counted == StepFlops({format: 3 * ATTENTION_FORWARD}, {format: 3 * ATTENTION_BACKWARD})


def test_each_product_is_counted_under_its_own_format() -> None:
    counted, counter = count_lowered(
        "int8:grad_input=fp8,grad_weight=int4,attention=bf16", Attention(), torch.randn(3, 5, 8)
    )
    assert counted.forward == {"int8": 3 * (ATTENTION_FORWARD - 800), "bf16": 3 * 800}
    # qkv, the first layer, has no input gradient.
    assert counted.backward == {"int4": 3 * (1920 + 640), "fp8": 3 * 640, "bf16": 3 * 2000}
    assert counter.lowered == 3 * (ATTENTION_FORWARD + ATTENTION_BACKWARD)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_what_is_not_lowered_keeps_its_own_format(format: str) -> None:
    # Nothing here is a multiple of a block, neither 6 inputs, nor 5 and 1 outputs, nor 4 samples.
    counted, counter = count_lowered(format, Perceptron(), torch.randn(4, 6))
    assert counted == StepFlops({"fp32": 4 * FORWARD}, {"fp32": 4 * BACKWARD})
    assert counter.lowered == 0


def test_a_product_that_is_refused_within_an_operation_keeps_its_own_format() -> None:
    # The input gradient contracts 40 output channels, which blocks of 32 refuse; the other products 32 channels, 96
    # numbers of a kernel, and 2 samples of 16 positions.
    conv, lowering = nn.Conv1d(32, 40, 3, padding=1, bias=False), Lowering("mxfp4")
    x = torch.randn(2, 32, 16, requires_grad=True)
    counter = FlopCounter(lowering.formats_of)
    with lowering.mode(seed=0):
        counted = count(lambda: conv(x).square().sum(), counter)
    product = 2 * (2 * 16 * 40) * (32 * 3)
    assert counted == StepFlops({"mxfp4": product}, {"mxfp4": product, "fp32": product})
    assert counter.lowered == 2 * product


def test_a_prediction_multiplies_what_the_exact_step_does() -> None:
    model, x = Attention(), torch.randn(3, 5, 8)
    predictor = EagerPredictor(model, Lowering("int4"))
    predictor.refresh(dict(model.named_parameters()))
    assert predictor.predict([x], 0, 0) is not None
    work = predictor.work(shape_key([x]))
    assert work is not None
    assert sum(work.forward.values()) == 3 * ATTENTION_FORWARD
    assert sum(work.backward.values()) == 3 * ATTENTION_BACKWARD


# ------------------------------------------------------------------------------------------------- what has no formula


def test_a_custom_operation_without_formula_is_named() -> None:
    with opaque_product() as product, FlopCounter() as counter:
        Opaque(product).training_step([torch.randn(4, 6)], 0)
    assert counter.uncounted == {"lightning_ledger_tests::opaque"}
    assert counter.counts().forward == {"fp32": 4 * FORWARD}


def test_light_operations_are_no_reason_to_warn() -> None:
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    with FlopCounter() as counter:
        loss = F.interpolate(x, scale_factor=2.0, mode="bilinear").sum() + F.normalize(x).sum() + x.norm()
        loss = loss + F.avg_pool2d(x, 2).sum() + F.group_norm(x, 1).sum() + F.unfold(x, 2).sum()
        loss = loss + torch.linalg.cross(x[..., :3], x[..., :3] + 1).sum() + torch.stack([x, x]).sum()
        counter.phase = "backward"
        loss.backward()
    assert counter.uncounted == set()
    assert counter.counts() == StepFlops({}, {})


def test_heavy_operations_without_formula_are_named() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), FlopCounter() as counter:
        layer(torch.randn(2, 5, 8))  # the fused fast path of evaluation
        torch.fft.fft(torch.randn(8))
        torch.cdist(torch.randn(3, 4), torch.randn(3, 4))
        F.bilinear(torch.randn(2, 3), torch.randn(2, 4), torch.randn(5, 3, 4))
    assert counter.uncounted == {
        "aten::_transformer_encoder_layer_fwd",
        "aten::_fft_r2c",
        "aten::_cdist_forward",
        "aten::_trilinear",
    }
