"""Windows of blocks: which ones fit a client's budget, and how FedEL's window slides from the input to the output."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pliant.integrations.flower.messages import Ability

Window = tuple[int, int]  # first and last block


def widest(ability: Ability, seconds: float) -> list[Window]:
    """For each last block, the window that reaches furthest back in a step of so many seconds; none where none fits."""
    found = []
    for last in range(len(ability.blocks)):
        fits = [first for first in range(last + 1) if ability.window(first, last) <= seconds * (1 + 1e-9)]
        if fits:
            found.append((fits[0], last))
    return found


def drawn(ability: Ability, seconds: float, rng: np.random.Generator) -> Window | None:
    """The whole model where it fits, else a random one of the widest windows; None where no window fits."""
    found = widest(ability, seconds)
    whole = 0, len(ability.blocks) - 1
    if whole in found:
        return whole
    return found[int(rng.integers(len(found)))] if found else None


def deepest(ability: Ability, seconds: float) -> Window | None:
    """Blocks from the input on, as many as fit: the sub-model of a weak client. None where not even the first one does."""
    found = [last for first, last in widest(ability, seconds) if first == 0]
    return (0, found[-1]) if found else None


def ahead(backward: Sequence[float], first: int, seconds: float) -> int:
    """The last block of a window that starts here: the first one with which the blocks' backward times reach `seconds`.

    >>> ahead([1.0, 1.0, 1.0, 1.0], 0, 1.5), ahead([1.0, 1.0, 1.0, 1.0], 3, 1.5)
    (1, 3)
    """
    total = 0.0
    for last in range(first, len(backward)):
        total += backward[last]
        if total >= seconds:
            return last
    return len(backward) - 1


def slid(backward: Sequence[float], window: Window | None, chosen: Collection[int], seconds: float) -> Window:
    """FedEL's next window (arXiv 2509.16902): the front moves on by blocks whose time reaches `seconds`; blocks at the end of
    which nothing was `chosen` are left behind; after the last block it begins again at the input.

    >>> slid([1.0] * 6, None, (), 2.0), slid([1.0] * 6, (0, 1), (1,), 2.0), slid([1.0] * 6, (1, 5), (2,), 2.0)
    ((0, 1), (1, 3), (0, 1))
    """
    if window is None or window[1] == len(backward) - 1:
        return 0, ahead(backward, 0, seconds)
    front = ahead(backward, window[1] + 1, seconds)
    kept = [block for block in range(window[0], window[1] + 1) if block in chosen]
    return (kept[0] if kept else window[1] + 1), front
