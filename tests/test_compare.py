"""`pliant compare`: cells are processes, failures are rows, what is done is not done again; the table and the front."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pliant import PliantError, cli
from pliant.apps import compare
from pliant.apps.compare import Cell, CellResult, cells, front, summary
from pliant.apps.train import Options, train
from pliant.cost.peaks import Peaks

PEAKS = Peaks(4e10, 1e10, "cpu", "float32", 1)
run = CliRunner().invoke
BASE = Options(model=tiny.MODEL, data=tiny.DATA, size=8, batch=8, epochs=1, scratch=True, device="cpu", evaluate_every=4)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    tiny.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    tiny.forget()


@pytest.fixture(autouse=True)
def known_peaks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's own cache is read or written, and no device is measured for it."""
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


@pytest.mark.parametrize(
    ("recipes", "budgets", "said"),
    [
        (["plaint"], [("time", "0.5")], "Did you mean 'pliant'"),
        (["last"], [("memory", "1MB")], "budget of time"),
        (["last"], [("time", "half")], "not an amount"),
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


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    best = front([(float(cost), float(gain)) for cost, gain in points])
    for i, (cost, gain) in enumerate(points):
        beaten = any(c <= cost and g >= gain and (c < cost or g > gain) for c, g in points)
        assert (i in best) == (not beaten)


# ---------------------------------------------------------------- processes


def test_a_comparison_runs_goes_on_and_records_what_fails(place: Path) -> None:
    made = cells(["full", "pliant"], [("macs", "0.9"), ("macs", "0.001")], [0])
    told: list[str] = []
    found = compare.compare(BASE, made, "out", jobs=2, on_row=lambda row, done, of: told.append(f"{done}/{of}"))
    full, fits, fails = found.rows
    assert full.result is not None and fits.result is not None and told == ["1/3", "2/3", "3/3"]
    assert (
        fails.result is None
        and "below the floor" in json.loads((place / "out/cells" / f"{fails.cell.name}.json").read_text())["error"]
    )
    assert found.lines[0].accuracy == full.result["evaluations"][-1]["accuracy"]
    assert full.result["memory_bytes"] > 0 and (place / "out/runs/full-seed0/run.jsonl").exists()
    assert json.loads((place / "out/comparison.json").read_text())["format"] == "pliant.comparison/1"

    (place / "out/runs/full-seed0/state.pt").unlink()  # whoever ran it again would notice
    before = (place / "out/cells/full-seed0.json").read_bytes()
    again = compare.compare(BASE, made[:2], "out")
    assert again.rows[0].result == full.result and (place / "out/cells/full-seed0.json").read_bytes() == before
    with pytest.raises(PliantError, match="another comparison: lr is"):
        compare.compare(Options(**{**vars(BASE), "lr": 1.0}), made[:1], "out")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"model": "tiny_net:ten"}, "4 classes need"), ({"data": "nowhere"}, "no data"), ({"device": "gpu"}, "is not a device")],
)
def test_what_every_cell_would_stumble_over_is_told_before_any_begins(place: Path, wrong: dict[str, str], said: str) -> None:
    with pytest.raises(PliantError, match=said):
        compare.compare(replace(BASE, **wrong), cells(["full"], [], [0]), "out")  # type: ignore[arg-type]
    assert not list((place / "out/cells").iterdir()) and not (place / "out/runs").exists()


def test_peaks_are_measured_once_before_cells_share_the_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr("pliant.cost.peaks.measured", lambda *_: measured.append(torch.get_num_threads()) or PEAKS)
    monkeypatch.setenv("PLIANT_CACHE", str(place / "another cache"))
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    made = compare.compare(BASE, cells(["last"], [("time", "1.0")], [0]), "out", threads=1)
    assert measured == [1] and torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), random)
    told = [json.loads(line) for line in (place / f"out/runs/{made.rows[0].cell.name}/run.jsonl").read_text().splitlines()]
    assert [line["peaks"]["flops"] for line in told if line["event"] == "roofline"] == [PEAKS.flops]


def test_a_cell_that_was_cut_off_is_resumed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cells(["full"], [], [0])
    counted: list[int] = []
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    tiny.on_forward(counted.append)
    train(replace(BASE, recipe="full", out="counted"))
    monkeypatch.setenv("TINY_KILLED_AT", str(len(counted) - 2))  # amid the steps
    cut = compare.compare(BASE, made, "out").rows[0]
    assert cut.result is None and f"{-signal.SIGKILL}" in cut.error
    monkeypatch.delenv("TINY_KILLED_AT")
    assert compare.compare(BASE, made, "out").rows[0].result is not None
    events = [json.loads(line)["event"] for line in (place / "out/runs/full-seed0/run.jsonl").read_text().splitlines()]
    assert "resume" in events


def test_the_command_prints_a_table_and_json(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])

    def ran(self: Any, where: Path, cell: Cell, base: Options) -> CellResult:
        if cell.recipe == "head":
            return CellResult(cell, None, "no reason")
        return CellResult(cell, result(0.9 if cell.recipe == "last" else 0.8, 5.0 - cell.seed))

    monkeypatch.setattr(compare._Running, "run", ran)
    flags = ["compare", "--recipe", "full", "--recipe", "last", "--recipe", "head", "--time", "0.5", "--out", "out"]
    shown = run(cli.app, flags, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "★ last" in text and "80.0 ±0.0" in text and "head: 2 of 2 failed: no reason" in text and "energy:" in text
    found = json.loads(run(cli.app, [*flags, "--json"]).stdout)
    assert [line["recipe"] for line in found["lines"]] == ["full", "last", "head"]


def test_bad_input_is_told(place: Path) -> None:
    shown = run(cli.app, ["compare", "--recipe", "plaint"])
    assert shown.exit_code == 2 and "Did you mean 'pliant'" in " ".join(shown.output.split())
    (place / "file").write_text("")
    shown = run(cli.app, ["compare", "--out", "file/x"])
    assert shown.exit_code == 1 and "cannot write into" in shown.output
    assert run(cli.app, ["compare", "--seeds", "0"]).exit_code == 2
