"""The roofline of a run, for its log."""

from __future__ import annotations

from typing import Any

from pliant.apps.layer_report import PendingReport
from pliant.apps.tasks import Task
from pliant.cost import measure
from pliant.session.session import Session


class PendingRoofline:
    """The roofline of a run, from the profile that the run measures anyway. It costs one forward pass and leaves no trace.

    The graph is read before anything is chosen, while every parameter is as the user left it; `event` follows the first step.
    """

    def __init__(self, session: Session, task: Task, batch: Any) -> None:
        self._session = session
        self._report = PendingReport(task.model, task.loss, batch) if session.policy.cost is measure.timed else None

    def event(self) -> dict[str, Any]:
        """The log line that a report draws the roofline from, or that says why there is none."""
        if self._report is None:
            recipe = self._session.policy.name
            why = f"the recipe {recipe!r} needs no seconds, so no layer was timed; `pliant profile` times them"
            return {"event": "roofline", "why": why}
        try:
            return {"event": "roofline", **self._report.finish(self._session.profile).to_json()}
        except (RuntimeError, ValueError) as error:
            return {"event": "roofline", "why": f"the device's peaks could not be measured: {error}"}
