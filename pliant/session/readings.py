"""What a user reads off a session: what is chosen, what steps cost, and what they took."""

from __future__ import annotations

from torch import nn

from pliant.core.budget import Progress
from pliant.core.types import Selection, Unit
from pliant.cost.profile import Profile
from pliant.engine.engine import Engine
from pliant.planning.policy import Policy
from pliant.session.controller import Controller
from pliant.session.feedback import Feedback, Round
from pliant.session.loop import Loop
from pliant.session.run_log import described, display


class Readings:
    """The part of a `Session` that only tells. Nothing here changes the run."""

    model: nn.Module
    _engine: Engine
    _controller: Controller
    _loop: Loop
    _closed: bool

    @property
    def selection(self) -> Selection:
        """What is chosen now."""
        return self._loop.selection

    @property
    def units(self) -> tuple[Unit, ...]:
        """Everything that can be chosen, nearest the loss first; empty before the first step."""
        return self._controller.units

    @property
    def policy(self) -> Policy:
        """The method and its budget as they are now."""
        return self._controller.policy

    @property
    def profile(self) -> Profile:
        """What a step costs here, for any selection, in the mode that steps run in."""
        return self._loop.profile

    @property
    def engine(self) -> str:
        """The mode of the coming step: "plain", or those of "lean", "prefix" and "graphs" that work together."""
        return str(self._engine.mode)

    @property
    def why_not(self) -> dict[str, str]:
        """What the engine cannot do here ("graphs", "cache", "runtime", …), and why."""
        return self._engine.why_not

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return self._loop.progress

    @property
    def measured_seconds(self) -> float | None:
        """The median of this round's last hundred steps, by this device's clock; None before its first step."""
        return self._loop.laps.median()

    @property
    def rounds(self) -> tuple[Round, ...]:
        """What was asked, predicted and measured, for every selection of the run."""
        so_far = Feedback.of(self._controller.feedback.state())
        so_far.see(self._loop.laps.peek(), self._controller.asked_seconds(self.progress))
        return tuple(so_far.rounds)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of wall time since the session began: in all, for profiling, for choosing, and saved by a kept profile."""
        known = self._controller.profile.origin if self._controller.profile is not None else {}
        return {**self._loop.time.account(), "saved": known["took"] if "cached" in known else 0.0}

    @property
    def caches(self) -> bool:
        """Whether the outputs of the frozen prefix are kept by sample, as far as is known."""
        return self._engine.caches

    def __repr__(self) -> str:
        what = self.policy, self.model, self.progress, self.engine, self._controller.selection, self.measured_seconds
        return f"<Session{' (closed)' * self._closed}: {described(*what)}>"

    def _repr_html_(self) -> str:
        """How a notebook shows it: what the last rounds asked, predicted and measured, and what is chosen now."""
        rounds = self.rounds if self._controller.selection is not None else ()
        return display(self.policy.name, self.engine, self._loop.steps, rounds, self._controller.selection)
