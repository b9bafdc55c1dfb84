"""Files that are whole or absent."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl


def cache_folder() -> Path | None:
    """Where measurements of this device are kept: `$PLIANT_CACHE`, else `pliant` in the user's cache folder.

    None where the user has no home.
    """
    own, users = os.environ.get("PLIANT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own) if own else (Path(users) if users else Path.home() / ".cache") / "pliant"
    except RuntimeError:
        return None


def write_aside(path: str | os.PathLike[str], *pieces: bytes | memoryview) -> None:
    """Write a file so that it is either the old one or the new one, never half of one. Its folder is made if there is none.

    The new one is written beside it under a random name, then renamed. What killed processes left of this file is removed.
    Errors name the file that was asked for.
    """
    try:
        _write_aside(Path(path), pieces)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error


def _write_aside(target: Path, pieces: Iterable[bytes | memoryview]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target)
    file = _new_beside(target)
    try:
        with file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform != "win32":  # while it is locked
                os.replace(file.name, target)
        if sys.platform == "win32":  # an open file cannot be renamed there
            os.replace(file.name, target)
    finally:
        Path(file.name).unlink(missing_ok=True)


def _new_beside(target: Path) -> BinaryIO:
    """A new file, locked as long as it is open. It is never opened through a link, since it must not exist before."""
    while True:
        file = open(target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp"), "xb")  # noqa: SIM115  # closed by the caller
        if sys.platform == "win32":
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BlockingIOError:  # another process takes it for stale
            pass
        except OSError:  # this file system has no locks, so nothing is taken for stale here
            return file
        except BaseException:
            file.close()
            Path(file.name).unlink(missing_ok=True)
            raise
        file.close()


def remove_stale(target: Path) -> None:
    """Remove new versions of this file that nobody writes any more. Whoever writes one holds its lock."""
    if sys.platform == "win32":
        return
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.tmp")
    with os.scandir(target.parent) as entries:
        stale = [entry.path for entry in entries if ours.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
    for path in stale:
        with suppress(OSError):  # it is gone, or locked
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(number)
