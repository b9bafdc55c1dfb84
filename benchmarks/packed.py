"""The folder with data and weights that some benchmarks need; `pliant.images` reads its files."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=None, help="folder with data and weights (or $PLIANT_DATA)")


def folder(given: Path | None) -> Path:
    """The folder with data and weights: `--data`, else $PLIANT_DATA."""
    found = given or (Path(os.environ["PLIANT_DATA"]) if os.environ.get("PLIANT_DATA") else None)
    if found is None or not found.is_dir():
        what = f"{found} is not one" if found else "none was given"
        raise SystemExit(
            f"this benchmark needs a folder with data and weights, and {what}: give --data DIR or set PLIANT_DATA."
        )
    return found


def need(path: Path) -> Path:
    """The same path, if the file exists."""
    if not path.exists():
        raise SystemExit(f"missing: {path.name} (looked in {path.parent.name}/ of the data folder).")
    return path
