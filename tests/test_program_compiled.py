"""Programs compiled by TorchInductor: near the eager predictor, cached on disk, and given up with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_ledger.precision import Lowering
from lightning_ledger.predictors.captured import BOUNDS, difference
from lightning_ledger.program import ShadowBuffers, capture, trainable
from lightning_ledger.program.compilation import NotCompilable, lift_random
from tests.lightning_runs import Regression
from tests.program_cases import Pair, batch_of, denoiser, digits, gpt, hf_gpt2, move, normal

# Importing inductor, torch warns of its own use of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated:DeprecationWarning")

ROOT = Path(__file__).parents[1]


def differences(pair: Pair, batches: list[Any]) -> Iterator[float]:
    """How far the program is from the eager predictor, at fresh weights for every batch."""
    for use, batch in enumerate(batches):
        prediction, eager = pair.predict(batch, use), pair.eager.predict(batch, use, 0)
        assert prediction is not None
        assert eager is not None
        assert list(prediction[1]) == list(eager[1])
        yield difference(prediction, eager)
        move(pair.module, use)
        pair.refresh(use)


class Dropping(Regression):
    """A small perceptron with heavy dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def small_batch(seed: int) -> tuple[Tensor, Tensor]:
    return normal(4, 8, seed=seed), normal(4, 3, seed=seed + 100)


@pytest.mark.slow
def test_pt190758_dropout_masks_of_a_compiled_program_equal_eager() -> None:
    """With other masks of p = 0.5 gradients would differ by about their own size."""
    torch.manual_seed(0)
    pair = Pair(Dropping(), "int8", engine="compiled")
    for use in range(2):
        assert pair.agree(small_batch(0), use)
    found = list(differences(pair, [small_batch(1)] * 4))
    assert pair.ran[2:] == [False, True, False, False]
    assert pair.program.engine == "compiled"
    assert pair.program.compilations == 1
    assert max(found) < BOUNDS["compiled"], found
    first, again, other = (pair.predict(small_batch(1), seed) for seed in (5, 6, 5))  # use 8, in the middle, is eager
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first[0], other[0])
    assert difference(again, first) > 0.1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("fmt", "rounding"),
    [("bf16", "nearest"), ("int8", "nearest"), ("fp32", "nearest"), ("int8", "stochastic")],
)
@pytest.mark.parametrize("make", [digits, denoiser, gpt, hf_gpt2])
def test_a_compiled_program_stays_within_its_bound(
    make: Callable[[], pl.LightningModule], fmt: str, rounding: str
) -> None:
    pair = Pair(make(), fmt, rounding, engine="compiled")
    for use in range(2):
        assert pair.agree(batch_of(pair.module, 0), use)
    found = list(differences(pair, [batch_of(pair.module, seed) for seed in (1, 2, 3, 4)]))
    assert pair.program.engine == "compiled"
    assert pair.program.compilations == 1
    assert pair.ran[2:] == [False, True, False, False]
    assert max(found) < BOUNDS["compiled"], found


class Sampling(Dropping):
    """Draws numbers whose distribution depends on data."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss((x + self.draw(x), y))


@pytest.mark.parametrize(
    ("draw", "liftable"),
    [
        (torch.randn_like, True),
        (lambda x: torch.rand(x.shape), True),
        (lambda x: torch.bernoulli(torch.sigmoid(x)), False),
        (lambda x: torch.multinomial(torch.softmax(x, 1), 1).to(x.dtype), False),
    ],
    ids=["randn_like", "rand", "bernoulli", "multinomial"],
)
def test_random_numbers_are_lifted_unless_they_depend_on_data(draw: Callable[[Tensor], Tensor], liftable: bool) -> None:
    torch.manual_seed(0)
    module = Sampling(draw)
    lowering = Lowering("int8")
    lowering.refresh(trainable(module), 0)
    program = capture(module, trainable(module), ShadowBuffers(module), (small_batch(0), 0), 1, lowering)
    assert program.draws
    if not liftable:
        with pytest.raises(NotCompilable, match="depends on the values of its arguments"):
            lift_random(program.graph)
        return
    inputs = program.inputs(trainable(module), [], small_batch(1))
    lifted, draws = lift_random(program.graph)
    assert len(draws) == 2  # its own numbers and a dropout mask
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(3)
        expected = program.graph(*inputs)
        torch.manual_seed(3)
        found = lifted(*inputs, *[make() for make in draws])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


SCRIPT = """
import json, time, torch
from lightning_ledger.program import compilation
from tests.program_cases import Pair
from tests.test_program_compiled import Dropping, small_batch
torch.manual_seed(0)
pair = Pair(Dropping(), "int8", engine="compiled")
start = time.perf_counter()
agreed = [pair.agree(small_batch(0), use) for use in range(2)]
seconds = time.perf_counter() - start
after = [pair.agree(small_batch(1), use) for use in range(2)]
print(json.dumps({"engine": pair.program.engine, "compilations": pair.program.compilations, "seconds": seconds,
                  "agreed": agreed, "after": after, "ran": pair.ran}))
"""


def in_a_process(cache: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """The script's answer, and what it wrote to stderr."""
    settings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=settings, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer, done.stderr


@pytest.mark.slow
def test_without_a_compiler_predictions_run_captured_and_the_reason_is_given(tmp_path: Path) -> None:
    answer, errors = in_a_process(tmp_path, CXX="/nonexistent/g++")
    assert answer["engine"] == "captured"
    assert answer["compilations"] == 0
    assert answer["agreed"] == answer["after"] == [True, True]  # to the bit, as captured programs are
    assert answer["ran"] == [True, True, False, True]
    assert "Predictions run as a captured graph, not compiled: TorchInductor failed with" in errors


@pytest.mark.slow
def test_a_second_process_compiles_from_the_cache_on_disk(tmp_path: Path) -> None:
    first, _ = in_a_process(tmp_path)
    second, _ = in_a_process(tmp_path)
    print(f"compiled in {first['seconds']:.1f} s, from the cache in {second['seconds']:.1f} s")
    assert first["compilations"] == second["compilations"] == 1
    assert second["seconds"] < 0.7 * first["seconds"]
