"""What `transfer.py` trains: pretrained networks with a new head, and the datasets that they are fine-tuned on.

A dataset is decoded once per process and kept on the device as it was stored: images as bytes. There a batch is picked,
shifted, mirrored (where the mirror image is of the same class), enlarged and normalised. Which samples a batch holds and how
they are changed depends only on the seed and the epoch, so every method sees the same batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import nets
import numpy as np
import packed
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import AT_A_TIME
from transfer_nets import KeywordSpotter, MiniLM

from pliant import data, images, models

FOLDER = [Path()]  # the folder with data and weights: `--data`
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation, as torchvision's weights expect it
SHIFT = 0.1  # of an image's side, at most, in each direction
CHANGES = 3  # random numbers for one change of an image: down, right, mirrored

Weights = dict[str, Tensor]


# ---------------------------------------------------------------- networks


def _mobilenet_v2(path: Path, classes: int) -> nn.Module:
    return _filled(nets.MobileNetV2(classes), models.read_weights(path)[0])


def _efficientnet_lite0(path: Path, classes: int) -> nn.Module:
    """Its weights come with a package, not from the folder."""
    model = models.efficientnet_lite0(classes, pretrained=True)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # the 0.01 of ImageNet training would need hundreds of steps to adapt
    return model


def _minilm(path: Path, classes: int) -> nn.Module:
    weights = models.read_weights(path)[0]
    words, places = (len(weights[f"embeddings.{kind}_embeddings.weight"]) for kind in ("word", "position"))
    return _filled(MiniLM(words, places, classes), weights)


def _filled(model: nn.Module, weights: Weights) -> nn.Module:
    """The model with these weights everywhere but in its head; any other difference in names is an error."""
    body = {name: value.float() for name, value in weights.items() if not name.startswith("classifier.")}
    result = model.load_state_dict(body, strict=False)
    own = ("classifier.", "num_batches_tracked")
    odd = result.unexpected_keys + [name for name in result.missing_keys if not any(part in name for part in own)]
    if odd:
        raise SystemExit(f"these weights are not of {type(model).__name__}: only one of the two has {odd[0]}.")
    return model


@dataclass(frozen=True)
class Backbone:
    """A network, its weight file and its inputs; the head is called `classifier` in all of them."""

    weights: str  # a file of the folder; empty: from a package
    build: Callable[[Path, int], nn.Module]
    kind: str  # of its input: images, text or sound
    pixel_stats: images.PixelStats = (0.0, 1.0)
    pixels: int = 0  # default side of an image on a GPU
    pixels_cpu: int = 0  # and on a CPU
    optimizer: str = "sgd"


BACKBONES = {
    "mobilenet_v2": Backbone("mobilenetv2_fp16", _mobilenet_v2, "images", IMAGENET, 224, 64),
    "efficientnet_lite0": Backbone("", _efficientnet_lite0, "images", models.PIXEL_STATS, 224, 64),
    "mcunet": Backbone(
        "mcunet_5fps_int8", lambda path, classes: models.load(str(path), classes), "images", models.FOLDED_PIXEL_STATS, 128, 64
    ),
    "minilm": Backbone("minilm_l6_fp16", _minilm, "text", optimizer="adamw"),
    "keywords": Backbone(
        "dscnn_kws_fp16", lambda path, classes: _filled(KeywordSpotter(classes), models.read_weights(path)[0]), "sound"
    ),
}


def weights_of(backbone: str) -> Path:
    """The weight file of a network, which must exist."""
    name = BACKBONES[backbone].weights
    return packed.need(FOLDER[0] / "weights" / f"{name}.safetensors") if name else FOLDER[0]


def start(backbone: str, classes: int, seed: int) -> nn.Module:
    """The network on the CPU, in training mode: pretrained, with a random head that depends only on the seed."""
    model = BACKBONES[backbone].build(weights_of(backbone), classes)
    torch.manual_seed(seed)
    nn.init.normal_(model.classifier.weight, std=0.01)
    nn.init.zeros_(model.classifier.bias)
    return model.train()


def fingerprint(model: nn.Module) -> int:
    """A checksum of all weights and buffers."""
    out = 0
    for value in model.state_dict().values():
        out = zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes(), out)
    return out


# ---------------------------------------------------------------- datasets


@dataclass(frozen=True)
class Source:
    """A file of samples. If it has no validation split, one is cut from its training split.

    Several images of a traffic sign come from one drive past it, so validation images resemble training images more than new
    ones would.
    """

    file: str
    kind: str
    pixels: int = 0  # side of an image, as stored
    flip: bool = False  # whether the mirror image is of the same class


SETS = {
    "cub": Source("cub200_128.npz", "images", 128, flip=True),
    "pets": Source("pets37_128.npz", "images", 128, flip=True),
    "gtsrb": Source("gtsrb43_64.npz", "images", 64),
    "sst2": Source("sst2_ids.npz", "text"),
    "trec6": Source("trec6_ids.npz", "text"),
    "spoken_digits": Source("fsdd_mfcc.npz", "sound"),
}
TASKS = tuple(f"{b}/{s}" for b, net in BACKBONES.items() for s, source in SETS.items() if net.kind == source.kind)


@dataclass(frozen=True, eq=False)
class Task:
    """Three splits on their device, as stored, and how a network sees their samples."""

    train: data.Split
    validation: data.Split
    test: data.Split
    classes: int
    mean: Tensor
    std: Tensor
    pixels: int  # side that images are enlarged to; 0: no images
    flip: bool

    def batches(self, size: int, seed: int, epoch: int, views: int = 0) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        """The full batches of one epoch, and the id of each sample.

        Images are changed differently every time. With `views`, each image has only this many changed versions, each with its
        own id.
        """
        many, device = len(self.train), self.train.labels.device
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        order = torch.randperm(many, generator=generator)
        changes, ids = torch.rand(many, CHANGES, generator=generator), order
        if views:
            ways = torch.rand(many, views, CHANGES, generator=torch.Generator().manual_seed(seed))
            way = torch.randint(views, (many,), generator=generator)
            changes, ids = ways[order, way], views * order + way
        here, changes = order.to(device), changes.to(device)
        for begin in range(0, many - size + 1, size):
            some = slice(begin, begin + size)
            shown = self.shown(self.train.images, here[some], changes[some])
            yield (shown, self.train.labels[here[some]]), ids[some]

    def shown(self, stored: Tensor, index: Tensor, changes: Tensor | None = None) -> Tensor:
        """Samples as a network sees them; changed images are channels-last."""
        if not self.pixels:
            return stored[index]
        some = stored[index] if changes is None else self._changed(stored, index, changes)
        some = some.float().div_(255)
        if some.shape[-1] != self.pixels:
            some = F.interpolate(some, size=(self.pixels, self.pixels), mode="bilinear", align_corners=False)
        return some.sub_(self.mean).div_(self.std)

    def _changed(self, stored: Tensor, index: Tensor, changes: Tensor) -> Tensor:
        """Shifted by up to `SHIFT` of the side with reflected borders, and half of them mirrored, in one indexing operation."""
        side = stored.shape[-1]
        most = round(SHIFT * side)
        moved = (changes[:, :2] * (2 * most + 1)).floor().long() - most
        rows, columns = ((torch.arange(side, device=stored.device) + by[:, None]) for by in moved.unbind(1))
        rows, columns = ((side - 1 - (side - 1 - places.abs()).abs()) for places in (rows, columns))
        if self.flip:
            columns = torch.where(changes[:, 2:] < 0.5, columns.flip(1), columns)
        return stored[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@lru_cache(maxsize=2)
def load(task: str, device: str, pixels: int | None, classes: int | None, most: int | None, validation: float) -> Task:
    """A task by its name: its first `classes` classes, with at most `most` samples of each class per split.

    The validation split is this share of every class, drawn with a seed that is the same for all runs.
    """
    backbone, name = task.split("/")
    net, source = BACKBONES[backbone], SETS[name]
    path = packed.need(FOLDER[0] / source.file)
    size = (pixels or (net.pixels if device == "cuda" else net.pixels_cpu)) if source.kind == "images" else 0
    found = images.packed(path, min(size, source.pixels)) if source.kind == "images" else _arrays(path)
    splits = found.splits(validation, seed=0)
    classes = min(classes or len(found.classes), len(found.classes))
    cut = (_some(split, classes, most, device) for split in splits)
    norm = (torch.tensor(part, device=device).reshape(-1, 1, 1) for part in net.pixel_stats)  # copied once, not per batch
    return Task(*cut, classes, *norm, size, source.flip)


def _arrays(path: Path) -> images.ImageSet:
    """Sentences as token ids, padded with 0; or sounds as they are. `ImageSet` splits any samples."""
    with np.load(path) as archive:
        held: dict[str, Any] = dict(archive)
    if "x" in held:
        inputs = torch.from_numpy(held["x"].astype(np.float32))
    else:
        rows = np.split(held["ids"].astype(np.int64), held["offset"][1:-1])
        inputs = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row, ids in zip(inputs, rows, strict=True):
            row[: len(ids)] = torch.from_numpy(ids)
    labels, split = torch.from_numpy(held["label"].astype(np.int64)), torch.from_numpy(held["split"])
    return images.ImageSet(inputs, labels, tuple(map(str, held["classes"])), split)


def _some(split: data.Split, classes: int, most: int | None, device: str) -> data.Split:
    if most is None:
        keep = split.labels < classes
    else:
        keep = torch.zeros(len(split), dtype=torch.bool)
        for label in range(classes):
            keep[(split.labels == label).nonzero()[:most, 0]] = True
    return data.Split(split.images[keep].to(device), split.labels[keep].to(device))


def pieces(task: Task, split: data.Split) -> Iterator[tuple[Tensor, Tensor]]:
    """A split in batches for an evaluation."""
    for some in torch.arange(len(split), device=split.labels.device).split(AT_A_TIME):
        yield task.shown(split.images, some), split.labels[some]
