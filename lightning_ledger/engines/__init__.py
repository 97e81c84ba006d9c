"""Inference engines: programs that run without torch's autograd, or without torch at all.

Needs ``pip install 'lightning-ledger[onnx]'``; nothing is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lightning_ledger.program import GradientProgram


def require_onnx() -> None:
    """Refuse to go on without ONNX and its runtime.

    Raises:
        ModuleNotFoundError: with the command that installs them.
    """
    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"engine='onnxruntime' and `lightning-ledger export` need {' and '.join(missing)}, which cannot be found. "
            "Install: pip install 'lightning-ledger[onnx]'"
        )


def run_in_onnxruntime(program: GradientProgram, inputs: Sequence[Tensor]) -> None:
    """Export a program, and run it in ONNX Runtime from now on.

    Args:
        program: will run there, with as many threads as torch has.
        inputs: of the program, noise included.

    Raises:
        NotExportable: with the reason; the program is then as it was.
    """
    from lightning_ledger.engines.session import replace

    replace(program, inputs)
