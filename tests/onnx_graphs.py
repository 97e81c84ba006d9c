"""Functions and captured programs as ONNX models, run by ONNX Runtime beside torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import onnxruntime
import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ledger.engines.decompositions import decompositions
from lightning_ledger.engines.export import ExportedProgram, export_program, translate
from lightning_ledger.engines.session import session
from lightning_ledger.microbatches import tensors_apart
from lightning_ledger.precision import Lowering
from lightning_ledger.program import GradientProgram, ShadowBuffers, capture, trainable
from tests.program_cases import batch_of


def exported_function(function: Callable[..., Tensor], *inputs: Tensor) -> ExportedProgram:
    """A function of tensors as a model."""
    graph = make_fx(functionalize(lambda *x: [function(*x)]), decompositions())(*inputs)
    names = tuple(f"x{number}" for number in range(len(inputs)))
    return ExportedProgram(translate(graph, names, ["y"]), names, ("y",), ())


def in_onnxruntime(function: Callable[..., Tensor], *inputs: Tensor, threads: int = 1) -> Tensor:
    """What a function gives in ONNX Runtime."""
    return session(exported_function(function, *inputs), threads)(*inputs)[0]


class Captured:
    """A captured training step, and the same as a model.

    Args:
        module: its weights and the shapes of its example batch are what is captured.
        format: of the products.
        rounding: of the products.
        export: make the model at all.
    """

    def __init__(
        self, module: pl.LightningModule, format: str = "fp32", rounding: str = "nearest", export: bool = True
    ) -> None:
        self.module = module
        self.lowering = Lowering(format, rounding)
        self.weights = trainable(module)
        self.buffers = ShadowBuffers(module)
        self.lowering.refresh(self.weights, 0)
        batch = batch_of(module, 0)
        self.program: GradientProgram = capture(module, self.weights, self.buffers, (batch, 0), 1, self.lowering)
        if export:
            self.exported = export_program(self.program, self.inputs(batch, 1), list(self.buffers.fresh()))

    def inputs(self, batch: Any, seed: int) -> list[Tensor]:
        apart = tensors_apart(batch)
        assert apart is not None
        others = [*self.buffers.fresh().values()]
        return [*self.program.inputs(self.weights, others, apart[0]), *self.program.noise(seed, torch.device("cpu"))]

    def in_torch(self, batch: Any, seed: int) -> list[Tensor]:
        """The loss and the gradients that there are."""
        others = [*self.buffers.fresh().values()]
        loss, gradients = self.program(self.weights, others, batch, seed)
        return [loss, *(g for g in gradients.values() if g is not None)]

    def in_onnxruntime(self, batch: Any, seed: int, run: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
        """The same from a session, under the same seed."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return list(run(*self.inputs(batch, seed)))


def apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest relative difference among the loss and the gradients, each by itself."""
    pairs = zip(a, b, strict=True)
    return max(float((x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-12)) for x, y in pairs)


def session_by_hand(model: bytes) -> Any:
    """A session with no options of ours."""
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
