"""Batches of every kind: a program is captured once per structure, and its tensors are inputs, each its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.lightning_runs import Regression
from tests.program_cases import Pair, integers, normal


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    note: str = "as it is"


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Keyed(Regression):
    """Reads a batch by names, a scale among them that is no tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            loss = self.loss((torch.as_tensor(batch["x"]), torch.as_tensor(batch["y"])))
            return loss * batch.get("scale", 1.0) * len(batch.get("texts", "a"))
        return self.loss((batch.x, batch.y) if hasattr(batch, "x") else tuple(batch))


def pairs(seed: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    return normal(samples, 8, seed=seed), normal(samples, 3, seed=seed + 100)


def pair(**settings: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(Keyed(dropout=0.2), **settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: {"x": x, "y": y},
        lambda x, y: {"x": x, "y": y, "scale": 0.5, "texts": ["a", "b"]},
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        Sample,
        Named,
    ],
    ids=["dict", "dict with a number and strings", "tuple", "list", "dataclass", "named tuple"],
)
def test_a_batch_of_any_structure_is_captured_once(make: Callable[[Tensor, Tensor], Any]) -> None:
    watched = pair()
    watched.warm_up(make(*pairs(0)))
    for use in range(3, 8):
        assert watched.agree(make(*pairs(use)), use)
    assert watched.program.captures == 1
    assert watched.ran == [False, True, False, False, False]


@pytest.mark.parametrize("key", ["scale", "texts"])
def test_another_constant_of_a_batch_is_another_program(key: str) -> None:
    watched = pair()
    constants: dict[str, list[Any]] = {"scale": [0.5, 2.0], "texts": [["a"], ["b", "c"]]}
    for step in range(4):
        for use in range(3):
            for constant in constants[key]:
                x, y = pairs(use)
                assert watched.agree({"x": x, "y": y, key: constant}, use)
        watched.refresh(seed=step)
    assert watched.program.captures == 2
    # Uses 10 to 12 of the first program and 7 to 9 of the second, in turn: number 8 is compared.
    assert watched.ran[-6:] == [False, False, False, True, False, False]


def test_constants_that_never_come_back_are_predicted_eagerly_and_rightly() -> None:
    watched = pair()
    for use in range(12):
        x, y = pairs(use)
        assert watched.agree({"x": x, "y": y, "texts": [f"row {use}"] * use}, use)
        watched.refresh(seed=use)
    assert watched.program.captures == 1  # the first


def test_numpy_arrays_in_a_batch_are_predicted_eagerly() -> None:
    watched = pair()

    def arrays(seed: int) -> dict[str, Any]:
        return {name: value.numpy() for name, value in zip("xy", pairs(seed), strict=True)}

    with pytest.warns(UserWarning, match="run eagerly from now on: the batch, a dict, holds arrays or objects"):
        assert watched.agree(arrays(0))
    for use in range(4):
        assert watched.agree(arrays(use), use)
    assert all(watched.ran)
    assert isinstance(arrays(0)["x"], np.ndarray)


class Aliased(nn.Module):
    """Stands for a batch of the user's own class, whose tensors only it can find."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.x, self.y = x, y


def test_a_batch_of_the_users_own_class_is_predicted_eagerly() -> None:
    watched = pair()
    with pytest.warns(UserWarning, match="the batch, a Aliased, holds arrays or objects that hide their tensors"):
        assert watched.agree(Aliased(*pairs(0)))
    for use in range(4):
        assert watched.agree(Aliased(*pairs(use)), use)


class Reconstruction(Regression):
    """Its target may be its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.embed(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def test_61_aliased_batch_leaves_are_separate_inputs() -> None:
    torch.manual_seed(0)
    watched = Pair(Reconstruction())
    tokens = integers(16, 4, 6)
    watched.warm_up({"input_ids": tokens, "labels": tokens})
    assert watched.agree({"input_ids": tokens, "labels": tokens})
    labels = integers(16, 4, 6, seed=1)
    assert watched.agree({"input_ids": tokens, "labels": labels})  # use 4, compared
    apart = watched.predict({"input_ids": tokens, "labels": labels})
    together = watched.predict({"input_ids": tokens, "labels": tokens})
    assert watched.agree({"input_ids": tokens, "labels": labels})
    assert watched.ran == [False, True, False, False, False]
    assert apart is not None
    assert together is not None
    assert not torch.equal(apart[0], together[0])
    assert watched.program.captures == 1


def test_another_layout_in_memory_is_another_program() -> None:
    """A transposed tensor of the same shape runs other kernels, whose sums may round otherwise."""
    watched = pair()
    x, y = pairs(0)
    turned = x.t().contiguous().t()
    for step in range(3):
        for use in range(3):
            assert watched.agree((x, y), use)
            assert watched.agree((turned, y), use)
        watched.refresh(seed=step)
    assert watched.program.captures == 2


class Writing(Keyed):
    """Writes to its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(2.0)
        return self.loss(batch)


def test_a_step_that_writes_to_its_batch_leaves_the_callers_as_it_is() -> None:
    torch.manual_seed(0)
    watched = Pair(Writing())
    watched.warm_up(pairs(0))
    x, y = pairs(1)
    kept = x.clone()
    assert watched.agree((x, y))
    assert watched.ran == [False]
    assert torch.equal(x, kept)
