"""`pliant watch`: a run's page, live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pliant.cli.app import app, meant, told


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or its log.", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
) -> None:
    """Serve a run's report while it trains, to this machine only. Ctrl-C ends it; the run goes on.

    Example: pliant watch runs/a
    """
    from pliant.apps import report as reports
    from pliant.apps import watch as watching

    console = Console()
    with told(console, OSError):
        with meant("RUN"):
            reports.log_of(run)
        with watching.server(run, port) as server:
            console.print(f"watching {run} on {watching.address(server)} (Ctrl-C ends it)", markup=False, soft_wrap=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:  # the way to end it, so no failure
                console.print("stopped.")
