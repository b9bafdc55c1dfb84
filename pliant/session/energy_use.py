"""Where joules are limited: the meter that is read, and the power that steps draw by it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pliant.cost.profile import Profile
from pliant.runtime import energy


class EnergyUse:
    """Gives a profile its watts, and corrects them while training."""

    def __init__(self, device: torch.device, watts: float | None = None) -> None:
        """`watts` is the power that steps drew so far, where a run is resumed."""
        self._meter = energy.required(device)
        self._power = energy.Power(watts)

    def begin(self, profile: Profile, measure: Callable[[energy.Meter], float]) -> Profile:
        """The profile with the power of full steps, measured unless it is known."""
        profile = profile if profile.watts is not None else profile.with_watts(measure(self._meter))
        self._power = energy.Power(profile.watts)
        return profile

    def update(self, profile: Profile, seconds: float, elapsed: float) -> Profile:
        """The profile with the power of the last steps: `seconds` of all steps so far, in `elapsed` seconds of the run."""
        watts = self._power.update(self._meter.joules, seconds, elapsed)
        return profile if watts is None or watts == profile.watts else profile.with_watts(watts)
