"""When to choose again: `once`, `every`, `on_drift`; and `ramp`, a number that changes with progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pliant.core.budget import Progress


@dataclass(frozen=True)
class Schedule:
    """`due(now, last, drift)` says whether to choose again.

    `now` and `last` are the progress now and at the last selection. `drift` is how much the chosen units' values have changed
    since then: 1 − cos of the two vectors (None: not known yet). It is measured only if `watches` is set.
    """

    name: str
    due: Callable[[Progress, Progress, float | None], bool]
    needs_epochs: bool = False
    watches: bool = False
    lasts: int = 0  # steps: if fewer are left in the run, nothing is chosen again


def once() -> Schedule:
    """Choose once, at the beginning, and never again."""
    return Schedule("once", lambda now, last, drift: False)


def every(steps: int | None = None, epochs: float | None = None, share: float | None = None) -> Schedule:
    """Choose again after a number of optimizer steps, of epochs, or after a share of the run.

    >>> every(steps=100).due(Progress(step=250), Progress(step=150), None)
    True
    """
    given = [interval for interval in (steps, epochs, share) if interval is not None]
    if len(given) != 1:
        raise ValueError(f"every() takes steps=…, epochs=… or share=…, one of them (given: {steps=}, {epochs=}, {share=}).")
    interval = given[0]
    if not interval > 0:
        raise ValueError(f"every({steps=}, {epochs=}, {share=}): the interval must be more than 0.")
    if share is not None and share > 1:
        raise ValueError(f"every({share=}) is more than the whole run: use a share of at most 1, or steps=….")
    if steps is not None:
        return Schedule(f"every {interval} steps", lambda now, last, drift: now.step - last.step >= interval)

    def due(now: Progress, last: Progress, drift: float | None) -> bool:
        length = now.steps_per_epoch if share is None else now.total_steps
        if length is None:
            needs = f"every({epochs=}) needs the length of an epoch: give Session(steps_per_epoch"
            if share is not None:
                needs = f"every({share=}) needs the length of the run: give Session(total_steps"
            raise ValueError(f"{needs}=…), or use fit().")
        return now.step - last.step >= max(round(interval * length), 1)

    return Schedule(f"every {interval} {'epochs' if share is None else 'of the run'}", due, needs_epochs=share is None)


def on_drift(threshold: float = 0.3, at_least: int = 20, at_most: int | None = None) -> Schedule:
    """Choose again when the values of the chosen units have changed by more than `threshold`.

    The change is 1 − cos of the vectors of values then and now, from gradients that training computes anyway. Units are chosen
    no sooner than `at_least` steps after the last selection, and no later than `at_most`. In the last `at_least` steps of a run
    of known length, nothing is chosen: it would not pay.
    """
    if not 0 < threshold <= 2:
        raise ValueError(f"on_drift(threshold={threshold}): drift is 1 − cos, so the threshold must be in (0, 2].")
    if at_most is not None and at_most < at_least:
        raise ValueError(f"on_drift({at_least=}, {at_most=}): at_most is less than at_least. Raise it, or leave it out.")

    def due(now: Progress, last: Progress, drift: float | None) -> bool:
        since = now.step - last.step
        if at_most is not None and since >= at_most:
            return True
        return since >= at_least and drift is not None and drift > threshold

    return Schedule(f"on drift > {threshold}", due, watches=True, lasts=at_least)


def ramp(start: float, end: float, until: float = 1.0) -> Callable[[Progress], float]:
    """A number that goes linearly from `start` to `end`, until the share `until` of the run is done.

    For budgets that change over a run: `Budget(time=ramp(1.0, 0.4))` begins with full steps and ends with short ones.

    >>> ramp(1.0, 0.5)(Progress(step=50, total_steps=100))
    0.75
    """
    if not 0 < until <= 1:
        raise ValueError(f"ramp(until={until}): the end of the ramp is a share of the run, in (0, 1].")
    return lambda progress: start + (end - start) * min(progress.fraction / until, 1.0)
