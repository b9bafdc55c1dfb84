"""What changes in `shift.py`: a network is tuned on one world, then adapts to a world in which one thing is different.

| family | shift | what is different |
|---|---|---|
| input | noise, blur, contrast, brightness, inversion, colour, saturation, vignette, pixels | images of another camera |
| features | subclasses | classes are made of sub-classes, and others of them come |
| labels | permuted | every class has another label |
| damage | noised, rounded | weights of one stage: noise of half their scatter, or rounded to four bits |
| classes | classes | the classes are new: the network before it was tuned, with a new head |

The training images of every class are cut into three parts, the same for all runs: the network is tuned on one; the labelled
images after the shift come from the second, and the learning rate is picked on the third. Test images are those of the set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import packed
import torch
import torch.nn.functional as F
import transfer_tasks as tasks
from torch import Tensor, nn
from training import accuracy, plain_step

from pliant import data, images

POOL, VALIDATION = 0.4, 0.12  # of the training images of a class: for adapting (at most `MOST`), and for picking rates
MOST = 20
GROUP = 4  # sub-classes of a class; the first half of them is seen before the shift, the second half after it
RATE, BATCH = 0.02, 32  # of tuning
PETS = (  # in groups that look alike; the sets of birds and signs are in such an order already
    *("Abyssinian", "Bengal", "Egyptian_Mau", "Bombay", "British_Shorthair", "Russian_Blue", "Siamese", "Sphynx"),
    *("Birman", "Maine_Coon", "Persian", "Ragdoll", "american_pit_bull_terrier", "staffordshire_bull_terrier"),
    *("american_bulldog", "boxer", "basset_hound", "beagle", "english_cocker_spaniel", "english_setter", "great_pyrenees"),
    *("newfoundland", "leonberger", "saint_bernard", "keeshond", "pomeranian", "samoyed", "shiba_inu", "scottish_terrier"),
    *("wheaten_terrier", "yorkshire_terrier", "havanese", "chihuahua", "japanese_chin", "pug", "miniature_pinscher"),
)

# ---------------------------------------------------------------- the images as another camera takes them


def _noise(x: Tensor, seed: int) -> Tensor:
    return x + 0.2 * torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(seed), device=x.device)


def _blur(x: Tensor, seed: int) -> Tensor:
    side = x.shape[-1]
    wide = 0.016 * side
    far = int(3 * wide) + 1
    kernel = torch.exp(-(torch.arange(-far, far + 1, device=x.device) ** 2) / (2 * wide**2))
    kernel = (kernel / kernel.sum()).expand(3, 1, -1)
    x = F.conv2d(F.pad(x, (far, far, 0, 0), mode="reflect"), kernel[:, :, None], groups=3)
    return F.conv2d(F.pad(x, (0, 0, far, far), mode="reflect"), kernel[..., None], groups=3)


def _colour(x: Tensor, seed: int) -> Tensor:
    """The channels of another sensor: each is a mixture."""
    mix = torch.tensor([[0.1, 0.7, 0.2], [0.1, 0.2, 0.7], [0.7, 0.2, 0.1]], device=x.device)
    return torch.einsum("oc,nchw->nohw", mix, x)


def _saturation(x: Tensor, seed: int) -> Tensor:
    grey = x.mean(1, keepdim=True)
    return grey + 4.0 * (x - grey)


def _vignette(x: Tensor, seed: int) -> Tensor:
    line = torch.linspace(-1, 1, x.shape[-1], device=x.device)
    return x * (1 - 0.9 * (line[:, None] ** 2 + line**2)).clamp_min(0.02)


def _pixels(x: Tensor, seed: int) -> Tensor:
    return F.interpolate(F.interpolate(x, scale_factor=0.25, mode="area"), size=x.shape[-2:], mode="nearest")


INPUT: dict[str, Callable[[Tensor, int], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": lambda x, seed: 0.5 + 0.15 * (x - 0.5),
    "brightness": lambda x, seed: 0.25 * x,
    "inversion": lambda x, seed: 1 - x,
    "colour": _colour,
    "saturation": _saturation,
    "vignette": _vignette,
    "pixels": _pixels,
}
FAMILIES = {
    "input": tuple(INPUT),
    "features": ("subclasses",),
    "labels": ("permuted",),
    "damage": ("noised", "rounded"),
    "classes": ("classes",),
}
SHIFTS = tuple(shift for family in FAMILIES.values() for shift in family)


def seen_by_camera(shift: str, stored: Tensor, seed: int) -> Tensor:
    """Images of bytes, changed and stored as bytes again."""
    if shift not in INPUT:
        return stored
    pieces = enumerate(stored.split(512))
    changed = [INPUT[shift](some.float() / 255, 1000 * seed + n).clamp_(0, 1).mul_(255).round_().byte() for n, some in pieces]
    return torch.cat(changed)


# ---------------------------------------------------------------- splits and labels


def decoded(name: str, pixels: int, cache: Path) -> images.ImageSet:
    """A set of images; decoded once, and read from `cache` by other processes."""
    place = cache / f"{name}_{pixels}.pt"
    if not place.exists():
        found = images.packed(packed.need(tasks.FOLDER[0] / tasks.SETS[name].file), pixels)
        cache.mkdir(parents=True, exist_ok=True)
        temporary = place.with_suffix(f".{os.getpid()}")
        torch.save({"images": found.images, "labels": found.labels, "split": found.split, "classes": found.classes}, temporary)
        os.replace(temporary, place)
    return images.ImageSet(**torch.load(place, mmap=True))


@lru_cache(maxsize=4)
def parts(name: str, pixels: int, classes: int | None, most: int | None, cache: Path) -> tuple[images.ImageSet, list[Tensor]]:
    """A set, and the indices of its four parts: for tuning, for adapting, for validation, for testing."""
    found = decoded(name, pixels, cache)
    generator, cut = torch.Generator().manual_seed(0), ([], [], [], [])
    for label in range(min(classes or len(found.classes), len(found.classes))):
        of_class = found.labels == label
        own = (of_class & (found.split == 0)).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=generator)][: 4 * most if most else None]
        adapt = min(MOST, round(POOL * len(own)))
        judge = adapt + max(round(VALIDATION * len(own)), 1)
        test = (of_class & (found.split == 2)).nonzero()[:, 0][:most]
        for part, some in zip(cut, (own[judge:], own[:adapt], own[adapt:judge], test), strict=True):
            part.append(some)
    return found, [torch.cat(part) for part in cut]


def groups(name: str, names: tuple[str, ...]) -> dict[int, tuple[int, bool]]:
    """For each sub-class: its class, and whether it is seen before the shift. The last ones may be too few for a group."""
    order = [names.index(one) for one in PETS if one in names] if name == "pets" else list(range(len(names)))
    whole = len(order) // GROUP * GROUP
    return {label: (place // GROUP, place % GROUP < GROUP // 2) for place, label in enumerate(order[:whole])}


def _in_groups(split: data.Split, of: dict[int, tuple[int, bool]], before: bool) -> data.Split:
    keep = torch.tensor([of.get(label, (0, not before))[1] == before for label in split.labels.tolist()])
    kept = split.labels[keep.to(split.labels.device)]
    labels = torch.tensor([of[label][0] for label in kept.tolist()], device=kept.device)
    return data.Split(split.images[keep.to(split.images.device)], labels)


def world(
    backbone: str, name: str, shift: str | None, per_class: int, seed: int, setting: dict[str, object], cache: Path
) -> tasks.Task:
    """The splits after this shift, with `per_class` labelled images; None: those before any shift, for tuning.

    "subclasses before" is the world that networks for the shift of sub-classes are tuned on.
    """
    device, pixels = str(setting["device"]), int(str(setting["pixels"]))
    most = setting["images"]
    classes = setting["classes"]
    stored = min(pixels, tasks.SETS[name].pixels)
    found, (tune, adapt, judge, test) = parts(name, stored, classes, most, cache)  # type: ignore[arg-type]
    many = len(found.labels[tune].unique())
    if shift not in (None, "subclasses before"):
        generator, chosen = torch.Generator().manual_seed(seed), []
        for label in range(many):
            own = adapt[found.labels[adapt] == label]
            chosen.append(own[torch.randperm(len(own), generator=generator)[:per_class]])
        tune = torch.cat(chosen)
    cut = [data.Split(found.images[some].to(device), found.labels[some].to(device)) for some in (tune, judge, test)]
    if shift in ("subclasses", "subclasses before"):
        of = groups(name, found.classes[:many])
        cut = [_in_groups(split, of, shift != "subclasses") for split in cut]
        many = len(of) // GROUP
    elif shift == "permuted":
        other = torch.randperm(many, generator=torch.Generator().manual_seed(1)).to(device)
        cut = [data.Split(split.images, other[split.labels]) for split in cut]
    elif shift is not None:
        cut = [data.Split(seen_by_camera(shift, split.images, n), split.labels) for n, split in enumerate(cut)]
    stats = (torch.tensor(part, device=device).reshape(-1, 1, 1) for part in tasks.BACKBONES[backbone].pixel_stats)
    return tasks.Task(*cut, many, *stats, pixels, tasks.SETS[name].flip)


# ---------------------------------------------------------------- networks


def tuned(backbone: str, name: str, shift: str, setting: dict[str, object], cache: Path) -> dict[str, Tensor]:
    """The weights of a network that was tuned on the world before the shift; made once and kept in `cache`."""
    before = "subclasses before" if shift == "subclasses" else None
    place = cache / f"{backbone}_{name}{'_subclasses' if before else ''}.pt"
    if not place.exists():
        device, epochs = str(setting["device"]), int(str(setting["source_epochs"]))
        task = world(backbone, name, before, 0, 0, setting, cache)
        model = tasks.start(backbone, task.classes, seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
        total = epochs * (len(task.train) // BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=total + 1, pct_start=0.1)
        for epoch in range(epochs):
            for batch, _ in task.batches(BATCH, 0, epoch):
                plain_step(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, 1.0)
                schedule.step()
        reached = accuracy(model, tasks.pieces(task, task.test))
        print(f"{backbone} on {name}{' in groups' if before else ''}: {100 * reached:.1f} % before any shift", flush=True)
        temporary = place.with_suffix(f".{os.getpid()}")
        half = {key: value.half() if value.is_floating_point() else value for key, value in model.state_dict().items()}
        torch.save({key: value.cpu() for key, value in half.items()}, temporary)
        os.replace(temporary, place)
    return {key: value.float() if value.is_floating_point() else value for key, value in torch.load(place).items()}


def network(backbone: str, name: str, shift: str, classes: int, setting: dict[str, object], cache: Path) -> nn.Module:
    """The tuned network as it is after the shift: damaged, where the shift is one of its weights."""
    model = tasks.start(backbone, classes, seed=0)
    if shift == "classes":
        return model
    model.load_state_dict(tuned(backbone, name, shift, setting, cache))
    if shift in FAMILIES["damage"]:
        damage_(model, shift)
    return model


def damage_(model: nn.Module, shift: str) -> None:
    """Change the convolutions of one stage: the second third of the network is noised, the first third rounded."""
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    third = len(layers) // 3
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in layers[third : 2 * third] if shift == "noised" else layers[:third]:
            weight = layer.weight
            if shift == "noised":
                weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
            else:
                step = weight.abs().max() / 7  # fifteen levels
                weight.copy_((weight / step).round() * step)
