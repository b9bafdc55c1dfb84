"""The `pliant` command: one file per subcommand, imported when it is used."""

from __future__ import annotations

import io
import sys

from pliant.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """The `pliant` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?" for what it lacks
    app()
