"""Random small instances for the laws of decisions. Prices and values are whole numbers, so that sums are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from pliant.core.types import Cost, Part, Unit
from pliant.cost.profile import Charge, ChargeKind, Profile
from pliant.planning.solve import Problem


def laws(examples: int) -> settings:
    """The same examples in every run, and no clock."""
    return settings(derandomize=True, deadline=None, max_examples=examples)


# ---------------------------------------------------------------- problems


def problem(
    values: Sequence[float],
    needed: Sequence[Sequence[int]] | np.ndarray,
    price: Sequence[Sequence[float]] | np.ndarray,
    limits: Sequence[float],
    always: Sequence[int] = (),
    round: int = 0,
    seed: int = 0,
    resource: Sequence[str] | None = None,
) -> Problem:
    """A problem from plain lists: units are a, b, c, …; `always` holds positions."""
    mask = np.zeros(len(values), bool)
    mask[list(always)] = True
    return Problem(
        tuple(chr(ord("a") + i) if len(values) <= 26 else f"u{i}" for i in range(len(values))),
        np.array(values, float),
        np.array(needed, bool).reshape(-1, len(values)),
        np.array(price, float),
        np.array(limits, float),
        mask,
        round,
        seed,
        None if resource is None else tuple(resource),
    )


def chain_rows(units: int) -> np.ndarray:
    """Every unit's own charge, then the way to each: unit d pays the ways 0 … d."""
    return np.concatenate([np.eye(units, dtype=bool), np.triu(np.ones((units, units), bool))])


def graph_rows(units: int, carries: Sequence[int], via: Sequence[int]) -> np.ndarray:
    """Charge j is due with unit `carries[j]` and with those of the next five charges that the bits of `via[j]` name."""
    rows = np.zeros((len(carries), units), bool)
    for j in range(len(carries) - 1, -1, -1):
        rows[j, carries[j]] = True
        for step in range(1, 6):
            if via[j] >> (step - 1) & 1 and j + step < len(carries):
                rows[j] |= rows[j + step]
    return rows


@st.composite
def problems(
    draw: st.DrawFn,
    shape: str = "chain",
    least: int = 1,
    most: int = 12,
    limits: int = 1,
    lowest_value: int = -8,
    lowest_price: int = 0,
    most_always: int = 2,
    moments: int = 1,
) -> Problem:
    """A chain or a graph with branches; what is always chosen fits every limit. A resource may have several `moments`.

    All but the number of units comes from one seed: to draw each number by itself would take longer than what is tested.
    """
    units = draw(st.integers(least, most))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))

    def numbers(low: int, high: int, count: int) -> list[int]:
        return random.integers(low, high, count, endpoint=True).tolist()

    if shape == "chain":
        rows = chain_rows(units)
    else:
        [charges] = numbers(1, 2 * units, 1)
        rows = graph_rows(units, numbers(0, units - 1, charges), numbers(0, 31, charges))
    [count] = numbers(1, limits, 1)
    resource = [f"r{r}" for r, times in enumerate(numbers(1, moments, count)) for _ in range(times)]
    price = random.integers(lowest_price, 9, (len(resource), len(rows)), endpoint=True)
    always = random.permutation(units)[: random.integers(0, min(most_always, units), endpoint=True)]
    values = numbers(lowest_value, 20, units)
    unlimited = problem(values, rows, price, [np.inf] * len(resource), sorted(always), resource=resource)
    floor, full = unlimited.cost(unlimited.always), unlimited.price.sum(axis=1)
    share = random.choice([0.0, 1.0, *random.random(6)], len(resource))  # the least and the most are limits worth trying
    return replace(unlimited, limits=np.round(floor + share * (full - floor)))


def bits(row: np.ndarray) -> int:
    return sum(1 << int(i) for i in np.flatnonzero(row))


def brute_force(given: Problem) -> float:
    """The best value of all 2^units choices; a choice is an integer and a charge is due where they share a bit."""
    always = bits(given.always)
    choices = np.arange(2 ** len(given.names))
    choices = choices[choices & always == always]
    cost = np.zeros((len(given.limits), len(choices)))
    for row, price in zip(given.needed, given.price.T, strict=True):
        cost += price[:, None] * (choices & bits(row) != 0)
    value = sum(worth * (choices >> i & 1) for i, worth in enumerate(given.values))
    return float(value[(cost <= given.limits[:, None]).all(axis=0)].max())


# ---------------------------------------------------------------- profiles


def units(count: int) -> tuple[Unit, ...]:
    return tuple(Unit(f"u{i}", (Part(f"p{i}"),)) for i in range(count))


def chain_profile(
    own: Sequence[float], way: Sequence[float] | None = None, base: float = 1.0, head: Sequence[str] = ()
) -> Profile:
    """Parameter d costs `own[d]`; every parameter behind d also pays `way[d]`. A second is 1,000 bytes and 10 MACs."""

    def cost(amount: float) -> Cost:
        return Cost(amount, round(amount * 1000), round(amount * 10))

    charges: list[Charge] = []
    for d, amount in enumerate(own):
        charges.append(Charge(ChargeKind.NODE, cost(amount), (f"p{d}",)))
        if way is not None and d + 1 < len(own):
            behind = (2 * d + 2, 2 * d + 3) if d + 2 < len(own) else (2 * d + 2,)
            charges.append(Charge(ChargeKind.NODE, cost(way[d]), via=behind))
    return Profile(tuple(charges), cost(base), tuple(head))


@st.composite
def profiles(draw: st.DrawFn, params: int = 6, charges: int = 14, moments: int = 1) -> Profile:
    """Charges with any parameters and any later charges, some with neither, that live at any of up to so many `moments`."""
    count, moments = draw(st.integers(0, charges)), draw(st.integers(1, moments))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    lives = random.integers(0, 30, moments, endpoint=True).tolist() if moments > 1 else [0]
    out = []
    for i in range(count):
        names = random.choice(params, random.integers(0, 3), replace=False)
        later = random.permutation(np.arange(i + 1, count))[: random.integers(0, 4)]
        live = tuple(sorted(random.integers(0, moments, 2, endpoint=True).tolist()))
        out.append(
            Charge(
                ChargeKind.NODE,
                _cost(random),
                tuple(f"p{n}" for n in sorted(names)),
                tuple(sorted(later.tolist())),
                live if moments > 1 and random.integers(2) else None,
            )
        )
    return Profile(tuple(out), _cost(random), moments=tuple(lives))


def _cost(random: np.random.Generator) -> Cost:
    seconds, size, macs = random.integers(0, 9, 3, endpoint=True).tolist()
    return Cost(float(seconds), size, macs)
