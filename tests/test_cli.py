"""The command: help, version, a short demo, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pliant
from pliant import cli, data, models

run = CliRunner().invoke


def test_version_and_help() -> None:
    assert run(cli.app, ["--version"]).output.strip() == f"pliant {pliant.__version__}"
    shown = run(cli.app, ["demo", "--help"])
    assert shown.exit_code == 0 and "Example: pliant demo" in shown.output


def test_the_demo_compares_plain_and_elastic(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    shown = run(cli.app, ["demo", "--steps", "2", "--batch", "4", "--size", "32", "--time", "0.8", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    plain, elastic = json.loads(out.read_text())
    assert plain["chosen"] == "everything" and plain["steps"] == elastic["steps"] == 2
    assert 0 < elastic["kept_bytes"] <= plain["kept_bytes"]
    assert 0 <= elastic["accuracy"] <= 1 and elastic["seconds_per_step"] > 0
    assert "test accuracy" in shown.output and "layers, chosen" in shown.output


def test_a_budget_below_the_floor_is_told(tmp_path: Path) -> None:
    shown = run(cli.app, ["demo", "--steps", "2", "--batch", "4", "--size", "32", "--time", "0.01"])
    assert shown.exit_code == 1
    assert "below the floor" in " ".join(shown.output.split())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("Run: pip install 'pliant[demo]'")

    monkeypatch.setattr(data, "digits", missing)
    shown = run(cli.app, ["demo"])
    assert shown.exit_code == 1 and "pliant[demo]" in shown.output
    assert models.NORM  # the library itself is whole without the extra


@pytest.mark.parametrize("wrong", [["--time", "0"], ["--time", "1.5"], ["--steps", "1"], ["--batch", "2"], ["dance"]])
def test_bad_input_is_refused(wrong: list[str]) -> None:
    assert run(cli.app, ["demo", *wrong] if wrong[0].startswith("-") else wrong).exit_code == 2
