"""JSON as every reader takes it. The standard has no NaN and no infinity, which `json.dumps` writes all the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """Numbers that are not finite become null.

    >>> json_text({"loss": float("nan"), "steps": [1, float("inf")]})
    '{"loss": null, "steps": [1, null]}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
