"""The progress bar of a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, what: str, total: int, note: str = "") -> Iterator[Callable[[int, str], None]]:
    """A progress bar, as a function of the amount done and of a note to show beside it.

    The bar stays on the screen when the work ends or is stopped by Ctrl-C. When the work fails, it is removed: the user should
    read the error.
    """
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    # A note may hold any text, so it is not parsed as markup.
    notes = TextColumn("{task.fields[note]}", markup=False)
    with Progress(TextColumn("{task.description}"), *columns, notes, console=console) as progress:
        task = progress.add_task(what, total=total, note=note)
        try:
            yield lambda done, note: progress.update(task, completed=done, note=note)
        except Exception:
            progress.live.transient = True
            raise
