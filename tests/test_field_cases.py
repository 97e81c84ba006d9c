"""Every way in which plug-ins like this one are known to break in users' hands has a test that is named after it.

The names are those of the reports: pl for PyTorch Lightning's tracker, pt for PyTorch's, hf for Hugging Face
transformers', wb for W&B's, pyg for PyTorch Geometric's; others by project. What stands beside each is what this
plug-in does about it, or refuses to do.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CASES = {
    "pl4151": "the loss scale is in every gradient that is seen before the optimizer's step, in ours too",
    "pl15501": "fused optimizers unscale inside their step: predictions are scaled as exact gradients are",
    "pl18669": "clipping sees the corrected gradient",
    "pl18828": "a step that the scaler skips is waste, and no part of the statistics",
    "pt25814": ".grad is added to in place, never rebound",
    "pt4829": "sparse gradients are refused by the parameter's name",
    "pl20350": "micro-batches are weighed by what the loss averages over",
    "pl19987": "the divisor of an incomplete accumulation window is Lightning's own",
    "pl21808": "windows close at optimizer steps, whatever the number of batches in an epoch",
    "hf38448": "token counts of micro-batches add up to the window's",
    "hf37766": "a loss that ignores its normaliser is refused with the measured ratio",
    "pl15315": "losses are reported undivided",
    "simclr13": "in-batch negatives are refused, with the numbers that show it",
    "pl4083": "L-BFGS is refused by name",
    "ranger46": "an optimizer that does not call its closure is named",
    "pl5243": "a batch whose step returned None injects nothing, and on one rank only it is refused",
    "pl17958": "steps are counted once a batch, however many optimizers step in it",
    "pl17281": "manual optimization is refused",
    "pl7750": "a dict without a loss is an error that names the user's training step",
    "pl4921": "metrics are updated by exact passes only",
    "pl4100": "the user's logged keys stay what they are",
    "pl10349": "epoch means weigh batches by the size that the user gave",
    "pl1173": "one ledger row per optimizer step",
    "pt96136": "buffers are what the exact passes leave",
    "opacus319": "BatchNorm in training mode is refused by its path, with the ways out",
    "pyg829": "micro-batches are balanced: no tail of one sample",
    "torchgpipe35": "how many micro-batches there are changes nothing but rounding",
    "gc_dpr12": "the exact and the predicted pass on a micro-batch drop the same units",
    "pt190758": "a compiled program draws the masks that eager mode draws",
    "pl6988": "no draw from a global generator, and the order of the data stays",
    "rlinf1500": "all leaves of a batch are cut at the same places",
    "composer_pr833": "columns and a list of samples are never confused by guessing",
    "composer_pr1906": "lists of strings are cut, and shared values repeated",
    "hf23138": "a BatchEncoding is cut by key, and stays one",
    "pyg9829": "graphs are cut by a function of the user's, or refused by the batch's type",
    "pt139476": "a program is captured anew when the trainable set changes",
    "pl21901": "trainability is read from the parameters; what a resumed run froze is named",
    "pt114743": "tied parameters have one gradient, added once",
    "functorch1046": "weights are inputs of a program, not constants",
    "pt99662": "buffers are inputs of a program, which leaves the module's own alone",
    "pt66363": "spectral norm takes one power iteration a batch, and predictions none",
    "pt91469": "gradient penalties are differentiated twice, and rightly",
    "pt179804": "programs are compared with the training step, and given up where they differ",
    "pt143249": "control flow that depends on data is predicted eagerly, naming the source line",
    "ezpz190": "each shape of batch is captured once",
    "pl17177": "logging stays out of programs, and the user's own logs appear",
    "pl17415": "the keys of state_dict are the same with and without the plug-in",
    "pt110832": "attention with unequal heads is captured, counted and lowered",
    "pt178469": "integer products of few rows are padded",
    "ao571": "the shapes of all three products are looked at, and refusals named",
    "torchtitan1703": "layers that a format's blocks do not fit stay exact, and are priced so",
    "pt105723": "under DDP predictions run on the module itself, and unused parameters may be searched for",
    "deepspeed2329": "strategies that hide .grad are refused by name",
    "pt134804": "attention's FLOPs are counted once, as worked out by hand",
    "pl11386": "counts are exact integers, and are logged in double precision",
    "pl20235": "samples are counted, not assumed",
    "pl5405": "no row is dropped by W&B",
    "tango152": "resumed totals are those of an uninterrupted run, and rows logged twice are marked",
    "pl15256": "missing and doubled callbacks fail at set-up",
    "pl19815": "a checkpoint in the middle of an epoch charges each batch once",
    "test_61": "leaves of a batch that are one tensor are inputs apart",
}


def names() -> set[str]:
    """The names of all test functions."""
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(node.name)
    return found


@pytest.fixture(scope="module")
def known() -> set[str]:
    return names()


@pytest.mark.parametrize("case", CASES)
def test_a_test_is_named_after_each_report(case: str, known: set[str]) -> None:
    assert any(f"_{case}_" in f"_{name}_" for name in known), f"no test is named after {case}: {CASES[case]}"


def test_there_are_61_reports() -> None:
    assert len(CASES) == 61
