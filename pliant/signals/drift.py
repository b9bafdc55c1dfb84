"""Values over time: the latest that are known, and how far they have turned since the last selection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key")


class Drift:
    """How far the values of the chosen units have turned since the selection: 1 − cos of a mean then and a mean now.

    A single unit cannot turn; there it is the relative change of its value.
    """

    every = 4  # steps between two readings: reading numbers off a GPU waits for it
    settle, keep = 4, 0.8  # readings that make the first mean; share of the old in the moving one

    def __init__(self) -> None:
        self.count = 0
        self.then: dict[str, float] = {}
        self.now: dict[str, float] = {}

    def see(self, values: Mapping[str, float]) -> None:
        """Add the values of one reading; a step without gradients, or with one that is not finite, does not count."""
        if not values or not all(math.isfinite(v) for v in values.values()):
            return
        self.count += 1
        if self.then:  # a unit that joins later cannot have turned
            values = {n: v for n, v in values.items() if n in self.then}
        if self.count <= self.settle:
            self.then = {n: self.then.get(n, 0.0) + v / self.settle for n, v in values.items()}
            self.now = dict(self.then)
        else:
            self.now = {n: self.keep * self.now.get(n, 0.0) + (1 - self.keep) * v for n, v in values.items()}

    def follow_only(self, names: Iterable[str]) -> None:
        """Some of the units are no longer chosen, or others are too: go on with those that were there and still are."""
        staying = set(names)
        self.then = {n: v for n, v in self.then.items() if n in staying}
        self.now = {n: v for n, v in self.now.items() if n in staying}

    @property
    def amount(self) -> float | None:
        """0: not at all; 1: nothing in common; None: not known yet."""
        if self.count <= self.settle:
            return None
        if len(self.then) == 1:  # one unit cannot turn: how much it has changed
            then, now = sum(self.then.values()), sum(self.now.values())
            return abs(now - then) / abs(then) if then else None
        lengths = math.hypot(*self.then.values()) * math.hypot(*self.now.values())
        return 1 - sum(self.then.get(n, 0.0) * v for n, v in self.now.items()) / lengths if lengths else None

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "then": self.then, "now": self.now}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Drift:
        out = cls()
        out.count, out.then, out.now = state["count"], dict(state["then"]), dict(state["now"])
        return out


def latest(old: Mapping[Key, float], new: Mapping[Key, float]) -> dict[Key, float]:
    """The new values; where one is not finite, the old one stays if there is one that is."""
    return {key: value if math.isfinite(value) else old.get(key, math.nan) for key, value in new.items()}
