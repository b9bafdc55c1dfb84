"""Files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path


def write_aside(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that it is either the old one or the new one, never half of one. Its folder is made if there is none."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
