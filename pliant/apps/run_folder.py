"""The folder of a run: its files, and a lock so that only one process writes into it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pliant import __version__
from pliant.core.errors import PliantError
from pliant.runtime.files import remove_stale, write_aside

_FORMAT = "pliant.run/1"


class FolderError(PliantError, OSError):
    """A folder that a run cannot use."""


@dataclass(frozen=True)
class Folder:
    """The files of a run. `run` holds its options; `state` is all that a resumed run needs."""

    path: Path
    claim: tuple[int, int] | None = None  # device and number of the lock file that the run holds

    @property
    def is_there(self) -> bool:
        """Whether this is still the folder that the run has locked: it may have been removed, moved or replaced."""
        try:
            return self.claim == _number(os.stat(self.lock))
        except OSError:
            return False

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def log(self) -> Path:
        return self.path / "run.jsonl"

    @property
    def state(self) -> Path:
        return self.path / "state.pt"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    @property
    def readme(self) -> Path:
        return self.path / "README.md"

    @property
    def skipped(self) -> Path:
        return self.path / "skipped.csv"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"


def options_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options that the run in a folder began with."""
    return dict(_held(path)["options"])


def data_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fingerprints of the data that the run in a folder began with; nothing where an earlier version began it."""
    found = _held(path).get("data")
    return dict(found) if isinstance(found, dict) else {}


def _held(path: str | os.PathLike[str]) -> dict[str, Any]:
    file = Folder(Path(path)).run
    try:
        held = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise FolderError(f"there is no run in {os.fspath(path)!r} to resume: it holds no {file.name}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FolderError(f"{os.fspath(file)!r} cannot be read: {error}") from error
    if not isinstance(held, dict) or held.get("format") != _FORMAT or not isinstance(held.get("options"), dict):
        raise FolderError(f"{os.fspath(file)!r} is not what a run of `pliant train` writes. Give the folder of such a run.")
    return held


def write_options(folder: Folder, options: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """The file that `options_of` and `data_of` read."""
    held = {"format": _FORMAT, "pliant": __version__, "options": dict(options), "data": dict(data)}
    write_aside(folder.run, json.dumps(held, indent=2).encode())


def _number(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def unused(name: str, within: str | os.PathLike[str] = "runs") -> Path:
    """An unused folder for a run: `runs/name`, else `runs/name-2` and so on."""
    number, path = 1, Path(within, name)
    while path.exists():
        number += 1
        path = Path(within, f"{name}-{number}")
    return path


@contextmanager
def locked(path: Path) -> Iterator[Folder]:
    """Lock a folder, which is created if needed.

    The operating system holds the lock, so a killed process leaves none behind.
    """
    name = os.fspath(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(Folder(path).lock, "a+b")  # noqa: SIM115  # closed below
    except OSError as error:
        raise FolderError(f"cannot write into {name!r}: {error.strerror}. Choose another folder (--out).") from error
    with lock:
        if not _try_lock(lock):
            raise FolderError(f"another process is using {name!r}. Wait for it, or choose another folder (--out).")
        yield Folder(path, _number(os.fstat(lock.fileno())))


@contextmanager
def claimed(
    path: str | os.PathLike[str], options: Mapping[str, Any], resume: bool, data: Mapping[str, Any]
) -> Iterator[Folder]:
    """The folder of a run with these options and fingerprints of its data, locked while the run lasts. A folder that holds
    another run is refused.

    A run that fails before its first checkpoint removes its files.
    """
    name = os.fspath(path)
    new = not Path(path).exists()
    with locked(Path(path)) as folder:
        for file in (folder.run, folder.state, folder.best, folder.last, folder.readme, folder.skipped):
            remove_stale(file)
        others = sorted(entry.name for entry in folder.path.iterdir() if entry != folder.lock)
        if not resume and folder.run.exists():
            raise FolderError(f"{name!r} holds a run already: add --resume to continue it, or choose another folder (--out).")
        if not resume and others:
            raise FolderError(f"{name!r} is not empty (it holds {others[0]!r}): choose another folder (--out).")
        try:
            if not resume:
                write_options(folder, options, data)
            yield folder
        except BaseException:
            if not resume and folder.is_there and not folder.state.exists():
                _clear(folder, new)
            raise


def _clear(folder: Folder, new: bool) -> None:
    """Remove the files of a failed run. An error here is ignored: the error of the run is the one to show."""
    with suppress(OSError):
        for file in (folder.run, folder.log, folder.best, folder.last, folder.readme, folder.skipped, folder.lock):
            file.unlink(missing_ok=True)
        if new:
            folder.path.rmdir()


def _try_lock(file: BinaryIO) -> bool:
    """Take the lock if it is free; closing the file releases it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
