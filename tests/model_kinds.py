"""Networks of every kind that people train, small: each with a batch and a loss that is a mean over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH = 8


class Convolutions(nn.Module):
    """Strided, depthwise, dilated and pointwise convolutions, group normalisation, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.SiLU(),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.Conv2d(32, 32, 1),
            nn.Conv2d(32, 32, 3, padding=2, dilation=2),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Critic(nn.Module):
    """What a gradient penalty is put on: smooth, without batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip connection; instance normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 4, stride=2, padding=1), nn.InstanceNorm2d(16, affine=True))
        self.up = nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1)
        self.out = nn.Conv2d(19, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x, self.up(functional.relu(self.down(x)))], 1))


class CausalConvolutions(nn.Module):
    """A temporal convolutional network, its weights normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv1d(6, 16, 3))
        self.second = parametrizations.weight_norm(nn.Conv1d(16, 4, 3, dilation=2))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(functional.pad(x, (2, 0))))
        return self.second(functional.pad(x, (4, 0)))


class Recurrent(nn.Module):
    """Two directions; the last step's output is read.

    Args:
        layer: LSTM, GRU or RNN.
    """

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = layer(6, 16, batch_first=True, bidirectional=True)  # type: ignore[call-arg]
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class Packed(Recurrent):
    """Sequences of unequal lengths, packed."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(
            pad_packed_sequence(self.layers(packed)[0], batch_first=True, total_length=x.shape[1])[0].mean(1)
        )


class GroupedAttention(nn.Module):
    """Attention in which several heads share keys and values, and values are of another size than queries and keys.

    Args:
        shared: heads of keys and values; 1 is multi-query attention.
        fused: leave the sharing to PyTorch's own attention.
    """

    def __init__(self, shared: int, fused: bool, width: int = 32, heads: int = 4, qk: int = 8, v: int = 16) -> None:
        super().__init__()
        self.heads, self.shared, self.fused = heads, shared, fused
        self.q, self.k = nn.Linear(width, heads * qk), nn.Linear(width, shared * qk)
        self.v, self.out = nn.Linear(width, shared * v), nn.Linear(heads * v, width)
        self.register_buffer("mask", torch.ones(6, 6).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.shared, -1)).transpose(1, 2) for f in (self.k, self.v))
        if not self.fused:
            k, v = (t.repeat_interleave(self.heads // self.shared, 1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=self.fused)
        return self.out(y.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """PyTorch's own attention layer over a context of other widths, some of whose places are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, kdim=12, vdim=20, batch_first=True)

    def forward(self, x: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return self.attention(x, k, v, key_padding_mask=padding)[0]


class Transformer(nn.Module):
    """PyTorch's encoder over embedded tokens, with a buffer of sinusoidal positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)
        angles = torch.arange(6)[:, None] / 100 ** (torch.arange(16) / 16)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens) + self.positions).mean(1))


class Bags(nn.Module):
    """Bags of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(17, 32, mode="mean")
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class FourierLayer(nn.Module):
    """A convolution in frequency space, as Fourier neural operators have: complex weights, kept as pairs of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 16)
        self.weight = nn.Parameter(0.1 * torch.randn(16, 16, 5, 2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x.transpose(1, 2)).transpose(1, 2)
        frequencies = torch.einsum("bim,iom->bom", torch.fft.rfft(x), torch.view_as_complex(self.weight))
        return self.head((x + torch.fft.irfft(frequencies, n=x.shape[-1])).relu().mean(-1))


class Frozen(nn.Module):
    """BatchNorm with frozen statistics, as in a pretrained backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 3)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        self.norm.eval()  # Lightning trains each layer in the mode it finds it in

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Spectral(nn.Module):
    """Layers of spectral norm one; a power iteration a batch brings their buffers closer to the largest singular pair.

    Args:
        old: PyTorch's earlier form, a hook.
    """

    def __init__(self, old: bool = False) -> None:
        super().__init__()
        norm = nn.utils.spectral_norm if old else parametrizations.spectral_norm
        self.first, self.second = norm(nn.Conv2d(3, 16, 3)), norm(nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.leaky_relu(self.first(x)).mean((2, 3)))


class Trained(pl.LightningModule):
    """A network and its loss: the mean square of the difference to what the batch's last part says.

    Args:
        net: takes the batch's other parts.
        rate: of SGD.
    """

    def __init__(self, net: nn.Module, rate: float = 0.1) -> None:
        super().__init__()
        self.net, self.rate = net, rate

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        *inputs, wanted = batch
        return functional.mse_loss(self.net(*inputs), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9 if self.rate else 0.0)


class Penalised(Trained):
    """The loss has a gradient penalty: the slope by the input ought to be one."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, wanted = batch
        x = x.detach().requires_grad_()
        y = self.net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return functional.mse_loss(y, wanted) + (slope.flatten(1).norm(dim=1) - 1).square().mean()


@dataclass(frozen=True)
class Kind:
    """A kind of network.

    Args:
        net: makes one.
        shapes: of one sample's parts, the last one what is wanted.
        module: what trains it.
        integers: parts that hold tokens or lengths, by place, with the least and the greatest number.
        masks: parts that mark padding, by place.
        warns: of what predictions of it warn, if of anything.
    """

    net: Callable[[], nn.Module]
    shapes: Sequence[tuple[int, ...]]
    module: type[Trained] = Trained
    integers: Sequence[tuple[int, int, int]] = ()
    masks: Sequence[int] = ()
    warns: str = ""

    def make(self, rate: float = 0.1) -> Trained:
        """The module, always the same."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.module(self.net(), rate)

    def batch(self, seed: int) -> list[Tensor]:
        """A batch of ``BATCH`` samples."""
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(BATCH, *shape, generator=generator) for shape in self.shapes]
        for place, least, greatest in self.integers:
            parts[place] = torch.randint(least, greatest + 1, (BATCH, *self.shapes[place]), generator=generator)
        for place in self.masks:
            last = parts[place].shape[1]
            parts[place] = torch.arange(last) >= torch.randint(1, last + 1, (BATCH, 1), generator=generator)
        return parts


IMAGE = (3, 8, 8)
MOSTLY_EXACT = "Only .* of a prediction's FLOPs run in"

KINDS: dict[str, Kind] = {
    "convolutions": Kind(Convolutions, [IMAGE, (3,)]),
    "transposed convolution": Kind(UNet, [IMAGE, IMAGE], warns=MOSTLY_EXACT),
    "causal convolutions, weight norm": Kind(CausalConvolutions, [(6, 7), (4, 7)]),
    "LSTM": Kind(lambda: Recurrent(nn.LSTM), [(4, 6), (3,)], warns=MOSTLY_EXACT),
    "GRU": Kind(lambda: Recurrent(nn.GRU), [(4, 6), (3,)], warns=MOSTLY_EXACT),
    "RNN": Kind(lambda: Recurrent(nn.RNN), [(4, 6), (3,)], warns=MOSTLY_EXACT),
    "packed sequences": Kind(
        lambda: Packed(nn.LSTM),
        [(5, 6), (), (3,)],
        integers=[(1, 1, 5)],
        warns="Predictions run eagerly|" + MOSTLY_EXACT,
    ),
    "multi-query attention": Kind(lambda: GroupedAttention(1, fused=False), [(6, 32), (6, 32)]),
    "grouped-query attention": Kind(lambda: GroupedAttention(2, fused=True), [(6, 32), (6, 32)]),
    "cross-attention": Kind(CrossAttention, [(4, 16), (6, 12), (6, 20), (6,), (4, 16)], masks=[3]),
    "transformer": Kind(Transformer, [(6,), (3,)], integers=[(0, 0, 16)]),
    "bags of words": Kind(Bags, [(6,), (3,)], integers=[(0, 0, 16)]),
    "Fourier layer": Kind(FourierLayer, [(6, 8), (3,)], warns="No FLOP formula for aten::_fft_c2c|" + MOSTLY_EXACT),
    "frozen BatchNorm": Kind(Frozen, [IMAGE, (3,)], warns=r"Found 1 module\(s\) in eval mode"),
    "spectral norm": Kind(Spectral, [IMAGE, (3,)]),
    "spectral norm, hook": Kind(lambda: Spectral(old=True), [IMAGE, (3,)]),
    "gradient penalty": Kind(Critic, [IMAGE, (3,)], module=Penalised),
}


def gradient(module: nn.Module) -> Tensor:
    """What ``.grad`` holds, as one vector in double precision; a missing gradient is zero."""
    found = (torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())
    return torch.cat([g.double().flatten() for g in found])


def states(module: nn.Module) -> dict[str, Any]:
    """Copies of parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict().items()}
