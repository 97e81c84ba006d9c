"""Predictions on the workers of a Ray cluster, while the training process runs its exact passes.

A batch's jobs are cut into chunks, as many as there are workers, by their number alone; each worker sums its chunk and
answers with two sums, so that what comes back is no larger than two gradients, whatever the batch. A chunk that is lost
is predicted again elsewhere, from the same weights and seeds, which gives the same numbers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet.base import Fleet, FleetLost, Job, Predictions
from lightning_ledger.fleet.chunks import chunks, merge, tensor_bytes
from lightning_ledger.fleet.cluster import Cluster, Worker, require_ray
from lightning_ledger.fleet.following import Following
from lightning_ledger.fleet.messages import BadReplyError, Decoded, WorkerError
from lightning_ledger.fleet.recipe import PredictorRecipe
from lightning_ledger.fleet.settings import FleetBackend, Observers, RaySettings
from lightning_ledger.fleet.worker import pack, pickled
from lightning_ledger.flops import StepFlops
from lightning_ledger.microbatches import shape_key
from lightning_ledger.program import trainable
from lightning_ledger.work import Work, add_to

# So often is a chunk given to a worker before the fleet counts as lost.
MAX_ATTEMPTS = 4


class RayBackend(FleetBackend):
    """The workers of one run.

    Args:
        cluster: that they are on; started.
        module: that is trained.
        deadline: seconds that a worker may take for a chunk.
    """

    def __init__(self, cluster: Cluster, module: pl.LightningModule, deadline: float) -> None:
        self.cluster = cluster
        self._module = module
        self._deadline = deadline

    @classmethod
    def start(cls, settings: RaySettings, module: pl.LightningModule) -> RayBackend:
        """Reach or start a cluster, with workers to predict this module's gradients."""
        held = sum(p.nbytes for p in module.parameters())
        # Two versions of the weights, two sums from each worker, and room for batches.
        store = 256 * 2**20 + 2 * held * (settings.workers + 1)
        cluster = Cluster(settings.workers, settings.threads, settings.address, store, settings.retry_every)
        cluster.start()
        return cls(cluster, module, settings.deadline)

    def fleet(self, recipe: PredictorRecipe, layout: Layout, observers: Observers) -> RayFleet:
        return RayFleet(self.cluster, self._module, recipe, layout, observers, self._deadline)

    def available(self) -> bool:
        return self.cluster.available()

    def close(self) -> None:
        self.cluster.stop()


@dataclass(eq=False)
class _Chunk:
    """A part of a batch on its way.

    Attributes:
        place: among the chunks.
        jobs: as they are sent.
        worker: that has it.
        ends: when the worker must have answered.
        attempts: workers that were given it.
        lost: attempts whose work is lost.
        doubtful: an answer that was not finite, and who gave it.
    """

    place: int
    jobs: Sequence[Job]
    worker: Worker | None = None
    ends: float = 0.0
    attempts: int = 0
    lost: int = 0
    doubtful: tuple[Worker, Decoded] | None = None


@dataclass
class _Round:
    """A batch on its way.

    Attributes:
        arguments: the rest of what ``training_step`` takes.
        observe: whether norms and samples are wanted.
        total: its jobs.
        look: at the module, when it was sent.
        epoch: of the cluster, then.
        pending: chunks by Ray's reference to their answers.
        done: answers by place.
        work: billed besides what answers tell.
    """

    arguments: Sequence[Any]
    observe: bool
    total: int
    look: int
    epoch: int
    pending: dict[Any, _Chunk] = field(default_factory=dict)
    done: dict[int, Decoded] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)


class RayFleet(Fleet):
    """One number format's predictions on a cluster's workers.

    Args:
        cluster: started.
        module: whose gradients; workers are sent a copy, once.
        recipe: of the predictor.
        layout: names the layers and the sampled coordinates.
        observers: told what predictors did; programs are captured by each worker for itself.
        deadline: seconds that a worker may take for a chunk.
    """

    def __init__(
        self,
        cluster: Cluster,
        module: pl.LightningModule,
        recipe: PredictorRecipe,
        layout: Layout,
        observers: Observers | None = None,
        deadline: float = 600.0,
    ) -> None:
        self._cluster = cluster
        self._ray = require_ray()
        self._module = module
        self._layout = layout
        self._observers = observers or Observers()
        self._deadline = deadline
        self._key = uuid.uuid4().hex
        self._following = Following(module)
        self._version = 0
        self._counts: dict[Hashable, StepFlops] = {}
        self._told: set[str] = set()
        self._round: _Round | None = None
        try:
            content = pickled(module, recipe, layout)
        except Exception as error:
            raise TypeError(
                f"{type(module).__qualname__} cannot be sent to Ray's workers, because something in it cannot be "
                f"pickled ({type(error).__name__}: {error}). Drop it in __getstate__, or predict with "
                "fleet='in_process'."
            ) from error
        cluster.define(self._key, content)

    def close(self) -> None:
        self._cluster.drop(self._key)

    def work(self, shape: Hashable) -> StepFlops | None:
        return self._counts.get(shape)

    def refresh(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Work]:
        self._version += 1
        packed = {name: pack(w) for name, w in weights.items()}
        self._cluster.check()
        try:
            sent = self._cluster.refresh(self._key, self._version, packed, seed)
        except self._ray.exceptions.RayError as error:
            raise self._cluster.lose(_first_line(error)) from error
        return {"transfer/weights": Work(bytes=sent)}

    def run_eagerly(self, reason: str) -> bool:
        return self._cluster.run_eagerly(self._key, reason)

    # --------------------------------------------------------------------------------------------------------- submit

    def submit(self, jobs: Sequence[Job], arguments: Sequence[Any], observe: bool) -> None:
        first = self._version == 1 and not self._counts
        workers = self._cluster.ready(everyone=first)
        sent = [replace(j, microbatch=replace(j.microbatch, data=_on_cpu(j.microbatch.data))) for j in jobs]
        batch = _Round([_on_cpu(a) for a in arguments], observe, len(jobs), self._following.look(), self._cluster.epoch)
        self._round = batch
        self._cluster.check()
        for place, part in enumerate(chunks(sent, self._cluster.size)):
            self._send(batch, _Chunk(place, part), workers[place % len(workers)])

    def _send(self, batch: _Round, chunk: _Chunk, worker: Worker) -> None:
        shapes = {shape_key(job.microbatch.data): job.microbatch.index for job in chunk.jobs}
        uncounted = [index for shape, index in shapes.items() if shape not in self._counts]
        changes = self._following.since(worker.seen.get(self._key, 0))
        answer = worker.actor.predict.remote(
            self._key, chunk.jobs, batch.arguments, batch.observe, batch.total, changes, uncounted
        )
        worker.seen[self._key] = batch.look
        worker.busy += 1
        chunk.worker, chunk.ends = worker, time.monotonic() + self._deadline * worker.busy
        chunk.attempts += 1
        batch.pending[answer] = chunk
        tensors = sum(tensor_bytes(job.microbatch.data) for job in chunk.jobs) + sum(
            map(tensor_bytes, changes.values())
        )
        add_to(batch.work, [("transfer/weights", Work(bytes=tensors))])

    # --------------------------------------------------------------------------------------------------------- gather

    def gather(self) -> Predictions:
        batch = self._round
        assert batch is not None, "gather() follows submit()"
        try:
            while batch.pending:
                if batch.epoch != self._cluster.epoch:
                    raise FleetLost("it was lost while it predicted another batch")
                answers, _ = self._ray.wait(list(batch.pending), num_returns=1, timeout=1.0)
                if answers:
                    self._cluster.check()
                for answer in answers:
                    self._receive(batch, batch.pending.pop(answer), answer)
                if not answers:
                    self._look_after(batch)
        except FleetLost as lost:
            lost.work = self._spent(batch)
            raise
        except self._ray.exceptions.RayError as error:
            gone = self._cluster.lose(_first_line(error))
            gone.work = self._spent(batch)
            raise gone from error
        finally:
            self._round = None
        total = merge([batch.done[place].predictions for place in sorted(batch.done)])
        add_to(total.work, batch.work.items())
        if resent := self._cluster.resent:
            self._cluster.resent = 0
            add_to(total.work, [("transfer/weights", Work(bytes=resent))])
        return total

    def _receive(self, batch: _Round, chunk: _Chunk, answer: Any) -> None:
        worker = chunk.worker
        assert worker is not None
        worker.busy -= 1
        parameters = {n: p for n, p in trainable(self._module).items() if n in set(self._layout.names)}
        try:
            reply = self._ray.get(answer)
            found = Decoded(reply, self._version, chunk.jobs, batch.observe, self._layout, parameters)
        except self._ray.exceptions.RayError as error:
            self._again(batch, chunk, f"died ({_first_line(error)})")
        except BadReplyError as error:
            self._again(batch, chunk, f"sent a wrong answer: {error}")
        except WorkerError as error:
            if error.memory:
                self._again(batch, chunk, "ran out of memory")
            elif chunk.attempts == 1:  # a worker that answers may stay; perhaps another one can
                chunk.lost += 1
                self._send(batch, chunk, self._other(worker))
            else:
                raise RuntimeError(
                    f"{type(self._module).__qualname__}.training_step raised an exception on the workers of the fleet, "
                    f"each time it was tried. What the last of them reports:\n{error}"
                ) from None
        else:
            add_to(batch.work, [("transfer/gradients", Work(bytes=found.bytes))])
            self._accept(batch, chunk, worker, found)

    def _accept(self, batch: _Round, chunk: _Chunk, worker: Worker, found: Decoded) -> None:
        if not found.finite and chunk.doubtful is None:
            # Of a broken machine, or of training that diverges: whoever is asked next will tell.
            chunk.doubtful = worker, found
            chunk.lost += 1
            self._send(batch, chunk, self._other(worker))
            return
        if found.finite and chunk.doubtful is not None:
            self._end(chunk.doubtful[0], "sent numbers that are not finite, where another's are")
        batch.done[chunk.place] = found
        if chunk.lost:
            work = sum((found.predictions.work.get(a, Work()) for a in ("fleet/prediction", "fleet/control")), Work())
            add_to(batch.work, [("waste/lost_prediction", work * chunk.lost)])
        shapes = {job.microbatch.index: shape_key(job.microbatch.data) for job in chunk.jobs}
        for index, flops in found.counts.items():
            self._counts.setdefault(shapes[index], flops)
        for counted in found.counted:
            self._observers.on_counted(counted.counter, counted.unlowered)
        for warning in found.warnings:
            self._tell(f"A worker of the fleet warns: {warning}")

    def _again(self, batch: _Round, chunk: _Chunk, reason: str) -> None:
        """Give a lost chunk to another worker."""
        assert chunk.worker is not None
        chunk.lost += 1
        self._end(chunk.worker, reason)
        if chunk.attempts >= MAX_ATTEMPTS:
            raise self._cluster.lose(f"{chunk.attempts} workers one after another could not predict; the last {reason}")
        self._cluster.check()
        self._send(batch, chunk, self._other(chunk.worker))

    def _other(self, worker: Worker) -> Worker:
        """The least busy worker that is not this one, if there is another."""
        found = self._cluster.ready()
        return min(found, key=lambda other: (other is worker, other.busy))

    def _end(self, worker: Worker, reason: str) -> None:
        if worker in self._cluster.workers:
            rank_zero_warn(f"A worker of the fleet {reason}; it is replaced, and its chunk predicted elsewhere.")
            self._cluster.replace(worker)

    def _look_after(self, batch: _Round) -> None:
        """Nothing came for a while: end what hangs."""
        self._cluster.check()
        for answer, chunk in list(batch.pending.items()):
            if time.monotonic() > chunk.ends:
                del batch.pending[answer]
                self._again(batch, chunk, f"did not answer within {self._deadline:g} s")

    def _spent(self, batch: _Round) -> dict[str, Work]:
        """What was done for a batch that nothing comes of."""
        work = dict(batch.work)
        for decoded in batch.done.values():
            add_to(work, decoded.predictions.work.items())
        for chunk in batch.pending.values():
            for job in chunk.jobs:
                flops = self.work(shape_key(job.microbatch.data))
                if flops is not None:
                    add_to(work, [("waste/lost_prediction", flops.work(passes=1) * chunk.attempts)])
        return work

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            rank_zero_warn(text)


def _on_cpu(data: Any) -> Any:
    return move_data_to_device(data, "cpu")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: " + next(iter(str(error).strip().splitlines()), "")
