"""The `pliant` command: one file per subcommand, imported when it is used."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from pliant.cli.app import app, say_error
from pliant.core.errors import PliantError

__all__ = ["app", "main"]


class OutputError(PliantError):
    """The standard output cannot be written. It is no OSError, so that nobody takes it for one of another file."""


def main() -> None:
    """The `pliant` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?" for what it lacks
    out: Any = sys.stdout
    if out is not None:
        out.write, out.flush = _explained(out.write), _explained(out.flush)
    try:
        app()
    except OutputError as error:
        say_error(error)
        raise SystemExit(1) from None


def _explained(act: Callable[..., Any]) -> Callable[..., Any]:
    def told(*given: Any) -> Any:
        try:
            return act(*given)
        except BrokenPipeError:  # nobody reads any more, which is no error
            raise
        except OSError as error:
            sys.stdout = io.StringIO()  # or Python says it again at exit
            raise OutputError(
                f"the standard output cannot be written: {error.strerror or error}. Check where it goes."
            ) from error

    return told
