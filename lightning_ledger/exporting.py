"""`lightning-ledger export`: the captured program of a configuration's model and first micro-batch, as a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import onnx
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_ledger.callbacks import GradientPrediction
from lightning_ledger.callbacks.common import callback_of
from lightning_ledger.engines.export import ExportedProgram, export_program
from lightning_ledger.estimation import PredictionSettings
from lightning_ledger.microbatches import Splitter, tensors_apart
from lightning_ledger.precision import Lowering
from lightning_ledger.program import ShadowBuffers, capture, seeded, trainable

HELP = """\
usage: lightning-ledger export [-o FILE] [options of fit]

Write the captured program of a model and its first micro-batch as an ONNX model: from weights, batch and random numbers
to the loss and its gradients. Beside it goes an .npz file with its inputs, to run it by hand.

  -o FILE, --output FILE   the model; program.onnx by default

Number format, rounding and micro-batches are those of the configuration's GradientPrediction.

example: lightning-ledger export --config configs/demo.yaml --config configs/demo/gpcv-int8.yaml -o program.onnx
"""


def output_of(options: Sequence[str]) -> tuple[Path, list[str]]:
    """Where the model goes, and the options that are left for Lightning.

    Example:
        >>> output_of(["--config", "run.yaml", "-o", "a.onnx"])
        (PosixPath('a.onnx'), ['--config', 'run.yaml'])
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, default=Path("program.onnx"))
    chosen, rest = parser.parse_known_args(list(options))
    return chosen.output, rest


def export(output: Path) -> str:
    """Export what the process's arguments configure; returns what was written and how to run it.

    Args:
        output: the model's file; the inputs go beside it.
    """
    cli = LightningCLI(run=False, save_config_callback=None, subclass_mode_model=True, subclass_mode_data=True)
    exported, inputs, seed = first_program(cli.trainer, cli.model, cli.datamodule)
    output.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(exported.model, output)
    arrays = output.with_suffix(".npz")
    with seeded(seed, torch.device("cpu")):
        np.savez(arrays, **exported.feed(inputs))
    products = exported.operations().get("MatMulInteger", 0)
    lines = [
        f"Wrote {output}: {len(exported.model.graph.node):,} operations, {products} of them MatMulInteger.",
        f"Wrote {arrays}: its {len(exported.inputs)} inputs at the present weights.",
        "",
        "Inputs:",
        *(f"  {_described(value)}" for value in exported.model.graph.input),
        "Outputs:",
        *(f"  {_described(value)}" for value in exported.model.graph.output),
        "",
        "Run it:",
        "  import numpy, onnxruntime",
        f"  session = onnxruntime.InferenceSession({str(output)!r})",
        f"  loss, *gradients = session.run(None, dict(numpy.load({str(arrays)!r})))",
    ]
    return "\n".join(lines)


def first_program(
    trainer: pl.Trainer, module: pl.LightningModule, data: pl.LightningDataModule | None
) -> tuple[ExportedProgram, list[Tensor], int]:
    """The program of a module's training step on the first micro-batch of its training data.

    Args:
        trainer: whose precision and ``GradientPrediction`` hold.
        module: the user's module.
        data: its data; None where the module has a training loader of its own.

    Returns:
        The exported program, its inputs, random ones apart, and the seed of these.

    Raises:
        NotExportable: naming what stands in the way.
    """
    module.trainer = trainer
    module.configure_model()
    owner = module if data is None else data
    for hooks in (owner, module) if owner is not module else (module,):
        hooks.prepare_data()
        hooks.setup("fit")
    predicts = callback_of(trainer, GradientPrediction)
    settings = PredictionSettings() if predicts is None else predicts.prediction
    batch: Any = trainer.precision_plugin.convert_input(next(iter(owner.train_dataloader())))
    transfers = owner if is_overridden("on_before_batch_transfer", owner) else module
    batch = module.transfer_batch_to_device(transfers.on_before_batch_transfer(batch, 0), torch.device("cpu"), 0)
    splitter = Splitter(settings.split_fn)
    microbatch = splitter.split(batch, min(settings.microbatches, splitter.batch_size(batch)))[0]
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    lowering = Lowering(settings.format, settings.rounding, settings.rotation, settings.keep, module)
    weights, buffers, seed = trainable(module), ShadowBuffers(module), settings.seed
    frozen = {name: p for name, p in module.named_parameters() if name not in weights}
    lowering.refresh({**weights, **{name: p for name, p in frozen.items() if p.is_floating_point()}}, seed)
    arguments = (microbatch, *((0,) if takes_index else ()))
    context = trainer.precision_plugin.train_step_context
    program = capture(module, weights, buffers, arguments, seed, lowering, context)
    leaves = tensors_apart(microbatch)
    assert leaves is not None, "what was captured can be taken apart"
    others = {**frozen, **buffers.fresh()}
    inputs = [*program.inputs(weights, [*others.values()], leaves[0]), *program.noise(seed, torch.device("cpu"))]
    return export_program(program, inputs, list(others)), inputs, seed


def _described(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    shape = ", ".join(str(size.dim_value) for size in tensor.shape.dim)
    return f"{value.name}: {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()}[{shape}]"
