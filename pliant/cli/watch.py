"""`pliant watch`: the report of a run while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pliant.apps import report
from pliant.apps import watch as watching
from pliant.cli.app import app, exit_on_errors, naming


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or its log.", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free one.")] = 0,
) -> None:
    """Serve the report of a run while it trains, to this machine only. Ctrl-C stops the server, not the run.

    Example: pliant watch runs/a
    """
    console = Console()
    with exit_on_errors(OSError):
        with naming("RUN"):
            report.log_of(run)
        with watching.server(run, port) as server:
            console.print(f"watching {run} on {watching.address(server)} (stop with Ctrl-C)", markup=False, soft_wrap=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:  # the normal way to stop it, so the exit code is 0
                console.print("stopped.")
