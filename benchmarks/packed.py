"""Where the data and weights of benchmarks lie; `pliant.apps.data.images` reads them."""

from __future__ import annotations

import os
from pathlib import Path


def folder(given: Path | None) -> Path:
    """Where data and weights lie: `--data`, else $PLIANT_DATA."""
    found = given or (Path(os.environ["PLIANT_DATA"]) if os.environ.get("PLIANT_DATA") else None)
    if found is None or not found.is_dir():
        what = f"{found} is no folder" if found else "none was given"
        raise SystemExit(
            f"this benchmark needs a folder with data and weights, and {what}: give --data DIR or set PLIANT_DATA."
        )
    return found


def need(path: Path) -> Path:
    if not path.exists():
        raise SystemExit(f"missing: {path.name} (looked in {path.parent.name}/ of the data folder).")
    return path
