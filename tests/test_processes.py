"""Several processes: two gloo processes on the CPU, started once. What they run is in `processes.py`."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from filelock import FileLock
from processes import RECIPES, ROWS, STEPS

from pliant.runtime import ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each process found. Workers of one test run share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "processes"
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return processes.found(folder)
        folder.mkdir()
        return processes.run(folder)


@cache
def alone(name: str) -> dict[str, Any]:
    """The same run in one process, with the same global batches."""
    return processes.train(name, "one", None)


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_processes_stay_equal_and_train_as_one(found: list[Any], name: str, kind: str) -> None:
    first, second = (one["trained"][name, kind] for one in found)
    for what in ("units", "chosen"):
        assert first[what] == second[what] == alone(name)[what]
    changes = len({tuple(chosen) for chosen in first["chosen"]})
    assert len(first["chosen"]) == STEPS and (changes > 1) == (name not in ("full", "only", "last"))
    for key, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][key]), f"{key} differs between processes"
        torch.testing.assert_close(weight, alone(name)["weights"][key], rtol=1e-9, atol=1e-11)


def test_accumulation_and_the_callers_own_loop_do_the_same(found: list[Any]) -> None:
    """The same batch twice, and half of each gradient, is that batch."""
    once = processes.train("pliant", "one", None, 12)["weights"]
    for weights in (*(one["trained"]["accumulate"]["weights"] for one in found), *(one["own loop"] for one in found)):
        for key, weight in weights.items():
            torch.testing.assert_close(weight, once[key], rtol=1e-9, atol=1e-11)


def test_with_real_clocks_all_processes_choose_the_same(found: list[Any]) -> None:
    assert found[0]["measured"] == found[1]["measured"] and found[0]["measured"][0]


def test_a_run_of_several_processes_goes_on_as_if_never_stopped(found: list[Any]) -> None:
    assert all(one["resumed"] for one in found)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        ("flags", "find_unused_parameters=False"),
        ("static", "static_graph=True"),
        ("frozen", "DistributedDataParallel does not average it"),
        ("not told", "Give the session the wrapped model"),
        ("nan", "the loss of the probe batch is nan"),
        ("energy", "energy= is measured for one process"),
        ("sharded timed", "measure before you shard"),
        ("sharded memory", "memory= is not predicted"),
    ],
)
def test_wrong_use_is_refused_before_a_weight_moves(found: list[Any], use: str, says: str) -> None:
    for one in found:
        message, is_untouched = one["wrong"][use]
        assert says in message and is_untouched
    assert found[0]["wrong"]["full needs no flag"] == ("not refused", False)


def test_other_wrappers_are_refused(tmp_path: Path) -> None:
    model = processes.net()
    with pytest.raises(ValueError, match="wrapped by DataParallel"):
        processes.one_step(torch.nn.DataParallel(model), RECIPES["full"](), model, 0)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ([1.0, 2.0], [1.0 + 1e-12, 2.0], True),  # sums of other threads round otherwise
        ([1.0, 2.0], [1.001, 2.0], False),
        ([math.nan, math.nan], [math.nan, math.nan], True),
        ([math.nan, math.inf], [1.0, 2.0], False),
        (None, None, True),
        (None, [0.0, 0.0], False),
    ],
)
def test_gradients_of_processes_are_compared_up_to_rounding(one: Any, other: Any, alike: bool) -> None:
    assert ranks._is_alike(one, other) == ranks._is_alike(other, one) == alike
