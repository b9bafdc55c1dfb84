"""What the benchmarks of few-shot adaptation compare: methods, networks, domains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import packed
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from pliant import Budget, Mode, Policy, plan, recipes, score, solve, units
from pliant.apps import fewshot, models
from pliant.apps.data import images
from pliant.apps.fewshot.views import Views
from pliant.cost.profile import Profile
from pliant.graph.backward import Graph, read
from pliant.planning.floor import in_reach
from pliant.runtime.sandbox import sandbox

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
    """`recipes.pliant` for so little memory that hardly a whole layer fits into it: its signal, with channels."""
    return replace(with_depthwise(tinytrain(exact=True)), signal=recipes.pliant().signal, name="pliant")


class LowRank(nn.Module):
    """weight + up · down, beside the weight itself, which stays. Hu et al., 2021, arXiv 2106.09685."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1], device=weight.device) / weight.shape[1] ** 0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.up @ self.down).view_as(weight)


def with_low_rank(net: nn.Module, rank: int = 4) -> nn.Module:
    net = copy.deepcopy(net)
    torch.manual_seed(rank)  # the same beginning for every task
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
OWN = ", own rate"  # at the end of a method's name: each task has its own (`fewshot.rate_for`)
NAMES = (*METHODS, *(f"{name}{OWN}" for name in METHODS if name != "none"))


@cache
def sparse_update(net: nn.Module) -> Policy:
    """The input channels that the exact choice has for one task of the source, from then on whatever the task is."""
    support = fewshot.Sampling(support=60).draw(domain(SOURCE), seed=1).support
    return fixed(with_depthwise(tinytrain(exact=True, axis="in"), "in"), net, support)


def fixed(policy: Policy, net: nn.Module, support: images.ImageSet, pieces: int = 50) -> Policy:
    """What a policy chooses for a support set when one image at a time is trained on, as a policy without a budget.

    What is chosen is what a session with batches of one image chooses: its costs are those of one image. The values are those
    of the whole support set, which do not hang on the pieces that it comes in, so that large ones can be taken.
    """
    model, optimizer = prototypes(net)
    device = model.log_scale.device
    several = Views(support, pieces, net.pixel_stats, device=device)
    model.fit_(((x, y) for x, y, _ in several), len(support.classes))
    one = next(iter(Views(support, 1, net.pixel_stats, device=device)))
    profile, graph = prices(policy.cost, net, len(support.classes), tuple(one[0].shape))
    changed = Views(support, pieces, net.pixel_stats, fewshot.Augment(), device=device)
    candidates = policy.units(graph)
    windows = [in_reach(policy, profile, candidates)]
    values = score.probe(
        policy.signal, model, optimizer, loss, one, candidates, seed=policy.seed, windows=windows, pieces=changed
    )
    names = [unit.name.replace("[", "[[]", 1) for unit in plan(policy, profile, values).units]  # globs read brackets
    return replace(policy, signal=score.nearness(), solver=solve.fixed(*names), budget=Budget())


def prototypes(net: nn.Module) -> tuple[fewshot.Prototypes, torch.optim.Optimizer]:
    """A copy of a network as `fewshot.adapt` trains it."""
    model = fewshot.Prototypes(copy.deepcopy(net)).eval()
    model.log_scale.requires_grad_(False)
    return model, torch.optim.SGD(model.backbone.parameters(), lr=0.02, momentum=0.9)


@lru_cache(maxsize=4)
def prices(cost: Any, net: nn.Module, classes: int, shape: tuple[int, ...]) -> tuple[Profile, Graph]:
    """What training a network costs where so many classes are told apart: the same for every task of that many."""
    model, optimizer = prototypes(net)
    device = model.log_scale.device
    images, label, share = torch.zeros(shape, device=device), torch.zeros(1, dtype=torch.long, device=device), torch.ones(())
    model.fit_([(images, label)], classes)
    one = images, label, share.to(device)
    profile = cost(model, optimizer, loss, one, norm="frozen").on(Mode(lean=True))
    with sandbox(model):
        return profile, read(model, loss, one)


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """As `fewshot.adapt` has it."""
    x, y, share = batch
    return share * F.cross_entropy(model(x), y)


# ---------------------------------------------------------------- data and starts

FOLDER = [Path()]  # where data and weights lie: `--data`


@cache
def domain(name: str) -> images.ImageSet:
    """A set of images by its file; of one that has splits, all of it."""
    return images.packed(packed.need(FOLDER[0] / name), PIXELS)


def start(backbone: str, meta: Path | None = None) -> tuple[nn.Module, float]:
    """The weights that every method begins with, and the scale of the cosines."""
    path = meta or packed.need(FOLDER[0] / BACKBONES[backbone])
    return models.load(str(path)), fewshot.scale_of(path)


def ready(method: str, net: nn.Module, support: images.ImageSet) -> tuple[nn.Module, Policy | None]:
    """The network that a method trains for a task, and what it trains of it."""
    method = method.removesuffix(OWN)
    policy = METHODS[method](net)
    if policy is not None and policy.budget != Budget():
        policy = fixed(policy, net, support)
    return with_low_rank(net) if method == "lora" else net, policy
