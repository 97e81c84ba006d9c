"""Two real processes with a gloo process group, started once and given one task after another."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

SIZE = 2
# Of one task, in seconds; the first one waits for the processes to import.
PATIENCE = 90.0
# How long the other process may take to finish once one of them failed.
GRACE = 3.0


class Failed(RuntimeError):
    """A task raised; the message holds every process's traceback."""


def on_two_ranks(task: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``task(*arguments)`` on both ranks, in an environment that Lightning takes for torchrun's.

    Args:
        task: a module's function; its module must be importable.
        *arguments: picklable.

    Returns:
        What it returned, by rank.

    Raises:
        Failed: if it raised on a rank, or did not return.
    """
    if not all(process.is_alive() for _, process in _processes()):
        _stop()
    pipes = [pipe for pipe, _ in _processes()]
    for pipe in pipes:
        pipe.send((task, arguments))
    results: list[Any] = [None] * SIZE
    failures: list[str] = []
    waiting, end = dict(enumerate(pipes)), time.monotonic() + PATIENCE
    while waiting and time.monotonic() < end:
        for rank, pipe in list(waiting.items()):
            if pipe.poll(0.01):
                ok, value = pipe.recv()
                del waiting[rank]
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
                    end = min(end, time.monotonic() + GRACE)
    if waiting:
        _stop()
        failures.append(f"no answer from the ranks {sorted(waiting)}")
    if failures:
        raise Failed("\n".join(failures))
    return results


@functools.cache
def _processes() -> list[tuple[Connection, BaseProcess]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, started = multiprocessing.get_context("spawn"), []
    for rank in range(SIZE):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, port), daemon=True)
        process.start()
        started.append((ours, process))
    atexit.register(_stop)
    return started


def _stop() -> None:
    if _processes.cache_info().currsize:
        for _, process in _processes():
            process.kill()
            process.join()
        _processes.cache_clear()


def _serve(pipe: Connection, rank: int, port: int) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE, "GROUP_RANK": 0}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in where.items()})
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=SIZE)
    # As in pyproject.toml: a warning is an error unless Lightning's own and about tests this small.
    warnings.simplefilter("error")
    for message in (
        "`isinstance.treespec, LeafSpec.` is deprecated",
        "The '.*' does not have many workers",
        "The number of training batches .* is smaller than the logging interval",
        "FSDP2-wrapped module .* returned a view tensor",
    ):
        warnings.filterwarnings("ignore", message)
    while True:
        task, arguments = pipe.recv()
        try:
            answer = True, task(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
