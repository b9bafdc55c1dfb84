"""What surrounds a run: the time and energy it spends, Ctrl-C, a disk that fills up, TensorBoard."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pliant.apps.run_folder import Folder, FolderError
from pliant.apps.train.options import Moment, Watch
from pliant.runtime import energy


class Stopped(KeyboardInterrupt):
    """Ctrl-C, heard between two steps."""


class Spent:
    """Seconds and joules of training alone: it stands still while something else is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meter = energy.meter(device)
        self._seconds, self._joules = 0.0, 0.0
        self._since: tuple[float, float] | None = self._now()

    def _now(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter(), self._meter.joules() if self._meter is not None else 0.0

    def add(self, seconds: float, joules: float | None) -> None:
        """What was spent before, in the run that goes on."""
        self._seconds += seconds
        self._joules += joules or 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._take()
        self._since = None
        try:
            yield
        finally:
            self._since = self._now()

    def _take(self) -> None:
        if self._since is not None:
            now = self._now()
            self._seconds += now[0] - self._since[0]
            self._joules += now[1] - self._since[1]
            self._since = now

    @property
    def seconds(self) -> float:
        self._take()
        return self._seconds

    @property
    def joules(self) -> float | None:
        self._take()
        return self._joules if self._meter is not None else None


@contextmanager
def interrupts(has_trained: Callable[[], bool]) -> Iterator[threading.Event]:
    """Ctrl-C waits for the step that runs, since half a step is no state to save. A second one does not wait, nor one
    that comes before there is anything to lose."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there signals are heard
        yield stop
        return

    def hear(*_: object) -> None:
        if stop.is_set() or not has_trained():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def told_of_the_disk(place: Folder) -> Iterator[None]:
    """Files that cannot be written end a run with a line that says what is left."""
    try:
        yield
    except (FolderError, BrokenPipeError):  # told already; or nobody reads what is printed
        raise
    except OSError as error:
        kept = "The last good checkpoint stays: make room, then go on with --resume." if place.state.exists() else ""
        where = os.fspath(error.filename if error.filename is not None else place.path)
        raise FolderError(f"cannot write {where!r}: {error.strerror or error}. {kept}".rstrip()) from error


@contextmanager
def tensorboard(log_to: str | None, place: Folder) -> Iterator[Watch | None]:
    """A watch that writes for TensorBoard, if that is asked."""
    if log_to is None:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard is not installed. Run: pip install 'pliant[tensorboard]'", name="tensorboard") from error
    writer: Any = SummaryWriter(os.fspath(place.path))

    def watch(moment: Moment) -> None:
        if moment.loss is not None:
            writer.add_scalar("loss/train", moment.loss, moment.step)
        if moment.evaluated:
            writer.add_scalar("accuracy/validation", moment.accuracy, moment.step)
        if moment.share is not None:
            writer.add_scalar("step/share_of_full", moment.share, moment.step)
        if moment.trained:
            writer.add_scalar("step/units_trained", sum(moment.trained), moment.step)

    try:
        yield watch
    finally:
        writer.close()
