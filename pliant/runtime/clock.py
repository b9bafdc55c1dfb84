"""Clocks: seconds between two moments on a device, the wall time of a run, and what its steps take."""

from __future__ import annotations

import gc
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

_CYCLES_PER_SECOND = 2e9  # of a GPU that is held back: about


@contextmanager
def undisturbed() -> Iterator[None]:
    """Python does not collect garbage inside: that can take longer than many steps."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Watch:
    """Marks moments and gives the seconds between them: this thread's CPU time, wall time, or CUDA events.

    `wall` is the clock of the run as a whole. A simulated device is a subclass with clocks of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda, self._device = device.type == "cuda", device
        self.wall: Callable[[], float] = time.monotonic
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def mark(self) -> Any:
        if not self.cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start

    def time(self, work: Callable[[], Any], lead: float = 0.0) -> tuple[float, Any]:
        """Seconds that some work takes, and its result. A GPU first sleeps for `lead` seconds, so that all work is issued when
        it starts."""
        self.settle()
        if lead and self.cuda:
            with torch.cuda.device(self._device):
                torch.cuda._sleep(int(lead * _CYCLES_PER_SECOND))
        start = self.mark()
        result = work()
        end = self.mark()
        self.settle()
        return self.seconds(start, end), result

    def typical(self, seconds: Sequence[float]) -> float:
        """One number for several tries: on a CPU the fastest, since what disturbs only adds to it; on CUDA the median."""
        return median(seconds) if self.cuda else min(seconds)


class LaunchWatch(Watch):
    """Measures how long the CPU is busy with issuing work to a GPU, which may finish it later."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._now = time.perf_counter


def device_name(device: torch.device) -> str:
    """What runs here: the kind of device and its model, as far as the system tells."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return f"{device.type}: {platform.machine()}"
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines()]
    except OSError:  # not Linux
        lines = []
    found = {key.strip(): value.strip() for key, _, value in lines}
    model = next((found[key] for key in ("model name", "Model", "CPU part") if found.get(key)), platform.processor())
    return f"cpu: {platform.machine()} {model}".rstrip()


class RunTime:
    """The wall time of a run: all of it, what profiling and choosing took, and what passes between steps."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._opened = now()
        self._before = 0.0  # in sessions that this one continues
        self._first: float | None = None  # when training began
        self.spent = {"profiling": 0.0, "choosing": 0.0}

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._before + self._now() - self._opened

    def account(self) -> dict[str, float]:
        """Seconds of the run so far: all of them, and what they were spent on beside training."""
        return {"all": self.elapsed, **self.spent}

    @contextmanager
    def not_training(self, kind: Literal["profiling", "choosing"]) -> Iterator[None]:
        """What runs inside is not training."""
        start = self.elapsed
        if self._first is None:
            self._first = start
        try:
            yield
        finally:
            self.spent[kind] += self.elapsed - start

    def now(self, steps: int, mean_step: float | None) -> tuple[float, float]:
        """Seconds since the run began, and those that pass beside a step."""
        return self.elapsed, self.aside(steps, mean_step)

    def aside(self, steps: int, mean_step: float | None) -> float:
        """Seconds that pass beside a step of `mean_step` seconds, on average."""
        if self._first is None or not steps or mean_step is None:
            return 0.0
        return max((self.elapsed - self._first - sum(self.spent.values())) / steps - mean_step, 0.0)

    def state(self) -> dict[str, Any]:
        return {"elapsed": self.elapsed, "spent": dict(self.spent), "first": self._first}

    def load(self, state: Mapping[str, Any]) -> None:
        self._opened, self._before = self._now(), state["elapsed"]
        self._first, self.spent = state["first"], dict(state["spent"])


_Span = tuple[Any, Any]  # two marks
_Lap = list[_Span]  # a span, and the pauses in it


class Laps:
    """How long steps take. Moments are marked at once and read later, since reading waits for the device."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._begun: Any = None
        self._pauses: list[_Span] = []  # of the lap that runs
        self._last: deque[_Lap] = deque(maxlen=100)  # of this round
        self._unread: list[_Lap | float] = []

    @property
    def is_running(self) -> bool:
        """Whether a lap began that has not ended."""
        return self._begun is not None

    def begin(self) -> None:
        self._begun, self._pauses = self.watch.mark(), []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no part of the lap."""
        start = self.watch.mark()
        try:
            yield
        finally:
            self._pauses.append((start, self.watch.mark()))

    def drop(self) -> None:
        """The lap that runs does not count."""
        self._begun = None

    def end(self, counts: bool = True) -> Callable[[], float]:
        """The lap is over, and counts or not; the result reads its seconds."""
        lap = [(self._begun, self.watch.mark()), *self._pauses]
        self._begun = None
        if counts:
            self._last.append(lap)
            self._unread.append(lap)
        return partial(self._seconds, lap)

    def _seconds(self, lap: _Lap) -> float:
        return self.seconds(lap[0]) - sum(map(self.seconds, lap[1:]))

    def seconds(self, span: _Span) -> float:
        """Between two marks, as soon as the device has reached them."""
        self.watch.settle()
        return self.watch.seconds(*span)

    def median(self) -> float | None:
        """Of this round's last hundred laps; None before the first."""
        taken = sorted(map(self._seconds, self._last))
        return taken[len(taken) // 2] if taken else None

    def new_round(self) -> None:
        self._last.clear()

    @property
    def unread(self) -> int:
        return len(self._unread)

    def peek(self) -> list[float]:
        """The laps that nobody has read yet."""
        return [lap if isinstance(lap, float) else self._seconds(lap) for lap in self._unread]

    def read(self) -> list[float]:
        """The same, and now they are read."""
        laps = self.peek()
        self._unread.clear()
        return laps

    def load(self, laps: Sequence[float]) -> None:
        """Go on with what `peek` gave elsewhere."""
        self._begun, self._unread = None, list(laps)
