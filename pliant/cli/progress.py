"""Progress of a command: a bar for what is counted, and a line for whatever takes long on its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from pliant.runtime.working import Listener, listening

_SILENT = 2.0  # seconds that anything may take without a word
_EVERY = 10.0  # seconds between two lines in a pipe or a file
_REDRAW = 0.1  # seconds between two pictures on a terminal


def duration(seconds: float) -> str:
    """
    >>> duration(7.2), duration(130), duration(7300)
    ('7 s', '2 min 10 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Phase:
    """What is being done now, how far it is, and how long the rest will take at the same pace."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what, self._began = "", 0.0

    def see(self, what: str, done: int, total: int) -> tuple[str, float]:
        """A line, empty at the end of the phase; and how many seconds the phase has lasted."""
        if what != self._what or not done:
            self._what, self._began = what, self._clock()
        lasted = self._clock() - self._began
        if done >= total:
            self._what = ""
            return "", lasted
        left = f", {duration(lasted / done * (total - done))} left" if done else ""
        return f"{what}: {done} of {total}{left}", lasted


@contextmanager
def working(console: Console) -> Iterator[None]:
    """Shows what long computations inside tell of themselves, and their notes.

    On a terminal that can redraw, this is one line that is removed in the end. Elsewhere it is a line every ten seconds, for
    what takes more than two.
    """
    phase = Phase()

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal or console.is_dumb_terminal:
        with listening(Listener(lines(console, phase), note)):
            yield
        return
    last = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:  # a thread that draws would disturb measurements

        def show(what: str, done: int, total: int) -> None:
            nonlocal last
            line, _ = phase.see(what, done, total)
            if not line or time.monotonic() - last >= _REDRAW:
                last = time.monotonic()
                live.update(Text(line), refresh=True)

        with listening(Listener(show, note)):
            yield


def lines(console: Console, phase: Phase) -> Callable[[str, int, int], None]:
    """Progress as lines of text, for pipes and files."""
    last = -_EVERY

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        line, lasted = phase.see(what, done, total)
        if line and lasted >= _SILENT and time.monotonic() - last >= _EVERY:
            last = time.monotonic()
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show


@contextmanager
def bar(console: Console, what: str, total: int, note: str = "") -> Iterator[Callable[[int, str], None]]:
    """A progress bar, as a function of the amount done and of a note to show beside it.

    The bar stays on the screen when the work ends or is stopped by Ctrl-C. When the work fails, it is removed: the user should
    read the error.
    """
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    # A note may hold any text, so it is not parsed as markup.
    notes = TextColumn("{task.fields[note]}", markup=False)
    phase = Phase()
    with Progress(TextColumn("{task.description}"), *columns, notes, console=console) as progress:
        task = progress.add_task(what, total=total, note=note)

        def show_phase(what: str, done: int, total: int) -> None:
            progress.update(task, note=phase.see(what, done, total)[0])

        try:
            with listening(Listener(show_phase, lambda text: progress.update(task, note=text))):
                yield lambda done, note: progress.update(task, completed=done, note=note)
        except Exception:
            progress.live.transient = True
            raise
