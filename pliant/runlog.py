"""The run log: one JSON object per line. A line is whole or absent; a torn last line is cut off on reopening."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


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
