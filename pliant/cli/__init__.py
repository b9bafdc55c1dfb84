"""argv → the functions of the library: a file for each command."""

from __future__ import annotations

from pliant.cli import demo, profile  # noqa: F401  # each adds its command
from pliant.cli.app import app


def main() -> None:
    """The `pliant` command."""
    app()
