"""What cannot be exported, and the optional package that is missing."""

from __future__ import annotations

from pliant.core.errors import PliantError


class ExportError(PliantError, ValueError):
    """A model, a loss or a selection that no program for the device can be made of. Nothing was written."""


def missing(error: ImportError) -> ImportError:
    """What to do where ExecuTorch is not installed."""
    return ImportError(f"programs for devices need ExecuTorch ({error}). Install it: pip install 'pliant[executorch]'.")
