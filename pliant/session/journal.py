"""What a session writes down of itself: lines of its log, and how a notebook shows it. Nothing is measured or written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pliant import __version__
from pliant.core import text
from pliant.core.mode import Mode
from pliant.core.types import Selection, Unit
from pliant.cost.profile import Profile
from pliant.planning.policy import Policy
from pliant.session.feedback import Round

_SHOWN = 10  # of the last rounds


def start(
    policy: Policy, profile: Profile, units: tuple[Unit, ...], engine: str, profiling_seconds: float | None
) -> dict[str, Any]:
    """What a run begins with; the cost of a unit is that of a step with it alone."""
    return {
        "pliant": __version__,
        "policy": policy.name,
        "when": policy.when.name,
        "signal": policy.signal.name,
        "engine": engine,
        "seed": policy.seed,
        "origin": dict(profile.origin),
        "full": asdict(profile.full),
        "forward": asdict(profile.base),
        "units": {unit.name: list(unit.params) for unit in units},
        "costs": {unit.name: asdict(cost) for unit, cost in zip(units, profile.alone(units), strict=True)},
        "split": _split(profile.on(Mode()), [profile.everything]),
        "checks": [list(check) for check in profile.checks],
        "coverage": profile.coverage,
        "uncounted": list(profile.uncounted),
        "profiling_seconds": profiling_seconds,
    }


def chosen(
    selection: Selection,
    profile: Profile,
    engine: str,
    choosing_seconds: float,
    measured_before: float | None,
    resident: int | None,
) -> dict[str, Any]:
    """A selection, what the parts of its step cost, and what choosing it took."""
    return {
        **selection.to_json(),
        "split": _split(profile, selection.units),
        "engine": engine,
        "choosing_seconds": choosing_seconds,
        "measured_before": measured_before,
        "resident": resident,
    }


def memory(step: int, number: int, asked: Round, measured: int) -> dict[str, Any]:
    """The bytes of a step that was measured, beside those that its round asked for and predicted."""
    amounts = {"asked": asked.asked_bytes, "predicted": asked.predicted_bytes, "measured": measured}
    return {"step": step, "round": number, **amounts}


def display(name: str, engine: str, steps: int, rounds: Sequence[Round], selection: Selection | None) -> str:
    """HTML: what was asked, predicted and measured of late, and what is chosen now."""
    if selection is None:
        return text.tag("p", f"{name}: nothing is chosen yet; the first step chooses.")
    rows = [
        (str(r.number), str(r.step + 1), str(r.steps), *map(text.seconds, (r.asked, r.predicted, r.measured)))
        for r in rounds[-_SHOWN:]
    ]
    title = f"{name}, {steps} steps on the {engine} engine: time per step"
    table = text.Table(title, ("round", "from step", "steps", "asked", "predicted", "measured"), rows)
    return table.html() + selection._repr_html_()


def _split(profile: Profile, units: Sequence[Unit]) -> dict[str, Any]:
    return {part: asdict(cost) for part, cost in profile.split(units).items()}
