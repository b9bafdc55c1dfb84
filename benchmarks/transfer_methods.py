"""The methods that `transfer.py` compares, by name: a recipe, its share, and options that change one thing in it.

    full                       a plain PyTorch loop: float32, SGD
    full, tuned                the same with bfloat16, channels-last and the fused optimizer; on CUDA
    full, captured             `recipes.full` as a CUDA graph: what graphs gain without a selection
    head, norm+bias, lora      fixed parts; lora: rank 8 beside every 1×1 convolution or linear layer
    last 0.5, random 0.5       a share of the time of a plain full step; also elastic_trainer, elastic_layers and pliant
    green_trainer 0.5          a share of its MACs
    freeze_out, lisa, badam    with their defaults

Options after a comma change one thing, for ablations:

    units tensors      other units                       memory 200MB     a memory limit beside the time
    signal fisher      another signal                    every 100        re-select every so many steps
    cost counted       prices in MACs instead of seconds state drop       drop optimizer state of frozen layers
    solver greedy      another solver; `dense`: values   power 1          exponent of values (`solve.coverage`)
                       that add up, for any batch norms  alike 0.5        discount of neighbours (`solve.coverage`)
    engine plain       another engine                    norm frozen      another rule for batch norms
    epochs 6           a shorter run                     cache 4          four fixed views per image, and a feature cache
    head_first 0       share of the run for the head alone
    prefix int8        the frozen layers before the first trained one in int8; needs ONNX Runtime
    ramp 0.8-0.2       the share falls from the first    wide 0.4         everything for the first 0.4 of the run, then the
                       step to the last                                   selection
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fewshot_methods import LowRank
from torch import nn
from torch.nn.utils import parametrize

from pliant import Budget, Policy, Progress, measure, recipes, schedule, score, solve, units

FULL, TUNED, CAPTURED = "full", "full, tuned", "full, captured"
FIXED = ("norm+bias", "lora")  # defined here; all others are recipes
MAIN = (
    *(FULL, TUNED, CAPTURED, "head", "norm+bias", "lora", "last 0.5", "random 0.5"),
    *("elastic_trainer 0.35", "elastic_trainer 0.5", "elastic_trainer 0.7", "elastic_layers 0.5", "green_trainer 0.5"),
    *("pliant 0.35", "pliant 0.5", "freeze_out", "lisa", "badam"),
)
QUICK = (FULL, "head", "last 0.5", "elastic_trainer 0.5", "pliant 0.5")
RANK = 8
CACHE_BYTES = "8GB"

Change = Callable[[Policy, str], Policy]
CHANGES: dict[str, Change] = {
    "units": lambda policy, word: replace(policy, units=getattr(units, word)()),
    "signal": lambda policy, word: replace(policy, signal=getattr(score, word)()),
    "cost": lambda policy, word: _priced(policy, word),
    "solver": lambda policy, word: replace(policy, solver=_solver(word)),
    "every": lambda policy, word: replace(policy, when=schedule.every(steps=int(word))),
    "state": lambda policy, word: replace(policy, state=word),
    "memory": lambda policy, word: replace(policy, budget=replace(policy.budget, memory=amount(word))),
    "power": lambda policy, word: replace(policy, solver=solve.coverage(power=float(word))),
    "alike": lambda policy, word: replace(policy, solver=solve.coverage(float(word))),
    "ramp": lambda policy, word: replace(policy, budget=replace(policy.budget, time=_ramp(word))),
    "wide": lambda policy, word: _wide(policy, float(word)),
    "head_first": lambda policy, word: replace(policy, head_first=float(word)),
}
AROUND = ("engine", "norm", "cache", "epochs", "prefix")  # options of the run, not of the policy


@dataclass(frozen=True)
class Method:
    """A method, parsed from its name."""

    name: str
    recipe: str
    share: str | None
    words: dict[str, str]

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain loop: other options need a session."""
        return self.recipe == "full" and self.words.keys() <= {"tuned", "epochs"}

    @property
    def is_tuned(self) -> bool:
        return not self.is_plain or "tuned" in self.words

    @property
    def views(self) -> int:
        return int(self.words.get("cache", 0))

    @property
    def engine(self) -> str:
        return "graphs" if "captured" in self.words else self.words.get("engine", "auto")

    def epochs(self, usual: int) -> int:
        return int(self.words.get("epochs", usual))


def parse(name: str) -> Method:
    """A method by its name; an unknown one is an error.

    >>> parse("pliant 0.5, engine plain")
    Method(name='pliant 0.5, engine plain', recipe='pliant', share='0.5', words={'engine': 'plain'})
    """
    first, *rest = name.split(", ")
    recipe, _, share = first.partition(" ")
    words = {word: value for word, _, value in (part.partition(" ") for part in rest)}
    modes = ("tuned", "captured") if recipe == "full" else ()
    odd = [word for word, value in words.items() if word not in modes and (word not in (*CHANGES, *AROUND) or not value)]
    if odd:
        raise SystemExit(f"method {name!r}: {odd[0]!r} is not an option. The options are {', '.join((*CHANGES, *AROUND))}.")
    if recipe not in FIXED and not hasattr(recipes, recipe):
        raise SystemExit(f"no method {name!r}: pliant.recipes has no {recipe!r}.")
    return Method(name, recipe, share or None, words)


def available(device: str, names: Sequence[str] = MAIN) -> list[str]:
    """The methods that can run on this device: some need CUDA."""
    return [name for name in names if device == "cuda" or name not in (TUNED, CAPTURED)]


def policy(method: Method, model: nn.Module, seed: int) -> Policy:
    """The recipe with its share, its seed and its options."""
    if method.recipe == "lora":
        out = recipes.only("*parametrizations.weight.0.*", "classifier.*")
    elif method.recipe == "norm+bias":
        out = recipes.only(*norms_and_biases(model))
    else:
        make = getattr(recipes, method.recipe)
        takes = inspect.signature(make).parameters
        given: dict[str, Any] = {"seed": seed} if "seed" in takes else {}
        if method.share is not None:
            limit = next((kind for kind in ("time", "macs") if kind in takes), None)
            if limit is None:
                raise SystemExit(f"method {method.name!r}: {method.recipe} takes no share.")
            given[limit] = amount(method.share)
        out = make(**given)
    for word, value in method.words.items():
        if word in CHANGES:
            out = CHANGES[word](out, value)
    return out


def amount(given: str) -> float | str:
    """A budget: a share if it is a bare number, else an amount with its unit.

    >>> amount("0.4"), amount("3ms")
    (0.4, '3ms')
    """
    try:
        return float(given)
    except ValueError:
        return given


def _ramp(word: str) -> Callable[[Progress], float]:
    start, end = map(float, word.split("-"))
    return schedule.ramp(start, end)


def _wide(policy: Policy, until: float) -> Policy:
    """Everything for this share of the run, and then what the budget allows, selected once."""
    limit = policy.budget.time
    if callable(limit):
        raise SystemExit("'wide' and 'ramp' both change the budget over time: give one of them.")
    once = schedule.Schedule(f"at {until} of the run", lambda now, last, drift: last.fraction < until <= now.fraction)
    return replace(policy, when=once, budget=replace(policy.budget, time=lambda now: 1.0 if now.fraction < until else limit))


def _solver(word: str) -> solve.Solver:
    return solve.coverage(0.0) if word == "dense" else getattr(solve, word)()


def _priced(policy: Policy, word: str) -> Policy:
    """Another cost. Without measured seconds, a share of a step's time becomes a share of its MACs."""
    budget = policy.budget if word == "timed" else Budget(macs=policy.budget.time, memory=policy.budget.memory)
    return replace(policy, cost=getattr(measure, word), budget=budget)


def norms_and_biases(model: nn.Module) -> list[str]:
    """Scale and shift of every norm, every other bias, and the head."""
    norm = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    inside = {f"{name}." for name, module in model.named_modules() if isinstance(module, norm)}
    return [
        name
        for name, _ in model.named_parameters()
        if name.endswith("bias") or name.startswith("classifier.") or f"{name.rpartition('.')[0]}." in inside
    ]


def with_low_rank(model: nn.Module, seed: int, rank: int = RANK) -> nn.Module:
    """Add a low-rank term to every 1×1 convolution and linear layer but the head; at first it changes no output."""
    torch.manual_seed(seed)
    for name, module in list(model.named_modules()):
        narrow = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
        if (narrow or isinstance(module, nn.Linear)) and name != "classifier":
            parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank))
    return model


def optimizer(model: nn.Module, kind: str, lr: float, fused: bool) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=fused)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=fused)
