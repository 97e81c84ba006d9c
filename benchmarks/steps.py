"""The steps that the benchmark of programs compares: exact ones, compiled ones, captured programs."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.machine import seconds
from examples.gpt import GPT
from lightning_ledger.flops import EXTRA_FORMULAS, FlopCounter
from lightning_ledger.microbatches import shape_key, tensors_apart
from lightning_ledger.precision import Lowering, get_format
from lightning_ledger.predictors import EagerPredictor
from lightning_ledger.predictors.captured import difference
from lightning_ledger.program import capture, trainable
from lightning_ledger.program.compilation import compile_program

EXACT = ("exact fp32", "exact bf16-mixed")
COMPILED = ("torch.compile fp32", "torch.compile bf16-mixed")
PROGRAMS = (
    "captured fp32",
    "compiled bf16",
    "compiled int8",
    "compiled int8:attention=bf16",
    "compiled int8:grad_weight=bf16,attention=bf16",
)
ROWS = (*EXACT, *COMPILED, *PROGRAMS)


@dataclass(frozen=True)
class Model:
    """A model and one micro-batch for it.

    Attributes:
        build: makes the module and the micro-batch.
        items: in the micro-batch.
        unit: what they are.
    """

    build: Callable[[], tuple[pl.LightningModule, Any]]
    items: int
    unit: str = "tokens"


def gpt(layers: int, heads: int, width: int, vocabulary: int = 256, context: int = 256, samples: int = 4) -> Model:
    """A GPT and a micro-batch of random tokens."""

    def build() -> tuple[pl.LightningModule, Any]:
        torch.manual_seed(0)
        module = GPT(layers=layers, heads=heads, width=width, vocabulary=vocabulary, context=context)
        return module, torch.randint(0, vocabulary, (samples, context + 1))

    return Model(build, samples * context)


def convnet(width: int, blocks: int, size: int, samples: int) -> Model:
    """A residual network and a micro-batch of random images."""

    def build() -> tuple[pl.LightningModule, Any]:
        from examples.convnet import Denoiser

        torch.manual_seed(0)
        images = torch.randn(2, samples, 3, size, size)
        return Denoiser(width=width, blocks=blocks), (images[0], images[1])

    return Model(build, samples, "samples")


MODELS = {
    "gpt 10M": gpt(layers=6, heads=6, width=384),
    "gpt 33M": gpt(layers=10, heads=8, width=512),
    "gpt 124M": gpt(layers=12, heads=12, width=768, vocabulary=50257, context=1024, samples=1),
    "convnet 5M": convnet(width=128, blocks=16, size=32, samples=4),  # 4 x 16 x 16 cells
}


@dataclass
class Step:
    """One row, ready to run.

    Attributes:
        run: forward and backward pass of the micro-batch.
        plain: the same products in the same formats, operation by operation, for counting and timing them.
        fresh: called before a lap with new weights: whatever was made of the old ones is dropped.
        formats: FLOPs by the number format that they are declared to run in; None where that is how they run.
        apart: relative difference of a program's gradient from the eager predictor's; None for an exact step.
    """

    run: Callable[[], object]
    plain: Callable[[], object]
    fresh: Callable[[], object] = lambda: None
    formats: Mapping[str, int] | None = None
    apart: float | None = None

    def lap(self) -> float:
        """Seconds of one step."""
        start = seconds()
        self.run()
        return seconds() - start


def prepare(row: str, module: Any, batch: Any) -> Step:
    """The step of a row.

    Args:
        row: "exact FORMAT" or "torch.compile FORMAT", of fp32 and bf16-mixed; "captured SPEC" or "compiled SPEC",
            of any spec that ``GradientPrediction(format=...)`` takes.
        module: an example's module, with its loss as a method.
        batch: a micro-batch.

    Raises:
        ValueError: there is no such row.
        NotCapturable, NotCompilable: with the reason.
    """
    engine, _, spec = row.partition(" ")
    if row in EXACT + COMPILED:
        return _exact(module, batch, compiled=row in COMPILED, mixed=spec == "bf16-mixed")
    if engine not in ("captured", "compiled"):
        raise ValueError(
            f"row={row!r} is not one of {', '.join(map(repr, EXACT + COMPILED))}, nor 'captured FORMAT' or "
            "'compiled FORMAT', such as 'compiled int8:attention=bf16'."
        )
    return _program(module, batch, spec, compiled=engine == "compiled")


def _exact(module: Any, batch: Any, compiled: bool, mixed: bool) -> Step:
    weights = list(trainable(module).values())

    def step(loss_of: Callable[[Any], Tensor]) -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = loss_of(batch)
        return torch.autograd.grad(loss, weights)

    loss_of = torch.compile(module._loss) if compiled else module._loss
    return Step(lambda: step(loss_of), lambda: step(module._loss))


def _program(module: pl.LightningModule, batch: Any, format: str, compiled: bool) -> Step:
    lowering, weights = Lowering(format, module=module), trainable(module)
    eager = EagerPredictor(module, lowering)
    eager.refresh(weights)
    others = list(eager.buffers.fresh().values())
    program = capture(module, weights, eager.buffers, (batch, 0), 0, lowering)
    if compiled:
        apart = tensors_apart(batch)
        assert apart is not None
        inputs = program.inputs(weights, others, apart[0])
        compile_program(program, [*inputs, *program.noise(0, inputs[0].device)])
    expected = eager.predict(batch, 0, 0)
    assert expected is not None, "these models skip no batch"
    flops = eager.work(shape_key(batch))
    assert flops is not None
    return Step(
        run=lambda: program(weights, others, batch, 0),
        plain=lambda: eager.predict(batch, 0, 0),
        fresh=lambda: eager.refresh(weights),
        formats=flops.by_format(),
        apart=difference(program(weights, others, batch, 0), expected),
    )


class ProductClock(TorchDispatchMode):
    """Adds up the seconds spent in matrix products, convolutions and attention, at the shapes and data that they have.

    Attributes:
        seconds: so far.
        calls: how many there were.
    """

    seconds = 0.0
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = seconds()
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry or func._overloadpacket.__name__ in EXTRA_FORMULAS:
            self.seconds += seconds() - start
            self.calls += 1
        return result


class Products(NamedTuple):
    """A step's products: FLOPs by the format of the operands that the kernels get, seconds, and how many there are."""

    flops: dict[str, int]
    seconds: float
    calls: int


def products(step: Step, repeats: int = 2) -> Products:
    """What a step's products do and take, run operation by operation.

    Args:
        step: whose plain form runs.
        repeats: the fastest counts.
    """
    fastest = float("inf")
    for _ in range(repeats):
        clock, counter = ProductClock(), FlopCounter()
        with clock, counter:  # the counter takes composite operations apart: their products reach the clock
            step.plain()
        fastest = min(fastest, clock.seconds)
    return Products(counter.counts().by_format(), fastest, clock.calls)


def native_share(declared: Mapping[str, int], executed: Mapping[str, int]) -> float:
    """The share of FLOPs that run in the machine's instructions for the format they are declared to run in.

        sum over native formats of min(declared, executed) / sum of declared

    Args:
        declared: FLOPs by format name.
        executed: FLOPs by the format of the operands that the kernels get.

    Example:
        >>> native_share({"fp32": 100}, {"fp32": 100})
        1.0
        >>> native_share({"mxfp4": 75, "fp32": 25}, {"fp32": 100})
        0.25
    """
    native = (n for n in declared if get_format(n).is_native("cpu"))
    return sum(min(declared[n], executed.get(n, 0)) for n in native) / sum(declared.values())


def peak_bytes(step: Step) -> int:
    """The most memory that a step's tensors take at a time, with what it makes anew of its weights; not the weights.

    From torch's profiler, which sees each allocation of torch's own allocator: compiled code's too, kernels' private
    workspaces not. Other rows in the same process do not disturb it, as they would the process's own high-water mark.
    """
    step.fresh()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return max((e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]"), default=0)


def refresh_seconds(step: Step, usual: Sequence[float], repeats: int = 2) -> float:
    """How much longer a step with new weights takes: it rounds them, once for all micro-batches of a batch."""
    laps = []
    for _ in range(repeats):
        step.fresh()
        laps.append(step.lap())
    return max(0.0, statistics.median(laps) - statistics.median(usual))
