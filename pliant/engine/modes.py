"""Ways to run a step: what the user allows, and which of them is the fastest here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """Which engines work together on a step; none of them: plain autograd.

    >>> str(Way(lean=True, graphs=True)), str(Way(prefix=True, cache=True)), str(Way())
    ('lean+graphs', 'prefix, cache', 'plain')
    """

    lean: bool = False  # keeps only what the choice needs
    prefix: bool = False  # what needs no gradient runs as inference
    graphs: bool = False  # a step is one launch
    cache: bool = False  # or rather, what needs no gradient is computed once for each sample

    def __str__(self) -> str:
        engines = "+".join(name for name in MODES if getattr(self, name)) or "plain"
        return f"{engines}, cache" if self.cache else engines


MODES = ("lean", "prefix", "graphs")


def allowed(
    engine: str, *, memory_is_short: bool, cuda: bool, caches: bool, macs_are_short: bool = False, may_hold: bool = False
) -> list[Way]:
    """The ways that steps may go, the simplest first: one that is named, or what "auto" may pick from.

    "auto-graphs" forbids one; "lean+prefix" forces two. Where memory is short there is no room for copies of weights that
    inference likes better (on CUDA there are none), and captured steps take part only if they `may_hold` on to what they take.
    A cache is the prefix engine's; it comes first, so that it fills before anything is compared with it. Where MACs are
    limited, choices count on it, and nothing else takes its place.

    >>> [str(way) for way in allowed("auto", memory_is_short=False, cuda=True, caches=False)]
    ['plain', 'graphs', 'prefix+graphs']
    """
    first, *others = engine.split("-")
    named = others if first == "auto" else [] if engine == "plain" else engine.split("+")
    if any(name not in MODES for name in named) or len(set(named)) < len(named):
        raise ValueError(
            f"engine={engine!r} is not there; choose 'auto', 'plain', or of {', '.join(MODES)} one or several like "
            f"'lean+graphs'; 'auto-graphs' leaves one out."
        )
    if first != "auto":
        return [Way(**dict.fromkeys(named, True), cache=caches and "prefix" in named)]
    may = {name: name not in named for name in MODES}
    caches = caches and may["prefix"]
    if memory_is_short:
        held = (
            [Way(lean=True, graphs=True), Way(lean=True, prefix=True, graphs=True)] if cuda and may_hold and not caches else []
        )
        held = [way for way in held if all(may[name] or not getattr(way, name) for name in MODES)]
        return [Way(lean=may["lean"], prefix=caches, cache=caches), *held]
    ways = [Way()]
    if cuda:
        ways += [Way(graphs=True), Way(prefix=True, graphs=True), Way(prefix=True)]
        ways = ways[:3] if may["graphs"] else ways
    else:
        ways += [Way(prefix=True), Way(lean=True), Way(lean=True, prefix=True)]
    ways = [way for way in ways if all(may[name] or not getattr(way, name) for name in MODES)]
    if not caches:
        return ways
    cached = Way(prefix=True, graphs=cuda and may["graphs"], cache=True)
    return [cached] if macs_are_short else [cached, *ways]


class Race:
    """Real steps go each way in turn until it is known which is the fastest; from then on all go that way.

    Captured steps come last, each way's in a row: a GPU that has just waited for others takes longer for the first of them.
    """

    tries = 3  # each, after one that does not count
    captured_tries = 5  # that take next to nothing, and the first of which prepares the others
    margin = 0.97  # of the time of a simpler way is what another one must stay below
    hopeless = 1.5  # times as long as a captured step

    def __init__(
        self, ways: Sequence[Way], winner: Way | None = None, behind: Collection[Way] = (), without: Collection[Way] = ()
    ) -> None:
        """`behind`: the ways that were far behind before, and do not take part again; `without`: those that are left out of
        this race."""
        self._behind, self.allowed, self.without = set(behind), list(ways), set(without)
        self.ways = [way for way in ways if way not in self._behind | self.without]
        self.winner = winner if winner in self.ways else self.ways[0] if len(self.ways) == 1 else None
        self.least: dict[Way, float] = {}  # seconds of the fastest step of each, once all have had their turn
        self._taken: dict[Way, list[Callable[[], float]]] = {way: [] for way in self.ways}
        self._steps, captured = 0, [way for way in self.ways if way.graphs and not way.cache]
        self._order = [way for way in self.ways if way not in captured] * (self.tries + 1)
        self._order += [way for way in captured for _ in range(self.captured_tries + 1)]

    @property
    def now(self) -> Way:
        """The way of the coming step."""
        return self.winner or self._order[self._steps]

    @property
    def is_on(self) -> bool:
        """Whether some have had their turn, and not all."""
        return self.winner is None and self._steps > 0

    def far_behind(self) -> set[Way]:
        """The ways that are not worth another race: those that wait for launches, where captured steps do not have to. What all
        others are worth hangs on what is chosen."""
        captured = min((seconds for way, seconds in self.least.items() if way.graphs and not way.cache), default=math.inf)
        slow = {way for way, seconds in self.least.items() if not way.graphs and seconds > self.hopeless * captured}
        return self._behind | slow

    def see(self, seconds: Callable[[], float]) -> bool:
        """A step went the way that was due; what it took is read when all have had their turn. Tells whether that is now."""
        if self.winner is not None:
            return False
        self._taken[self.now].append(seconds)
        self._steps += 1
        if self._steps < len(self._order):
            return False
        best = None
        for way, taken in self._taken.items():
            least = self.least[way] = min(read() for read in taken[1:])
            if best is None or least < self.margin * best:
                self.winner, best = way, least
        self._taken.clear()
        return True
