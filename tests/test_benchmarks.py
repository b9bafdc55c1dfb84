"""How benchmarks pick learning rates, and which runs their tables hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(BENCHMARKS):
            del sys.modules[name]


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
