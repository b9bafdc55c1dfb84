"""What can go wrong, as exceptions."""

from __future__ import annotations


class PliantError(Exception):
    """The base of Pliant's own errors."""


class BudgetError(PliantError, ValueError):
    """A budget that no selection can keep."""


class ProfileMismatch(PliantError, ValueError):
    """A profile that was measured under other conditions: another model, batch shape or device."""


class ProbeError(PliantError, RuntimeError):
    """A batch on which units cannot be scored, for example because its loss is not finite."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or else its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
