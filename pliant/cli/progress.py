"""The bar that a command shows while it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, what: str, total: int, note: str = "") -> Iterator[Callable[[int, str], None]]:
    """A bar that is told how much is done, and a note to stand beside it.

    It stays on the screen when the work ends, and when Ctrl-C ends it. Where the work fails it goes: the error is what to read.
    """
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    # Notes hold text of anywhere, which is not to be read as markup.
    notes = TextColumn("{task.fields[note]}", markup=False)
    with Progress(TextColumn("{task.description}"), *columns, notes, console=console) as progress:
        task = progress.add_task(what, total=total, note=note)
        try:
            yield lambda done, note: progress.update(task, completed=done, note=note)
        except Exception:
            progress.live.transient = True
            raise
