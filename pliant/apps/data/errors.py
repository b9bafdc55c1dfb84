"""What is wrong with data, and with single files of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pliant.core.errors import PliantError


class DataError(PliantError, ValueError):
    """Data that cannot be used as they are."""


class Skipped(NamedTuple):
    """A sample that could not be read, and why."""

    name: str
    why: str


def in_short(skipped: Sequence[Skipped]) -> str:
    """What to say of samples that were skipped."""
    return f"{len(skipped)} samples cannot be read and were skipped, the first because {skipped[0].why.rstrip('.')}"
