"""The captured predictor: one graph per input shape, checked against the eager predictor."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_ledger.engines import require_onnx, run_in_onnxruntime
from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.microbatches import shape_key, tensors_apart
from lightning_ledger.precision import Lowering, derive_seed
from lightning_ledger.predictors.base import GradientPredictor, Prediction
from lightning_ledger.predictors.eager import EagerPredictor
from lightning_ledger.program import Context, Deliver, GradientProgram, NotCapturable, capture
from lightning_ledger.program.compilation import NotCompilable, compile_program

Engine = Literal["eager", "captured", "compiled", "onnxruntime"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

# How far a program's loss and gradient may be from the eager predictor's, relative to their size. A captured program
# runs the same kernels on the same numbers. Other engines add in another order, and a number near the middle between
# two of a coarse format then rounds to the other neighbour: .02 to .03 in a compiled int8 GPT of 33M parameters.
BOUNDS: dict[Engine, float] = {"captured": 1e-5, "compiled": 0.1, "onnxruntime": 0.1}
UNROUNDED_BOUND = 1e-3
# A program is compared at its uses number 1, 2, 4, 8, ... and, from this one on, at each multiple of it.
CHECK_EVERY = 512
MAX_PROGRAMS = 32


@dataclass
class _Entry:
    """What is known of one input shape.

    Attributes:
        name: of the shape, the same in every process.
        program: once captured.
        engine: that runs it.
        first_refresh: when it was first seen.
        resumed: whether an earlier run, continued here, had captured it.
    """

    name: int
    first_refresh: int
    resumed: bool
    program: GradientProgram | None = None
    engine: Engine = "captured"


class ProgramPredictor(GradientPredictor):
    """Captures the training step once per input shape and runs the captured program: the default.

    A program is compared with the eager predictor when it is first used and on a schedule (uses 2, 4, 8, ..., then
    every 512). Where the step cannot be captured, or the two differ beyond ``BOUNDS``, the eager predictor takes over,
    with one warning that says why. The first shape is captured at once, others when they come back in a later step:
    a shape seen once is not worth it.

    Args:
        module: the user's module, unmodified.
        lowering: the number format of the matrix products.
        context: the Trainer's precision context.
        engine: "captured": the graph as it is, bit for bit the eager predictor's numbers; "compiled": through
            TorchInductor, within ``BOUNDS``; "onnxruntime": in ONNX Runtime, within ``BOUNDS``; "eager": no program at
            all.
        on_counted: called with the counter of the first prediction of each shape.
        on_checked: called with the work of every pass that serves to capture or to compare, and whether a restart made
            it necessary.
        uses: how often each shape was predicted, carried over restarts; shared and kept up to date.

    Attributes:
        captures: programs captured so far.
        compilations: programs compiled, or exported to another engine, so far.
        why_eager: why programs were given up; empty while they were not.

    Example:
        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> model = BoringModel()
        >>> predictor = ProgramPredictor(model, Lowering("int8"))
        >>> predictor.refresh(dict(model.named_parameters()))
        >>> loss, gradients = predictor.predict(torch.ones(4, 32), 0, 0)
        >>> sorted(gradients), predictor.captures
        (['layer.bias', 'layer.weight'], 1)
    """

    def __init__(
        self,
        module: pl.LightningModule,
        lowering: Lowering,
        context: Context = contextlib.nullcontext,
        engine: Engine = "captured",
        on_counted: Callable[[FlopCounter], None] = lambda counter: None,
        on_checked: Callable[[StepFlops, bool], None] = lambda flops, restarted: None,
        uses: dict[int, int] | None = None,
    ) -> None:
        if engine == "onnxruntime":
            require_onnx()
        self.module = module
        self.lowering = lowering
        self.engine: Engine = engine
        self.captures = self.compilations = 0
        self.why_eager = ""
        self._context = context
        self._on_checked = on_checked
        self._eager = EagerPredictor(module, lowering, context, on_counted)
        self._uses = {} if uses is None else uses
        self._continues = bool(self._uses)  # an earlier run, in which the first shape was captured
        self._entries: dict[Hashable, _Entry] = {}
        self._weights: Mapping[str, Tensor] = {}
        self._refreshes = 0

    def refresh(self, weights: Mapping[str, Tensor], seed: int = 0) -> None:
        if list(weights) != list(self._weights):
            self._entries.clear()  # another trainable set has another backward pass
        self._weights = dict(weights)
        self._eager.refresh(weights, seed)
        self._refreshes += 1

    def work(self, shape: Hashable, skipped: bool = False) -> StepFlops | None:
        return self._eager.work(shape, skipped)

    def run_eagerly(self, reason: str) -> bool:
        if self.engine == "eager":
            return False
        self.engine, self.why_eager = "eager", reason
        self._entries.clear()
        rank_zero_warn(
            f"Predictions run eagerly from now on: {reason}. They are right, but slower than a captured program. "
            "GradientPrediction(engine='eager') asks for this and silences the warning."
        )
        return True

    def predict(self, microbatch: Any, seed: int, *arguments: Any, loss_scale: float = 1.0) -> Prediction | None:
        entry = self._entry(microbatch)
        if entry is None:
            return self._eager.predict(microbatch, seed, *arguments, loss_scale=loss_scale)
        use = self._count(entry)
        if entry.program is not None and not _is_due(use):
            prediction = self._run(entry.program, microbatch, seed, loss_scale)
            return prediction or self._eager.predict(microbatch, seed, *arguments, loss_scale=loss_scale)
        eager = self._eager.predict(microbatch, seed, *arguments, loss_scale=loss_scale)
        if eager is None:
            return None  # whoever asked knows what else was skipped, and may ask again without programs
        restarted = entry.program is None and entry.resumed
        if entry.program is None:
            self._capture(entry, microbatch, seed, arguments)
        if entry.program is not None:
            self._compare(entry, entry.program, eager, microbatch, seed, loss_scale, restarted and not _is_due(use))
        return eager

    def predict_into(
        self, deliver: Deliver, microbatch: Any, seed: int, *arguments: Any, loss_scale: float = 1.0
    ) -> Tensor | None:
        entry = self._entry(microbatch)
        if entry is None or entry.program is None or _is_due(self._uses.get(entry.name, 0) + 1):
            return super().predict_into(deliver, microbatch, seed, *arguments, loss_scale=loss_scale)
        self._count(entry)
        delivered: set[str] = set()

        def passed_on(name: str, gradient: Tensor) -> None:
            delivered.add(name)
            deliver(name, gradient)

        try:
            return entry.program.run(self._weights, self._others(), microbatch, seed, passed_on, loss_scale)
        except Exception as error:
            self._failed(error)
        # What the program has delivered cannot be taken back: the training step gives the rest.
        return super().predict_into(
            lambda name, gradient: None if name in delivered else deliver(name, gradient),
            microbatch,
            seed,
            *arguments,
            loss_scale=loss_scale,
        )

    def _entry(self, microbatch: Any) -> _Entry | None:
        """The program to use; None to predict eagerly."""
        if self.engine == "eager":
            return None
        apart = tensors_apart(microbatch)
        if apart is None:
            self.run_eagerly(
                f"the batch, a {type(microbatch).__name__}, holds arrays or objects that hide their tensors"
            )
            return None
        # A layer in evaluation mode runs other operations.
        key = (apart[2], tuple(layer.training for layer in self.module.modules()))
        entry = self._entries.get(key)
        if entry is None:
            name = derive_seed(key, tuple(self._weights))
            entry = _Entry(name, self._refreshes, resumed=name in self._uses)
            if len(self._entries) < 64 * MAX_PROGRAMS:
                self._entries[key] = entry
        if entry.program is not None:
            return entry
        captured = sum(e.program is not None for e in self._entries.values())
        is_first = captured == 0 and not self._continues
        is_worth_it = is_first or entry.resumed or entry.first_refresh < self._refreshes
        return entry if is_worth_it and captured < MAX_PROGRAMS else None

    def _count(self, entry: _Entry) -> int:
        use = self._uses[entry.name] = self._uses.get(entry.name, 0) + 1
        return use

    def _others(self) -> list[Tensor]:
        frozen = [p for name, p in self.module.named_parameters() if name not in self._weights]
        return [*frozen, *self._eager.buffers.fresh().values()]

    def _run(self, program: GradientProgram, microbatch: Any, seed: int, loss_scale: float) -> Prediction | None:
        """The program's prediction; None where it fails, and then it has run for the last time."""
        try:
            return program(self._weights, self._others(), microbatch, seed, loss_scale)
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        """Give up programs after one failed, but not for lack of memory: the training step needs more."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        lines = str(error).strip().splitlines() or [""]
        self.run_eagerly(
            f"the captured program failed with {type(error).__name__}: {lines[0]}. A shape that depends on data, such "
            "as the number of elements that a mask selects, is fixed at capture"
        )

    def _capture(self, entry: _Entry, microbatch: Any, seed: int, arguments: tuple[Any, ...]) -> None:
        start = time.perf_counter()
        try:
            entry.program = capture(
                self.module,
                self._weights,
                self._eager.buffers,
                (microbatch, *arguments),
                seed,
                self.lowering,
                self._context,
            )
        except NotCapturable as error:
            self.run_eagerly(f"the training step could not be captured as a program: {error}")
            return
        self._charge(microbatch, entry.resumed)
        self.captures += 1
        rank_zero_info(
            f"Captured the training step in {time.perf_counter() - start:.1f} s: "
            f"{len(entry.program.graph.graph.nodes):,} operations."
        )
        if self.engine in ("compiled", "onnxruntime"):
            self._compile(entry.program, microbatch, seed)
        entry.engine = self.engine

    def _compile(self, program: GradientProgram, microbatch: Any, seed: int) -> None:
        apart = tensors_apart(microbatch)
        assert apart is not None
        try:
            inputs = program.inputs(self._weights, self._others(), apart[0])
            build = compile_program if self.engine == "compiled" else run_in_onnxruntime
            build(program, [*inputs, *program.noise(seed, inputs[0].device)])
        except NotCompilable as error:
            wanted = "compiled" if self.engine == "compiled" else "in ONNX Runtime"
            self.engine = "captured"
            rank_zero_warn(f"Predictions run as a captured graph, not {wanted}: {error}.")
            return
        self.compilations += 1

    def _compare(
        self,
        entry: _Entry,
        program: GradientProgram,
        eager: Prediction,
        microbatch: Any,
        seed: int,
        loss_scale: float,
        restarted: bool,
    ) -> None:
        """Fall back to the eager predictor where the program's prediction is another."""
        unrounded = all(fmt.name == "fp32" for fmt in self.lowering.formats.distinct)
        bound = min(BOUNDS[entry.engine], UNROUNDED_BOUND if unrounded else math.inf)
        found = Difference(eager)
        try:
            found.loss = program.run(self._weights, self._others(), microbatch, seed, found, loss_scale)
        except Exception as error:
            self._failed(error)
            return
        finally:
            self._charge(microbatch, restarted)
        if not (apart := found.relative()) <= bound:
            self.run_eagerly(
                f"the captured program's gradient differs from the training step's by {apart:.2g} of its size, more "
                f"than {bound:g}. Python state that the step reads (batch_idx, global_step, an attribute, NumPy's "
                "random numbers) is fixed at capture, and so are the random numbers of a checkpointed layer"
            )

    def _charge(self, microbatch: Any, restarted: bool) -> None:
        if (flops := self.work(shape_key(microbatch))) is not None:
            self._on_checked(flops, restarted)


def _is_due(use: int) -> bool:
    """Whether a program's use of this number is compared with the eager predictor.

    >>> [use for use in range(1, 1600) if _is_due(use)]
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536]
    """
    return use & (use - 1) == 0 if use < CHECK_EVERY else use % CHECK_EVERY == 0


class Difference:
    """How far a prediction, delivered gradient by gradient, is from a reference.

    Args:
        reference: loss and gradients.

    Attributes:
        loss: the prediction's.
    """

    def __init__(self, reference: Prediction) -> None:
        self._reference_loss, self._missing = reference[0], dict(reference[1])
        self._apart = self._norm = 0.0
        self._extra = False
        self.loss: Tensor | None = None

    def __call__(self, name: str, gradient: Tensor) -> None:
        """Take a gradient."""
        expected = self._missing.pop(name, None)
        if expected is None:
            self._extra = True
            return
        self._apart += float((gradient.float() - expected.float()).norm()) ** 2
        self._norm += float(expected.float().norm()) ** 2

    def relative(self) -> float:
        """``max(|a - b| / |b|)`` of the losses and of the whole gradients.

        Returns:
            The relative difference; infinite where one has a gradient that the other lacks; 0 where the reference is
            not finite, since there is nothing to compare with.
        """
        reference = float(self._reference_loss)
        if not (math.isfinite(self._norm) and math.isfinite(reference)):
            return 0.0
        if self.loss is None or self._extra or any(g is not None for g in self._missing.values()):
            return math.inf
        tiny = 1e-30
        gradients = math.sqrt(self._apart / (self._norm + tiny))
        return max(gradients, abs(float(self.loss) - reference) / (abs(reference) + tiny))


def difference(a: Prediction, b: Prediction) -> float:
    """How far a prediction is from a reference; see :meth:`Difference.relative`."""
    found = Difference(b)
    found.loss = a[0]
    for name, gradient in a[1].items():
        if gradient is not None:
            found(name, gradient)
    return found.relative()
