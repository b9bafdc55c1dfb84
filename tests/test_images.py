"""Images from folders and packed files, made here; what is wrong with them is said by name."""

from __future__ import annotations

import builtins
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from pliant import PliantError
from pliant.apps.data.errors import DataError
from pliant.apps.data.images import ImageError, ImageSet, decoded, folder, loose, packed
from pliant.apps.data.prepare import Reading, prepare

RED, BLUE = (255, 0, 0), (0, 0, 255)


def write(file: Path, colour: tuple[int, ...] = RED, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)
    return file


def jpeg(colour: tuple[int, int, int], side: int = 8) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(out, "JPEG", quality=95)
    return out.getvalue()


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    write(tmp_path / "red" / "1.png", RED)
    write(tmp_path / "red" / "0.PNG", RED, (16, 4))
    write(tmp_path / "blue" / "a.bmp", BLUE, (5, 5))
    (tmp_path / "red" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "README").write_text("nor this")
    found = folder(tmp_path, 8)
    assert found.classes == ("blue", "red")
    assert found.labels.tolist() == [0, 1, 1] and found.labels.dtype == torch.int64
    assert found.images.shape == (3, 3, 8, 8) and found.images.dtype == torch.uint8
    assert found.images[:, :, 0, 0].tolist() == [list(BLUE), list(RED), list(RED)]
    assert found.split is None


def test_folders_for_splits_hold_folders_for_classes(tmp_path: Path) -> None:
    for split, names in {"train": ("cat", "dog"), "val": ("cat",), "test": ("dog",)}.items():
        for name in names:
            write(tmp_path / split / name / "0.png")
    found = folder(tmp_path, 4)
    assert found.classes == ("cat", "dog")
    assert found.split is not None
    assert sorted(zip(found.split.tolist(), found.labels.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0), (2, 1)]


def test_resizing_keeps_the_whole_image_and_smooths_when_it_shrinks(tmp_path: Path) -> None:
    stripes = np.zeros((64, 32, 3), np.uint8)
    stripes[:, ::2] = 255  # columns black and white by turns: what does not smooth gives one or the other
    (tmp_path / "a").mkdir()
    Image.fromarray(stripes).save(tmp_path / "a" / "stripes.png")
    image = folder(tmp_path, 8).images[0].float()
    assert (image - 127.5).abs().max() < 25


def test_images_are_upright_and_on_white(tmp_path: Path) -> None:
    top_red = Image.new("RGB", (8, 8), BLUE)
    top_red.paste(RED, (0, 0, 8, 4))
    exif = top_red.getexif()
    exif[0x0112] = 3  # taken upside down
    (tmp_path / "a").mkdir()
    top_red.save(tmp_path / "a" / "0.png", exif=exif)
    write(tmp_path / "a" / "1.png", (9, 9, 9, 0), mode="RGBA")
    grey = write(tmp_path / "a" / "2.png", (7,), mode="L")
    images = folder(tmp_path, 8).images
    assert images[0, :, 0, 0].tolist() == list(BLUE) and images[0, :, 7, 0].tolist() == list(RED)
    assert (images[1] == 255).all()
    assert (images[2] == 7).all(), grey


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        folder(path, 8)
    assert isinstance(caught.value, PliantError)
    return str(caught.value)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    assert "not there" in refused(tmp_path / "nowhere")
    assert "is a file" in refused(write(tmp_path / "file.png"))
    assert "but 1 files" in refused(tmp_path)
    write(tmp_path / "cat" / "0.png")
    (tmp_path / "dog").mkdir()
    assert "the class 'dog' is empty" in refused(tmp_path)


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    broken = tmp_path / "a" / "broken.jpg"
    broken.write_bytes(b"this is no image")
    assert "broken.jpg" in refused(tmp_path)
    broken.write_bytes(jpeg(RED, 64)[:300])  # the download stopped
    assert "broken.jpg" in refused(tmp_path)


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a" / "0.png")
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pliant\[images\]"):
        folder(tmp_path, 8)


def test_images_without_classes_come_with_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.png", BLUE)
    write(tmp_path / "a.png", RED)
    write(tmp_path / "class" / "c.png", RED)
    images, names = loose(tmp_path, 4)
    assert names == ["a.png", "b.png"] and images[:, :, 0, 0].tolist() == [list(RED), list(BLUE)]
    assert loose(tmp_path / "nowhere", 4)[1] == []


def test_packed_jpegs(tmp_path: Path) -> None:
    files = [jpeg(RED), jpeg(BLUE, 12)]
    np.savez(
        tmp_path / "set.npz",
        data=np.frombuffer(b"".join(files), np.uint8),
        offset=np.cumsum([0, *map(len, files)]),
        label=np.array([1, 0], np.int16),
        split=np.array([0, 2], np.uint8),
        classes=np.array(["blue", "red"]),
    )
    found = packed(tmp_path / "set.npz", 8)
    assert found.classes == ("blue", "red") and found.labels.tolist() == [1, 0]
    assert found.split is not None and found.split.tolist() == [0, 2]
    assert (found.images[:, :, 4, 4].int() - torch.tensor([RED, BLUE])).abs().max() < 8


def test_packed_drawings_are_black_on_white(tmp_path: Path) -> None:
    ink = np.zeros((2, 9, 9), np.uint8)
    ink[0, :, :4] = 1
    np.savez(tmp_path / "set.npz", bits=np.packbits(ink.reshape(2, -1), axis=1), label=[0, 1], classes=np.array(["a/1", "a/2"]))
    same, smaller = packed(tmp_path / "set.npz", 9), packed(tmp_path / "set.npz", 3)
    assert torch.equal(same.images[:, 0], torch.from_numpy(255 - 255 * ink))
    assert torch.equal(same.images[:, 0], same.images[:, 2])
    assert smaller.images.shape == (2, 3, 3, 3) and smaller.images[0, 0, 1].tolist()[0] < 10
    assert same.split is None


def test_a_packed_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no file"):
        packed(tmp_path / "set.npz", 8)
    (tmp_path / "set.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(ImageError, match=r"set\.npz"):
        packed(tmp_path / "set.npz", 8)
    np.savez(tmp_path / "set.npz", label=[0])
    with pytest.raises(ImageError, match="it holds label"):
        packed(tmp_path / "set.npz", 8)
    np.savez(
        tmp_path / "set.npz", data=np.frombuffer(jpeg(RED)[:99], np.uint8), offset=[0, 99], label=[0], classes=np.array(["a"])
    )
    with pytest.raises(ImageError, match="image 0 of"):
        packed(tmp_path / "set.npz", 8)


ODD = {
    "a split below 0": ({"split": np.array([0, -1])}, "split holds -1"),
    "a split above 2": ({"split": np.array([0, 256])}, "split holds 256"),
    "a broken split": ({"split": np.array([0, 0.5])}, r"split holds 0\.5"),
    "a split that is no number": ({"split": np.array([0, np.nan])}, "split holds nan"),
    "words": ({"split": np.array(["train", "test"])}, "split holds train.*0 for training"),
    "digits in words": ({"split": np.array(["0", "1"])}, "split holds 0"),
    "a split of two dims": ({"split": np.zeros((2, 1), int)}, r"split has shape \(2, 1\) for 2 samples"),
    "a split of one number": ({"split": np.array(0)}, r"split has shape \(\) for 2 samples"),
    "a split too short": ({"split": np.array([0])}, r"split has shape \(1,\) for 2 samples"),
    "a class named twice": ({"classes": np.array(["a", "b", "a"])}, "'a' is in classes more than once"),
    "no list of classes": ({"classes": np.array("a")}, "classes"),
    "nothing": (
        {"x": np.zeros((0, 3)), "y": np.zeros(0, int), "bits": np.zeros((0, 8), np.uint8), "label": np.zeros(0, int)},
        "holds no",
    ),
}


@pytest.mark.parametrize("kind", ["arrays", "images"])
@pytest.mark.parametrize("case", ODD)
def test_odd_arrays_are_refused_by_name(case: str, kind: str, tmp_path: Path) -> None:
    held, said = ODD[case]
    file, two = str(tmp_path / "set.npz"), np.array([0, 1])
    good = {"x": np.zeros((2, 3)), "y": two} if kind == "arrays" else {"bits": np.zeros((2, 8), np.uint8), "label": two}
    mine = {name: array for name, array in held.items() if name in {*good, "split", "classes"}}
    np.savez(file, **{"classes": np.array(["a", "b"]), **good, **mine})
    with pytest.raises(DataError, match=rf"set\.npz'.*{said}"):
        prepare(file, Reading(8))


@pytest.mark.parametrize("split", [[0, 2], [0.0, 2.0], [False, True]], ids=repr)
def test_a_split_may_be_of_any_type_of_numbers(split: list[float], tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x=np.zeros((2, 3)), y=[0, 1], split=split)
    found = prepare(str(tmp_path / "set.npz"), Reading()).split
    assert found is not None and found.tolist() == split and found.dtype == torch.uint8


def toy(counts: dict[int, int], split: list[int] | None = None) -> ImageSet:
    labels = torch.tensor([label for label, count in counts.items() for _ in range(count)])
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    return ImageSet(images, labels, tuple("abc")[: len(counts)], None if split is None else torch.tensor(split))


def test_normalised_is_what_networks_take() -> None:
    one = ImageSet(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1), torch.tensor([0, 0]), ("a",))
    assert one.normalised((0.5, 0.5)).images[:, 0, 0, 0].tolist() == [-1.0, 1.0]
    each = one.normalised(((0.0, 0.5, 1.0), (1.0, 0.5, 0.25))).images[1, :, 0, 0]
    assert each.tolist() == [1.0, 1.0, 0.0]
    with pytest.raises(ImageError, match="already"):
        one.normalised((0.5, 0.5)).normalised((0.5, 0.5))


def test_splits_are_cut_class_by_class_where_nobody_said() -> None:
    cut = toy({0: 10, 1: 20, 2: 1}).splits(0.2, seed=3)
    assert [split.labels.bincount(minlength=3).tolist() for split in cut] == [[6, 12, 1], [2, 4, 0], [2, 4, 0]]
    seen = torch.cat([split.images[:, 0, 0, 0] for split in cut])
    assert sorted(seen.tolist()) == list(range(31))
    again = toy({0: 10, 1: 20, 2: 1}).splits(0.2, seed=3)
    assert all(torch.equal(one.images, other.images) for one, other in zip(cut, again, strict=True))
    with pytest.raises(ImageError, match=r"validation=0\.7"):
        toy({0: 10}).splits(0.7)


def test_splits_that_were_said_stand() -> None:
    given = toy({0: 10, 1: 5}, split=[0] * 8 + [2] * 2 + [0] * 4 + [2])
    cut = given.splits(0.25)
    assert [len(split) for split in cut] == [9, 3, 3]
    assert cut.test.images[:, 0, 0, 0].tolist() == [8, 9, 14]
    whole = toy({0: 3}, split=[0, 1, 2]).splits()
    assert [split.images[0, 0, 0, 0].item() for split in whole] == [0, 1, 2]


def test_select_takes_some_and_keeps_the_classes() -> None:
    some = toy({0: 2, 1: 2}, split=[0, 2, 0, 2]).select(torch.tensor([1, 3]))
    assert len(some) == 2 and some.labels.tolist() == [0, 1] and some.classes == ("a", "b")
    assert some.split is not None and some.split.tolist() == [2, 2]


def test_a_set_that_contradicts_itself_is_refused() -> None:
    images = torch.zeros(2, 3, 1, 1, dtype=torch.uint8)
    with pytest.raises(ImageError, match="disagree"):
        ImageSet(images, torch.tensor([0]), ("a",))
    with pytest.raises(ImageError, match="from 0 to 1"):
        ImageSet(images, torch.tensor([0, 1]), ("a",))


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("L", (40, 40)).save(tmp_path / name / "1.png")
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1000)
    monkeypatch.setattr("PIL.Image.Image.convert", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(ImageError, match=r"1600 pixels.*Replace or remove it"):
        folder(tmp_path, 8)


@pytest.mark.parametrize(
    "held",
    [
        {"bits": np.zeros(8, np.uint8)},
        {"bits": np.zeros((2, 8), np.float32)},
        {"bits": np.zeros((2, 0), np.uint8)},
        {"data": np.zeros((2, 3), np.uint8), "offset": np.array([0, 3])},
        {"data": np.zeros(3, np.uint8), "offset": np.array(3)},
        {"data": np.zeros(3, np.uint8), "offset": np.array([0.0, 3.0])},
        {"bits": np.zeros((2, 8), np.uint8), "label": np.zeros((2, 2), int)},
        {"bits": np.zeros((2, 8), np.uint8), "classes": np.array("a")},
    ],
    ids=range(8),
)
def test_arrays_of_another_shape_or_type_are_told(tmp_path: Path, held: dict[str, Any]) -> None:
    np.savez(tmp_path / "set.npz", **{"label": np.array([0, 1]), "classes": np.array(["a", "b"]), **held})
    with pytest.raises(ImageError, match="not a packed set"):
        packed(tmp_path / "set.npz", 8)


def tagged(orientation: int, *more: bytes) -> bytes:
    """A PNG whose left half is red and whose right half is blue, with this orientation and more EXIF entries."""
    image = Image.new("RGB", (8, 8), BLUE)
    image.paste(RED, (0, 0, 4, 8))
    entries = [struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0), *more]
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    out = io.BytesIO()
    image.save(out, "PNG", exif=exif)
    return out.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_like_pillow_turns_them(orientation: int) -> None:
    held = tagged(orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(held)))
    assert torch.equal(decoded(io.BytesIO(held), "it", 8), torch.from_numpy(np.array(upright)).permute(2, 0, 1))


def test_a_damaged_exif_entry_is_no_obstacle() -> None:
    held = tagged(3, struct.pack("<HHI4s", 0x011A, 2, 4, b"odd"))  # a text, where the resolution belongs
    assert decoded(io.BytesIO(held), "it", 8)[:, 0, 0].tolist() == list(BLUE)


@pytest.mark.parametrize("error", [struct.error("odd"), TypeError("odd"), IndexError("odd"), AssertionError("odd")], ids=repr)
def test_whatever_pillow_raises_is_an_image_that_cannot_be_read(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("PIL.Image.Image.getexif", fails)
    with pytest.raises(ImageError, match=r"^it cannot be read: odd\. Replace or remove it"):
        decoded(io.BytesIO(jpeg(RED)), "it", 8)


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [("png", "<u2"), ("tif", "<u2"), ("tif", ">u2"), ("pgm", "<u2")],
    ids=["png", "tif", "big-endian tif", "pgm"],
)
def test_grey_values_of_16_bits_keep_their_shades(suffix: str, kind: str, tmp_path: Path) -> None:
    grey = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(grey.astype(kind) * np.array(257, kind)).save(tmp_path / f"grey.{suffix}")
    found = decoded(tmp_path / f"grey.{suffix}", "it", 8)
    assert torch.equal(found, torch.from_numpy(grey).expand(3, 8, 8))


def test_a_shade_of_16_bits_may_be_transparent() -> None:
    out, values = io.BytesIO(), np.array([[30000, 25700]], np.uint16).repeat(2, 0)
    Image.fromarray(values).save(out, "PNG", transparency=30000)
    assert decoded(out, "it", 2)[0].tolist() == [[255, 100]] * 2


@pytest.mark.parametrize("kind", ["int32", "float32"])
def test_grey_values_without_a_known_white_are_refused(kind: str, tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 300, kind)).save(tmp_path / "grey.tif")
    with pytest.raises(ImageError, match=r"grey\.tif' has .* grey values.*Convert it to 8 bits"):
        loose(tmp_path, 8)
