"""How `pliant train` shows a run while it goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pliant.apps.train import Moment

_SHADES = "·░▒▓█"


def strip(trained: Sequence[bool], width: int) -> str:
    """What trains now, input to output: a block for each unit, or for some of them where there are more than fit.

    >>> strip([False, True, True, True], 4), strip([False, True, True, True], 2)
    ('·███', '▒█')
    """
    if len(trained) <= width:
        return "".join("█" if on else "·" for on in trained)
    edges = [len(trained) * i // width for i in range(width + 1)]
    shares = [sum(trained[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(_SHADES[math.ceil(4 * share)] for share in shares)


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


def line(moment: Moment) -> str:
    """A moment in one line, for logs and pipes."""
    said = [f"step {moment.step}/{moment.steps}", f"epoch {moment.epoch}/{moment.epochs}"]
    if moment.loss is not None:
        said.append(f"loss {moment.loss:.3f}")
    said += [part for part in (moment.news, moment.budget) if part]
    if moment.trained:
        said.append(f"{sum(moment.trained)} of {len(moment.trained)} units")
    if moment.seconds_left:
        said.append(f"{duration(moment.seconds_left)} left")
    return " · ".join(said)


def panel(moment: Moment, width: int) -> Group:
    """A moment as it stands on a terminal."""
    top = Table.grid(padding=(0, 1))
    left = f"{duration(moment.seconds_left)} left" if moment.seconds_left is not None else "measuring"
    top.add_row(
        f"epoch {moment.epoch}/{moment.epochs}",
        ProgressBar(total=moment.steps, completed=moment.step, width=max(10, min(40, width - 50))),
        f"step {moment.step}/{moment.steps}",
        left if moment.step < moment.steps else "",
    )
    rows = Table.grid(padding=(0, 2))
    loss = f"{moment.loss:.4f}" if moment.loss is not None else "–"
    rows.add_row("loss", Text(loss))
    rows.add_row("accuracy", Text(f"{moment.accuracy:.1%}, best {moment.best:.1%}"))
    rows.add_row("budget", Text(moment.budget or "–"))
    if moment.trained:
        share = f"{sum(moment.trained)} of {len(moment.trained)} units, input to output"
        rows.add_row("trains", Text(strip(moment.trained, max(width - 12, 8)), style="green"))
        rows.add_row("", Text(share, style="dim"))
    return Group(top, rows)


@contextmanager
def shown(console: Console) -> Iterator[Callable[[Moment], None]]:
    """What `train` may tell of itself; the last panel stays on the screen, unless the run fails: then the error is what to
    read."""
    if not console.is_terminal:
        yield lambda moment: console.print(line(moment), markup=False, highlight=False, soft_wrap=True) if moment.news else None
        return
    with Live(console=console, auto_refresh=False) as live:

        def show(moment: Moment) -> None:
            if moment.news:
                console.print(f"step {moment.step}: {moment.news}", markup=False, highlight=False)
            live.update(panel(moment, console.width), refresh=True)

        try:
            yield show
        except Exception:
            live.transient = True
            raise
