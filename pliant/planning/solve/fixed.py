"""Units one by one in some order, or always the same ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pliant.core.types import match
from pliant.planning.solve.problem import Array, Mask, Problem, Solver


def greedy(by: str = "value", stop: bool = False) -> Solver:
    """Take units one by one as long as they fit; `stop` at the first that does not.

    `by` says in which order: falling "value", falling "score" of value to size, or "order", from the loss to the
    input. The score is TinyTrain's: value / ((elements / most elements) · (MACs / most MACs)) of the unit by
    itself, whatever its distance from the loss. arXiv 2307.09988.
    """
    if by not in ("value", "score", "order"):
        raise ValueError(f"greedy(by={by!r}): choose 'value', 'score' or 'order'.")

    def solve(problem: Problem) -> Mask:
        if by == "order":
            return fill(problem, [int(i) for i in np.flatnonzero(~problem.always & problem.allowed)], stop)
        keys = problem.values
        if by == "score":
            if problem.elements is None or problem.macs is None:
                raise ValueError("greedy(by='score') needs to know how large units are: give Problem elements and macs.")
            for size in (problem.elements, problem.macs):
                keys = keys / (np.maximum(size, 1) / max(size.max(), 1))
        return fill(problem, sorted((int(i) for i in problem.free), key=lambda i: -keys[i]), stop)

    return solve


def fill(problem: Problem, order: list[int], stop: bool, most: int | None = None) -> Mask:
    chosen, taken = problem.always.copy(), 0
    due = problem.needed[:, chosen].any(axis=1)
    cost = problem.price[:, due].sum(axis=1)
    for unit in order:
        if most is not None and taken >= most:
            break
        new = problem.needed[:, unit] & ~due  # what this unit adds; to sum all again takes seconds for thousands of channels
        with_it = cost + problem.price[:, new].sum(axis=1)
        if problem.is_within(with_it):
            chosen[unit], due, cost = True, due | new, with_it
            taken += 1
        elif stop:
            break
    return chosen


def within_layers(solver: Solver, share: float = 0.25) -> Solver:
    """Layers by another solver, each with its best `share` of channels; then more channels that fit, of these layers first.

    Units of one layer are those whose names agree up to a bracket ("layer[out 0:8]"); others are layers of their own.
    """
    if not 0 < share <= 1:
        raise ValueError(f"within_layers(share={share}): must be more than 0 and at most 1.")

    def solve(problem: Problem) -> Mask:
        layers: dict[str, list[int]] = {}
        for i, name in enumerate(problem.names):
            layers.setdefault(name.partition("[")[0], []).append(i)
        best = {
            name: sorted(units, key=lambda i: (not problem.allowed[i], -problem.values[i])) for name, units in layers.items()
        }
        first = {name: units[: max(1, round(share * len(units)))] for name, units in best.items()}
        always = np.array([problem.always[units].any() for units in layers.values()])
        picked = [_members(problem, units, first[name]) for name, units in layers.items()]
        may = np.array([problem.allowed[units].all() for units in picked])
        coarse = replace(
            problem,
            names=tuple(layers),
            values=np.array([problem.values[units].sum() for units in picked]),
            needed=np.stack([problem.needed[:, units].any(axis=1) for units in picked], axis=1),
            always=always,
            may=may,
            elements=_by_layer(problem.elements, layers),
            macs=_by_layer(problem.macs, layers),
        )
        taken = solver(coarse)
        chosen = problem.always.copy()
        for units, is_taken in zip(picked, taken, strict=True):
            chosen[units] |= is_taken
        inside = {i for name, is_taken in zip(layers, taken, strict=True) if is_taken for i in layers[name]}
        more = [int(i) for i in problem.free if not chosen[i]]
        order = sorted(more, key=lambda i: (i not in inside, -problem.values[i]))
        return fill(replace(problem, always=chosen), order, stop=False)

    return solve


def _by_layer(sizes: Array | None, layers: dict[str, list[int]]) -> Array | None:
    return None if sizes is None else np.array([sizes[units].sum() for units in layers.values()])


def _members(problem: Problem, units: list[int], best: list[int]) -> list[int]:
    """The units that represent a layer: those of it that are always chosen, else its best channels."""
    return [i for i in units if problem.always[i]] or best


def fixed(*globs: str) -> Solver:
    """Always the units whose names match. It ignores limits: if the choice exceeds one, `plan` raises `BudgetError`."""

    def solve(problem: Problem) -> Mask:
        chosen = problem.always.copy()
        chosen[list(match(problem.names, globs))] = True
        return chosen

    return solve
