"""argv → the functions of the library: a file for each command."""

from __future__ import annotations

try:
    from pliant.cli import adapt, compare, demo, doctor, meta_train, plan, profile, report, train, watch  # noqa: F401
    from pliant.cli.app import app
except KeyboardInterrupt:  # to import torch takes seconds, and Ctrl-C then is no error to be traced
    raise SystemExit(130) from None


def main() -> None:
    """The `pliant` command."""
    app()
