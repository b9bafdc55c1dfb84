"""Labelled samples before they are read: which files or texts there are, and the class and the split of each.

They come from a folder with one folder per class, from a table (CSV or TSV), or from a Hugging Face dataset saved to disk.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pliant.apps.data import images
from pliant.apps.data.audio import is_wav
from pliant.apps.data.errors import DataError
from pliant.apps.data.folders import SPLIT_FOLDERS, class_files, tell_ignored
from pliant.apps.data.inputs import Source
from pliant.apps.optional import needed
from pliant.core.errors import first_line
from pliant.core.types import nearest

LABEL_NAMES = ("label", "labels", "class", "category", "target", "y")
TEXT_NAMES = ("text", "sentence", "content", "review", "comment", "question", "message", "tweet", "title")
FILE_NAMES = ("path", "file", "filename", "file_name", "image", "img", "audio", "wav", "sound", "filepath", "file_path")
_FILES = {"images": "image", "audio": "WAV file", "arrays": "array (.npy)"}
_SHOWN = 8  # columns that a message names


class ColumnError(DataError):
    """A column that was asked for and is not there."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one kind ("images", "text" or "audio"). `names` are for messages; labels are None where nobody knows them."""

    kind: str
    sources: Sequence[Source]
    names: Sequence[str]
    labels: Sequence[str] | None = None
    split: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.sources)


def is_table(source: str | os.PathLike[str]) -> bool:
    return os.fspath(source).lower().endswith((".csv", ".tsv"))


def is_dataset(source: str | os.PathLike[str]) -> bool:
    """Whether a folder is a Hugging Face dataset that was saved to disk."""
    place = Path(source)
    return (place / "dataset_dict.json").is_file() or (
        (place / "dataset_info.json").is_file() and (place / "state.json").is_file()
    )


def find(source: str | os.PathLike[str], input_column: str | None = None, label_column: str | None = None) -> Samples:
    """The samples of a folder, a table or a saved dataset. Nothing is decoded yet."""
    if is_table(source):
        return table(source, input_column, label_column)
    if is_dataset(source):
        return saved_dataset(source, input_column, label_column)
    return class_folders(source)


# ---------------------------------------------------------------- folders


def class_folders(path: str | os.PathLike[str]) -> Samples:
    """The images or WAV files of a folder with one folder per class, or with such folders inside train, val and test."""
    files, labels, split = class_files(path, _is_sample, "image or WAV file")
    names = [f"the {'sound' if is_wav(file) else 'image'} {os.fspath(file)!r}" for file in files]
    return Samples(_kind_of_files(files, os.fspath(path)), files, names, labels, split)


def unlabelled(paths: Iterable[str | os.PathLike[str]], kind: str, input_column: str | None = None) -> Samples:
    """Samples to classify: files, folders with everything inside, and tables. For text also files with one text per line.

    The names are those of the files, or the texts themselves.
    """
    sources: list[Source] = []
    for path in map(Path, paths):
        if is_table(path):
            some = table(path, input_column, None, labelled=False)
            if some.kind != kind:
                raise DataError(f"{os.fspath(path)!r} lists {some.kind}, but this model was trained on {kind}.")
            sources += some.sources
        elif kind == "text":
            sources += _lines(path)
        elif path.is_dir():
            inside = [file for file in _files_below(path) if file.is_file() and not file.name.startswith(".")]
            mine = [file for file in inside if _fits(file, kind)]
            if not mine:
                raise DataError(f"{os.fspath(path)!r} holds no {_FILES[kind]}. Give files, or a folder of them.")
            tell_ignored(path, [file for file in inside if not _fits(file, kind)], _FILES[kind])
            sources += mine
        elif not path.exists():
            raise DataError(f"{os.fspath(path)!r} is not there. Check the path.")
        else:
            sources.append(path)
    return Samples(kind, sources, [str(one) for one in sources])


def _files_below(folder: Path) -> list[Path]:
    """The files of a folder and of those inside it, sorted. Links are followed last, and no folder is read twice."""
    files: list[Path] = []
    seen: set[str] = set()
    left = [os.fspath(folder)]
    while left:
        for place, folders, names in os.walk(left.pop(0)):
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders.sort()
            files += [Path(place, name) for name in names]
            left += [path for name in folders if os.path.islink(path := os.path.join(place, name))]
    return sorted(files)


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise DataError(f"{os.fspath(path)!r} is not there. Check the path.")
    if path.is_dir():
        raise DataError(f"{os.fspath(path)!r} is a folder: give a table (.csv, .tsv) or a file with one text per line.")
    try:
        return [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{os.fspath(path)!r} cannot be read as text (UTF-8): {error}.") from error


def _is_sample(file: Path) -> bool:
    return images.is_image(file) or (is_wav(file) and file.is_file() and not file.name.startswith("."))


def _fits(file: Path, kind: str) -> bool:
    return {"images": images.is_image, "audio": is_wav, "arrays": lambda f: f.suffix == ".npy"}[kind](file)


def _kind_of_files(files: Sequence[Path], where: str) -> str:
    sounds = sum(map(is_wav, files))
    if 0 < sounds < len(files):
        raise DataError(f"{where!r} holds both images ({len(files) - sounds}) and WAV files ({sounds}). Keep one kind.")
    return "audio" if sounds else "images"


# ---------------------------------------------------------------- tables


def table(
    path: str | os.PathLike[str], input_column: str | None = None, label_column: str | None = None, *, labelled: bool = True
) -> Samples:
    """The samples of a CSV or TSV file with a header: a column of files or texts, one of labels, and maybe one called split.

    Files are named from the folder of the table on. The columns are found by their usual names, or given.
    """
    where, file = os.fspath(path), Path(path)
    try:
        content = file.read_text(encoding="utf-8-sig")
        rows = list(
            csv.reader(io.StringIO(content, newline=""), delimiter="\t" if where.lower().endswith(".tsv") else ",", strict=True)
        )
    except FileNotFoundError:
        raise DataError(f"no file {where!r}. Give a table (.csv or .tsv) with a header.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{where!r} is not a table in UTF-8: {error}. Save it as UTF-8.") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{where!r} cannot be read as a table: {error}. Check its quotes and commas.") from error
    lines = [(number, row) for number, row in enumerate(rows, 1) if any(cell.strip() for cell in row)]
    if len(lines) < 2:
        raise DataError(f"{where!r} has {'no rows' if lines else 'nothing in it'}. Give a header and one row per sample.")
    header = [name.strip() for name in lines[0][1]]
    for number, row in lines[1:]:
        if len(row) != len(header):
            raise DataError(
                f"{where!r}, row {number}: {len(row)} cells, but the header has {len(header)}. Put text that holds the "
                f"separator in quotes."
            )
    label = _label_column(header, label_column, where) if labelled else None
    split = next((i for i, name in enumerate(header) if name.lower() == "split" and i != label), None)
    others = {i for i, name in enumerate(header) if i in (label, split) or (label is None and name.lower() in LABEL_NAMES)}
    column = _input_column(header, input_column, others, where)
    values = [row[column] for _, row in lines[1:]]
    kind = _kind_of_values(header[column], values)
    if kind != "text":
        values = [value.strip() for value in values]
    sources: list[Source] = list(values) if kind == "text" else [file.parent / value for value in values]
    names = [
        f"row {number} of {where!r}" if kind == "text" else f"the file {value!r} (row {number} of {where!r})"
        for (number, _), value in zip(lines[1:], values, strict=True)
    ]
    return Samples(
        kind,
        sources,
        names,
        None if label is None else [_label(row[label], number, where) for number, row in lines[1:]],
        None if split is None else [_split_number(row[split], number, where) for number, row in lines[1:]],
    )


def _label(cell: str, number: int, where: str) -> str:
    if not cell.strip():
        raise DataError(f"{where!r}, row {number}: the label is empty. Fill it in, or remove the row.")
    return cell.strip()


def _split_number(cell: str, number: int, where: str) -> int:
    if cell.strip().lower() not in SPLIT_FOLDERS:
        raise DataError(f"{where!r}, row {number}: the split is {cell!r}. Use {', '.join(SPLIT_FOLDERS)}.")
    return SPLIT_FOLDERS[cell.strip().lower()]


def _label_column(header: Sequence[str], asked: str | None, where: str) -> int:
    if asked is not None:
        return _asked(header, asked, where, "--label-column")
    for wanted in LABEL_NAMES:
        for place, name in enumerate(header):
            if name.lower() == wanted:
                return place
    raise ColumnError(f"{where!r} has no column 'label': it has {_listed(header)}. Name the one to use with --label-column.")


def _input_column(header: Sequence[str], asked: str | None, taken: set[int], where: str) -> int:
    if asked is not None:
        return _asked(header, asked, where, "--input-column")
    for wanted in (*FILE_NAMES, *TEXT_NAMES):
        for place, name in enumerate(header):
            if name.lower() == wanted and place not in taken:
                return place
    left = [place for place in range(len(header)) if place not in taken]
    if len(left) == 1:
        return left[0]
    raise ColumnError(
        f"{where!r} has no column 'text' or 'path': it has {_listed(header)}. Name the one to use with --input-column."
    )


def _asked(header: Sequence[str], asked: str, where: str, option: str) -> int:
    if asked not in header:
        raise ColumnError(f"{option}: {where!r} has no column {asked!r}. It has {_listed(header)}.{nearest(asked, header)}")
    return list(header).index(asked)


def _listed(header: Sequence[str]) -> str:
    return ", ".join(map(repr, header[:_SHOWN])) + (f" and {len(header) - _SHOWN} more" if len(header) > _SHOWN else "")


def _kind_of_values(column: str, values: Sequence[str]) -> str:
    """What a column holds: files if most of its values end like one, else texts."""
    sounds = sum(is_wav(value.strip()) for value in values)
    pictures = sum(images.has_image_suffix(value.strip()) for value in values)
    if column.lower() in TEXT_NAMES or 2 * max(sounds, pictures) <= len(values):
        return "text"
    return "audio" if sounds > pictures else "images"


# ---------------------------------------------------------------- datasets of Hugging Face


def saved_dataset(path: str | os.PathLike[str], input_column: str | None = None, label_column: str | None = None) -> Samples:
    """The samples of a dataset that `datasets` saved to disk, with the splits that it has."""
    where = os.fspath(path)
    datasets = needed("datasets", "datasets", f"the dataset {where!r}")
    try:
        held = datasets.load_from_disk(where)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where!r} cannot be read as a saved dataset: {first_line(error)}") from error
    parts = dict(held) if isinstance(held, dict) else {"train": held}
    known = {name: part for name, part in parts.items() if name.lower() in SPLIT_FOLDERS}
    if not known:
        raise DataError(f"{where!r} has the splits {_listed(list(parts))}. Name them train, validation and test.")
    some = [_one_split(part, where, SPLIT_FOLDERS[name.lower()], input_column, label_column) for name, part in known.items()]
    first = some[0]
    return replace(
        first,
        sources=[source for one in some for source in one.sources],
        names=[name for one in some for name in one.names],
        labels=[label for one in some for label in one.labels or ()],
        split=[number for one in some for number in one.split or ()] if isinstance(held, dict) else None,
    )


def _one_split(part: Any, where: str, split: int, input_column: str | None, label_column: str | None) -> Samples:
    header = list(part.column_names)
    label = header[_label_column(header, label_column, where)]
    column = header[_input_column(header, input_column, {header.index(label)}, where)]
    feature = part.features[column]
    kind = {"Image": "images", "Audio": "audio"}.get(type(feature).__name__, "text")
    if kind != "text":
        part = part.cast_column(column, type(feature)(decode=False))
    values = part[column]
    sources: list[Source] = []
    for value in values:
        if kind == "text":
            sources.append("" if value is None else str(value))
        else:
            sources.append(value["bytes"] if value.get("bytes") else Path(value["path"] or ""))
    numbers = part.features[label]
    labels = [
        numbers.int2str(value) if hasattr(numbers, "int2str") and isinstance(value, int) else value for value in part[label]
    ]
    for place, value in enumerate(labels):
        if value is None or str(value).strip() == "":
            raise DataError(f"{where!r}, sample {place}: the label is empty. Fill it in, or remove the sample.")
    names = [f"sample {place} of {where!r}" for place in range(len(sources))]
    return Samples(kind, sources, names, [str(value) for value in labels], [split] * len(sources))
