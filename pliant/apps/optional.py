"""Packages that Pliant uses where they are installed, and an error that names the one that is really missing."""

from __future__ import annotations

import importlib
from typing import Any

from pliant.core.errors import first_line


def needed(package: str, extra: str, what: str) -> Any:
    """A package by name. Where it or one that it imports is missing, the error names that one and the extra to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        missing = (error.name or package).partition(".")[0]
        if missing == package:
            why = f"{package}, which is not installed"
        else:
            why = f"{package}, which needs {missing}: {first_line(error)}"
        raise ImportError(f"{what} needs {why}. Run: pip install 'pliant[{extra}]'", name=missing) from error
    except RuntimeError as error:  # torchvision beside a PyTorch that it was not built for
        first = first_line(error)
        raise ImportError(
            f"{what} needs {package}, which is installed but does not load beside this PyTorch: {first}. Install the "
            f"version of {package} that belongs to it.",
            name=package,
        ) from error
