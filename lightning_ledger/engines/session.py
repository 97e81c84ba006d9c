"""A captured program in ONNX Runtime, which has no autograd at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_ledger.engines.export import ExportedProgram, NotExportable, export_program
from lightning_ledger.program import GradientProgram
from lightning_ledger.program.graphs import outputs


def session(exported: ExportedProgram, threads: int) -> Callable[..., list[Tensor]]:
    """A function that runs an exported program in ONNX Runtime, on the CPU.

    Args:
        exported: the program.
        threads: how many it computes with.

    Returns:
        From the program's inputs, noise included, to the loss and the gradients.

    Raises:
        NotExportable: if ONNX Runtime has no kernel for one of the model's operations.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.use_deterministic_compute = True
    options.log_severity_level = 3
    # CPUs with AVX2 or AVX-512 but no 8-bit dot products would saturate sums of two 8-bit products at 16 bits.
    options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        engine = onnxruntime.InferenceSession(
            exported.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its exceptions share no base class
        raise NotExportable(f"ONNX Runtime cannot run it: {' '.join(str(error).split())}") from error

    def run(*inputs: Tensor) -> list[Tensor]:
        arrays: list[Any] = engine.run(list(exported.outputs), exported.feed(inputs))
        return [torch.from_numpy(array) for array in arrays]

    return run


def replace(program: GradientProgram, inputs: Sequence[Tensor]) -> None:
    """Export a program and run it in ONNX Runtime from now on; see ``run_in_onnxruntime``."""
    start = time.perf_counter()
    exported = export_program(program, inputs)
    run = session(exported, torch.get_num_threads())
    dtypes = [output.meta["val"].dtype for output in outputs(program.graph)]

    def rounded(*inputs: Tensor) -> list[Tensor]:
        return [x.to(dtype) for x, dtype in zip(run(*inputs), dtypes, strict=True)]

    try:
        rounded(*inputs)
    except Exception as error:
        raise NotExportable(f"ONNX Runtime cannot run it: {' '.join(str(error).split())}") from error
    rank_zero_info(
        f"Exported the captured program to ONNX Runtime in {time.perf_counter() - start:.1f} s: "
        f"{len(exported.model.graph.node):,} operations."
    )
    program.replace(rounded)
