"""What the few-shot benchmarks compare: methods, networks and domains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import packed
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pliant import Budget, Policy, Session, fewshot, images, models, recipes, score, solve, units

BACKBONES = {
    "mcunet": "weights/mcunet_5fps_int8.safetensors",
    "mobilenet_v2_0.35": "weights/mbv2_w0.35_int8.safetensors",
    "proxyless_0.3": "weights/proxyless_w0.3_int8.safetensors",
}
DOMAINS = {
    "pets": "fewshot/pets_128.npz",
    "gtsrb": "fewshot/gtsrb_64.npz",
    "cifar10": "fewshot/cifar10_32.npz",
    "omniglot": "fewshot/omniglot8_105.npz",
}
SOURCE = "fewshot/cub_128.npz"
PIXELS = 128
MEMORY, MACS = "1MB", 0.15

# ---------------------------------------------------------------- methods


def tinytrain(macs: float = MACS, **how: Any) -> Policy:
    return recipes.tinytrain(memory=MEMORY, macs=macs, **how)


def full() -> Policy:
    return recipes.only("backbone.stem.*", "backbone.blocks.*")


def last_layer(net: nn.Module) -> Policy:
    last = [name for name, module in net.named_modules() if isinstance(module, nn.Conv2d)][-1]
    return recipes.only(f"backbone.{last}.*")


def with_depthwise(policy: Policy, axis: Literal["out", "in"] = "out") -> Policy:
    return replace(policy, units=units.channels(axis))


def chance() -> Policy:
    return replace(tinytrain(), signal=score.random(), solver=solve.sample(), name="random")


def channels_by_gain() -> Policy:
    """The update gain with channels as units: hardly a whole layer fits into this little memory."""
    return replace(with_depthwise(tinytrain(exact=True)), signal=score.update_gain(), name="pliant")


class LowRank(nn.Module):
    """weight + up · down; the weight itself stays as it is. Hu et al., 2021, arXiv 2106.09685."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1], device=weight.device) / weight.shape[1] ** 0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.up @ self.down).view_as(weight)


def with_low_rank(net: nn.Module, rank: int = 4) -> nn.Module:
    net = copy.deepcopy(net)
    torch.manual_seed(rank)  # the same start for every task
    for module in list(net.modules()):
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank))
    return net


METHODS: dict[str, Callable[[nn.Module], Policy | None]] = {
    "none": lambda net: None,
    "full": lambda net: full(),
    "last layer": last_layer,
    "bias": lambda net: recipes.only("backbone.stem.bias", "backbone.blocks.*.bias"),
    "sparse update": lambda net: sparse_update(net),
    "lora": lambda net: recipes.only("backbone.*parametrizations.weight.0.*"),
    "random": lambda net: chance(),
    "tinytrain": lambda net: tinytrain(),
    "tinytrain, exact": lambda net: tinytrain(exact=True),
    "tinytrain, exact, half": lambda net: tinytrain(exact=True, macs=MACS / 2),
    "tinytrain, exact, depthwise too": lambda net: with_depthwise(tinytrain(exact=True)),
    "pliant": lambda net: channels_by_gain(),
}
OWN = ", own rate"  # at the end of a name: each task has its own learning rate (`fewshot.rate_for`)
NAMES = (*METHODS, *(f"{name}{OWN}" for name in METHODS if name != "none"))


@cache
def sparse_update(net: nn.Module) -> Policy:
    """The input channels that the exact choice selects for one task of the source, used for every task."""
    support = fewshot.Sampling(support=60).draw(domain(SOURCE), seed=1).support
    return fixed(with_depthwise(tinytrain(exact=True, axis="in"), "in"), net, support)


def fixed(policy: Policy, net: nn.Module, support: images.ImageSet, batch: int = 50) -> Policy:
    """What a policy selects for a support set when training sees one image at a time, as a policy without a budget.

    Costs are those of one image. Values are those of the whole support set, which is scored in large batches to save time.
    """
    model = fewshot.Prototypes(copy.deepcopy(net)).eval()
    model.log_scale.requires_grad_(False)
    device = model.log_scale.device
    optimizer = torch.optim.SGD(model.backbone.parameters(), lr=0.02, momentum=0.9)
    plain, changed = (batches(support, batch, net.pixel_stats, device, augment) for augment in (None, fewshot.Augment()))
    model.fit_(((x, y) for x, y, _ in plain), len(support.classes))
    one = plain[0][0][:1], plain[0][1][:1], torch.ones((), device=device)
    with Session(model, optimizer, loss, policy, engine="lean", norm="frozen", probe=changed, undo=False) as session:
        session.before_step(one)
        names = [unit.name.replace("[", "[[]", 1) for unit in session.selection.units]  # patterns treat brackets specially
    return replace(policy, signal=score.nearness(), solver=solve.fixed(*names), budget=Budget())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The loss of `fewshot.adapt`."""
    x, y, share = batch
    return share * F.cross_entropy(model(x), y)


def batches(
    support: images.ImageSet,
    size: int,
    norm: images.PixelStats,
    device: torch.device | None = None,
    augment: fewshot.Augment | None = None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A support set as `fewshot.adapt` sees it: normalised images, their labels, and the batch's size over the mean size.

    With `augment`, images are changed as in the first step of `fewshot.adapt`.
    """
    numbers = np.random.default_rng([0, 0]).random((len(support), 5))
    mean, std = (torch.as_tensor(part, dtype=torch.float32, device=device).reshape(-1, 1, 1) for part in norm)
    out, count = [], -(-len(support) // size)
    for start in range(0, len(support), size):
        some = slice(start, start + size)
        pixels = support.images[some].to(device).float() / 255
        if augment is not None:
            pixels = augment(pixels, numbers[some])
        labels = support.labels[some].to(device)
        share = torch.tensor(len(labels) * count / len(support), device=device)
        out.append(((pixels - mean) / std, labels, share))
    return out


# ---------------------------------------------------------------- data and starts

FOLDER = [Path()]  # the folder with data and weights: `--data`


@cache
def domain(name: str) -> images.ImageSet:
    """All images of a file, whatever their split."""
    return images.packed(packed.need(FOLDER[0] / name), PIXELS)


def start(backbone: str, meta: Path | None = None) -> tuple[nn.Module, float]:
    """The network that every method starts from, and the scale of its cosines."""
    path = meta or packed.need(FOLDER[0] / BACKBONES[backbone])
    return models.load(str(path)), fewshot.scale_of(path)


def ready(method: str, net: nn.Module, support: images.ImageSet) -> tuple[nn.Module, Policy | None]:
    """The network that a method trains for a task, and the policy that says what of it."""
    method = method.removesuffix(OWN)
    policy = METHODS[method](net)
    if policy is not None and policy.budget != Budget():
        policy = fixed(policy, net, support)
    return with_low_rank(net) if method == "lora" else net, policy
