"""The roofline of a run: where the backward pass of each layer stands against what the device can do."""

from __future__ import annotations

from typing import Any

from torch import nn

from pliant.apps.layer_report import Sketch
from pliant.apps.tasks import loss
from pliant.cost import measure
from pliant.session.session import Session


class Roof:
    """Made of what a run measures anyway, so that it costs one forward pass, and the device's peaks where nobody measured them
    yet. Leaves no trace.

    The sketch is made before anything is chosen, when every parameter is as it was found; the rest follows the first step.
    """

    def __init__(self, session: Session, model: nn.Module, batch: Any) -> None:
        self._session = session
        self._sketch = Sketch(model, loss, batch) if session.policy.cost is measure.timed else None

    def line(self) -> dict[str, Any]:
        """The line of a log that a report draws the roofline from, or that says why there is none."""
        if self._sketch is None:
            recipe = self._session.policy.name
            why = f"the recipe {recipe!r} needs no seconds, so no layer was timed; `pliant profile` times them"
            return {"event": "roofline", "why": why}
        try:
            return {"event": "roofline", **self._sketch.survey(self._session.profile).to_json()}
        except (RuntimeError, ValueError) as error:
            return {"event": "roofline", "why": f"the device's peaks could not be measured: {error}"}
