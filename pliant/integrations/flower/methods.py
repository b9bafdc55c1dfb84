"""Who trains what in a round: each method is a function from what the server knows to one task for each client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from pliant.integrations.flower import windows
from pliant.integrations.flower.messages import Ability, Task


@dataclass(frozen=True)
class Situation:
    """What the server knows when a round begins.

    `deadline` are the seconds of a round. `importance` is the fleet's, by parameter. `chosen` are the parameters that each
    client trained in its last round, `memory` is what the method noted about each client.
    """

    round: int
    abilities: Mapping[str, Ability]
    deadline: float
    importance: Mapping[str, float] = field(default_factory=dict)
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def rng(self, client: str) -> np.random.Generator:
        """Random numbers of one client in one round."""
        return np.random.default_rng([self.seed, self.round, *client.encode()])

    def seed_of(self, client: str) -> int:
        return int(self.rng(client).integers(2**31))


Tasks = dict[str, Task | None]  # None: the client sits this round out
Method = Callable[[Situation], tuple[Tasks, dict[str, Any]]]  # and what to remember of each client


def _each(task: Callable[[Situation, str, Ability], Task | None]) -> Method:
    """A method that decides client by client and remembers nothing."""

    def method(now: Situation) -> tuple[Tasks, dict[str, Any]]:
        return {client: task(now, client, able) for client, able in now.abilities.items()}, {}

    return method


def fedavg() -> Method:
    """Everybody trains everything, and the round waits for the slowest. arXiv 1602.05629."""
    return _each(lambda now, client, able: Task(able.steps, seed=now.seed_of(client)))


def drop_stragglers() -> Method:
    """FedAvg with those alone who train everything before the deadline."""

    def task(now: Situation, client: str, able: Ability) -> Task | None:
        if able.round > now.deadline * (1 + 1e-9):
            return None
        return Task(able.steps, now.deadline, stop=False, seed=now.seed_of(client))

    return _each(task)


def fewer_steps() -> Method:
    """Everybody trains everything, for as many steps as fit before the deadline."""
    return _each(lambda now, client, able: Task(able.steps, now.deadline, seed=now.seed_of(client)))


def last_layers() -> Method:
    """The last layers, as many as fit."""
    return _each(lambda now, client, able: Task(able.steps, now.deadline, choose="last", seed=now.seed_of(client)))


def depth() -> Method:
    """Sub-models by depth: each client always trains as many blocks from the input on as fit, and the exit after them.

    Needs exits. As in DepthFL, ICLR 2023, without its distillation between exits.
    """

    def task(now: Situation, client: str, able: Ability) -> Task:
        return _in_window(now, client, able, windows.deepest(able, now.deadline / able.steps) or (0, 0))

    return _each(task)


def random_windows() -> Method:
    """A window of blocks that fits, another random one in each round; everything in it trains."""

    def task(now: Situation, client: str, able: Ability) -> Task:
        return _in_window(now, client, able, windows.drawn(able, now.deadline / able.steps, now.rng(client)) or (0, 0))

    return _each(task)


def elastic_trainer() -> Method:
    """ElasticTrainer on each client for itself: any tensors of the whole model, by their local values."""
    return _each(lambda now, client, able: Task(able.steps, now.deadline, choose="tensors", seed=now.seed_of(client)))


def fedel(beta: float = 0.6, stop: bool = False) -> Method:
    """FedEL as published, arXiv 2509.16902: a window slides from the input to the output, ElasticTrainer chooses in it.

    Window edges count backward times alone, so a step with its forward pass may take longer than asked; the round waits, unless
    clients `stop` at the deadline.
    """

    def method(now: Situation) -> tuple[Tasks, dict[str, Any]]:
        tasks: Tasks = {}
        memory: dict[str, Any] = {}
        for client, able in now.abilities.items():
            known, seconds = now.memory.get(client), now.deadline / able.steps
            trained = set(now.chosen.get(client, ()))
            chosen = [i for i, block in enumerate(able.blocks) if trained.intersection(block)]
            window = windows.slid(able.backward, (known[0], known[1]) if known else None, chosen, seconds)
            memory[client] = list(window)
            tasks[client] = Task(
                able.steps,
                now.deadline,
                window[1] if able.exits else None,
                able.params(*window),
                "tensors",
                now.importance,
                beta,
                stop=stop,
                seed=now.seed_of(client),
            )
        return tasks, memory

    return method


def pliant() -> Method:
    """Ours: each client trains the layers of most value in a whole round, in fewer steps where that brings more.

    Time that is left for no more of these steps goes to cheaper ones. Values are the fleet's, so no client spends its time on a
    probe; in the first round, the last layers count most.
    """

    def task(now: Situation, client: str, able: Ability) -> Task:
        everything = Task(able.steps, now.deadline, seed=now.seed_of(client))
        if able.round <= now.deadline * (1 + 1e-9):
            return everything
        return replace(everything, choose="pace", importance=now.importance, beta=0.0)

    return _each(task)


def exact_windows(beta: float = 0.6) -> Method:
    """FedEL with windows re-drawn in every round from measured prices, the exact solver in them, no step after the deadline."""

    def task(now: Situation, client: str, able: Ability) -> Task:
        window = windows.drawn(able, now.deadline / able.steps, now.rng(client)) or (0, 0)
        if window == (0, len(able.blocks) - 1):
            return Task(able.steps, now.deadline, seed=now.seed_of(client))
        inside = able.params(0, window[1])
        seed = now.seed_of(client)
        exit = window[1] if able.exits else None
        return Task(able.steps, now.deadline, exit, inside, "layers", now.importance, beta, seed=seed)

    return _each(task)


def _in_window(now: Situation, client: str, able: Ability, window: windows.Window) -> Task:
    """Everything in this window trains."""
    exit = window[1] if able.exits else None
    return Task(able.steps, now.deadline, exit, able.params(*window), seed=now.seed_of(client))


METHODS: dict[str, Callable[[], Method]] = {
    "fedavg": fedavg,
    "drop_stragglers": drop_stragglers,
    "fewer_steps": fewer_steps,
    "last_layers": last_layers,
    "depth": depth,
    "random_windows": random_windows,
    "elastic_trainer": elastic_trainer,
    "fedel": fedel,
    "fedel_stopped": partial(fedel, stop=True),
    "exact_windows": exact_windows,
    "pliant": pliant,
}
