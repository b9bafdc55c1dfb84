"""What can go wrong, as exceptions."""

from __future__ import annotations


class PliantError(Exception):
    """Whatever Pliant refuses to do."""


class BudgetError(PliantError, ValueError):
    """A budget that no selection can keep."""


class ProfileMismatch(PliantError, ValueError):
    """A profile that was taken under other conditions than those of now."""


class ProbeError(PliantError, RuntimeError):
    """A probe batch from which nothing can be learned."""
