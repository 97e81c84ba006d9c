"""Worker processes on a Ray cluster: started, replaced, and ended."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ledger.fleet.base import FleetLost
from lightning_ledger.fleet.worker import Packed, PredictionWorker

# A process imports torch and Lightning before it is ready.
START_SECONDS = 120.0
# Ray ends a driver that could not reach the cluster's head for a minute. Training goes on without a cluster.
_ENVIRONMENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(10**8),
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call after a loss would join, or start, whatever cluster there is
}
# Of a cluster on this machine alone: it listens on 127.0.0.1 only, and tells nobody that it is in use.
_LOCAL_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def require_ray(local: bool = False) -> Any:
    """The ``ray`` package.

    Args:
        local: whether the cluster is, or will be, one that this machine alone can reach.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    if "ray" not in sys.modules:  # it reads these when it is imported
        for name, value in {**_ENVIRONMENT, **(_LOCAL_ENVIRONMENT if local else {})}.items():
            os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "fleet='ray' needs the package ray, which is not installed: pip install 'lightning-ledger[ray]'."
        ) from error
    return ray


@dataclass(eq=False)
class Worker:
    """A worker process.

    Attributes:
        actor: Ray's handle of it.
        started: resolves when it is ready.
        busy: chunks that it was sent and has not answered.
        seen: by predictor, the last look at the module that it knows of.
    """

    actor: Any
    started: Any
    busy: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    is_ready: bool = False


@dataclass
class _Held:
    """What a worker must know of a predictor; a new one is told all of it.

    Attributes:
        content: how to make it, see ``worker.pickled``.
        shared: that, in the cluster's object store.
        weights: version, Ray's reference to them, seed.
        bytes: of the weights.
        eager: why it gave up captured programs.
    """

    content: bytes
    shared: Any = None
    weights: tuple[int, Any, int] | None = None
    bytes: int = 0
    eager: str = ""


class Cluster:
    """So many worker processes, on a cluster that is reached or started.

    Args:
        workers: how many.
        threads: of each.
        address: of the cluster; None to start one on this machine.
        object_store: bytes of a started cluster's object store.
        retry_every: seconds between two attempts to come back.

    Attributes:
        workers: the present ones.
        resent: bytes of weights that replacements were sent.
        epoch: how often the workers were started together.
    """

    def __init__(self, workers: int, threads: int, address: str | None, object_store: int, retry_every: float) -> None:
        self.size = workers
        self.retry_every = retry_every
        self.workers: list[Worker] = []
        self.resent = self.epoch = 0
        self._threads = threads
        self._address = address
        self._object_store = object_store
        self._owns_connection = False
        self._held: dict[str, _Held] = {}
        self._state = "down"
        self._since = -float("inf")
        self._ray = require_ray(local=address is None or _host(address) in _LOOPBACK)
        self._doors: list[tuple[str, int]] = []

    # ------------------------------------------------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Reach or start the cluster, and start the workers; they are not ready yet.

        Raises:
            ConnectionError: if the cluster cannot be reached.
        """
        ray = self._ray
        if not ray.is_initialized():
            if self._address not in (None, "auto", "local") and not _listens(*_host_and_port(str(self._address))):
                raise ConnectionError(
                    f"No Ray cluster answers at address={self._address!r}. Start one there with `ray start --head "
                    "--port=...`, pass another address, or address=None to start one on this machine."
                )
            where: dict[str, Any] = {"address": self._address}
            if self._address is None:
                where = {
                    "address": "local",
                    "num_cpus": self.size * self._threads,
                    "include_dashboard": False,
                    "object_store_memory": self._object_store,
                }
            with _undisturbed():
                ray.init(**where, log_to_driver=False, logging_level="ERROR", configure_logging=False)
            self._owns_connection = True
        context = ray.get_runtime_context()
        here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self._doors = [
            _host_and_port(context.gcs_address),
            (here["NodeManagerAddress"], here["NodeManagerPort"]),
        ]
        for held in self._held.values():
            held.shared = held.weights = None  # gone with an earlier cluster
        self.workers = [self._new() for _ in range(self.size)]
        self.epoch += 1
        self._state, self._since = "starting", time.monotonic()

    def stop(self) -> None:
        """End the workers; and the cluster, if it was started here."""
        workers, self.workers = self.workers, []
        self.epoch += 1  # what was asked of these workers is not to be waited for
        self._state, self._since = "down", time.monotonic()
        if not self._ray.is_initialized():
            return
        for worker in workers:
            with contextlib.suppress(Exception):
                self._ray.kill(worker.actor)
        if self._owns_connection:
            self._owns_connection = False
            with _undisturbed():
                self._ray.shutdown()

    def lose(self, reason: str) -> FleetLost:
        """Give up all workers for now; what to raise."""
        self.stop()
        rank_zero_warn(
            f"The fleet is lost: {reason}. Training goes on with exact gradients of all micro-batches, at their full "
            f"cost; every {self.retry_every:g} s it tries to start the fleet again."
        )
        return FleetLost(reason)

    def available(self) -> bool:
        """Whether there is a worker, or one may be waited for; after a loss, tries to come back now and then."""
        waited = time.monotonic() - self._since
        if self._state == "down" and waited >= self.retry_every:
            try:
                self.start()
            except Exception:  # whatever the reason, the next attempt may succeed
                self.stop()
            return False
        if self._state == "starting":
            if self._ready():
                rank_zero_warn(f"The fleet is back: {len(self._ready())} of {self.size} workers.")
                self._state = "up"
            elif waited > START_SECONDS:
                self.stop()
        return self._state == "up"

    def reachable(self) -> bool:
        """Whether the cluster's head, and its node on this machine, still answer."""
        return bool(self._doors) and all(_listens(*door) for door in self._doors)

    def check(self) -> None:
        """Before anything goes through the object store: Ray ends a process that finds the store gone.

        Raises:
            FleetLost: if the cluster does not answer.
        """
        if not self.reachable():
            raise self.lose("the cluster does not answer")

    # -------------------------------------------------------------------------------------------------------- workers

    def ready(self, everyone: bool = False) -> list[Worker]:
        """Workers that can be given chunks, at least one; waits for the first, or for all.

        Raises:
            FleetLost: if none becomes ready.
        """
        end = time.monotonic() + START_SECONDS
        while not (found := self._ready()) or (everyone and len(found) < self.size):
            if time.monotonic() > end or not self.workers:
                break
            self._ray.wait([w.started for w in self.workers if not w.is_ready], timeout=1.0)
            if not found and not self.reachable():
                break
        if not found:
            why = "" if self.reachable() else ": the cluster does not answer"
            raise self.lose(f"none of its {self.size} workers started in {START_SECONDS:g} s{why}")
        self._state = "up"
        return found

    def _ready(self) -> list[Worker]:
        for worker in self.workers:
            if not worker.is_ready and self._ray.wait([worker.started], timeout=0)[0]:
                try:
                    worker.is_ready = bool(self._ray.get(worker.started))
                except self._ray.exceptions.RayError:
                    self.replace(worker)
        return [worker for worker in self.workers if worker.is_ready]

    def replace(self, worker: Worker) -> None:
        """End a worker that died, hangs or is wrong, and start another in its place, unless that was done."""
        if worker in self.workers:
            with contextlib.suppress(Exception):
                self._ray.kill(worker.actor)
            self.workers[self.workers.index(worker)] = self._new()

    def _new(self) -> Worker:
        remote = self._ray.remote(PredictionWorker).options(num_cpus=self._threads, max_restarts=0, max_task_retries=0)
        actor = remote.remote(self._threads, [os.path.abspath(path) for path in sys.path])
        worker = Worker(actor, actor.ready.remote())
        for key, held in self._held.items():
            actor.define.remote(key, self._shared(held))
            if held.eager:
                actor.run_eagerly.remote(key, held.eager)
            if held.weights is not None:
                version, weights, seed = held.weights
                actor.refresh.remote(key, version, weights, seed)
                self.resent += held.bytes
        return worker

    # ----------------------------------------------------------------------------------- what all workers are told

    def define(self, key: str, content: bytes) -> None:
        """Tell all workers of a predictor."""
        held = self._held[key] = _Held(content)
        for worker in self.workers:
            worker.actor.define.remote(key, self._shared(held))

    def drop(self, key: str) -> None:
        """Tell them to forget it."""
        if self._held.pop(key, None) is not None:
            for worker in self.workers:
                worker.actor.drop.remote(key)

    def refresh(self, key: str, version: int, weights: Mapping[str, Packed], seed: int) -> int:
        """Send a predictor's weights: put into the object store once, fetched by each worker; bytes for all."""
        held = self._held[key]
        held.weights = version, self._ray.put(dict(weights)), seed
        held.bytes = sum(array.nbytes for _, _, array in weights.values())
        for worker in self.workers:
            worker.actor.refresh.remote(key, *held.weights)
        return held.bytes * len(self.workers)

    def run_eagerly(self, key: str, reason: str) -> bool:
        """Tell all to give up captured programs of a predictor; whether any had some."""
        self._held[key].eager = reason
        found = [worker.actor.run_eagerly.remote(key, reason) for worker in self.workers]
        answers = []
        for answer in found:
            with contextlib.suppress(self._ray.exceptions.RayError):
                answers.append(self._ray.get(answer, timeout=START_SECONDS))
        return any(answers)

    def _shared(self, held: _Held) -> Any:
        if held.shared is None:
            held.shared = self._ray.put(held.content)
        return held.shared


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ray draws ports from global generators and takes SIGTERM for itself; both are the Trainer's."""
    main = threading.current_thread() is threading.main_thread()
    handlers: dict[int, Any] = {}
    if main:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _host(address: str) -> str:
    return address.rpartition("://")[2].rpartition(":")[0].strip("[]")


def _host_and_port(address: str) -> tuple[str, int]:
    return _host(address), int(address.rpartition(":")[2])


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True
