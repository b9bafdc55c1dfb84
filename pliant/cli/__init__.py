"""The `pliant` command: one file per subcommand."""

from __future__ import annotations

import io
import sys

try:
    from pliant.cli import adapt, compare, demo, doctor, meta_train, plan, profile, report, train, watch  # noqa: F401
    from pliant.cli.app import app
except KeyboardInterrupt:  # importing torch takes seconds: Ctrl-C then should show no traceback
    raise SystemExit(130) from None


def main() -> None:
    """The `pliant` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?" for what it lacks
    app()
