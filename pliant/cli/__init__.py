"""argv → the functions of the library: a file for each command."""

from __future__ import annotations

from pliant.cli import adapt, compare, demo, doctor, meta_train, plan, profile, report, train, watch  # noqa: F401
from pliant.cli.app import app


def main() -> None:
    """The `pliant` command."""
    app()
