"""A sweep file says here what it says to W&B: the same runs in the same order, by the same commands."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from lightning_ledger.sweeps import Sweep
from lightning_ledger.sweeps.definition import arguments
from lightning_ledger.sweeps.parameters import parse

DRAWS = 4000


def sweep(folder: Path, parameters: dict[str, Any], **keys: Any) -> Sweep:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"method": "grid", "program": "train.py", "parameters": parameters, **keys}))
    return Sweep.read(file)


def draws(**config: Any) -> list[Any]:
    generator, parameter = Random(0), parse("x", config)
    return [parameter.draw(generator) for _ in range(DRAWS)]


# Grids.


def test_a_grid_goes_through_sorted_names_the_last_one_fastest(tmp_path):
    runs = sweep(tmp_path, {"b": {"values": [3, 1]}, "a": {"values": ["x", "y"]}, "c": {"value": 7}}).runs()
    assert [tuple(run.parameters.items()) for run in runs] == [
        (("a", "x"), ("b", 3), ("c", 7)),
        (("a", "x"), ("b", 1), ("c", 7)),
        (("a", "y"), ("b", 3), ("c", 7)),
        (("a", "y"), ("b", 1), ("c", 7)),
    ]


def test_a_grid_takes_whole_ranges_and_steps(tmp_path):
    parameters = {"n": {"min": 2, "max": 4}, "q": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.25}}
    runs = sweep(tmp_path, parameters).runs()
    assert [run.parameters["n"] for run in runs[::4]] == [2, 3, 4]  # both ends
    assert [run.parameters["q"] for run in runs[:4]] == [0.0, 0.25, 0.5, 0.75]  # short of the upper end


def test_nested_parameters_have_dotted_names(tmp_path):
    nested = {"model": {"parameters": {"width": {"values": [8]}, "init_args": {"parameters": {"lr": {"value": 0.1}}}}}}
    (run,) = sweep(tmp_path, nested).runs()
    assert run.parameters == {"model.init_args.lr": 0.1, "model.width": 8}


def test_a_grid_is_cut_by_its_cap_and_by_the_count(tmp_path):
    parameters = {"a": {"values": [1, 2, 3, 4]}}
    assert len(sweep(tmp_path, parameters, run_cap=3).runs()) == 3
    assert len(sweep(tmp_path, parameters, run_cap=3).runs(count=2)) == 2


# Random draws.


def test_random_draws_are_seeded_and_a_longer_list_begins_with_the_shorter(tmp_path):
    found = sweep(tmp_path, {"a": {"min": 0.0, "max": 1.0}, "b": {"values": [1, 2]}}, method="random", run_cap=9)
    values = [run.parameters for run in found.runs()]
    assert len(values) == 9
    assert [run.parameters for run in found.runs(count=4)] == values[:4]
    assert [run.parameters for run in found.runs(seed=1)] != values
    assert found.runs()[3].name == found.runs(count=4)[3].name
    assert found.runs()[3].name.startswith("0003-a-")


def test_uniform_draws_are_uniform():
    found = draws(min=2.0, max=6.0)
    # A uniform's standard deviation is 4 / sqrt(12); five standard errors of the mean.
    assert statistics.mean(found) == pytest.approx(4.0, abs=5 * 4 / math.sqrt(12 * DRAWS))
    assert statistics.pstdev(found) == pytest.approx(4 / math.sqrt(12), rel=0.05)
    assert min(found) >= 2
    assert max(found) <= 6


def test_log_uniform_values_have_a_uniform_logarithm():
    found = draws(distribution="log_uniform_values", min=1e-4, max=1e-2)
    logs = [math.log10(value) for value in found]
    assert statistics.mean(logs) == pytest.approx(-3, abs=5 * 2 / math.sqrt(12 * DRAWS))
    assert statistics.pstdev(logs) == pytest.approx(2 / math.sqrt(12), rel=0.05)
    assert 1e-4 <= min(found) < max(found) <= 1e-2


def test_q_uniform_rounds_to_multiples_and_the_ends_get_half_a_share():
    found = Counter(draws(distribution="q_uniform", min=0, max=8, q=2))
    assert sorted(found) == [0, 2, 4, 6, 8]
    assert all(isinstance(value, int) for value in found)
    for value, share in ((0, 1 / 8), (4, 1 / 4), (8, 1 / 8)):
        assert found[value] / DRAWS == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / DRAWS))


def test_whole_ranges_include_both_ends_and_choices_follow_their_probabilities():
    assert sorted(Counter(draws(min=1, max=3))) == [1, 2, 3]
    found = Counter(draws(values=["a", "b"], probabilities=[0.9, 0.1]))
    assert found["b"] / DRAWS == pytest.approx(0.1, abs=5 * math.sqrt(0.09 / DRAWS))
    assert Counter(draws(values=["a", "b"]))["b"] / DRAWS == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / DRAWS))


# Commands.


def test_arguments_are_those_of_wandbs_agent():
    values = {"a.b": 0.5, "deep": True, "flat": False, "name": "x y", "none": None, "list": [1, 2]}
    theirs = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    assert arguments(values) == {name: flags for name, flags in theirs.items() if name != "args_dict"}


def test_macros_are_filled_in_as_by_wandbs_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_SET", "here")
    monkeypatch.delenv("SOME_UNSET", raising=False)
    words = ["${env}", "${interpreter}", "-u", "${program}", "--x=${envvar:SOME_SET}/${envvar:SOME_UNSET}", "${args}"]
    (run,) = sweep(tmp_path, {"a": {"value": 1}}, command=list(words)).runs()
    filled = create_sweep_command(list(words))[4]
    assert run.words == ["/usr/bin/env", "${interpreter}", "-u", "train.py", filled, "--a=1"]
    assert filled == "--x=here/SOME_UNSET"
    assert Path(run.command(tmp_path)[1]).name.startswith("python")


def test_without_a_command_it_is_wandbs_default(tmp_path):
    (run,) = sweep(tmp_path, {"a": {"value": 1}}).runs()
    assert run.words == ["/usr/bin/env", "${interpreter}", "train.py", "--a=1"]


def test_a_fit_keeps_everything_in_its_folder_and_continues_from_its_checkpoint(tmp_path):
    (run,) = sweep(tmp_path, {"a": {"value": 1}}, command=["lightning-ledger", "fit", "${args}"]).runs()
    command = run.command(tmp_path / "one")
    assert command[:3] == ["lightning-ledger", "fit", "--a=1"]
    assert f"--trainer.default_root_dir={tmp_path}/one" in command
    assert not any(word.startswith("--ckpt_path") for word in command)
    (tmp_path / "one" / "checkpoints").mkdir(parents=True)
    (last := tmp_path / "one" / "checkpoints" / "last.ckpt").touch()
    assert run.command(tmp_path / "one")[-1] == f"--ckpt_path={last}"


# Names.


def test_names_tell_what_varies_and_the_seed_last(tmp_path):
    parameters = {
        "config": {"values": ["configs/demo/gpcv-int8.yaml", "configs/demo/exact-4.yaml"]},
        "model.init_args.learning_rate": {"values": [0.001]},
        "data.init_args.path": {"value": "LICENSE"},
        "seed_everything": {"values": [0, 1]},
        "trainer.max_steps": {"values": [2, 3]},
    }
    names = [run.name for run in sweep(tmp_path, parameters).runs()]
    assert names[:3] == [f"gpcv-int8-max_steps-{end}" for end in ("2-seed-0", "3-seed-0", "2-seed-1")]
    assert len(set(names)) == 8


def test_names_are_distinct_even_if_what_they_show_is_not(tmp_path):
    values = [0.12345678, 0.12345679, "a/b.yaml", "c/b.yaml", "x" * 300, "x" * 300 + "y"]
    names = [run.name for run in sweep(tmp_path, {"v": {"values": values}}).runs()]
    assert len(set(names)) == len(values)
    assert max(map(len, names)) < 200
    short = sweep(tmp_path, {"a.width": {"values": [1, 2]}, "b.width": {"values": [1]}, "c.x": {"values": [0, 1]}})
    assert short.runs()[0].name == "width-1-x-0"
    clash = sweep(tmp_path, {"a.width": {"values": [1, 2]}, "b.width": {"values": [1, 2]}})
    assert clash.runs()[0].name == "a.width-1-b.width-1"


# Mistakes.


@pytest.mark.parametrize(
    ("parameters", "keys", "message"),
    [
        ({"a": {"values": [1]}}, {"method": "bayes"}, "method='bayes' is not run here"),
        ({"a": {"min": 0.0, "max": 1.0}}, {}, "a is uniform, which has no end of values"),
        ({"a": {"min": 0.0, "max": 1.0}}, {"method": "random"}, "goes on for ever"),
        ({"a": 3}, {}, r"Write `a: \{value: 3\}`"),
        ({"a": {"distribution": "normal"}}, {}, "'normal' that is not known here"),
        ({"a": {}}, {}, "has no value, values, or min and max"),
        ({"a": {"values": []}}, {}, "no list of values"),
        ({"a": {"min": "1e-4", "max": 1.0}}, {}, "write 1.0e-4"),
        ({"a": {"min": 2, "max": 1}}, {}, "no range for int_uniform"),
        ({"a": {"min": 0, "max": 1, "distribution": "log_uniform_values"}}, {}, "begins above 0"),
        ({"a": {"min": 0, "max": 1, "q": 0, "distribution": "q_uniform"}}, {}, "must be a positive number"),
        ({"a": {"values": [1, 2], "probabilities": [0.9, 0.2]}}, {}, "sum to 1"),
        ({"a": {"value": 1}}, {"program": ""}, "has no `program`"),
        ({"a": {"value": 1}}, {"command": "python"}, "no list"),
        ({"a": {"value": 1}}, {"command": ["${argz}"]}, r"\$\{argz\} is no macro"),
    ],
)
def test_mistakes_are_told_with_their_repair(tmp_path, parameters, keys, message):
    with pytest.raises(ValueError, match=message):
        sweep(tmp_path, parameters, **keys).runs()


def test_a_file_that_is_none_is_refused(tmp_path):
    (file := tmp_path / "sweep.yaml").write_text("method: grid\n")
    with pytest.raises(ValueError, match="no W&B sweep file"):
        Sweep.read(file)
    file.write_text("a: [")
    with pytest.raises(ValueError, match="no YAML"):
        Sweep.read(file)
