"""Solvers that rotate: a number of units, or those whose turn it is, whatever they are worth."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pliant.planning.solve.fixed import fill
from pliant.planning.solve.problem import SLACK, Mask, Problem, Solver


@dataclass(frozen=True)
class Rotating:
    """A solver that chooses by round, not by value. Its selections are never corrected by adding or removing units."""

    choose: Solver

    def __call__(self, problem: Problem) -> Mask:
        return self.choose(problem)


def sample(k: int | None = None) -> Solver:
    """Random units, as many as fit; at most `k`. Re-drawn every round; the same seed gives the same units.

    Units that the loss does not depend on are not drawn.
    """

    if k is not None and k < 1:
        raise ValueError(f"sample(k={k}): must be at least 1 unit.")

    def solve(problem: Problem) -> Mask:
        free = problem.reached & ~problem.always & problem.allowed
        order = [int(i) for i in problem.rng().permutation(len(problem.names)) if free[i]]
        return fill(problem, order, stop=False, most=k)

    return Rotating(solve) if k is not None else solve


def cycle(k: int = 1, order: str = "descending") -> Solver:
    """The next `k` units each round, in turn. Units that the loss does not depend on are left out.

    The `order` is "descending" (from the loss to the input), "ascending" (from the input to the loss) or "random", which is new
    in each cycle.
    """

    if k < 1:
        raise ValueError(f"cycle(k={k}): must be at least 1 unit.")
    if order not in ("descending", "ascending", "random"):
        raise ValueError(f"cycle(order={order!r}): choose 'descending', 'ascending' or 'random'.")

    def solve(problem: Problem) -> Mask:
        others = np.flatnonzero(problem.reached & ~problem.always & problem.allowed)

        def unit(turn: int) -> int:
            lap, place = divmod(turn, len(others))
            if order == "random":
                return int(np.random.default_rng([problem.seed, lap]).permutation(others)[place])
            return int(others[place if order == "descending" else -1 - place])

        start = problem.round * k
        return fill(problem, [unit(start + i) for i in range(min(k, len(others)))], stop=False)

    return Rotating(solve)


def with_ends(solver: Solver) -> Solver:
    """Another solver for all units but two: the one nearest the loss and the one furthest from it are always chosen."""

    def solve(problem: Problem) -> Mask:
        always, reached = problem.always.copy(), np.flatnonzero(problem.reached)
        always[[*reached[:1], *reached[-1:]]] = True
        return solver(replace(problem, always=always))

    return Rotating(solve) if isinstance(solver, Rotating) else solve


def freeze(start: float = 0.8, cubed: bool = True) -> Solver:
    """All units at first; then they freeze for good, one after another from the input on. FreezeOut, arXiv 1706.04983.

    Of the L units that are not always chosen, number i from the input (counted from 0) freezes when
    t_i = start + (1 − start)·i/L of the run is done; with `cubed`, when t_i³ is. Units that the loss does not depend on are
    never chosen.
    """
    if not 0 <= start < 1:
        raise ValueError(f"freeze(start={start}): a share of the run, 0 or more, and less than 1.")

    def solve(problem: Problem) -> Mask:
        if problem.done is None:
            raise ValueError("freezing layer by layer needs the length of the run: give Session(total_steps=…), or use fit().")
        others = np.flatnonzero(problem.reached & ~problem.always & problem.allowed)
        from_input = np.arange(len(others))[::-1]
        leave_at = (start + (1 - start) * from_input / max(len(others), 1)) ** (3 if cubed else 1)
        stay = problem.done < leave_at * (1 - SLACK)
        return fill(problem, [int(i) for i in others[stay]], stop=False)

    return Rotating(solve)
