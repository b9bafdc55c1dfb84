"""Labelled images from disk: one folder per class, or one packed file. They are kept as bytes and normalised on use."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.apps.data.digits import Split
from pliant.apps.data.errors import DataError
from pliant.apps.data.folders import TEST, TRAIN, VALIDATION, class_files
from pliant.core.errors import first_line
from pliant.runtime.working import told

PixelStats = tuple[float | Sequence[float], float | Sequence[float]]
"""Mean and standard deviation of pixels in 0…1: one number each, or one per channel."""

# of a packed set: the kinds of numpy types of each array, and how many dims it has
_ARRAYS = {
    "data": ("u", 1),
    "offset": ("iu", 1),
    "bits": ("u", 2),
    "label": ("iub", 1),
    "classes": ("USiu", 1),
}
_SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))

_ORIENTATION = 0x0112  # in EXIF
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


class ImageError(DataError):
    """Images that cannot be used as they are."""


class Splits(NamedTuple):
    """Images for training, validation and testing."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Square images of one size (N×3×S×S), with the class and the split of each.

    Images are bytes, 0…255, until `normalised`. `split` is 0 for training, 1 for validation and 2 for testing; None means
    unknown.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    split: Tensor | None = None

    def __post_init__(self) -> None:
        if self.split is not None:
            object.__setattr__(self, "split", torch.as_tensor(self.split, dtype=torch.uint8))
        counts = {len(self.images), len(self.labels), len(self.labels if self.split is None else self.split)}
        if len(counts) > 1:
            raise ImageError(
                f"images, labels and split disagree in length: {sorted(counts)}. Give one label and one split per image."
            )
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise ImageError(
                f"labels go from {int(self.labels.min())} to {int(self.labels.max())}, but there are {len(self.classes)} "
                f"classes. A label is the position of its class, counted from 0."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: Tensor) -> ImageSet:
        """The images at these positions or of this mask; the classes keep their numbers."""
        return replace(
            self,
            images=self.images[index],
            labels=self.labels[index],
            split=None if self.split is None else self.split[index.to(self.split.device)],
        )

    def normalised(self, pixel_stats: PixelStats) -> ImageSet:
        """The same images as a network expects them: (x/255 − mean) / standard deviation, in float32."""
        if self.images.is_floating_point():
            raise ImageError("these images are normalised already. Call normalised() on images of bytes, 0…255.")
        device = self.images.device
        mean, std = (torch.as_tensor(part, dtype=torch.float32, device=device).reshape(-1, 1, 1) for part in pixel_stats)
        return replace(self, images=(self.images.float() / 255 - mean) / std)

    def splits(self, validation: float = 0.2, seed: int = 0, *, test: bool = True) -> Splits:
        """Three splits of the images. Call `normalised` first if a network will see them.

        A split that the set defines is kept. Without validation images, a random share of the training images of every class is
        used for validation; without test images, as many again for testing (unless `test=False`). A class keeps at least one
        training image.
        """
        if not 0 < validation < 0.5:
            raise ImageError(f"validation={validation}: give the share of every class to set aside, above 0 and below 0.5.")
        split = completed(self.labels.cpu(), len(self.classes), self.split, validation, seed, test=test)
        parts = [(split == kind).to(self.labels.device) for kind in (TRAIN, VALIDATION, TEST)]
        return Splits(*(Split(self.images[part], self.labels[part]) for part in parts))


def completed(labels: Tensor, classes: int, given: Tensor | None, validation: float, seed: int, *, test: bool) -> Tensor:
    """The split of every sample, with those that are missing taken at random from the training samples of every class."""
    split = torch.zeros(len(labels), dtype=torch.uint8) if given is None else given.cpu().clone()
    missing = [kind for kind in (VALIDATION, *([TEST] if test else [])) if not bool((split == kind).any())]
    generator = torch.Generator().manual_seed(seed)
    for label in range(classes):
        mine = ((labels == label) & (split == TRAIN)).nonzero()[:, 0]
        mine = mine[torch.randperm(len(mine), generator=generator)]
        each = min(round(validation * len(mine)), (len(mine) - 1) // len(missing)) if missing and len(mine) else 0
        for place, kind in enumerate(missing):
            split[mine[place * each : (place + 1) * each]] = kind
    return split


def load(path: str | os.PathLike[str], size: int) -> ImageSet:
    """A `packed` set if the name ends in .npz, else a `folder`."""
    return packed(path, size) if Path(path).suffix == ".npz" else folder(path, size)


def loose(path: str | os.PathLike[str], size: int) -> tuple[Tensor, list[str]]:
    """The images directly inside a folder, without classes, resized as in `folder`; and the names of their files."""
    root = Path(path)
    files = sorted(file for file in root.iterdir() if is_image(file)) if root.is_dir() else []
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    for row, file in zip(images, files, strict=True):
        row.copy_(decoded(file, f"the image {os.fspath(file)!r}", size))
    return images, [file.name for file in files]


def folder(path: str | os.PathLike[str], size: int) -> ImageSet:
    """The images of a folder with one folder per class, or with such folders inside train, val and test.

    Classes are sorted by name. Images are turned upright, converted to RGB (transparency becomes white) and resized to
    `size`×`size`, bilinear with antialiasing. Grey values of 16 bits become bytes; of 32 bits, they are refused. An image that
    is not square is squeezed, so that nothing is cut off. Files without an image suffix, and names that start with a dot, are
    skipped.
    """
    files, names, split = class_files(path, is_image, "image")
    classes = tuple(sorted(set(names)))
    number = {name: label for label, name in enumerate(classes)}
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    for row, file in told("reading images", list(zip(images, files, strict=True))):
        row.copy_(decoded(file, f"the image {os.fspath(file)!r}", size))
    labels = torch.tensor([number[name] for name in names])
    return ImageSet(images, labels, classes, None if split is None else torch.tensor(split))


def packed(path: str | os.PathLike[str], size: int) -> ImageSet:
    """The images of one .npz file, resized as in `folder`.

    The file holds `label`, `classes` and optionally `split`. The images are either JPEG files (image n is
    `data[offset[n]:offset[n+1]]`) or square drawings (`bits`: one bit per pixel, 1 for ink; they become black on white).
    """
    file = os.fspath(path)
    try:
        with open(file, "rb") as raw, np.load(raw) as archive:
            held = {name: archive[name] for name in ("data", "offset", "bits", "label", "classes", "split") if name in archive}
    except FileNotFoundError as error:
        raise ImageError(f"no file {file!r}. Give a packed set of images (.npz).") from error
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, TypeError, AttributeError, MemoryError, SyntaxError) as error:
        raise ImageError(f"{file!r} is not a whole .npz file: {error}. Copy it again.") from error
    if not {"label", "classes"} <= set(held) or not ({"data", "offset"} <= set(held) or "bits" in held):
        raise ImageError(
            f"{file!r} is not a packed set of images: it holds {', '.join(sorted(held)) or 'none of its arrays'}. It needs "
            f"label and classes, and data and offset (JPEG) or bits (drawings)."
        )
    for name, (kind, dims) in _ARRAYS.items():
        if name in held and (held[name].ndim != dims or held[name].dtype.kind not in kind):
            given = f"{name!r} is {held[name].dtype} of shape {held[name].shape}"
            raise ImageError(
                f"{file!r} is not a packed set of images: {given}. It should have {dims} dim(s), and a fitting type."
            )
    if "bits" in held:
        if not held["bits"].shape[1] or held["bits"].dtype != np.uint8:
            raise ImageError(
                f"{file!r} is not a packed set of images: 'bits' are not bytes, or have no pixels. Pack the set again."
            )
        images = _drawn(held["bits"], size)
    else:
        data, offset = held["data"], held["offset"]
        images = torch.empty(max(len(offset) - 1, 0), 3, size, size, dtype=torch.uint8)
        for i, row in enumerate(images):
            jpeg = io.BytesIO(data[offset[i] : offset[i + 1]].tobytes())
            row.copy_(decoded(jpeg, f"image {i} of {file!r}", size))
    labels = torch.from_numpy(held["label"].astype(np.int64))
    if not len(labels):
        raise ImageError(f"{file!r} holds no image. Pack the set again, with images in it.")
    split = split_of(held["split"], len(labels), file) if "split" in held else None
    return ImageSet(images, labels, class_names(held["classes"], file), split)


def split_of(given: np.ndarray[Any, Any], count: int, file: str) -> Tensor:
    """The array `split` of a .npz file with `count` samples."""
    if given.shape != (count,):
        raise DataError(
            f"{file!r}: split has shape {given.shape} for {count} samples. Give one number per sample, or no split."
        )
    kinds = (TRAIN, VALIDATION, TEST)
    odd = given[~np.isin(given, kinds)] if given.dtype.kind in "iubf" else given
    if len(odd):
        raise DataError(f"{file!r}: split holds {odd[0]}. Use 0 for training, 1 for validation and 2 for testing.")
    return torch.from_numpy(given.astype(np.uint8))


def class_names(given: np.ndarray[Any, Any], file: str) -> tuple[str, ...]:
    """The array `classes` of a .npz file."""
    if given.ndim != 1:
        raise DataError(f"{file!r}: classes has shape {given.shape}. Give a list of names.")
    names = tuple(str(name) for name in given)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{file!r}: the class {twice[0]!r} is in classes more than once. Give every class a name of its own.")
    return names


def is_image(file: Path) -> bool:
    return file.is_file() and has_image_suffix(file) and not file.name.startswith(".")


def has_image_suffix(file: str | os.PathLike[str]) -> bool:
    return os.path.splitext(os.fspath(file))[1].lower() in _SUFFIXES


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise ImportError(
            "images are read with Pillow, which is not installed. Run: pip install 'pliant[images]'", name="PIL"
        ) from error
    return PIL


def decoded(source: Path | BinaryIO, what: str, size: int) -> Tensor:
    """One image as 3×size×size bytes."""
    pillow = _pillow()
    try:
        with _opened(pillow, source) as opened:
            opened.load()
            image, turn = _of_bytes(pillow, opened, what), _TURNS.get(opened.getexif().get(_ORIENTATION))
            # ImageOps.exif_transpose() would also write the other entries anew, and fail if one of them is damaged.
            if turn is not None:
                image = image.transpose(pillow.Image.Transpose[turn])
            if image.has_transparency_data:
                clear = image.convert("RGBA")
                image = pillow.Image.alpha_composite(pillow.Image.new("RGBA", clear.size, "white"), clear)
            image = image.convert("RGB")
        if image.size != (size, size):
            # Pillow widens the filter when it shrinks an image.
            image = image.resize((size, size), pillow.Image.Resampling.BILINEAR)
    except ImageError:
        raise
    except Exception as error:  # of a damaged file, Pillow raises errors of any type
        raise ImageError(f"{what} cannot be read: {first_line(error)}. Replace or remove it.") from error
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _opened(pillow: Any, source: Path | BinaryIO) -> Any:
    """An image whose size is known and whose pixels are not decoded yet; more of them than Pillow's limit are refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow.Image.DecompressionBombWarning)
        return pillow.Image.open(source)


def _of_bytes(pillow: Any, image: Any, what: str) -> Any:
    """The image; grey values of 16 bits as bytes, because Pillow would clip them at 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # mode I: 16 bits, held in 32
        values = np.asarray(image)
        grey = np.rint(values / 257).astype(np.uint8)
        grey[values == image.info.get("transparency", -1)] = 255
        return pillow.Image.fromarray(grey)
    if image.mode in ("I", "F"):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise ImageError(
            f"{what} has {kind} grey values, and nothing says which of them is white. Convert it to 8 bits, or remove it."
        )
    return image


def _drawn(bits: np.ndarray[Any, np.dtype[np.uint8]], size: int) -> Tensor:
    """Packed drawings as images, black on white."""
    side = math.isqrt(8 * bits.shape[1])
    ink = torch.from_numpy(np.unpackbits(bits, axis=1)[:, : side * side].reshape(-1, 1, side, side))
    out = torch.empty(len(ink), 3, size, size, dtype=torch.uint8)
    for few, rows in zip(ink.split(256), out.split(256), strict=True):  # all of them as floats would need much memory
        large = F.interpolate(few.float(), size=(size, size), mode="bilinear", align_corners=False, antialias=True)
        rows.copy_(255 - (255 * large).round().clamp(0, 255).expand(-1, 3, -1, -1))
    return out
