"""Whether a run paid: what it took with everything, against full training on the same device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pliant.core import text
from pliant.cost import measure
from pliant.planning.policy import Policy
from pliant.session.session import Session

# How many full steps the first run on a device measures for: about, as `docs/results.md` has it for each network.
_MEASURING_STEPS = {"cpu": 12, "cuda": 30}


@dataclass(frozen=True)
class Outcome:
    """What a run took and what full training would have taken: the measured full step, as often as there were steps.

    `seconds` are those of training: measuring, choosing and steps, by the clock that steps are measured with (CPU time where
    one thread computes). `whole_seconds` are wall time, also with evaluating and saving, which full training would need too.
    Bytes are those of a step beyond inference: the highest that was measured, else predicted.
    """

    steps: int
    seconds: float
    whole_seconds: float
    full_step_seconds: float | None
    full_seconds: float | None
    bytes: int | None
    bytes_measured: bool
    full_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people, one line for each of time and memory."""
        took = f"training took {text.seconds(self.seconds)} with measuring and choosing"
        if self.full_seconds is None:
            took = f"training took {text.seconds(self.seconds)}"
        else:
            full = f"full training would take {text.seconds(self.full_seconds)} here"
            steps = f"{self.steps} steps of {text.seconds(self.full_step_seconds)}"
            took = f"{took}; {full} ({steps}): {self.verdict}"
        out = [f"{took}. With evaluating and saving: {text.seconds(self.whole_seconds)}"]
        if self.bytes is not None and self.full_bytes:
            how = "measured" if self.bytes_measured else "predicted"
            full = f"a full step would take {text.size(self.full_bytes)}"
            out.append(f"memory of a step beyond inference: {text.size(self.bytes)} {how}; {full}")
        return out

    @property
    def verdict(self) -> str:
        """Whether the run saved time, in a few words."""
        if not self.full_seconds:
            return ""
        share = self.seconds / self.full_seconds
        if share > 1:
            return f"it took {share - 1:.0%} longer" if share < 2 else f"it took {share:.1f} times as long"
        return f"it saved {1 - share:.0%} of the time"


def outcome(session: Session, seconds: float, whole_seconds: float, measured_bytes: int | None) -> Outcome:
    """What a run took: `seconds` of training, by the clock of its steps, and `whole_seconds` of wall time."""
    rounds = session.rounds
    steps = sum(one.steps for one in rounds)
    full = session.profile.full if session.units else None
    step_seconds = full.seconds if full is not None and full.seconds else None
    peaks = [one.measured_bytes for one in rounds if one.measured_bytes]
    measured = max([*peaks, *([measured_bytes] if measured_bytes else [])], default=None)
    predicted = session.selection.cost.bytes if session.units else None
    return Outcome(
        steps=steps,
        seconds=seconds,
        whole_seconds=whole_seconds,
        full_step_seconds=step_seconds,
        full_seconds=None if step_seconds is None else step_seconds * steps,
        bytes=measured or predicted,
        bytes_measured=measured is not None,
        full_bytes=full.bytes if full is not None else None,
    )


def too_short(policy: Policy, steps: int, steps_per_epoch: int, device: str) -> str | None:
    """A line about a run that has too few steps to save time, and how many would; None for others.

    Measuring takes as long as some full steps, and every step saves at most what the budget leaves out.
    """
    share = policy.budget.time
    if policy.cost is not measure.timed or not isinstance(share, (int, float)) or not 0 < share < 1:
        return None
    measuring = _MEASURING_STEPS.get(device, _MEASURING_STEPS["cpu"])
    needed = math.ceil(measuring / (1 - share))
    if steps >= needed:
        return None
    return (
        f"{steps} steps are too few to save time: measuring takes as long as about {measuring} full steps, unless an earlier "
        f"run kept its profile. From {needed} steps on (--epochs {math.ceil(needed / steps_per_epoch)}) it pays at "
        f"time={share:g}; --recipe full trains everything now"
    )


def confusion(labels: Sequence[int], guesses: Sequence[int]) -> list[list[int]]:
    """[class, predicted class, samples] for each pair that occurs.

    >>> confusion([0, 1, 1, 1], [0, 1, 1, 0])
    [[0, 0, 1], [1, 0, 1], [1, 1, 2]]
    """
    counts: dict[tuple[int, int], int] = {}
    for pair in zip(labels, guesses, strict=True):
        counts[pair] = counts.get(pair, 0) + 1
    return [[true, guess, count] for (true, guess), count in sorted(counts.items())]
