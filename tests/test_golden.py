"""What is chosen stays what it was, whatever moves around it: see `golden.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden import FILE, decisions
from test_laws import table

EXPECTED: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())


def same(found: Any, expected: Any, at: str = "") -> None:
    """Equal, and numbers equal up to rounding."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6), at
    elif isinstance(expected, dict):
        assert sorted(found) == sorted(expected), at
        for key in expected:
            same(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{at}: {found} is not {expected}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            same(a, b, f"{at}[{i}]")
    else:
        assert found == expected, at


@table
def test_decisions_are_those_of_the_golden_file(recipe: str, model_name: str) -> None:
    found = json.loads(json.dumps(decisions(recipe, model_name)))
    same(found, EXPECTED[f"{recipe}-{model_name}"], f"{recipe} on {model_name}")
