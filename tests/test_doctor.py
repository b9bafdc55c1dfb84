"""`pliant doctor`: what is there, what is missing and how to get it, and whether the library runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from command import run, text

from pliant.apps import doctor
from pliant.cost.peaks import Peaks


def test_everything_is_looked_at_and_what_is_missing_has_a_remedy() -> None:
    found = doctor.examine(peaks=False)
    assert found.can_run
    assert {one.topic for one in found.findings} == {"software", "devices", "engines", "measures", "extras"}
    extras = {one.name: one for one in found.findings if one.topic == "extras"}
    assert set(extras) == {module for module, _, _ in doctor.EXTRAS}
    for name, one in extras.items():
        there = importlib.util.find_spec(name) is not None
        assert one.standing == ("there" if there else "missing") and bool(one.remedy) == (not there)


def test_extras_are_those_that_can_be_installed() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    named = {package.partition("[")[2].rstrip("]") for _, package, _ in doctor.EXTRAS if package.startswith("pliant[")}
    assert named and all(f"\n{extra} = [" in project for extra in {*named, "toml"})


def test_a_library_that_cannot_take_a_step_is_told_with_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(doctor, "Session", broken)
    shown = run(["doctor", "--no-peaks"])
    assert shown.exit_code == 1 and "✗ a step: RuntimeError: no kernel" in text(shown) and "does NOT run" in text(shown)
    found = run(["doctor", "--no-peaks", "--json"])
    assert found.exit_code == 1 and json.loads(found.stdout)["can_run"] is False


def test_the_command_tells_peaks_and_brackets_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measured_peaks", lambda device, again: Peaks(2e9, 1e9, str(device), "float32", 1))
    monkeypatch.setattr(doctor, "_version", lambda module: None)
    shown = run(["doctor"])
    assert shown.exit_code == 0 and "2 GFLOP/s, 1 GB/s" in text(shown) and "pip install 'pliant[demo]'" in text(shown)


def test_json_holds_the_same() -> None:
    found = json.loads(run(["doctor", "--no-peaks", "--json"]).stdout)
    assert found["can_run"] and {"topic", "name", "standing", "said", "remedy"} == set(found["findings"][0])
