"""The run log: whole lines only, whatever interrupts the writing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from pliant.session import run_log as runlog


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run.jsonl"  # its folder does not exist yet


def test_lines_come_back_in_order(log: Path) -> None:
    runlog.append(log, [{"event": "start"}])
    runlog.append(log, [{"event": "step", "step": 1}, {"event": "step", "step": 2}])
    assert [line.get("step") for line in runlog.read(log)] == [None, 1, 2]
    assert all(isinstance(json.loads(line), dict) for line in log.read_text().splitlines())


def test_what_json_cannot_say_becomes_null(log: Path) -> None:
    runlog.append(log, [{"loss": float("nan"), "nested": {"values": [1.5, float("inf"), (float("-inf"), "µs")]}}])
    assert next(runlog.read(log)) == {"loss": None, "nested": {"values": [1.5, None, [None, "µs"]]}}


@pytest.mark.parametrize("torn", [b'{"event": "st', b"{", '{"text": "µ'.encode()[:-1]])
def test_a_torn_last_line_is_passed_over_and_then_cut_off(log: Path, torn: bytes) -> None:
    runlog.append(log, [{"step": 1}])
    with open(log, "ab") as file:
        file.write(torn)
    assert list(runlog.read(log)) == [{"step": 1}]
    runlog.append(log, [{"step": 2}])
    assert list(runlog.read(log)) == [{"step": 1}, {"step": 2}]
    log.write_bytes(torn)
    assert list(runlog.read(log)) == []
    runlog.append(log, [{"step": 3}])
    assert list(runlog.read(log)) == [{"step": 3}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(log: Path) -> None:
    log.parent.mkdir()
    log.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    lines = runlog.read(log)
    assert next(lines) == {"step": 1}
    with pytest.raises(ValueError, match="line 2"):
        next(lines)


def test_steps_are_told_before_whatever_comes_after_them(log: Path) -> None:
    told = runlog.RunLog(log)
    told.write("start", seed=0)
    told.step(1, 0, torch.tensor(0.5), lambda: 0.25)
    told.step(2, 0, None, lambda: 0.5)
    told.step(3, 0, torch.tensor(float("nan"), dtype=torch.bfloat16), lambda: 1.0)
    told.write("end", step=3)
    assert list(runlog.read(log)) == [
        {"event": "start", "seed": 0},
        {"event": "step", "step": 1, "round": 0, "loss": 0.5, "seconds": 0.25},
        {"event": "step", "step": 2, "round": 0, "loss": None, "seconds": 0.5},
        {"event": "step", "step": 3, "round": 0, "loss": None, "seconds": 1.0},
        {"event": "end", "step": 3},
    ]


def test_a_long_stretch_of_steps_does_not_wait_for_its_end(log: Path) -> None:
    told = runlog.RunLog(log)
    for step in range(1, 101):
        told.step(step, 0, torch.tensor(1.0), lambda: 0.0)
    steps = [line["step"] for line in runlog.read(log)]
    assert len(steps) > 50
    told.flush()
    told.flush()
    assert [line["step"] for line in runlog.read(log)] == list(range(1, 101))


def test_without_a_path_or_a_line_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = runlog.RunLog(None)
    told.step(1, 0, torch.tensor(0.5), lambda: 0.25)
    told.write("end")
    told.flush()
    runlog.append(tmp_path / "run.jsonl", [])
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_cannot_be_written_writes_nothing(log: Path) -> None:
    runlog.append(log, [{"step": 1}])
    with pytest.raises(TypeError):
        runlog.append(log, [{"step": 2}, {"what": object()}])
    assert list(runlog.read(log)) == [{"step": 1}]


def test_a_write_that_stops_halfway_loses_only_itself(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runlog.append(log, [{"step": 1}])

    class Full(io.FileIO):
        """A file on a disk that fills up."""

        def write(self, text: bytes) -> int:  # type: ignore[override]
            super().write(text[: len(text) // 2])
            raise OSError("no space left")

    monkeypatch.setattr(runlog, "open", lambda path, mode: Full(path, "a+"), raising=False)
    with pytest.raises(OSError, match="no space"):
        runlog.append(log, [{"step": 2}, {"step": 3}])
    monkeypatch.undo()
    runlog.append(log, [{"step": 4}])
    read = [line["step"] for line in runlog.read(log)]
    assert read[0] == 1
    assert read[-1] == 4
    assert set(read) <= {1, 2, 4}  # a line that was written whole may stay
