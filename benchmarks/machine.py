"""What the benchmarks run on, and how fast it multiplies matrices."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Where this was measured."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def physical_cores() -> int:
    """Cores that this process may use, threads of one core counted once."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    capabilities: dict[str, int] = getattr(torch.cpu, "get_capabilities", dict)()
    return min(allowed, capabilities.get("num_physical_cores") or allowed)


def seconds() -> float:
    """The clock that steps are timed by: with one thread its own CPU time, which other programs hardly disturb."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def matrix_rates(size: int = 2048, repeats: int = 7) -> dict[str, float]:
    """GFLOP/s of large square products, by format.

        rate = 2 size^3 / seconds

    Args:
        size: rows and columns of the matrices.
        repeats: of each product, in turns; the fastest counts, since a rate is what the machine can do.

    Returns:
        For "fp32" and "bf16", torch's own products; for "int8", ``torch._int_mm``.
    """
    floats = torch.randn(size, size)
    halves, integers = floats.bfloat16(), floats.mul(40).clamp_(-127, 127).to(torch.int8)
    products: dict[str, Callable[[], object]] = {
        "fp32": lambda: floats @ floats,
        "bf16": lambda: halves @ halves,
        "int8": lambda: torch._int_mm(integers, integers),
    }
    fastest = dict.fromkeys(products, float("inf"))
    for turn in range(1 + repeats):
        for name, product in products.items():
            start = seconds()
            product()
            if turn:  # the first one sets the kernel up
                fastest[name] = min(fastest[name], seconds() - start)
    return {name: 2e-9 * size**3 / best for name, best in fastest.items()}
