"""Products apart: each in its own format, kept out of it by name, rotated, or refused."""

from __future__ import annotations

from itertools import product as every

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from lightning_ledger.precision import FORMATS, Lowering, get_format, parse_formats
from lightning_ledger.precision.formats import Role
from tests.lowered_steps import Block, inputs, make_block, same, step
from tests.precision_oracle import close, every_rounding, oracle, rand

PRODUCTS = ("output", "grad_input", "grad_weight")

# ------------------------------------------------------------------------------------------------------------- specs


def test_a_spec_names_the_format_of_each_product() -> None:
    formats = parse_formats(" int8 : grad_weight = bf16 , attention=fp8")
    names = [getattr(formats, product).name for product in (*PRODUCTS, "attention")]
    assert names == ["int8", "int8", "bf16", "fp8"]
    assert formats.name == "int8:grad_weight=bf16,attention=fp8"
    assert parse_formats(formats.name) == formats
    assert parse_formats(formats) is formats
    assert [fmt.name for fmt in formats.distinct] == ["int8", "bf16", "fp8"]
    assert parse_formats("int8:output=int4").name == "int4:grad_input=int8,grad_weight=int8,attention=int8"
    for name, fmt in FORMATS.items():
        assert parse_formats(name).distinct == (fmt,) == parse_formats(fmt).distinct
        assert parse_formats(f"{name}:grad_input={name}").name == name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int9", "format='int9' is not a number format"),
        ("int8:grad_weight=int9", "format='int9' is not a number format"),
        ("int8:", r"format='int8:': '' is no product=format\. Write for example 'int8:grad_weight=bf16"),
        ("int8:bf16", "'bf16' is no product=format"),
        ("int8:weights=bf16", "'weights=bf16' is not one of output, grad_input, grad_weight, attention"),
        ("int8:output=bf16,output=fp8", "'output=fp8' is set twice"),
    ],
)
def test_a_spec_that_is_none_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lowering(spec)


@pytest.mark.parametrize("apart", PRODUCTS)
@pytest.mark.parametrize(("base", "other"), [("int8", "int4"), ("fp32", "mxfp4"), ("fp8", "w4a16"), ("w4a8", "bf16")])
def test_each_product_of_a_linear_layer_runs_in_its_own_format(base: str, other: str, apart: str) -> None:
    names = {product: other if product == apart else base for product in PRODUCTS}
    x, w = rand(32, 64, requires_grad=True), rand(96, 64, seed=1, requires_grad=True)
    dy = rand(32, 96, seed=2)
    lowering = Lowering(",".join([f"{base}:{apart}={other}"]))
    lowering.refresh([w], seed=0)
    with lowering.mode(0):
        y = linear(x, w)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
    a, b = x.detach(), w.detach()
    roles: dict[str, tuple[Tensor, Tensor, Role, Role]] = {
        "output": (a, b.mT, "activation", "weight"),
        "grad_input": (dy, b, "gradient", "weight"),
        "grad_weight": (dy.mT, a, "gradient", "activation"),
    }
    for product, actual in zip(PRODUCTS, (y.detach(), dx, dw), strict=True):
        fmt = get_format(names[product])
        left, right, of_left, of_right = roles[product]
        along = -1 if product == "grad_input" and fmt.rounds_weights_once else -2
        expected = oracle(fmt, left, -1, of_left).double() @ oracle(fmt, right, along, of_right).double()
        close(actual, expected, left.shape[-1], fmt)
        wrong = get_format(base if product == apart else other)
        assert (actual - oracle(wrong, left, -1, of_left) @ oracle(wrong, right, -2, of_right)).norm() > 1e-4


@pytest.mark.parametrize("fused", [False, True])
def test_attention_is_set_apart_from_layers(fused: bool) -> None:
    block = make_block(fused)
    exact, whole = step(block, None), step(block, Lowering("int4"))
    attention = step(block, Lowering("fp32:attention=int4"))
    layers = step(block, Lowering("int4:attention=fp32"))
    for a, b in every((exact, whole, attention, layers), repeat=2):
        assert same(a, b) == (a is b)
    # The last layer's bias gradient sees attention through the forward pass alone, the loss too.
    assert abs(attention[0] - exact[0]) < abs(whole[0] - exact[0])


def test_an_activation_whose_memory_is_reused_is_not_taken_for_the_gradient() -> None:
    # The input of a frozen layer is not kept for the backward pass; the gradient may come to lie where it lay.
    w, factor, fmt = rand(64, 64, seed=1), rand(32, 64, seed=2), FORMATS["fp8"]
    leaf = rand(32, 64, requires_grad=True)
    expected = oracle(fmt, factor, -1, "gradient").double() @ oracle(fmt, w, -1).double().mT
    for _ in range(20):
        with Lowering(fmt).mode(0):
            loss = (linear(leaf * 1, w.mT) * factor).sum()
            (dx,) = torch.autograd.grad(loss, leaf)
        close(dx, expected, 64)


# -------------------------------------------------------------------------------------------------------------- keep


class Net(nn.Module):
    """Two blocks and a head that shares the weight of the first layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(32, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def make_net(tied: bool = False) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(tied)


def kept_layers(net: Net, keep: list[str]) -> set[str]:
    """The layers none of whose three products differs from the exact one, each layer tried by itself."""
    lowering = Lowering("int4", keep=keep, module=net)
    lowering.refresh(dict(net.named_parameters()), seed=0)
    exact = set()
    for name, layer in net.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        x, dy = rand(32, 32, requires_grad=True), rand(32, 32, seed=1)

        def products(layer: nn.Linear = layer, x: Tensor = x, dy: Tensor = dy) -> list[Tensor]:
            y = layer(x)
            return [y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy)]

        plain = products()
        with lowering.mode(0):
            actual = products()
        equal = [torch.equal(a, b) for a, b in zip(actual, plain, strict=True)]
        assert len(set(equal)) == 1  # all three or none
        if equal[0]:
            exact.add(name)
            assert all("kept by keep=" in lowering.unlowered[name, product] for product in PRODUCTS)
    return exact


@pytest.mark.parametrize(
    ("keep", "layers"),
    [
        ([], set()),
        (["head"], {"head"}),
        (["blocks.0"], {"blocks.0.0"}),
        (["blocks.*"], {"blocks.0.0", "blocks.1.0"}),
        (["blocks"], {"blocks.0.0", "blocks.1.0"}),
        (["*.1.0", "embed"], {"blocks.1.0", "embed"}),
        (["*"], {"embed", "blocks.0.0", "blocks.1.0", "head"}),
    ],
)
def test_kept_layers_are_exact_bit_for_bit_and_others_are_not(keep: list[str], layers: set[str]) -> None:
    assert kept_layers(make_net(), keep) == layers


def test_a_tied_weight_is_kept_in_every_layer_that_has_it() -> None:
    assert kept_layers(make_net(tied=True), ["head"]) == {"head", "embed"}
    assert kept_layers(make_net(tied=True), ["embed"]) == {"head", "embed"}


def test_everything_kept_is_the_exact_step() -> None:
    for fused in (False, True):
        block = make_block(fused)
        lowering = Lowering("int4", keep=["embed", "qkv", "out"], module=block)
        lowering.refresh(dict(block.named_parameters()), seed=0)
        exact, kept = step(block, None), step(block, lowering)
        assert not same(exact, kept)  # attention belongs to no layer of its own
        everything = Lowering("int4:attention=fp32", keep=["embed", "qkv", "out"], module=block)
        everything.refresh(dict(block.named_parameters()), seed=0)
        assert same(exact, step(block, everything))


def test_globs_that_match_nothing_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"keep=\['head', 'lm_head', 'b.0'\]: 'lm_head', 'b.0' matches no layer of Net"
    ):
        Lowering("int8", keep=["head", "lm_head", "b.0"], module=make_net())


def test_products_outside_of_any_layer_are_lowered() -> None:
    net = make_net()
    lowering = Lowering("int4", keep=["head"], module=net)
    lowering.refresh(dict(net.named_parameters()), seed=0)
    x, other = rand(4, 32), rand(32, 32, seed=1)
    with lowering.mode(0):
        lowered, kept = x @ other, x @ net.head.weight  # used by itself, but it is the head's
    assert not torch.equal(lowered, x @ other)
    assert torch.equal(kept, x @ net.head.weight)


def test_a_layer_that_fails_leaves_no_trace() -> None:
    net = make_net()
    lowering = Lowering("int4", keep=["head"], module=net)
    with lowering.mode(0):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net.head(rand(4, 31))
        assert not torch.equal(rand(4, 32) @ rand(32, 32, seed=1), torch.zeros(4, 32))
    assert lowering._layers.current == ""
    assert not lowering.unlowered.keys() - {("head", "output")}


# ---------------------------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("name", ["int8", "int4", "mxfp4", "nvfp4", "fp8"])
@every_rounding
def test_a_rotated_step_is_the_step_up_to_rounding(name: str, rounding: str) -> None:
    block = make_block()
    lowering = Lowering(name, rounding, rotation=True)
    lowering.refresh(block.parameters(), seed=0)
    exact, rotated = step(block, None), step(block, lowering)
    assert not same(rotated, step(block, Lowering(name, rounding)))
    for g, h in zip(exact, rotated, strict=True):
        assert torch.cosine_similarity(g.flatten(), h.flatten(), dim=0) > 0.8


def test_a_rotated_product_is_the_product_where_rounding_is_nearly_nothing() -> None:
    fine = get_format("bf16")
    x, w = rand(32, 64), rand(64, 48, seed=1)
    x[:, 3] *= 50
    plain, rotated = Lowering(fine), Lowering(fine, rotation=True)
    with plain.mode(0):
        a = x @ w
    with rotated.mode(0):
        b = x @ w
    assert not torch.equal(a, b)
    assert (b - x @ w).norm() < 2**-7 * (x @ w).norm()
    errors = []
    for rotation in (False, True):
        with Lowering("int4", rotation=rotation).mode(0):
            y = x @ w
        errors.append((y - x @ w).norm())
    assert errors[1] < errors[0]  # what rotation is for: outliers


@pytest.mark.parametrize("spec", ["w8a16", "w4a16", "w4a8", "int8:grad_input=w4a8"])
def test_rotation_is_refused_where_a_weight_is_rounded_once(spec: str) -> None:
    with pytest.raises(ValueError, match=r"rotation=True does not apply to w\da\d+: its weights are rounded once"):
        Lowering(spec, rotation=True)


# ----------------------------------------------------------------------------------------------------- checkpointing


class Checkpointed(Block):
    """The block with its forward pass computed again in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        # A reentrant checkpoint needs an input that requires a gradient.
        x = x.requires_grad_() if self.reentrant else x
        loss: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return loss


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "fp8", "mxfp8", "w4a8", "int8:grad_weight=fp8"])
def test_checkpointed_layers_have_the_same_gradients(name: str, reentrant: bool, fused: bool) -> None:
    plain, checkpointed = make_block(fused), Checkpointed(fused)
    checkpointed.load_state_dict(plain.state_dict())
    checkpointed.reentrant = reentrant
    results = []
    for model in (plain, checkpointed):
        lowering = Lowering(name)
        lowering.refresh(dict(model.named_parameters()), seed=0)
        model.zero_grad()
        with lowering.mode(0):
            loss = model(inputs(model))
            loss.backward()  # a reentrant checkpoint refuses autograd.grad
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert same(*results)
