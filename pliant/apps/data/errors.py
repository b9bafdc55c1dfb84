"""What is wrong with data, and with single files of it."""

from __future__ import annotations

from typing import NamedTuple

from pliant.core.errors import PliantError


class DataError(PliantError, ValueError):
    """Data that cannot be used as they are."""


class Skipped(NamedTuple):
    """A sample that could not be read, and why."""

    name: str
    why: str
