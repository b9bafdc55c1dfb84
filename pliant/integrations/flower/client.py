"""A client's round: measure what this device can do, train inside the budget that the server gave, return what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from pliant import signals
from pliant.core import schedule
from pliant.core.budget import Absolute, Budget
from pliant.core.errors import BudgetError
from pliant.core.types import Part, Unit, match
from pliant.cost.measure import read_graph, timed
from pliant.cost.profile import Profile
from pliant.graph import units
from pliant.integrations.flower.clock import Clock, WallClock, full_step, slowed
from pliant.integrations.flower.importance import blended
from pliant.integrations.flower.messages import Ability, Task
from pliant.integrations.flower.pace import Pace
from pliant.planning import recipes, solve
from pliant.planning.policy import Policy
from pliant.runtime.batches import Loss
from pliant.runtime.batchnorm import NormRule
from pliant.runtime.clock import device_name
from pliant.session.session import Session

Globs = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Local:
    """What a client trains with. Make it afresh for each message: model and optimizer start every round anew.

    `batches(seed)` gives a round's batches, all of one shape, at least `steps` of them. `blocks` are the parts of the model
    from the input to the output, each as globs over parameter names; without them every layer is a block. A model with early
    exits also names the parameters of the exit after each block; that of the last block is the head. `loss_at(block)` is the
    loss there: its forward pass ends after that block. `slowdown` makes this device a slower one, for simulations.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    batches: Callable[[int], Iterable[Any]]
    examples: int
    steps: int
    blocks: tuple[Globs, ...] = ()
    exits: tuple[Globs, ...] = ()
    loss_at: Callable[[int], Loss] | None = None
    clip: float | None = None
    norm: NormRule = "auto"
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if self.examples < 1 or self.steps < 1:
            raise ValueError(f"examples={self.examples}, steps={self.steps}: a client has at least one of each.")
        if bool(self.exits) != (self.loss_at is not None):
            raise ValueError("exits= and loss_at= belong together: name the parameters of each exit, and give the loss there.")
        if self.exits and len(self.exits) != len(self.blocks):
            raise ValueError(f"{len(self.exits)} exits for {len(self.blocks)} blocks: give one for each; the last may be ().")

    def loss_of(self, exit: int | None) -> Loss:
        """The loss of the exit after this block; without one, that of the whole model."""
        if exit is None or exit == len(self.blocks) - 1:
            return self.loss
        if self.loss_at is None:
            raise ValueError(f"the server asks for an exit after block {exit}, but this client has none: give Local loss_at=….")
        return self.loss_at(exit)


@dataclass(eq=False)
class Profiles:
    """The profiles of one device, one for each exit that was asked for. Hold it between rounds: nothing is measured twice."""

    by_exit: dict[int | None, Profile] = field(default_factory=dict)
    _slower: dict[tuple[int | None, float], Profile] = field(default_factory=dict)

    def of(self, local: Local, exit: int | None = None) -> Profile:
        """What steps cost here with this exit, on the device that `local` stands for."""
        if exit == len(local.blocks) - 1:
            exit = None
        if exit not in self.by_exit:
            loss, batch = local.loss_of(exit), next(iter(local.batches(0)))
            everything = replace(recipes.last(time=1.0), signal=signals.nearness())
            with Session(local.model, local.optimizer, loss, everything, **_how(local), undo=False) as session:
                session.before_step(batch)
                self.by_exit[exit] = session.profile
        if (exit, local.slowdown) not in self._slower:
            self._slower[exit, local.slowdown] = slowed(self.by_exit[exit], local.slowdown)
        return self._slower[exit, local.slowdown]


@dataclass(frozen=True, eq=False)
class Trained:
    """What a round came to: the tensors that changed, in their new values, and figures about it."""

    tensors: dict[str, torch.Tensor]
    examples: int
    metrics: dict[str, float]


def ability(local: Local, profiles: Profiles | None = None) -> Ability:
    """What this device can do, measured; a client answers a server's question with it."""
    profiles = profiles if profiles is not None else Profiles()
    whole = profiles.of(local)
    names = [name for name, param in local.model.named_parameters() if param.requires_grad]
    blocks = _named(names, local.blocks) if local.blocks else _layers(local)
    exits = _named(names, local.exits)
    windows = []
    for first in range(len(blocks)):
        row = []
        for last in range(first, len(blocks)):
            prices = profiles.of(local, last) if exits else whole
            inside = [name for block in blocks[first : last + 1] for name in block] + list(exits[last] if exits else ())
            row.append(prices.cost([_unit(dict.fromkeys([*inside, *prices.head]))]).seconds)
        windows.append(tuple(row))
    tails = [whole.cost([_unit([name for block in blocks[first:] for name in block])]).seconds for first in range(len(blocks))]
    added = [a - b for a, b in zip(tails, [*tails[1:], whole.base.seconds], strict=True)]
    where = next(local.model.parameters()).device
    floor = whole.cost([_unit(whole.head)]).seconds
    return Ability(
        full_step(whole),
        local.steps,
        local.examples,
        tuple(windows),
        tuple(max(seconds, 0.0) for seconds in added),
        blocks,
        exits,
        floor,
        device_name(where),
    )


def train_round(local: Local, task: Task, profiles: Profiles | None = None, clock: Clock | None = None) -> Trained:
    """Train one round as the server asks, inside its budget. The session's selection holds for the whole round.

    Where not even the cheapest step fits `seconds / steps`, fewer steps are taken; where not one fits, the round is refused.
    A round ends at its last step, or before one that may end after the deadline (see `Pace`); the time to collect what changed
    is measured after the first step. Where a probe would leave no time for a step, the last layers that fit train.
    """
    clock = clock if clock is not None else WallClock()
    profiles = profiles if profiles is not None else Profiles()
    loss = local.loss_of(task.exit)
    profile = profiles.of(local, task.exit)
    probes = task.choose in ("layers", "tensors") and _needs_probe(task)
    if probes and task.seconds is not None and task.stop and full_step(profile) + _least(profile) > task.seconds:
        task, probes = replace(task, choose="last"), False
    steps, each = _pace(task, profile, full_step(profile) if probes else 0.0)
    pace = Pace(task.seconds if task.seconds is not None else float("inf"), lambda units: profile.cost(units).seconds)
    policy = _policy(task, profile, each, pace)
    losses: list[torch.Tensor] = []
    planned, after = 0.0, 0.0  # `after` the last step: the seconds that it takes to collect what changed
    with Session(
        local.model,
        local.optimizer,
        loss,
        policy,
        **_how(local),
        profile=profile,
        total_steps=steps,
        correct=local.slowdown == 1,
    ) as session:
        if probes:
            clock.probed(profile)
        for batch in islice(local.batches(task.seed), steps):
            before = clock.elapsed
            if losses and task.stop and task.seconds is not None:
                pace.left = task.seconds - after - before
                if not pace.fits() and not pace.fits_less():
                    break
            losses.append(session.step(batch))
            clock.stepped(session, profile)
            pace.stepped(session.selection.units, clock.elapsed - before)
            planned += pace.price
            if len(losses) == 1 and task.stop and task.seconds is not None:
                before = clock.elapsed
                session.delta()
                after = clock.elapsed - before
        changed = session.delta()
    seconds = clock.elapsed
    value = float(torch.stack(losses).mean()) if losses else float("nan")
    metrics = {
        "loss": value,
        "steps": float(len(losses)),
        "seconds": seconds,
        "asked-seconds": task.seconds if task.seconds is not None else float("inf"),
        "step-seconds": planned / max(len(losses), 1),
        "full-step-seconds": full_step(profiles.of(local)),
        "share": planned / max(len(losses), 1) / full_step(profiles.of(local)),
        "trained-bytes": float(sum(t.numel() * t.element_size() for t in changed.values())),
    }
    return Trained(changed, local.examples, metrics)


def _pace(task: Task, profile: Profile, aside: float) -> tuple[int, float | None]:
    """How many steps to take and what each may cost, `aside` seconds being spent otherwise; None: whatever it costs."""
    if task.seconds is None:
        return task.steps, None
    inside = [name for name in task.params if name in set(profile.shapes)] if task.choose == "all" else []
    floor = _least(profile, inside)
    if task.choose == "all" and not task.params:
        floor = full_step(profile)
    left = task.seconds - aside
    if not task.stop:
        return task.steps, max(left / task.steps, floor)
    steps = min(task.steps, int(left / floor * (1 + 1e-9)))
    if steps < 1:
        raise BudgetError(
            f"a round of {task.seconds:.4g} s holds no step: the cheapest one takes {floor:.4g} s here, and choosing "
            f"{aside:.4g} s. Give this client at least {floor + aside:.4g} s, or fewer blocks."
        )
    if task.choose == "pace":  # its solver weighs what a step may cost against how many there are
        return task.steps, max(min(left, full_step(profile)), floor)
    return steps, max(left / steps, floor)


def _policy(task: Task, profile: Profile, each: float | None, pace: Pace) -> Policy:
    """The task as five words and a budget."""
    params = task.params or ("*",)
    head = tuple(name for name in profile.head if task.params and name not in task.params)
    if task.choose == "all":
        everything = recipes.only(*params, *head) if task.params else recipes.full()
        return replace(everything, budget=Budget(memory=task.memory))
    budget = Budget(time=Absolute(each) if each is not None else None, memory=task.memory)
    gain = blended(signals.update_gain(), task.importance, task.beta)
    if task.choose == "pace":  # never a probe: it may take as long as all the steps
        gain = blended(gain, task.importance, 0.0) if task.importance else signals.nearness()
    once, include = schedule.once(), (*params, *head)
    if task.choose == "layers":
        return Policy(units.layers(include), gain, timed, solve.milp(), once, budget, seed=task.seed, name="fleet_layers")
    if task.choose == "pace":
        solver = pace.solver(solve.milp(), task.steps)
        return Policy(units.layers(include), gain, timed, solver, pace.when(), budget, seed=task.seed, name="fleet")
    if task.choose == "tensors":
        return Policy(units.tensors(include), gain, timed, solve.knapsack(), once, budget, seed=task.seed, name="fleet_tensors")
    recipe = recipes.last(time=1.0) if task.choose == "last" else recipes.random(time=1.0, seed=task.seed)
    return replace(recipe, units=units.layers(include), budget=budget, when=once)


def _least(profile: Profile, inside: Iterable[str] = ()) -> float:
    """Seconds of a step that trains these parameters and the head."""
    return profile.cost([_unit(dict.fromkeys([*inside, *profile.head]))]).seconds


def _needs_probe(task: Task) -> bool:
    """Whether the client's own values count."""
    return task.beta > 0 or not task.importance


def _named(names: list[str], several: tuple[Globs, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[i] for i in match(names, globs, "parameter")) for globs in several)


def _layers(local: Local) -> tuple[tuple[str, ...], ...]:
    """The parameters of each layer, from the input on."""
    graph = read_graph(local.model, local.loss, next(iter(local.batches(0))), local.norm)
    return tuple(unit.params for unit in reversed(units.layers()(graph)) if not set(unit.params) & set(graph.unused))


def _how(local: Local) -> dict[str, Any]:
    return {"clip": local.clip, "norm": local.norm}


def _unit(params: Iterable[str]) -> Unit:
    return Unit("+".join(params), tuple(Part(name) for name in params))
