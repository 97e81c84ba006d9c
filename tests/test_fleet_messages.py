"""What a worker answers is looked at before any of it is used; what a worker follows; settings; chunks."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from lightning.pytorch.cli import LightningCLI
from lightning_runs import Regression, Samples, TokenModel, token_batch, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ledger.callbacks import GradientPrediction
from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet import Job, Predictions, RaySettings, SimulatedSettings
from lightning_ledger.fleet.chunks import chunks, merge
from lightning_ledger.fleet.following import Following, follow
from lightning_ledger.fleet.in_process import predict_jobs
from lightning_ledger.fleet.messages import BadReplyError, Decoded, Reply, WorkerError, encode, encode_error
from lightning_ledger.microbatches import MicroBatch
from lightning_ledger.precision import Lowering
from lightning_ledger.predictors import EagerPredictor
from lightning_ledger.program import trainable

MODEL = TokenModel(unused=True)
LAYOUT = Layout.of(trainable(MODEL))
JOBS = [Job(MicroBatch(token_batch(2, i), i, 2, 0, 0.5), i, control=i == 1) for i in range(2)]
VERSION = 3


def predicted(jobs: list[Job] = JOBS, total: int = 2) -> Predictions:
    predictor = EagerPredictor(MODEL, Lowering("int8"))
    predictor.refresh(trainable(MODEL))
    return predict_jobs(predictor, LAYOUT, jobs, (0,), True, total)


def decoded(reply: Any) -> Decoded:
    return Decoded(reply, VERSION, JOBS, True, LAYOUT, trainable(MODEL))


def reply() -> Reply:
    return encode(VERSION, predicted(), {}, [], ["mind the gap"])


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_an_answer_arrives_as_it_was_sent() -> None:
    sent, found = predicted(), decoded(reply())
    assert same(sent.control, found.predictions.control)
    assert same(sent.rest, found.predictions.rest)
    assert same(sent.samples, found.predictions.samples)
    assert found.predictions.losses == sent.losses
    assert found.predictions.work == sent.work
    assert sent.squared_norms is not None
    assert found.predictions.squared_norms is not None
    assert torch.equal(found.predictions.squared_norms, sent.squared_norms)
    assert found.finite
    assert found.warnings == ["mind the gap"]


def text(change: Callable[[dict[str, Any]], Any]) -> Callable[[], Any]:
    def make() -> Any:
        content, tensors = reply()
        fields = json.loads(content)
        change(fields)
        return json.dumps(fields), tensors

    return make


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[], Any]:
    def make() -> Any:
        content, raw = reply()
        held = safetensors.torch.load(raw)
        change(held)
        return content, safetensors.torch.save(held)

    return make


WEIGHT = "control/head.weight"
WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "an object": ("not a text and bytes", lambda: [1, 2]),
    "pickled": ("cannot be read", lambda: (reply()[0], pickle.dumps(predicted()))),
    "no json": ("cannot be read", lambda: ("{", reply()[1])),
    "torn": ("cannot be read", lambda: (reply()[0], reply()[1][:-8])),
    "version": ("version 2 of the weights, not 3", text(lambda f: f.update(version=2))),
    "another micro-batch": (
        r"micro-batches \[0, 7\], not \[0, 1\]",
        text(lambda f: f["losses"].update({"7": f["losses"].pop("1")})),
    ),
    "one twice": (r"micro-batches \[0, 1, 1\]", text(lambda f: f["skipped"].append(1))),
    "no loss": ("cannot be read", text(lambda f: f["losses"].update({"1": None}))),
    "scarce work": ("books work under", text(lambda f: f["work"].update({"scarce/forward": {"flops": 1}}))),
    "negative work": ("cannot be read", text(lambda f: f["work"].update({"fleet/control": {"flops": -1}}))),
    "shape": (r"has \(5,\).*expected is \(11, 12\)", tensors(lambda t: t.update({WEIGHT: torch.ones(5)}))),
    "dtype": ("torch.float64; expected", tensors(lambda t: t.update({WEIGHT: t[WEIGHT].double()}))),
    "a stranger": ("nothing of that name", tensors(lambda t: t.update({"control/tail.weight": torch.ones(5)}))),
    "no norms": ("lacks", tensors(lambda t: t.pop("squared_norms"))),
    "no sample": (r"lacks \['sample/1'\]", tensors(lambda t: t.pop("sample/1"))),
    "a sample outside of C": ("nothing of that name", tensors(lambda t: t.update({"sample/0": t["sample/1"].clone()}))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused(name: str) -> None:
    message, make = WRONG[name]
    with pytest.raises(BadReplyError, match=message):
        decoded(make())


def test_numbers_that_are_not_finite_are_told() -> None:
    assert not decoded(text(lambda f: f["losses"].update({"1": float("nan")}))()).finite
    assert not decoded(tensors(lambda t: t[WEIGHT].fill_(float("inf")))()).finite


def test_an_exception_arrives_as_text() -> None:
    with pytest.raises(WorkerError, match="it broke") as caught:
        decoded(encode_error(ValueError("x"), "it broke"))
    assert not caught.value.memory
    with pytest.raises(WorkerError) as caught:
        decoded(encode_error(torch.OutOfMemoryError("x"), "it broke"))
    assert caught.value.memory


def test_chunks_add_up_to_the_batch() -> None:
    whole, parts = predicted(), [predicted([job], total=2) for job in JOBS]
    total = merge(parts)
    assert same(total.control, whole.control)
    assert same(total.rest, whole.rest)
    assert total.losses == whole.losses
    assert total.work == whole.work
    assert total.squared_norms is not None
    assert whole.squared_norms is not None
    assert torch.equal(total.squared_norms, whole.squared_norms)
    assert [list(part) for part in chunks(range(7), 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert chunks([], 3) == []


def test_a_copy_follows_what_changes_and_only_that() -> None:
    module, copy = TokenModel(frozen=True, dropout=0.5), TokenModel(frozen=True, dropout=0.5)
    copy.load_state_dict(module.state_dict())
    following = Following(module)
    assert following.since(following.look()) == {}
    module.widen.weight.data.mul_(2)  # leaves no record
    with torch.no_grad():
        module.widen.bias.add_(1)
        module.head.weight.add_(1)  # trainable: refreshed, not followed
    module.dropout.eval()
    module.temperature = 0.5
    first = following.look()
    changes = following.since(0)
    assert {name for _, _, name in changes} == {"widen.weight", "widen.bias", "training", "temperature"}
    follow(copy, changes)
    assert torch.equal(copy.widen.weight, module.widen.weight)
    assert not torch.equal(copy.head.weight, module.head.weight)
    assert not copy.dropout.training
    assert copy.temperature == 0.5
    module.temperature = 0.25
    following.look()
    assert following.since(first) == {("attribute", "", "temperature"): 0.25}
    assert len(following.since(0)) == 4  # for a worker that is new


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"workers": 1.5}, {"threads": 0}, {"deadline": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        RaySettings(**wrong)


def test_an_unknown_fleet_is_refused() -> None:
    with pytest.raises(ValueError, match="fleet='kubernetes' is unknown: pass 'in_process', 'ray', 'simulated'"):
        GradientPrediction(fleet="kubernetes")  # type: ignore[arg-type]


@pytest.mark.parametrize("short", [True, False])
def test_a_configuration_file_names_the_fleet(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    settings: Any = "ray"
    if not short:
        settings = {"class_path": "lightning_ledger.fleet.RaySettings", "init_args": {"workers": 4, "deadline": 9.0}}
    callback = {"class_path": "lightning_ledger.callbacks.GradientPrediction", "init_args": {"fleet": settings}}
    given = {"trainer": {"callbacks": [callback], "logger": False}}
    cli = LightningCLI(Regression, args=given, run=False, seed_everything_default=False)
    found = next(c for c in cli.trainer.callbacks if isinstance(c, GradientPrediction)).prediction.fleet
    assert isinstance(found, RaySettings)
    assert (found.workers, found.deadline) == ((2, 600.0) if short else (4, 9.0))


def test_a_simulated_run_logs_its_virtual_clock(tmp_path: Path) -> None:
    fleet = SimulatedSettings(
        workers=2, worker_flops=1e3, gpu_flops=1e3, bandwidth=1e6, trainer_bandwidth=1e6, latency=0, straggling=0
    )
    runner = trainer(
        tmp_path, GradientPrediction(microbatches=4, fleet=fleet), strategy="predicted_gradients", max_steps=1
    )
    runner.fit(Regression(), DataLoader(Samples(8), batch_size=8))
    # Forward 2*2*(8*16+16*3)=704, backward 704 and 2*2*16*3=192 more; three predictions on two workers, two in a row.
    # Weights to two workers: 195*4 B, twice through one link; batches: 2*11*4 B each; sums: 195*4 B, twice.
    exact, sent = 1.600, 2 * 195 * 4 / 1e6
    fleet_seconds = 2 * 1.600 + 2 * 2 * 11 * 4 / 1e6 + 2 * sent
    logged = {name: float(value) for name, value in runner.callback_metrics.items()}
    assert logged["fleet/virtual_seconds"] == pytest.approx(fleet_seconds, rel=1e-6)
    assert logged["fleet/gpu_idle"] == pytest.approx(1 - exact / fleet_seconds, rel=1e-6)
    assert logged["fleet/busy"] == pytest.approx(3 * 1.600 / (2 * fleet_seconds), rel=1e-6)
    assert logged["fleet/price"] == pytest.approx(fleet_seconds / 3600 * (3.0 + 2 * 0.05), rel=1e-6)
