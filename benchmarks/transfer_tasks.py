"""What `transfer.py` trains: pretrained networks with a new head, and the sets that they are carried over to.

A set is decoded once per process and lies on the device as it was stored: images as bytes. A batch is picked, shifted, mirrored
(where that leaves an image what it is), enlarged and normalised there. Which samples a batch holds, and how they are changed,
hangs on the seed and the epoch alone, so every method sees the same.
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
from transfer_nets import KeywordSpotter, MiniLM

from pliant.apps import data, models
from pliant.apps.data import images
from pliant.apps.models.efficientnet_lite import renamed

FOLDER = [Path()]  # where data and weights lie: `--data`
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation, as torchvision's weights expect it
SHIFT = 0.1  # of an image's side, at most, each way
CHANGES = 3  # random numbers that a change of an image takes: down, right, mirrored
AT_A_TIME = 256  # samples, while evaluating

Weights = dict[str, Tensor]


# ---------------------------------------------------------------- networks


def _mobilenet_v2(path: Path, classes: int) -> nn.Module:
    return _filled(nets.MobileNetV2(classes), models.read_weights(path)[0])


def _efficientnet_lite0(path: Path, classes: int) -> nn.Module:
    model = _filled(models.EfficientNetLite0(classes), renamed(models.read_weights(path)[0]))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # the 0.01 of ImageNet training would need hundreds of steps to follow
    return model


def _minilm(path: Path, classes: int) -> nn.Module:
    weights = models.read_weights(path)[0]
    words, places = (len(weights[f"embeddings.{kind}_embeddings.weight"]) for kind in ("word", "position"))
    return _filled(MiniLM(words, places, classes), weights)


def _filled(model: nn.Module, weights: Weights) -> nn.Module:
    """The model with these weights everywhere but in its head, which may be of another size; anything else is an error."""
    body = {name: value.float() for name, value in weights.items() if not name.startswith("classifier.")}
    result = model.load_state_dict(body, strict=False)
    own = ("classifier.", "num_batches_tracked")
    odd = result.unexpected_keys + [name for name in result.missing_keys if not any(part in name for part in own)]
    if odd:
        raise SystemExit(f"these weights are not of {type(model).__name__}: {odd[0]} is in one of the two alone.")
    return model


@dataclass(frozen=True)
class Backbone:
    """A network, its weights, and what it takes; the head is called `classifier` in all of them."""

    weights: str
    build: Callable[[Path, int], nn.Module]
    kind: str  # of its input: images, text or sound
    norm: images.PixelStats = (0.0, 1.0)
    pixels: int = 0  # of a side, where nobody says otherwise; and on a CPU
    pixels_cpu: int = 0
    optimizer: str = "sgd"


BACKBONES = {
    "mobilenet_v2": Backbone("mobilenetv2_fp16", _mobilenet_v2, "images", IMAGENET, 224, 64),
    "efficientnet_lite0": Backbone("efficientnet_lite0_fp16", _efficientnet_lite0, "images", models.PIXEL_STATS, 224, 64),
    "mcunet": Backbone(
        "mcunet_5fps_int8", lambda path, classes: models.load(str(path), classes), "images", models.FOLDED_PIXEL_STATS, 128, 64
    ),
    "minilm": Backbone("minilm_l6_fp16", _minilm, "text", optimizer="adamw"),
    "keywords": Backbone(
        "dscnn_kws_fp16", lambda path, classes: _filled(KeywordSpotter(classes), models.read_weights(path)[0]), "sound"
    ),
}


def start(backbone: str, classes: int, seed: int, pretrained: bool = True) -> nn.Module:
    """The network on the CPU, in training mode: pretrained, with a head that is drawn by the seed."""
    known = BACKBONES[backbone]
    torch.manual_seed(seed)
    model = known.build(packed.need(FOLDER[0] / "weights" / f"{known.weights}.safetensors"), classes)
    if not pretrained:  # to tell what the weights are worth
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    torch.manual_seed(seed)  # whatever was drawn before
    nn.init.normal_(model.classifier.weight, std=0.01)
    nn.init.zeros_(model.classifier.bias)
    return model.train()


def fingerprint(model: nn.Module) -> int:
    """A number that tells other weights apart."""
    out = 0
    for value in model.state_dict().values():
        out = zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes(), out)
    return out


# ---------------------------------------------------------------- sets


@dataclass(frozen=True)
class Source:
    """A file of samples. Its validation split, where it has none, is cut from what is to train on.

    Several images of a traffic sign are of one drive past it: those to choose by are more like those to train on than new ones.
    """

    file: str
    kind: str
    pixels: int = 0  # of a side, as stored
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
    """Three splits on their device, as stored, and how a network is shown samples of them."""

    train: data.Split
    validation: data.Split
    test: data.Split
    classes: int
    mean: Tensor
    std: Tensor
    pixels: int  # that images are enlarged to; 0: no images
    flip: bool

    def batches(self, size: int, seed: int, epoch: int, views: int = 0) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        """The batches of one epoch, all of them full, and the number of each sample.

        Images are changed anew each time, or with `views` in one of so many ways that each of them has; every way of every
        image has a number of its own then.
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
        """Samples as a network takes them; images lie channels last where they were changed."""
        if not self.pixels:
            return stored[index]
        some = stored[index] if changes is None else self._changed(stored, index, changes)
        some = some.float().div_(255)
        if some.shape[-1] != self.pixels:
            some = F.interpolate(some, size=(self.pixels, self.pixels), mode="bilinear", align_corners=False)
        return some.sub_(self.mean).div_(self.std)

    def _changed(self, stored: Tensor, index: Tensor, changes: Tensor) -> Tensor:
        """Moved by up to `SHIFT` of the side, what is uncovered shows its mirror image, and mirrored half of the time; all by
        one gathering."""
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
    """A task by its name: the first `classes` of its classes, and of each at most so many samples in each split.

    The validation split is that share of every class, by a lot that does not hang on the seed of a run.
    """
    backbone, name = task.split("/")
    net, source = BACKBONES[backbone], SETS[name]
    path = packed.need(FOLDER[0] / source.file)
    size = (pixels or (net.pixels if device == "cuda" else net.pixels_cpu)) if source.kind == "images" else 0
    found = images.packed(path, min(size, source.pixels)) if source.kind == "images" else _arrays(path)
    splits = found.splits(validation, seed=0)
    classes = min(classes or len(found.classes), len(found.classes))
    cut = (_some(split, classes, most, device) for split in splits)
    norm = (torch.tensor(part, device=device).reshape(-1, 1, 1) for part in net.norm)  # from the host, each time would wait
    return Task(*cut, classes, *norm, size, source.flip)


def _arrays(path: Path) -> images.ImageSet:
    """Sentences as ids of their words, filled up with 0; or sounds as they are. `ImageSet` cuts splits of anything."""
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


def accuracy(model: nn.Module, task: Task, split: data.Split, forward: Callable[[nn.Module, Tensor], Tensor]) -> float:
    """The share of a split that the model names rightly; every module's own mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    hits = torch.zeros((), dtype=torch.long, device=split.labels.device)
    try:
        with torch.no_grad():
            for some in torch.arange(len(split), device=split.labels.device).split(AT_A_TIME):
                hits += (forward(model, task.shown(split.images, some)).argmax(1) == split.labels[some]).sum()
    finally:
        for module, mode in modes:
            module.training = mode
    return int(hits) / len(split)
