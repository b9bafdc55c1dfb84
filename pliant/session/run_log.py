"""The run log: one JSON object per line. A line is whole or absent; a torn last line is cut off on reopening."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_FLUSH_EVERY = 20  # steps: reading a loss off a GPU waits for it, so not at every one


class RunLog:
    """Writes the log of one run, steps in bundles; without a path it writes nothing."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = path
        self._steps: list[tuple[int, int, torch.Tensor | None, Callable[[], float]]] = []

    def write(self, event: str, **line: Any) -> None:
        """One line, after the steps that came before it."""
        if self.path is not None:
            self.flush()
            append(self.path, [{"event": event, **line}])

    def step(self, step: int, round: int, loss: torch.Tensor | None, seconds: Callable[[], float]) -> None:
        """One optimizer step; its loss and its seconds are read later, with those of its neighbours."""
        if self.path is not None:
            self._steps.append((step, round, loss, seconds))
            if len(self._steps) >= _FLUSH_EVERY:
                self.flush()

    def flush(self) -> None:
        """Write the steps that the file does not hold yet."""
        steps, self._steps = self._steps, []
        if self.path is None or not steps:
            return
        known = [loss.float() for _, _, loss, _ in steps if loss is not None]
        values = iter(torch.stack(known).tolist() if known else [])
        append(
            self.path,
            [
                {"event": "step", "step": n, "round": r, "loss": None if loss is None else next(values), "seconds": seconds()}
                for n, r, loss, seconds in steps
            ],
        )


def append(path: str | os.PathLike[str], lines: Iterable[Mapping[str, Any]]) -> None:
    """Add lines in one write, after cutting off what an interrupted write left behind."""
    text = "".join(json.dumps(_plain(line), allow_nan=False) + "\n" for line in lines).encode()
    if not text:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "a+b") as file:
        _cut_torn_line(file)
        file.write(text)


def _cut_torn_line(file: Any) -> None:
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; a torn last line is passed over, a broken line elsewhere is an error."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{os.fspath(path)!r}, line {number}: not a line of a run log ({error}).") from error


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
