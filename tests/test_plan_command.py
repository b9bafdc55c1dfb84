"""`pliant plan`: what a budget would choose, and why; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from command import run, text

pytestmark = pytest.mark.usefixtures("place")
FLAGS = ["plan", tiny.MODEL, "--data", tiny.DATA, "--size", "8", "--batch", "8", "--scratch", "--device", "cpu"]


def test_a_plan_keeps_its_budget_and_says_why() -> None:
    shown = run([*FLAGS, "--macs", "0.7", "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    units = {unit["name"]: unit for unit in found["units"]}
    assert next(iter(units)) == "7" and units["7"]["chosen"]  # the head, nearest the loss
    assert found["asked"]["macs"] == pytest.approx(0.7) and found["cost"]["macs"] <= 0.7
    chosen = [unit for unit in found["units"] if unit["chosen"]]
    assert chosen[-1]["cumulative"] == pytest.approx(found["cost"])
    steps = [unit["cumulative"]["macs"] for unit in chosen]
    assert steps == sorted(steps) and all(unit["alone"]["macs"] <= unit["cumulative"]["macs"] for unit in chosen)
    assert sum(unit["share_of_value"] for unit in found["units"]) == pytest.approx(1)
    for unit in found["units"]:
        if not unit["chosen"]:
            assert unit["why"] == "worth nothing" or unit["why"].startswith("no room: macs")


def test_all_the_room_there_is_chooses_all_that_is_worth_something() -> None:
    found = json.loads(run([*FLAGS, "--macs", "1.0", "--json"]).stdout)
    assert found["value"] == pytest.approx(1)
    assert {unit["why"] for unit in found["units"] if not unit["chosen"]} <= {"worth nothing"}


def test_what_has_no_room_even_alone_is_not_called_worthless() -> None:
    found = json.loads(run([*FLAGS, "--macs", "0.5", "--json"]).stdout)
    whys = [unit["why"] for unit in found["units"] if not unit["chosen"]]
    assert len(whys) == 2 and all(why.startswith("no room: macs 0.") for why in whys)


def test_the_table_tells_the_same() -> None:
    shown = run([*FLAGS, "--macs", "0.7"])
    assert shown.exit_code == 0 and "macs: asked 0.700" in text(shown) and "alone cumulative why" in text(shown)
    assert "█ 7" in text(shown) and "of 3 units" in text(shown)


def test_a_recipe_without_a_budget_is_shown_too() -> None:
    shown = run([*FLAGS, "--recipe", "head"])
    assert shown.exit_code == 0 and "head chooses 2 of 8 units" in text(shown)
    found = json.loads(run([*FLAGS, "--recipe", "head", "--json"]).stdout)
    assert {unit["why"] for unit in found["units"] if not unit["chosen"]} <= {"left out by the recipe", "worth nothing"}


def test_nothing_is_written(place: Path) -> None:
    before = sorted(entry.name for entry in place.iterdir())
    run([*FLAGS, "--macs", "0.7"])
    assert sorted(entry.name for entry in place.iterdir() if entry.name != "__pycache__") == before
