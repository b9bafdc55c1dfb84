"""Which parameters a probe may score together where memory is limited."""

from __future__ import annotations

from collections.abc import Sequence

from pliant.core.types import Part, Unit
from pliant.cost.profile import Profile
from pliant.signals.signals import Signal

_WHILE_SCORED = 3  # times a parameter's bytes, while it is scored: a gradient, its update and their product


def windows(signal: Signal, prices: Profile, names: Sequence[str], limit: float) -> list[list[str]]:
    """Neighbours that fit into `limit` bytes together. A parameter that alone needs more is in no window."""
    size = {name: prices.param_bytes(name) for name in names}
    if signal.needs == "activation":
        size = {name: prices.output_bytes(name) for name in names}

    def fits(window: list[str]) -> bool:
        held = sum(size[name] for name in window) if signal.needs == "activation" else 0
        scoring = _WHILE_SCORED * max(size[name] for name in window)
        passes = prices.without_optimizer.cost([Unit("*", tuple(Part(name) for name in window))]).bytes
        return passes + held + scoring <= limit

    out: list[list[str]] = []
    for name in names:
        if out and fits([*out[-1], name]):
            out[-1].append(name)
        elif fits([name]):
            out.append([name])
    return out
