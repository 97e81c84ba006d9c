"""What runs on a worker: predictors of one or more number formats, and nothing of the training."""

from __future__ import annotations

import io
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet.base import Job
from lightning_ledger.fleet.following import Changes, follow
from lightning_ledger.fleet.in_process import predict_jobs
from lightning_ledger.fleet.messages import Counted, Reply, encode, encode_error
from lightning_ledger.fleet.recipe import PredictorRecipe
from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.microbatches import shape_key
from lightning_ledger.precision import Lowering
from lightning_ledger.work import Work

Packed = tuple[str, tuple[int, ...], np.ndarray[Any, Any]]


def pack(tensor: Tensor) -> Packed:
    """A tensor's type, shape and bytes: an array, which Ray hands to processes of one machine without a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy()


def unpack(packed: Packed) -> Tensor:
    """The tensor, in memory of its own."""
    dtype, shape, array = packed
    return torch.from_numpy(array.copy()).view(getattr(torch, dtype)).reshape(shape)


def pickled(module: pl.LightningModule, recipe: PredictorRecipe, layout: Layout) -> bytes:
    """Everything a worker needs to make a predictor, tensors apart so that they can be read on another device."""
    from ray import cloudpickle

    buffer = io.BytesIO()
    torch.save((module, recipe, layout), buffer, pickle_module=cloudpickle)
    return buffer.getvalue()


class PredictionWorker:
    """Predicts chunks of batches, on the CPU, with every predictor it was given.

    It answers with sums, numbers and text (``messages.py``), an exception included: nothing that it sends can run.

    Args:
        threads: that torch may use.
        paths: where the training process finds its packages; those of them that a worker lacks are searched last.
    """

    def __init__(self, threads: int, paths: Sequence[str] = ()) -> None:
        torch.set_num_threads(threads)
        sys.path.extend(path for path in paths if path not in sys.path)
        self._predictors: dict[str, _Predictor] = {}
        self._broken: dict[str, Reply] = {}

    def ready(self) -> bool:
        """Answers once the process has started."""
        return True

    def define(self, key: str, content: bytes) -> None:
        """Make a predictor, to be called ``key``; where that fails, every answer says why."""
        try:
            self._predictors[key] = _Predictor(content)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self._broken[key] = encode_error(error, f"The module cannot be loaded on a worker.\n{text}")

    def drop(self, key: str) -> None:
        """Forget a predictor."""
        self._predictors.pop(key, None)
        self._broken.pop(key, None)

    def refresh(self, key: str, version: int, weights: dict[str, Packed], seed: int) -> None:
        """Predict at these weights from now on."""
        if key in self._predictors:
            self._predictors[key].refresh(version, weights, seed)

    def run_eagerly(self, key: str, reason: str) -> bool:
        """Give up captured programs; whether there were any."""
        return key in self._predictors and self._predictors[key].predictor.run_eagerly(reason)

    def predict(
        self,
        key: str,
        jobs: Sequence[Job],
        arguments: Sequence[Any],
        observe: bool,
        total: int,
        changes: Changes,
        uncounted: Sequence[int],
    ) -> Reply:
        """Predict a chunk.

        Args:
            key: of the predictor.
            jobs: of the chunk.
            arguments: the rest of what ``training_step`` takes.
            observe: whether norms and samples are wanted.
            total: jobs of the whole batch.
            changes: in the module, since the last chunk.
            uncounted: indices of micro-batches of whose shape the FLOPs are wanted.
        """
        if key in self._broken:
            return self._broken[key]
        try:
            return self._predictors[key].predict(jobs, arguments, observe, total, changes, uncounted)
        except Exception as error:
            return encode_error(error, "".join(traceback.format_exception(error)))


class _Predictor:
    """A predictor with the module it is of, and what it has counted."""

    def __init__(self, content: bytes) -> None:
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        module, recipe, self._layout = loaded
        plugin = getattr(recipe.context, "__self__", None)
        if isinstance(plugin, MixedPrecision):
            plugin.device = "cpu"
        self._module: pl.LightningModule = module
        self._checks = Work()
        self._version = -1
        self._counted: list[Counted] = []
        self.predictor = recipe.make(module, self._look, self._checked)

    def _look(self, lowering: Lowering, counter: FlopCounter) -> None:
        self._counted.append(Counted(counter, lowering.unlowered))

    def _checked(self, flops: StepFlops, restarted: bool) -> None:
        self._checks += flops.work()

    def refresh(self, version: int, weights: dict[str, Packed], seed: int) -> None:
        parameters = dict(self._module.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in weights)
        with torch.no_grad():
            for name, packed in weights.items():
                parameters[name].copy_(unpack(packed))
        self.predictor.refresh({name: parameters[name] for name in weights}, seed)
        self._version = version

    def predict(
        self,
        jobs: Sequence[Job],
        arguments: Sequence[Any],
        observe: bool,
        total: int,
        changes: Changes,
        uncounted: Sequence[int],
    ) -> Reply:
        follow(self._module, changes)
        self._checks, self._counted = Work(), []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            done = predict_jobs(self.predictor, self._layout, jobs, arguments, observe, total)
        if self._checks:
            done.work["setup/checks"] = self._checks
        counts = {}
        for job in jobs:
            flops = self.predictor.work(shape_key(job.microbatch.data))
            if job.microbatch.index in uncounted and flops is not None:
                counts[job.microbatch.index] = flops
        return encode(self._version, done, counts, self._counted, [str(w.message) for w in warned])
