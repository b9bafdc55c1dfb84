"""Folders with one folder per class: which file is of which class and split. Nothing is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pliant.apps.data.errors import DataError
from pliant.runtime.working import note

TRAIN, VALIDATION, TEST = 0, 1, 2
SPLIT_FOLDERS = {"train": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}


class ClassFiles(NamedTuple):
    """Files, with the class of each; and the split of each, if there are folders for splits."""

    files: list[Path]
    labels: list[str]
    split: list[int] | None


def class_files(path: str | os.PathLike[str], is_sample: Callable[[Path], bool], what: str) -> ClassFiles:
    """The files of a folder with one folder per class, or with such folders inside train, val and test.

    Other files, and names that start with a dot, are skipped; a note names some of them. `what` is the word for a sample.
    """
    root = Path(path)
    if not root.is_dir():
        found = "a file" if root.exists() else "not there"
        raise DataError(f"no folder {os.fspath(root)!r}: it is {found}. Give a folder with one folder per class.")
    tops = folders_in(root)
    by_split = bool(tops) and all(top.name.lower() in SPLIT_FOLDERS for top in tops)
    out = ClassFiles([], [], [] if by_split else None)
    ignored = [] if by_split else [file for file in root.iterdir() if file.is_file() and not file.name.startswith(".")]
    for place, split in [(top, SPLIT_FOLDERS[top.name.lower()]) for top in tops] if by_split else [(root, TRAIN)]:
        classes = folders_in(place)
        if not classes:
            loose = sum(is_sample(file) for file in place.iterdir())
            but = f", but {loose} files" if loose else ""
            raise DataError(f"{os.fspath(place)!r} holds no folders{but}. Put the files of each class into their own folder.")
        for of_class in classes:
            inside = sorted(of_class.iterdir())
            mine = [file for file in inside if is_sample(file)]
            if not mine:
                raise DataError(
                    f"the class {of_class.name!r} is empty: {os.fspath(of_class)!r} holds no {what}. Add some, or remove the "
                    f"folder."
                )
            ignored += [file for file in inside if not file.name.startswith(".") and not is_sample(file)]
            out.files.extend(mine)
            out.labels.extend([of_class.name] * len(mine))
            if out.split is not None:
                out.split.extend([split] * len(mine))
    tell_ignored(root, ignored, f"{what} of a class")
    return out


def folders_in(place: Path) -> list[Path]:
    return sorted(entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def tell_ignored(root: Path, ignored: Sequence[Path], what: str) -> None:
    """A note about files in a folder that were not read."""
    if ignored:
        some = ", ".join(repr(os.fspath(file.relative_to(root))) for file in sorted(ignored)[:3])
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        note(f"ignored in {os.fspath(root)!r}, because no {what}: {some}{more}")
