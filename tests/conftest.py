"""Names for parametrized values: the same in every test process."""

from __future__ import annotations

from typing import Any


def pytest_make_parametrize_id(config: Any, val: Any, argname: str) -> str | None:
    name = getattr(val, "name", None)
    return name if isinstance(name, str) else None
