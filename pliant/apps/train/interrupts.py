"""What surrounds a run: its time and energy, Ctrl-C, errors of the disk."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pliant.apps.run_folder import Folder, FolderError
from pliant.runtime import energy


class Stopped(KeyboardInterrupt):
    """Ctrl-C, handled between two steps."""


class Stopwatch:
    """Seconds and joules of training alone; `paused` while something else runs.

    The clock is that of steps, so that the two can be compared: CPU time where one thread computes, else wall time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        one_thread = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if one_thread else time.perf_counter
        self._meter = energy.meter(device)
        self._seconds, self._joules = 0.0, 0.0
        self._since: tuple[float, float] | None = self._now()

    def _now(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock(), self._meter.joules() if self._meter is not None else 0.0

    def add(self, seconds: float, joules: float | None) -> None:
        """Count what a resumed run spent before."""
        self._seconds += seconds
        self._joules += joules or 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._update()
        self._since = None
        try:
            yield
        finally:
            self._since = self._now()

    def _update(self) -> None:
        if self._since is not None:
            now = self._now()
            self._seconds += now[0] - self._since[0]
            self._joules += now[1] - self._since[1]
            self._since = now

    @property
    def seconds(self) -> float:
        self._update()
        return self._seconds

    @property
    def joules(self) -> float | None:
        self._update()
        return self._joules if self._meter is not None else None


@contextmanager
def delayed_interrupt(has_trained: Callable[[], bool]) -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the current step can end before the run stops.

    A second Ctrl-C stops at once, and so does one before the first step, when there is nothing to save.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield stop
        return

    def on_signal(*_: object) -> None:
        if stop.is_set() or not has_trained():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def explain_disk_errors(folder: Folder) -> Iterator[None]:
    """An error while writing a file ends the run with a message that says what is still there."""
    try:
        yield
    except (FolderError, BrokenPipeError):  # the message is clear already; or nobody reads the output
        raise
    except OSError as error:
        kept = (
            "The last good checkpoint is intact: free some space, then continue with --resume." if folder.state.exists() else ""
        )
        where = os.fspath(error.filename if error.filename is not None else folder.path)
        raise FolderError(f"cannot write {where!r}: {error.strerror or error}. {kept}".rstrip()) from error
