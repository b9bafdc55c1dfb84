"""The server's side without a network: gives tasks, takes updates, keeps its state in a file that is whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pliant.core import schema
from pliant.integrations.flower.aggregate import MOST_CHANGE, Mean, Update, norm_of, refusal
from pliant.integrations.flower.importance import of_change
from pliant.integrations.flower.messages import Ability, Task, from_json, to_json
from pliant.integrations.flower.methods import Method, Situation
from pliant.runtime.sealed import load_archive, save_archive

_SHAPE = {
    "format": str,
    "round": int,
    "model": {str: Any},
    "abilities": {str: str},
    "importance": {str: Any},
    "chosen": {str: [str]},
    "memory": {str: Any},
    "history": [dict],
}
_FORMAT = "pliant.fleet/1"


@dataclass(frozen=True)
class Reply:
    """What came back from one client: its update and its figures, or why there is none."""

    client: str
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class RoundReport:
    """One round: who took part, who was refused and why, and how long the slowest of them took by its own clock."""

    round: int
    took: int
    refused: Mapping[str, str]
    seconds: float
    late: int
    loss: float
    bytes_back: int


class Federation:
    """A server's state: the global model, what each client can do, and what the method remembers.

    `rate` is the learning rate of the clients, for FedEL's importance. `deadline` are the seconds of a round; without it, those
    of the fastest client's full round. `path` is the file of the state; where it exists, the federation goes on from there.
    """

    def __init__(
        self,
        model: Mapping[str, torch.Tensor],
        method: Method,
        *,
        deadline: float | None = None,
        rate: float = 0.1,
        seed: int = 0,
        most_change: float = MOST_CHANGE,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.model = {name: tensor.detach().cpu().clone() for name, tensor in model.items()}
        self.method, self.given_deadline, self.rate, self.seed = method, deadline, rate, seed
        self.most_change, self.path = most_change, None if path is None else Path(path)
        self.round = 0  # rounds that are over
        self.abilities: dict[str, Ability] = {}
        self.importance: dict[str, float] = {}
        self.chosen: dict[str, tuple[str, ...]] = {}
        self.memory: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        if self.path is not None and self.path.exists():
            self._load(self.path)

    @property
    def deadline(self) -> float:
        """Seconds of a round."""
        if self.given_deadline is not None:
            return self.given_deadline
        if not self.abilities:
            raise ValueError("no client has said what it can do, so there is no deadline yet: give deadline=, or ask them.")
        return min(able.round for able in self.abilities.values())

    def learn(self, client: str, ability: Ability) -> None:
        """A client said what it can do."""
        self.abilities[client] = ability

    def tasks(self, clients: Iterable[str]) -> dict[str, Task]:
        """What each of these clients is asked to do in the coming round; some may sit it out."""
        able = {client: self.abilities[client] for client in sorted(clients) if client in self.abilities}
        if not able:
            return {}
        now = Situation(self.round, able, self.deadline, self.importance, self.chosen, self.memory, self.seed)
        tasks, memory = self.method(now)
        self.memory.update(memory)
        return {client: task for client, task in tasks.items() if task is not None}

    def finish(self, tasks: Mapping[str, Task], replies: Iterable[Reply]) -> RoundReport:
        """Take the round's replies: refuse what is wrong, average the rest, write the state."""
        mean, refused, losses = Mean(self.model), {}, []
        seconds, late, back = 0.0, 0, 0
        came = sorted(replies, key=lambda reply: reply.client)
        norm = norm_of(self.model)
        for reply in came:
            reason = reply.error or ("nobody asked it" if reply.client not in tasks else None)
            update = Update(reply.client, reply.tensors, _number(reply, "num-examples"))
            reason = reason or refusal(update, self.model, self.most_change, norm)
            if reason is not None:
                refused[reply.client] = reason
                continue
            mean.add(update)
            self.chosen[reply.client] = reply.chosen
            took, asked = float(reply.metrics.get("seconds", 0.0)), tasks[reply.client].seconds
            seconds, late = max(seconds, took), late + (asked is not None and took > asked * (1 + 1e-9))
            losses.append(float(reply.metrics.get("loss", 0.0)))
            back += sum(tensor.numel() * tensor.element_size() for tensor in reply.tensors.values())
        new = mean.result()
        if losses:  # a round that brought nothing says nothing
            self.importance = of_change(new, self.model, self.rate)
        self.model, self.round = new, self.round + 1
        loss = sum(losses) / len(losses) if losses else float("nan")
        report = RoundReport(self.round, len(losses), refused, seconds, late, loss, back)
        self.history.append(asdict(report))
        if self.path is not None:
            self.save(self.path)
        return report

    # ------------------------------------------------------------ the file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Everything that decides how the federation goes on, written aside and renamed."""
        state = {
            "format": _FORMAT,
            "round": self.round,
            "model": self.model,
            "abilities": {client: to_json(able) for client, able in self.abilities.items()},
            "importance": self.importance,
            "chosen": {client: list(names) for client, names in self.chosen.items()},
            "memory": self.memory,
            "history": self.history,
        }
        save_archive(path, state)

    def _load(self, path: Path) -> None:
        """Go on from a file that `save` wrote; one that is damaged, or of another model, is refused."""
        try:
            state = load_archive(path)
            schema.check(_SHAPE, state, "state")
            if state["format"] != _FORMAT:
                raise ValueError(f"it is of format {state['format']!r}, not {_FORMAT!r}")
            for name in {**self.model, **state["model"]}:
                there, here = state["model"].get(name), self.model.get(name)
                if there is None or here is None or there.shape != here.shape or there.dtype != here.dtype:
                    raise ValueError(f"it is of another model: {name!r} differs")
        except ValueError as error:
            raise ValueError(
                f"{str(path)!r} is not a state of this federation: {error}. Move it away to begin anew."
            ) from error
        self.round, self.model = state["round"], state["model"]
        self.abilities = {client: from_json(Ability, text) for client, text in state["abilities"].items()}
        self.importance, self.memory, self.history = state["importance"], state["memory"], state["history"]
        self.chosen = {client: tuple(names) for client, names in state["chosen"].items()}


def _number(reply: Reply, name: str) -> float:
    return float(reply.metrics.get(name, 0.0))
