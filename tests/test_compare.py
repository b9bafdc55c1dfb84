"""`pliant compare`: cells are processes, failures are rows, what is done is not done again; the table and the front."""

from __future__ import annotations

import json
import signal
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from command import python_path, run, text
from hypothesis import given
from hypothesis import strategies as st
from instances import laws

from pliant import PliantError
from pliant.apps import compare, run_folder
from pliant.apps.compare import Cell, CellResult, cells, front, summary
from pliant.apps.train import Options
from pliant.cost.peaks import Peaks

PEAKS = Peaks(4e10, 1e10, "cpu", "float32", 1)
BASE = Options(model=tiny.MODEL, data=tiny.DATA, size=8, batch=8, epochs=1, scratch=True, device="cpu", evaluate_every=4)


@pytest.fixture(autouse=True)
def known_peaks(place: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's own cache is read or written, and no device is measured for it. Cells find the model."""
    monkeypatch.setenv("PYTHONPATH", python_path(place))
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("pliant.cost.peaks.measured", lambda *_: PEAKS)


def result(accuracy: float, seconds: float, at: tuple[tuple[float, float], ...] = (), **other: Any) -> dict[str, Any]:
    """A result as a process prints it, as far as a comparison reads it."""
    all_of_them = [*({"seconds": s, "accuracy": a} for s, a in at), {"seconds": seconds, "accuracy": accuracy}]
    rest = {"seconds_per_step": 0.1, "memory_bytes": 2_000_000, "joules": None}
    return {"evaluations": all_of_them, "seconds": seconds, **rest, **other}


# ---------------------------------------------------------------- cells


def test_every_recipe_runs_with_the_budgets_that_it_keeps() -> None:
    made = cells(["full", "last", "pliant"], [("time", "0.5"), ("memory", "9MB")], [0, 1])
    assert [cell.name for cell in made if cell.seed == 1] == [
        "full-seed1",
        "last-time-0.5-seed1",
        "pliant-time-0.5-seed1",
        "pliant-memory-9MB-seed1",
    ]
    assert len({cell.name for cell in made}) == len(made) == 8


def test_recipes_that_differ_in_a_special_character_have_folders_of_their_own() -> None:
    recipes = ["only:1*.weight", "only:1?.weight", "only:1-.weight"]
    names = [cell.name for cell in cells([*recipes, "elastic_layers", "last"], [("time", "0.5"), ("time", "5ms")], [0])]
    assert len(set(names)) == len(names) == 7 and all(
        set(name) <= {*string.ascii_letters, *string.digits, *"-_."} for name in names
    )
    assert names[3] == "elastic_layers-time-0.5-seed0"  # an ordinary name stays as it is


def test_a_run_that_began_with_other_options_is_not_resumed(place: Path) -> None:
    last = cells(["last"], [("time", "0.5")], [0])
    folder = run_folder.Folder(place / "out/runs" / last[0].name)
    run_folder.write_options(folder, replace(BASE, recipe="full").resolved().to_json(), {})
    with pytest.raises(PliantError, match="another comparison: recipe is 'full' there and 'last' here"):
        compare.compare(BASE, last, "out")


@pytest.mark.parametrize(
    ("recipes", "budgets", "said"),
    [
        (["last"], [("memory", "1MB")], "budget of time"),
        ([], [], "nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_told_before_anything_runs(recipes: list[str], budgets: Any, said: str) -> None:
    with pytest.raises(PliantError, match=said):
        cells(recipes, budgets, [0])


def test_a_cells_options_become_the_command_line_that_makes_them() -> None:
    options = Options(data="digits", lr=0.1, scratch=True, evaluate_every=5, out="x y")
    made = compare._arguments(options)
    assert made == ["--lr=0.1", "--evaluate-every=5", "--scratch", "--out=x y", "--json"]


# ---------------------------------------------------------------- what they came to


def test_lines_hold_means_over_seeds_and_times_to_the_reference() -> None:
    rows = [
        CellResult(Cell("full", "", "", 0), result(0.8, 10.0, ((4.0, 0.5),))),
        CellResult(Cell("full", "", "", 1), result(0.6, 12.0)),
        CellResult(Cell("last", "time", "0.5", 0), result(0.9, 6.0, ((3.0, 0.75),))),
        CellResult(Cell("last", "time", "0.5", 1), result(0.5, 6.0)),
        CellResult(Cell("head", "", "", 0), None, "it broke"),
    ]
    found = summary(rows)
    full, last, head = found.lines
    assert found.reference == pytest.approx(0.7)
    assert full.accuracy == pytest.approx(0.7) and full.accuracies == (0.8, 0.6) and full.seconds == 11.0
    assert full.to_reference == 10.0 and full.reached == 1
    assert last.to_reference == 3.0 and last.reached == 1 and last.front and not full.front
    assert head.failed == 1 and head.accuracy is None and head.error == "it broke" and not head.front
    assert last.joules is None and last.memory_bytes == 2_000_000
    assert summary(rows, reference=0.95).lines[0].to_reference is None
    assert json.loads(json.dumps(found.to_json()))["lines"][1]["budget"] == "time=0.5"


def test_without_full_there_is_no_reference() -> None:
    found = summary([CellResult(Cell("head", "", "", 0), result(0.5, 1.0))])
    assert found.reference is None and found.lines[0].to_reference is None


@laws(60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    best = front([(float(cost), float(gain)) for cost, gain in points])
    for i, (cost, gain) in enumerate(points):
        beaten = any(c <= cost and g >= gain and (c < cost or g > gain) for c, g in points)
        assert (i in best) == (not beaten)


# ---------------------------------------------------------------- processes


def test_a_comparison_resumes_what_was_cut_off_and_records_what_fails(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr("pliant.cost.peaks.measured", lambda *_: measured.append(torch.get_num_threads()) or PEAKS)
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    last, too_small = cells(["last"], [("time", "1.0")], [0]), cells(["pliant"], [("macs", "0.001")], [0])
    folder, told = place / "out/runs" / last[0].name, list[str]()
    monkeypatch.setenv("TINY_KILLED_AFTER", str(folder / "state.pt"))
    cut = compare.compare(BASE, last, "out").rows[0]
    assert cut.result is None and f"{-signal.SIGKILL}" in cut.error
    monkeypatch.delenv("TINY_KILLED_AFTER")

    made = [*last, *too_small]
    found = compare.compare(BASE, made, "out", jobs=2, threads=1, on_row=lambda row, done, of: told.append(f"{done}/{of}"))
    assert measured == [1] and torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), random)
    ends, fails = found.rows
    assert ends.result is not None and fails.result is None and told == ["1/2", "2/2"]
    assert "below the floor" in json.loads((place / f"out/cells/{fails.cell.name}.json").read_text())["error"]
    assert found.lines[0].accuracy == ends.result["evaluations"][-1]["accuracy"] and ends.result["memory_bytes"] > 0
    assert json.loads((place / "out/comparison.json").read_text())["format"] == "pliant.comparison/1"
    log = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert "resume" in [line["event"] for line in log]
    assert {line["peaks"]["flops"] for line in log if line["event"] == "roofline"} == {PEAKS.flops}  # measured here, once

    (folder / "state.pt").unlink()  # whoever ran it again would notice
    held = place / f"out/cells/{last[0].name}.json"
    before = held.read_bytes()
    again = compare.compare(BASE, last, "out")
    assert again.rows[0].result == ends.result and held.read_bytes() == before
    with pytest.raises(PliantError, match="another comparison: lr is"):
        compare.compare(replace(BASE, lr=1.0), last, "out")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"model": "tiny_net:ten"}, "4 classes need"), ({"data": "nowhere"}, "no data"), ({"device": "gpu"}, "is not a device")],
)
def test_what_no_cell_could_run_is_reported_before_any_begins(place: Path, wrong: dict[str, str], said: str) -> None:
    with pytest.raises(PliantError, match=said):
        compare.compare(replace(BASE, **wrong), cells(["full"], [], [0]), "out")  # type: ignore[arg-type]
    assert not list((place / "out/cells").iterdir()) and not (place / "out/runs").exists()


def test_the_command_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(self: Any, where: Path, cell: Cell, base: Options) -> CellResult:
        if cell.recipe == "head":
            return CellResult(cell, None, "no reason")
        return CellResult(cell, result(0.9 if cell.recipe == "last" else 0.8, 5.0 - cell.seed))

    monkeypatch.setattr(compare._Running, "run", ran)
    flags = ["compare", "--recipe", "full", "--recipe", "last", "--recipe", "head", "--time", "0.5", "--out", "out"]
    shown = run(flags)
    assert shown.exit_code == 0, shown.output
    for part in ("★ last", "80.0 ±0.0", "head: 2 of 2 failed: no reason", "energy:"):
        assert part in text(shown)
    found = json.loads(run([*flags, "--json"]).stdout)
    assert [line["recipe"] for line in found["lines"]] == ["full", "last", "head"]


def test_at_least_one_seed_is_needed() -> None:
    assert run(["compare", "--seeds", "0"]).exit_code == 2
