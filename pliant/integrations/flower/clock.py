"""How long a round has taken: by the wall, or on a simulated device whose steps cost what a real profile says."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from pliant.core.types import Cost, Unit
from pliant.cost.profile import Profile
from pliant.runtime.clock import Watch
from pliant.session.session import Session


class WallClock:
    """The time that passes. It starts when it is made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def probed(self, profile: Profile) -> None:
        """A probe ran."""

    def stepped(self, session: Session, profile: Profile) -> None:
        """A step was issued: wait until the device has run it."""
        Watch(next(session.model.parameters()).device).settle()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start


class SimulatedClock:
    """A device that is busy now and then: every step takes what its profile says, times one random factor per round.

    The factor is exp(x), x normally distributed around 0 with standard deviation `jitter`. A probe counts as a full step.
    """

    def __init__(self, jitter: float = 0.0, seed: int = 0) -> None:
        self._factor = float(np.exp(np.random.default_rng(seed).normal(0.0, jitter))) if jitter else 1.0
        self.elapsed = 0.0
        self._units: tuple[Unit, ...] = ()
        self._each = 0.0  # seconds of a step that trains these

    def probed(self, profile: Profile) -> None:
        self.elapsed += self._factor * full_step(profile)

    def stepped(self, session: Session, profile: Profile) -> None:
        if session.selection.units != self._units:
            self._units, self._each = session.selection.units, profile.cost(session.selection.units).seconds
        self.elapsed += self._factor * self._each


Clock = WallClock | SimulatedClock


def full_step(profile: Profile) -> float:
    """Seconds of a step that trains everything, as steps run in a session. `profile.full` is one of plain PyTorch."""
    return profile.cost([profile.everything]).seconds


def slowed(profile: Profile, factor: float) -> Profile:
    """The profile of a device that takes `factor` times as long for everything."""
    if factor == 1:
        return profile
    if not factor > 0:
        raise ValueError(f"factor={factor}: how much longer a step takes than here, more than 0.")

    def longer(cost: Cost) -> Cost:
        return replace(cost, seconds=cost.seconds * factor)

    return replace(
        profile,
        base=longer(profile.base),
        charges=tuple(replace(charge, cost=longer(charge.cost)) for charge in profile.charges),
        plain=longer(profile.plain) if profile.plain is not None else None,
        checks=(),
        other_seconds=tuple(seconds * factor for seconds in profile.other_seconds),
    )
