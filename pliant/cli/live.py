"""How `pliant train` shows the status of a run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pliant.apps.train import OnStatus, Status
from pliant.cli.progress import Phase, duration, lines
from pliant.runtime.working import Listener, listening

_SHADES, _ASCII = "·░▒▓█", ".-+*#"


def strip(trained: Sequence[bool], width: int, shades: str = _SHADES) -> str:
    """What is trained now, input to output: one character per unit, or per group of units if the width is too small.

    >>> strip([False, True, True, True], 4), strip([False, True, True, True], 2)
    ('·███', '▒█')
    """
    if len(trained) <= width:
        return "".join(shades[-1] if on else shades[0] for on in trained)
    edges = [len(trained) * i // width for i in range(width + 1)]
    shares = [sum(trained[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(shades[math.ceil(4 * share)] for share in shares)


def line(status: Status) -> str:
    """A status in one line, for logs and pipes."""
    parts = [f"step {status.step}/{status.steps}", f"epoch {status.epoch}/{status.epochs}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    parts += [part for part in (status.news, status.budget) if part]
    if status.trained:
        parts.append(f"{sum(status.trained)} of {len(status.trained)} units")
    if status.seconds_left:
        parts.append(f"{duration(status.seconds_left)} left")
    return " · ".join(parts)


def panel(status: Status, width: int, shades: str = _SHADES) -> Group:
    """A status as a panel of the terminal."""
    top = Table.grid(padding=(0, 1))
    left = f"{duration(status.seconds_left)} left" if status.seconds_left is not None else "measuring"
    top.add_row(
        f"epoch {status.epoch}/{status.epochs}",
        ProgressBar(total=status.steps, completed=status.step, width=max(10, min(40, width - 50))),
        f"step {status.step}/{status.steps}",
        left if status.step < status.steps else "",
    )
    rows = Table.grid(padding=(0, 2))
    loss = f"{status.loss:.4f}" if status.loss is not None else "-"
    rows.add_row("loss", Text(loss))
    rows.add_row("accuracy", Text(f"{status.accuracy:.1%}, best {status.best:.1%}"))
    rows.add_row("budget", Text(status.budget or "-"))
    if status.trained:
        share = f"{sum(status.trained)} of {len(status.trained)} units, input to output"
        rows.add_row("trained", Text(strip(status.trained, max(width - 12, 8), shades), style="green"))
        rows.add_row("", Text(share, style="dim"))
    return Group(top, rows)


def _can_show(console: Console, characters: str) -> bool:
    try:
        characters.encode(console.encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


@contextmanager
def shown(console: Console) -> Iterator[OnStatus]:
    """Shows each status that it is called with. The last panel stays on the screen unless the run fails: then the user should
    read the error."""
    phase = Phase()
    if not console.is_terminal:
        with listening(Listener(lines(console, phase))):
            yield (
                lambda status: (
                    console.print(line(status), markup=False, highlight=False, soft_wrap=True) if status.news else None
                )
            )
        return
    shades = _SHADES if _can_show(console, _SHADES) else _ASCII
    with Live(console=console, auto_refresh=False) as live:
        drawn: list[RenderableType] = []  # the last panel

        def show(status: Status) -> None:
            if status.news:
                console.print(f"step {status.step}: {status.news}", markup=False, highlight=False)
            drawn[:] = [panel(status, console.width, shades)]
            live.update(drawn[0], refresh=True)

        def show_phase(what: str, done: int, total: int) -> None:
            live.update(Group(*drawn, Text(phase.see(what, done, total)[0], style="dim")), refresh=True)

        try:
            with listening(Listener(show_phase)):
                yield show
        except Exception:
            live.transient = True
            raise
