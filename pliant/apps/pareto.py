"""The Pareto front of cost and gain."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[tuple[float | None, float | None]]) -> set[int]:
    """The Pareto front: positions of the (cost, gain) that no other one beats. An unknown value is never on it.

    >>> sorted(front([(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (2.0, None)]))
    [0, 1]
    """
    known = [(i, cost, gain) for i, (cost, gain) in enumerate(points) if cost is not None and gain is not None]
    return {i for i, cost, gain in known if not any(c <= cost and g >= gain and (c, g) != (cost, gain) for _, c, g in known)}
