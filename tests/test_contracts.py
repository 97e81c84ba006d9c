"""What every number format, predictor, fleet and callback owes the rest, tested alike: a newcomer costs one line."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import ray_runs
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ledger.callbacks import BudgetStopping, ComputeLedger, ControlVariate, GradientPrediction
from lightning_ledger.control_variate import Layout
from lightning_ledger.fleet import Fleet, InProcessFleet, Job, PredictorRecipe
from lightning_ledger.fleet.latency import Machines
from lightning_ledger.fleet.ray import RayFleet
from lightning_ledger.fleet.simulated import SimulatedBackend, SimulatedFleet
from lightning_ledger.microbatches import MicroBatch, shape_key
from lightning_ledger.precision import FORMATS, ROUNDINGS, Format, Lowering, get_format
from lightning_ledger.predictors import EagerPredictor, GradientPredictor, ProgramPredictor

FORMAT_LIST: list[Format] = list(FORMATS.values())

MakePredictor = Callable[["Model"], GradientPredictor]
MakeFleet = Callable[[GradientPredictor, Layout], Fleet]


def eager(fmt: str, rounding: str) -> MakePredictor:
    return lambda module: EagerPredictor(module, Lowering(fmt, rounding))


def captured(fmt: str, rounding: str) -> MakePredictor:
    def make(module: Model) -> GradientPredictor:
        module.indexed = False  # a program has the batch index that it was captured with
        return ProgramPredictor(module, Lowering(fmt, rounding), engine="captured")

    return make


PREDICTORS: dict[str, MakePredictor] = {
    **{f"eager {fmt} {rounding}": eager(fmt, rounding) for fmt in FORMATS for rounding in ROUNDINGS},
    # One format of each kind: as it is, by row, by block, by weight.
    "captured fp32 nearest": captured("fp32", "nearest"),
    "captured int8 stochastic": captured("int8", "stochastic"),
    "captured mxfp4 stochastic": captured("mxfp4", "stochastic"),
    "captured w4a16 nearest": captured("w4a16", "nearest"),
}


def recipe(predictor: GradientPredictor) -> PredictorRecipe:
    assert isinstance(predictor, EagerPredictor)
    lowering = predictor.lowering
    return PredictorRecipe(lowering.formats.name, lowering.rounding, lowering.rotation, lowering.keep, "eager")


FLEETS: dict[str, MakeFleet] = {
    "in process": InProcessFleet,
    "simulated": lambda predictor, layout: SimulatedFleet(
        SimulatedBackend(Machines(workers=2), predictor.module), predictor, layout
    ),
    "ray": lambda predictor, layout: RayFleet(ray_runs.workers(), predictor.module, recipe(predictor), layout),
}

CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "ComputeLedger": ComputeLedger,
    "GradientPrediction": lambda: GradientPrediction(microbatches=4, exact=2, refresh_every=3),
    "ControlVariate": ControlVariate,
    "BudgetStopping": lambda: BudgetStopping(max_cost=1e12),
}
STATEFUL = [name for name, make in CALLBACKS.items() if make().state_dict()]

every_format = pytest.mark.parametrize("fmt", FORMAT_LIST, ids=lambda fmt: fmt.name)
every_predictor = pytest.mark.parametrize("make", PREDICTORS.values(), ids=PREDICTORS)
every_fleet = pytest.mark.parametrize("make", FLEETS.values(), ids=FLEETS)
every_callback = pytest.mark.parametrize("name", CALLBACKS)
every_stateful_callback = pytest.mark.parametrize("name", STATEFUL)

FEATURES, HIDDEN = 32, 64  # multiples of every block


def batch(samples: int, seed: int = 0, skip: bool = False, gate: bool = False) -> dict[str, Any]:
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "gate": gate, "skip": skip}


class Model(L.LightningModule):
    """Everything a predictor must cope with: dropout, tied, frozen, unused and sometimes used parameters, buffers
    that the step writes to and reads, and attributes that it changes.

    Attributes:
        indexed: whether the loss depends on the batch index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(FEATURES, HIDDEN)
        self.tied = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.tied.weight = self.wide.weight
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.gated = nn.Parameter(torch.ones(HIDDEN))
        self.head = nn.Linear(HIDDEN, 1)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []
        self.indexed = True

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        self.calls += 1
        self.seen.append(len(batch["x"]))
        if batch["skip"]:
            return None
        h = self.dropout(torch.tanh(self.frozen(self.wide(batch["x"])) + self.tied(batch["x"])))
        if batch["gate"]:
            h = h * self.gated
        return (self.head(h) - self.calls - (0.1 * batch_idx if self.indexed else 0)).pow(2).mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


Prediction = tuple[Tensor, dict[str, Tensor | None]]


def same(a: Prediction | None, b: Prediction | None) -> bool:
    """Bit for bit."""
    if a is None or b is None:
        return a is b
    return torch.equal(a[0], b[0]) and equal(a[1], b[1])


def equal(a: Any, b: Any) -> bool:
    """Deep equality of plain containers and tensors, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


# ---------------------------------------------------------------------------------------------------------- formats


@every_format
def test_a_format_is_listed_under_its_name_and_says_what_it_is(fmt: Format) -> None:
    assert FORMATS[fmt.name] is get_format(fmt.name) is fmt
    assert GradientPrediction(format=fmt.name).prediction.format == fmt.name
    text = fmt.describe("cpu")
    assert text.startswith(f"{fmt.name}: ")
    kind = text.removeprefix(f"{fmt.name}: ").split()[0]
    assert kind == ("native" if fmt.is_native("cpu") else "emulated")
    assert "\n" not in text


@every_format
def test_a_format_names_the_products_that_run_in_it(fmt: Format) -> None:
    a = torch.ones(32, 32)
    lowering = Lowering(fmt)
    assert lowering.formats_of(torch.ops.aten.mm.default, (a, a)) == (fmt.name,)
    assert lowering.formats_of(torch.ops.aten.add.Tensor, (a, a)) == ()


# ------------------------------------------------------------------------------------------------------- predictors

# (micro-batch, seed, batch index): sizes, seeds and gates differ, and one is skipped.
REQUESTS = [
    (batch(3, seed=1), 11, 0),
    (batch(3, seed=2, gate=True), 12, 0),
    (batch(1, seed=3), 11, 4),
    (batch(2, seed=4, skip=True), 13, 1),
]


def often(predictor: GradientPredictor, request: tuple[dict[str, Any], int, int]) -> Prediction | None:
    """The same three times: a program runs by itself from its third use on."""
    first, second, third = (predictor.predict(*request) for _ in range(3))
    assert same(first, second)
    assert same(second, third)
    return third


@every_predictor
def test_a_prediction_depends_on_weights_microbatch_and_seed_alone(make: MakePredictor) -> None:
    module = model()

    def predict(order: Sequence[int]) -> dict[int, Prediction | None]:
        predictor = make(module)
        predictor.refresh(trainable(module), seed=5)
        return {i: often(predictor, REQUESTS[i]) for i in order}

    reference = predict([0, 1, 2, 3])
    assert reference[3] is None
    for order in ([3, 2, 1, 0], [1, 0, 3, 2], [2]):
        assert all(same(prediction, reference[i]) for i, prediction in predict(order).items())

    predictor = make(module)
    predictor.refresh(trainable(module), seed=5)
    microbatch, seed, index = REQUESTS[0]
    assert same(often(predictor, (microbatch, seed, index)), reference[0])
    assert not same(often(predictor, (microbatch, seed + 1, index)), reference[0])  # dropout
    assert same(often(predictor, (microbatch, seed, index + 1)), reference[0]) != module.indexed
    assert not same(often(predictor, (batch(3, seed=9), seed, index)), reference[0])


@every_predictor
def test_functorch1046_weights_are_inputs(make: MakePredictor) -> None:
    module = model()
    stale = {name: p.detach().clone().requires_grad_() for name, p in trainable(module).items()}
    follows, holds = make(module), make(module)
    follows.refresh(trainable(module))
    holds.refresh(stale)
    before = often(follows, REQUESTS[0])
    assert same(often(holds, REQUESTS[0]), before)
    with torch.no_grad():
        for p in trainable(module).values():
            p.mul_(0.5)
    assert not same(often(follows, REQUESTS[0]), before)
    assert same(often(holds, REQUESTS[0]), before)
    holds.refresh(trainable(module))
    assert same(often(holds, REQUESTS[0]), often(follows, REQUESTS[0]))


def everything(module: Model) -> dict[str, Any]:
    _, keys, *position = np.random.get_state()  # noqa: NPY002  the global state is what must not move
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "objects": {name: id(value) for name, value in [*module.named_parameters(), *module.named_buffers()]},
        "gradients": {name: p.grad for name, p in module.named_parameters()},
        "modes": [layer.training for layer in module.modules()],
        "seen": list(module.seen),
        "names": sorted(vars(module)),
        "torch": torch.get_rng_state(),
        "numpy": [keys.tolist(), *position],
        "python": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
    }


@every_predictor
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_prediction_leaves_no_trace(grad: bool, stale: bool, make: MakePredictor) -> None:
    module = model()
    weights = copy.deepcopy(trainable(module)) if stale else trainable(module)
    kept = {name: w.detach().clone() for name, w in weights.items()}
    with torch.set_grad_enabled(grad):
        predictor = make(module)
        before = everything(module)
        predictor.refresh(weights)
        for request in REQUESTS:
            often(predictor, request)
        assert equal(everything(module), before)
    assert all(torch.equal(w, kept[name]) and w.grad is None for name, w in weights.items())


@every_predictor
def test_gradients_are_named_as_the_weights_and_owned_by_the_caller(
    make: MakePredictor,
) -> None:
    module = model()
    predictor = make(module)
    predictor.refresh(trainable(module))
    first, second = (often(predictor, REQUESTS[0]) for _ in range(2))
    assert first is not None
    assert second is not None
    loss, gradients = first
    assert not loss.requires_grad
    assert loss.dim() == 0
    assert list(gradients) == list(trainable(module))
    missing = {name for name, gradient in gradients.items() if gradient is None}
    assert missing == {"gated", "unused.weight", "unused.bias"}
    for name, gradient in gradients.items():
        if gradient is not None:
            assert gradient.shape == trainable(module)[name].shape
            assert not gradient.requires_grad
            gradient.zero_()  # a fleet reuses them as storage
    assert same(predictor.predict(*REQUESTS[0]), second)


@every_predictor
def test_work_counts_what_one_prediction_multiplies(make: MakePredictor) -> None:
    module = model()
    predictor = make(module)
    predictor.refresh(trainable(module))
    microbatch, seed, index = REQUESTS[0]
    shape = shape_key(microbatch)
    assert predictor.work(shape) is None
    predictor.predict(microbatch, seed, index)
    work = predictor.work(shape)
    assert work is not None
    # 3 samples: wide and tied 6x10 each, frozen 10x10, head 10x1; a multiply-add is two.
    forward = 2 * 3 * (2 * FEATURES * HIDDEN + HIDDEN * HIDDEN + HIDDEN)
    # Weight gradients of wide, tied and head; input gradients of frozen and head.
    backward = 2 * 3 * (2 * FEATURES * HIDDEN + HIDDEN + HIDDEN * HIDDEN + HIDDEN)
    assert sum(work.forward.values()) == forward
    assert sum(work.backward.values()) == backward
    predictor.predict(microbatch, seed + 1, index)
    assert predictor.work(shape) == work
    assert predictor.work(shape_key(batch(2))) is None


@every_predictor
def test_a_prediction_resembles_the_gradient(make: MakePredictor) -> None:
    module = model()
    predictor = make(module)
    predictor.refresh(trainable(module))
    microbatch, seed, index = batch(16, seed=1, gate=True), 3, 0
    prediction = often(predictor, (microbatch, seed, index))
    assert prediction is not None
    # The plain computation, under the same dropout masks.
    twin = copy.deepcopy(module)
    torch.manual_seed(seed)
    loss = twin.training_step(microbatch, index)
    assert loss is not None
    loss.backward()
    gradients = {name: p.grad for name, p in trainable(twin).items() if p.grad is not None}
    exact = torch.cat([g.flatten() for g in gradients.values()])
    predicted = torch.cat([g.flatten() for name, g in prediction[1].items() if g is not None])
    assert gradients.keys() == {name for name, g in prediction[1].items() if g is not None}
    # Four bits, stochastically rounded, are an error of up to 1/7 of a block's largest number in each operand.
    torch.testing.assert_close(prediction[0], loss.detach(), rtol=0.3, atol=0)
    assert torch.cosine_similarity(predicted, exact, dim=0) > 0.8
    assert isinstance(predictor, EagerPredictor | ProgramPredictor)
    if predictor.lowering.formats.name == "fp32":
        assert torch.equal(predicted, exact)
        assert torch.equal(prediction[0], loss.detach())


# ----------------------------------------------------------------------------------------------------------- fleets


@dataclass(frozen=True)
class Asked:
    samples: int
    weight: float
    control: bool
    seed: int
    gate: bool
    skip: bool


asked = st.builds(
    Asked,
    samples=st.integers(1, 3),
    weight=st.floats(0.01, 1),
    control=st.booleans(),
    seed=st.integers(0, 2**63 - 2),
    gate=st.booleans(),
    skip=st.sampled_from([False] * 9 + [True]),
)


def jobs_of(requests: Sequence[Asked]) -> list[Job]:
    return [
        Job(MicroBatch(batch(r.samples, i, r.skip, r.gate), i, r.samples, 0, r.weight), r.seed, r.control)
        for i, r in enumerate(requests)
    ]


@every_fleet
@given(requests=st.lists(asked, min_size=1, max_size=6), observe=st.booleans())
@hypothesis_settings(max_examples=30, deadline=None, derandomize=True)
def test_a_fleet_returns_the_sums_of_the_slow_oracle(make: MakeFleet, requests: list[Asked], observe: bool) -> None:
    module = model()
    layout = Layout.of(trainable(module), per_parameter=FEATURES * HIDDEN)  # all coordinates of the largest
    fleet = make(EagerPredictor(module, Lowering("int8")), layout)
    fleet.refresh(trainable(module), seed=0)
    jobs = jobs_of(requests)
    for _ in range(2):  # a second batch owes nothing to the first
        fleet.submit(jobs, (7,), observe)
        returned = fleet.gather()

    # The obvious computation: one prediction at a time, all gradient sets kept, summed in double precision.
    sums: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
    losses, norms, samples, passes = {}, [], {}, {"fleet/control": 0, "fleet/prediction": 0}
    oracle = EagerPredictor(module, Lowering("int8"))
    oracle.refresh(trainable(module))
    for job in jobs:
        part = job.microbatch
        prediction = oracle.predict(part.data, job.seed, 7)
        if prediction is None:
            continue
        losses[part.index] = float(prediction[0])
        passes["fleet/control" if job.control else "fleet/prediction"] += 1
        share = len(jobs) * part.weight
        flat, squares = [], dict.fromkeys(layout.layers, 0.0)
        for name, gradient in prediction[1].items():
            g = torch.zeros_like(trainable(module)[name]).double() if gradient is None else gradient.double()
            flat.append(share * g.flatten())
            squares[name.rpartition(".")[0] or name] += float((share * g).pow(2).sum())
            if gradient is not None:
                held = sums[job.control].get(name, torch.zeros_like(g))
                sums[job.control][name] = held + part.weight * g
        norms.append(list(squares.values()))
        if job.control:
            samples[part.index] = torch.cat(flat)

    assert returned.skipped == [i for i, r in enumerate(requests) if r.skip]
    assert returned.losses == losses
    for control, actual in ((True, returned.control), (False, returned.rest)):
        given_back = {name: g for name, g in actual.items() if g is not None}
        assert given_back.keys() == sums[control].keys()  # what no micro-batch used is missing, not zero
        for name, expected in sums[control].items():
            # fp32 sums of at most six terms, which may cancel: the tolerance is that of their largest.
            largest = float(expected.abs().max()) + 1e-3
            torch.testing.assert_close(given_back[name].double(), expected, rtol=1e-5, atol=1e-5 * largest)
    for account, count in passes.items():
        assert (account in returned.work) == (count > 0)
        if count:
            assert returned.work[account].passes == count
            wanted = [r for r in requests if r.control == (account == "fleet/control") and not r.skip]
            assert returned.work[account].samples == sum(r.samples for r in wanted)
            counted = [oracle.work(shape_key(batch(r.samples))) for r in wanted]
            assert returned.work[account].flops == sum(work.total for work in counted if work is not None) > 0
    if observe and not returned.skipped:
        assert returned.squared_norms is not None
        torch.testing.assert_close(returned.squared_norms.double(), torch.tensor(norms).double(), rtol=1e-4, atol=1e-9)
        assert returned.samples.keys() == samples.keys()
        for index, expected in samples.items():
            torch.testing.assert_close(returned.samples[index].double(), expected, rtol=1e-5, atol=1e-6)


@every_fleet
def test_a_fleet_predicts_at_the_weights_it_was_given(make: MakeFleet) -> None:
    module = model()
    fleet = make(EagerPredictor(module, Lowering("fp32")), Layout.of(trainable(module)))
    jobs = jobs_of([Asked(2, 1.0, False, 0, False, False)])

    def rest() -> dict[str, Tensor | None]:
        fleet.submit(jobs, (0,), False)
        return {name: g.clone() for name, g in fleet.gather().rest.items() if g is not None}

    fleet.refresh({name: p.detach().clone().requires_grad_() for name, p in trainable(module).items()}, seed=0)
    before = rest()
    with torch.no_grad():
        module.head.weight.mul_(3)
    assert equal(rest(), before)
    fleet.refresh(trainable(module), seed=0)
    assert not equal(rest(), before)


# -------------------------------------------------------------------------------------------------------- callbacks


class Plain(L.LightningModule):
    """A perceptron that logs, with dropout and a shuffled loader: everything a callback could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)


def train(
    tmp_path: Path,
    *callbacks: L.Callback,
    strategy: str = "predicted_gradients",
    steps: int = 15,
    module: L.LightningModule | None = None,
) -> Any:
    """Train from one seed; the module, what it logged, and where the random generators ended."""
    L.seed_everything(0, verbose=False)
    module = module or Plain()
    runner = L.Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
    )
    runner.fit(module)
    logged = {k: v for k, v in runner.callback_metrics.items() if not k.startswith("ledger/")}
    return module.state_dict(), logged, torch.get_rng_state(), random.getstate()


def callbacks(**others: L.Callback) -> dict[str, L.Callback]:
    return {name: others.get(name) or make() for name, make in CALLBACKS.items()}


@pytest.mark.parametrize("strategy", ["auto", "predicted_gradients"])
def test_the_ledger_and_an_unspent_budget_observe_only(strategy: str, tmp_path: Path) -> None:
    others = [] if strategy == "auto" else [GradientPrediction(microbatches=4), ControlVariate()]
    without = train(tmp_path, *copy.deepcopy(others), strategy=strategy)
    ledger = ComputeLedger()
    observed = train(tmp_path, ledger, BudgetStopping(max_cost=1e12), *others, strategy=strategy)
    assert equal(observed, without)
    assert ledger.ledger.steps == 15
    assert ledger.ledger.totals()["scarce/backward"].flops > 0


@every_callback
def test_making_a_callback_draws_nothing(name: str) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    CALLBACKS[name]()
    assert equal((torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()), before)  # noqa: NPY002


@every_stateful_callback
def test_a_callbacks_state_survives_a_checkpoint_file(name: str, tmp_path: Path) -> None:
    stack = callbacks()
    train(tmp_path, *stack.values())
    state = stack[name].state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)  # plain containers and tensors
    fresh = CALLBACKS[name]()
    assert not equal(fresh.state_dict(), state)
    fresh.load_state_dict(loaded)
    assert equal(fresh.state_dict(), state)


@every_stateful_callback
def test_a_callbacks_state_is_a_snapshot(name: str, tmp_path: Path) -> None:
    stack, module = callbacks(), Plain()
    train(tmp_path, *stack.values(), module=module)
    state = stack[name].state_dict()
    kept = copy.deepcopy(state)
    train(tmp_path, *stack.values(), module=module)
    assert equal(state, kept)
    assert not equal(stack[name].state_dict(), kept)


@every_stateful_callback
def test_training_goes_on_from_a_loaded_state_as_from_the_callback_itself(name: str, tmp_path: Path) -> None:
    stack, module = callbacks(), Plain()
    train(tmp_path / "first", *stack.values(), module=module)
    twin, weights = copy.deepcopy(stack), copy.deepcopy(module.state_dict())
    loaded = CALLBACKS[name]()
    loaded.load_state_dict(copy.deepcopy(twin[name].state_dict()))
    twin[name] = loaded
    train(tmp_path / "other", *twin.values(), module=module)
    module.load_state_dict(weights)
    train(tmp_path / "first", *stack.values(), module=module)
    ours, theirs = loaded.state_dict(), stack[name].state_dict()
    for state in (ours, theirs):  # wall-clock time is information only
        for work in state.get("totals", {}).values():
            work.pop("seconds", None)
    assert equal(ours, theirs)


@every_stateful_callback
def test_a_foreign_state_is_refused_by_name(name: str) -> None:
    callback = CALLBACKS[name]()
    own = callback.state_dict()
    kind = own["kind"]
    foreign: list[dict[str, Any]] = [CALLBACKS[other]().state_dict() for other in STATEFUL if other != name]
    for state in (*foreign, {**own, "schema": 999}, {}):
        with pytest.raises(ValueError, match=r"kind|schema") as error:
            callback.load_state_dict(state)
        found, expected = ("999", str(own["schema"])) if state.get("kind") == kind else (str(state.get("kind")), kind)
        assert found in str(error.value)
        assert expected in str(error.value)
        assert equal(callback.state_dict(), own)
