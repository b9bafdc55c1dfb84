"""Benchmarks: what they import, how they pick learning rates, and which runs their tables hold."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import pliant
from pliant.moved import ROOM_OF

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(BENCHMARKS):
            del sys.modules[name]


def defined(place: Path) -> set[str]:
    """The public names that a module defines, read from its source; of a package, those in its `__all__`."""
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    offered = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets)
    ]
    own = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")}
    return set(offered[0]) if offered else own


def is_public(module: str, name: str | None = None) -> bool:
    """Whether users may import this module, or this name from it: what `pliant` and its public modules export."""
    is_integration = module.startswith("pliant.integrations.") and module.count(".") == 2
    if name is None:
        return module in ("pliant", "pliant.export") or module in ROOM_OF or is_integration
    if module == "pliant":
        return name in pliant.__all__ or f"pliant.{name}" in ROOM_OF
    if is_integration:  # what it stands on need not be installed
        return name in defined(Path(pliant.__file__).parent.parent / module.replace(".", "/"))
    if module != "pliant.export" and module not in ROOM_OF:
        return False
    there = importlib.import_module(module)
    own = [key for key, value in vars(there).items() if getattr(value, "__module__", there.__name__) == there.__name__]
    return name in getattr(there, "__all__", [key for key in own if not key.startswith("_")])


def imports(source: str) -> Iterator[tuple[str, str | None]]:
    """Every import from the library in some code: a module, or a module and a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "pliant")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pliant":
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_the_check_of_imports_refuses_internals() -> None:
    code = "import pliant.solve, pliant.engine; from pliant import Session, core; from pliant.measure import timed, _x, sandbox"
    refused = [found for found in imports(code) if not is_public(*found)]
    assert refused == [
        ("pliant.engine", None),
        ("pliant", "core"),
        ("pliant.measure", "_x"),
        ("pliant.measure", "sandbox"),
    ]


@pytest.mark.parametrize("path", sorted(Path(BENCHMARKS).glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_import_public_names_only(path: Path) -> None:
    assert [found for found in imports(path.read_text(encoding="utf-8")) if not is_public(*found)] == []


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("path", sorted(Path(BENCHMARKS).glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_can_be_imported(path: Path) -> None:
    assert importlib.import_module(path.stem).__doc__


def runs(lr: float, *validation: float | None) -> list[dict[str, Any]]:
    """One for each seed; None: it failed."""
    told = [{"failed": "why"} if judged is None else {"validation": judged} for judged in validation]
    return [{"task": "t", "method": "m", "lr": lr, "seed": seed} | one for seed, one in enumerate(told)]


@pytest.mark.usefixtures("benchmarks")
def test_rates_near_the_best_of_one_seed_are_judged_by_all() -> None:
    from transfer_table import best, contenders

    cells = runs(0.01, 0.80) + runs(0.03, 0.82) + runs(0.1, 0.70)
    assert contenders(cells, "t", "m", (0.01, 0.03, 0.1)) == [0.01, 0.03]
    assert contenders(cells, "t", "m", (0.01, 0.3)) == []  # not all of these were tried
    assert best(cells, "t", "m") == 0.03
    cells = runs(0.01, 0.80, 0.85, 0.85) + runs(0.03, 0.82, 0.80, 0.80) + runs(0.1, 0.70)
    assert best(cells, "t", "m") == 0.01
    assert best([*cells, runs(0.03, 0, 0, 0, 0.99)[3]], "t", "m") == 0.01  # a seed that the other has not had
    assert best(cells + runs(0.01, None), "t", "m") == 0.01  # the first run of a seed that went through counts
    assert best(cells + runs(0.01, 0.10), "t", "m") == 0.01


@pytest.mark.usefixtures("benchmarks")
def test_what_fails_is_never_the_best() -> None:
    from transfer_table import best, contenders

    assert best(runs(0.01, None) + runs(0.03, 0.1), "t", "m") == 0.03
    assert contenders(runs(0.01, None), "t", "m", (0.01,)) == [] and best(runs(0.01, None), "t", "m") is None
    assert best([], "t", "m") is None


@pytest.mark.usefixtures("benchmarks")
def test_tables_of_tasks_hold_what_every_method_has_had_at_its_rate() -> None:
    import fewshot

    def cell(method: str, task: int, lr: float, accuracy: float) -> dict[str, Any]:
        return {"backbone": "b", "start": "s", "domain": "d", "method": method, "task": task, "lr": lr, "accuracy": accuracy}

    cells = [cell("full", -1, 0.1, 0.5), cell("full", -1, 0.2, 0.6), cell("none", 0, 0.1, 0.1), cell("none", 1, 0.1, 0.2)]
    cells += [cell("full", 0, 0.1, 0.3), cell("full", 0, 0.2, 0.4), cell("full", 2, 0.2, 0.4)]
    assert [(c["method"], c["task"], c["lr"]) for c in fewshot.at_best(cells)] == [("none", 0, 0.1), ("full", 0, 0.2)]


@pytest.mark.usefixtures("benchmarks")
def test_what_went_wrong_is_not_tried_again_and_an_own_rate_needs_no_tuning() -> None:
    import argparse

    import fewshot

    args = argparse.Namespace(backbones=["b"], starts=["imagenet"], domains=["pets"], rates=[0.1, 0.2], tuning=1, tasks=2)
    args.methods = ["full", "full, own rate"]
    todo = fewshot.wanted(args, [])
    assert todo["b", "imagenet", "source", -1] == todo["b", "imagenet", "pets", -1] == {"full": (0.1, 0.2)}
    assert todo["b", "imagenet", "pets", 0] == todo["b", "imagenet", "pets", 1] == {"full, own rate": ("auto",)}
    job = "b", "imagenet", "pets", 0
    left = fewshot.wanted(args, [], {(job, "full, own rate")})
    assert job not in left and len(left) == len(todo) - 1


@pytest.mark.usefixtures("benchmarks")
def test_a_table_of_several_networks_begins_with_what_is_ahead_of_full_training() -> None:
    import fewshot

    def cell(backbone: str, method: str, domain: str, task: int, accuracy: float) -> dict[str, Any]:
        named = {"backbone": backbone, "start": "imagenet", "method": method, "domain": domain}
        return {**named, "task": task, "lr": 0.1, "accuracy": accuracy}

    cells = [
        cell(net, method, domain, task, 0.5 + 0.01 * task + gain)
        for net, better in (("mcunet", 0.02), ("proxyless_0.3", 0.04))
        for method, gain in (("full", 0.0), ("bias", better))
        for domain in ("pets", "gtsrb")
        for task in (0, 1, 2)
    ]
    table = fewshot.table(cells)
    assert "| bias | +2.0 ± 0.0 | +4.0 ± 0.0 | +3.0 |" in table.split("### mcunet")[0]


@pytest.mark.usefixtures("benchmarks")
def test_everything_at_first_and_then_what_the_budget_allows() -> None:
    import transfer_methods

    from pliant import Progress

    policy = transfer_methods.policy(transfer_methods.parse("pliant 3ms, wide 0.4"), torch.nn.Linear(2, 2), 0)
    limit = policy.budget.time
    assert callable(limit)
    moments = [Progress(step=step, total_steps=10) for step in range(10)]
    assert [limit(now) for now in moments] == [1.0] * 4 + ["3ms"] * 6
    due = [policy.when.due(now, last, None) for last, now in pairwise(moments)]
    assert due == [False, False, False, True, False, False, False, False, False]
    with pytest.raises(SystemExit, match="both"):
        transfer_methods.policy(transfer_methods.parse("pliant 0.4, ramp 0.8-0.2, wide 0.4"), torch.nn.Linear(2, 2), 0)


@pytest.mark.usefixtures("benchmarks")
def test_every_method_and_every_option_of_an_ablation_is_a_policy() -> None:
    import transfer_methods

    values = {"units": "tensors", "signal": "fisher", "cost": "counted", "solver": "greedy", "every": "10", "state": "drop"}
    values |= {"memory": "2MB", "power": "1", "alike": "0.5", "ramp": "0.8-0.2", "wide": "0.4", "head_first": "0"}
    assert values.keys() == transfer_methods.CHANGES.keys()
    changed = [f"pliant 0.5, {word} {value}" for word, value in values.items()]
    for name in (*transfer_methods.MAIN, *changed, "pliant 0.5, solver dense"):
        method = transfer_methods.parse(name)
        assert isinstance(transfer_methods.policy(method, torch.nn.Linear(2, 2), 0), pliant.Policy), name


@pytest.mark.usefixtures("benchmarks")
def test_freezing_by_hand_trains_the_chosen_alone() -> None:
    import nets
    from training import freeze_, plain_step, sgd

    torch.manual_seed(0)
    model, batch = nets.build("resnet18", 32), nets.batch("resnet18", 2, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    chosen = {"layers.3.1.conv2.weight", "layers.3.1.bn2.weight", "fc.bias"}
    freeze_(model, chosen)
    plain_step(model, sgd(model), nets.loss, batch)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    statistics = {f"layers.3.1.bn2.{kind}" for kind in ("running_mean", "running_var", "num_batches_tracked")}
    assert moved == chosen | statistics


@pytest.mark.usefixtures("benchmarks")
def test_the_meter_counts_what_lives_and_its_peak() -> None:
    from meter import LiveBytes

    given = torch.ones(100)
    with LiveBytes("cpu") as meter:
        kept = given * 2
        other = (kept + 1).view(10, 10)
        assert meter.bytes == 800
        del other
        given.add_(1)  # in place: nothing is created
        assert (meter.bytes, meter.peak) == (400, 800)
        meter.reset_peak()
        assert meter.peak == 400


@pytest.mark.usefixtures("benchmarks")
def test_a_run_of_steps_in_turn_is_accepted_within_its_bounds() -> None:
    import turns

    def cell(step: float, corrections: int = 0) -> dict[str, Any]:
        where = {"network": "n", "recipe": "r", "asked": 0.5, "run": 0, "begin": "second"}
        return {**where, "step": step, "mean": step, "corrections": corrections}

    assert [bool(turns.missed(cell(step))) for step in (0.42, 0.43, 0.5, 0.535, 0.545)] == [True, False, False, False, True]
    assert not turns.missed(cell(0.5, 2)) and turns.missed(cell(0.5, 3)) == ["3 corrections"]
    long = [{**cell(0.5), "mean": 0.6, "begin": begin} for begin in ("first", "second")]
    assert [turns.missed(one) for one in long] == [[], ["all steps: +20.0%, at most +10%"]]
    assert "| 1 of 2 |" in turns.table([cell(0.5), cell(0.6)])


@pytest.mark.usefixtures("benchmarks")
def test_foreign_rows_are_many_and_name_what_must_be_among_them() -> None:
    models = importlib.import_module("foreign_models")
    packages = {row.package for row in models.ROWS.values()}
    assert packages == {"timm", "torchvision", "transformers", "peft", "smp", "torch"}
    assert sum(row.package != "torch" and not row.missing for row in models.ROWS.values()) >= 120
    assert set(models.TEN) <= set(models.ROWS)


@pytest.mark.usefixtures("benchmarks")
def test_a_foreign_model_that_fails_is_named_with_its_reason() -> None:
    foreign = importlib.import_module("foreign")
    cells = [
        {"row": "timm/a", "reasons": {}, "seen": {"time": {"floor": 0.523, "chosen": "3 of 9"}}},
        {"row": "timm/b", "reasons": {"memory": "why | not"}},
        {"row": "torchvision/c", "left out": "no nms"},
    ]
    lines = foreign.table(cells).splitlines()
    assert "| timm | 2 | 1 |" in lines and "| all | 2 | 1 (50.0 %) |" in lines
    assert r"| timm/b | memory | why \| not |" in lines
    assert "| torchvision/c | – | left out: no nms; run it on a GPU machine |" in lines
    assert "| timm/a | pass | 0.52 | 3 of 9 | – |" in lines


@pytest.mark.usefixtures("benchmarks")
def test_a_check_of_foreign_models_gives_a_reason_and_no_traceback() -> None:
    foreign = importlib.import_module("foreign")

    def broken() -> None:
        raise ValueError("what is wrong\n— what to do")

    assert foreign.reason(lambda: None) == ""
    assert foreign.reason(broken).startswith("ValueError: what is wrong — what to do [test_benchmarks.py")
    row = foreign.ROWS["torch/weight_norm"]
    foreign.agrees(row, "lean", found := {})
    assert found["error"]["lean"] < 1e-12
