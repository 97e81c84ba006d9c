"""What a worker answers: text for numbers, raw bytes for tensors, and no code.

A reply is a pair. Its text is JSON, its bytes are in the safetensors format, which has names, types, shapes and numbers
and nothing that could run. The driver takes a reply for what it claims to be only after it has looked at all of it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet.base import Job, Predictions
from lightning_ledger.flops import FlopCounter, StepFlops
from lightning_ledger.work import Work

Reply = tuple[str, bytes]

# In-process predictions book under these; a worker may book under nothing else.
_ACCOUNTS = ("fleet/prediction", "fleet/control", "waste/lost_prediction", "setup/checks")


class BadReplyError(ValueError):
    """A worker's answer is not what was asked for."""


class WorkerError(RuntimeError):
    """What a worker was asked for raised an exception there.

    Attributes:
        memory: whether it ran out of memory.
    """

    def __init__(self, text: str, memory: bool = False) -> None:
        super().__init__(text)
        self.memory = memory


class Counted(NamedTuple):
    """What the first prediction on a shape showed.

    Attributes:
        counter: its FLOPs.
        unlowered: why products stayed in high precision, by layer and product.
    """

    counter: FlopCounter
    unlowered: Mapping[tuple[str, str], str]


def encode(
    version: int,
    predictions: Predictions,
    counts: Mapping[int, StepFlops],
    counted: Sequence[Counted],
    warnings: Sequence[str],
) -> Reply:
    """A worker's answer.

    Args:
        version: of the weights that were used.
        predictions: what was predicted.
        counts: FLOPs of one prediction, by the index of a micro-batch of that shape.
        counted: what first predictions showed.
        warnings: what Python warned of meanwhile.
    """
    p = predictions
    tensors = {f"control/{name}": g for name, g in p.control.items() if g is not None}
    tensors |= {f"rest/{name}": g for name, g in p.rest.items() if g is not None}
    tensors |= {f"sample/{index}": sample for index, sample in p.samples.items()}
    if p.squared_norms is not None:
        tensors["squared_norms"] = p.squared_norms
    text = {
        "version": version,
        "losses": p.losses,
        "skipped": p.skipped,
        "work": {account: work.to_dict() for account, work in p.work.items()},
        "counts": {index: [dict(flops.forward), dict(flops.backward)] for index, flops in counts.items()},
        "counted": [
            {
                "forward": dict(one.counter.counts().forward),
                "backward": dict(one.counter.counts().backward),
                "lowered": one.counter.lowered,
                "uncounted": sorted(one.counter.uncounted),
                "unlowered": [[*place, why] for place, why in one.unlowered.items()],
            }
            for one in counted
        ],
        "warnings": list(warnings),
    }
    return json.dumps(text), safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})


def encode_error(error: BaseException, text: str) -> Reply:
    """The answer of a worker whose work raised an exception."""
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return json.dumps({"error": text, "memory": memory}), b""


class Decoded:
    """A reply that was looked at.

    Args:
        reply: as it came.
        version: of the weights that were asked for.
        jobs: that were asked for.
        observe: whether norms and samples were.
        layout: of the trainable parameters.
        parameters: by name; they have the shapes and types that gradients must have.

    Attributes:
        predictions: what it holds.
        counts: FLOPs of one prediction, by the index of a micro-batch of that shape.
        counted: what first predictions showed.
        warnings: what Python warned of on the worker.
        bytes: of its tensors.
        finite: whether all of its gradients and losses are finite.

    Raises:
        BadReplyError: if it is not an answer to that.
        WorkerError: if it tells of an exception.
    """

    def __init__(
        self,
        reply: Any,
        version: int,
        jobs: Sequence[Job],
        observe: bool,
        layout: Layout,
        parameters: Mapping[str, Tensor],
    ) -> None:
        if not (isinstance(reply, tuple) and [type(part) for part in reply] == [str, bytes]):
            raise BadReplyError(f"it is {type(reply).__name__}, not a text and bytes")
        try:
            text = json.loads(reply[0])
            if "error" in text:
                raise WorkerError(str(text["error"]), bool(text.get("memory")))
            tensors = safetensors.torch.load(reply[1])
            self._read(text, tensors, version, jobs, observe, layout, parameters)
        except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
            if isinstance(error, BadReplyError):
                raise
            raise BadReplyError(f"it cannot be read ({type(error).__name__}: {error})") from error

    def _read(
        self,
        text: dict[str, Any],
        tensors: dict[str, Tensor],
        version: int,
        jobs: Sequence[Job],
        observe: bool,
        layout: Layout,
        parameters: Mapping[str, Tensor],
    ) -> None:
        if text["version"] != version:
            raise BadReplyError(f"it was made at version {text['version']} of the weights, not {version}")
        losses = {int(index): float(loss) for index, loss in text["losses"].items()}
        skipped = [int(index) for index in text["skipped"]]
        asked = {job.microbatch.index: job for job in jobs}
        if sorted([*losses, *skipped]) != sorted(asked):
            raise BadReplyError(f"it is about micro-batches {sorted([*losses, *skipped])}, not {sorted(asked)}")
        work = {str(account): Work.from_dict(fields) for account, fields in text["work"].items()}
        if unknown := sorted(set(work) - set(_ACCOUNTS)):
            raise BadReplyError(f"it books work under {unknown}")
        sampled = {i for i in losses if observe and (asked[i].control or asked[i].sample)}
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            f"sample/{i}": (tuple(layout.inflation.shape), layout.inflation.dtype) for i in sampled
        }
        if observe and not skipped:
            expected["squared_norms"] = ((len(jobs), len(layout.layers)), torch.float64)
        if missing := sorted(set(expected) - set(tensors)):
            raise BadReplyError(f"it lacks {missing}")
        for kind in ("control/", "rest/"):
            expected |= {kind + name: (tuple(p.shape), p.dtype) for name, p in parameters.items()}
        for name, tensor in tensors.items():
            found = tuple(tensor.shape), tensor.dtype
            if found != expected.get(name):
                wanted = "nothing of that name" if name not in expected else "{}, {}".format(*expected[name])
                raise BadReplyError(f"{name} has {found[0]}, {found[1]}; expected is {wanted}")
        self.counts = {int(i): StepFlops(*map(_by_format, parts)) for i, parts in text["counts"].items()}
        self.counted = [_counted(one) for one in text["counted"]]
        self.warnings = [str(warning) for warning in text["warnings"]]
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.finite = all(map(math.isfinite, losses.values())) and all(
            bool(torch.isfinite(tensor).all()) for tensor in tensors.values()
        )
        device = layout.inflation.device

        def gradients(kind: str) -> dict[str, Tensor | None]:
            return {n: tensors[kind + n].to(p.device) for n, p in parameters.items() if kind + n in tensors}

        self.predictions = Predictions(
            control=gradients("control/"),
            rest=gradients("rest/"),
            losses={i: losses[i] for i in asked if i in losses},
            squared_norms=tensors.get("squared_norms"),
            samples={i: tensors[f"sample/{i}"].to(device) for i in asked if i in sampled},
            work=work,
            skipped=[i for i in asked if i in set(skipped)],
        )


def _by_format(counts: Mapping[str, Any]) -> dict[str, int]:
    return {str(fmt): int(n) for fmt, n in counts.items()}


def _counted(fields: Mapping[str, Any]) -> Counted:
    counter = FlopCounter(uncounted={str(name) for name in fields["uncounted"]}, lowered=int(fields["lowered"]))
    for phase in ("forward", "backward"):
        counter._counts[phase] = Counter(_by_format(fields[phase]))
    unlowered = {(str(layer), str(product)): str(why) for layer, product, why in fields["unlowered"]}
    return Counted(counter, unlowered)
