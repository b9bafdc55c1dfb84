"""Flower's side: a ClientApp that trains inside a budget, and a strategy that gives each client its own."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from typing import Any

import numpy as np
import torch

from pliant.integrations.flower.aggregate import MOST_CHANGE
from pliant.integrations.flower.client import Local, Profiles, ability, train_round
from pliant.integrations.flower.clock import Clock, WallClock
from pliant.integrations.flower.federation import Federation, Reply, RoundReport
from pliant.integrations.flower.messages import Ability, Task, from_json, to_json
from pliant.integrations.flower.methods import METHODS, Method

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.logger import log
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise ImportError("Flower is not installed. Run: pip install 'pliant[flower]'", name="flwr") from error

_ARRAYS, _CONFIG, _METRICS, _PACKED = "arrays", "config", "metrics", "safetensors"


# ---------------------------------------------------------------- the client


def client_app(
    make: Callable[[Context], Local],
    *,
    clock: Callable[[Context, int], Clock] | None = None,
    profiles: Profiles | None = None,
) -> ClientApp:
    """A ClientApp that answers what its device can do, and trains one round inside the budget that it is given.

    `make(context)` gives the model, the optimizer and the data of this client, for each message anew. A round is timed by the
    wall, unless `clock(context, round)` gives another clock. Devices of one process share `profiles`.
    """
    app, known = ClientApp(), profiles if profiles is not None else Profiles()

    @app.query()  # type: ignore[untyped-decorator]
    def query(message: Message, context: Context) -> Message:
        answer = ConfigRecord({"ability": to_json(ability(make(context), known))})
        return Message(RecordDict({_CONFIG: answer}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        config, local = message.content[_CONFIG], make(context)
        task = from_json(Task, str(config["task"]))
        local.model.load_state_dict(_tensors(message.content[_ARRAYS]))
        now = clock(context, int(config["server-round"])) if clock is not None else WallClock()
        trained = train_round(local, task, known, now)
        metrics = MetricRecord({"num-examples": trained.examples, **trained.metrics})
        return Message(RecordDict({_ARRAYS: packed(trained.tensors), _METRICS: metrics}), reply_to=message)

    return app


# ---------------------------------------------------------------- the server


class Elastic(Strategy):  # type: ignore[misc]
    """Asks each client what it can do, gives each its own task, and averages every tensor over the clients that trained it.

    `method` is a name out of `METHODS`, or a function of your own. `deadline` are the seconds of a round; without it, those of
    the fastest client's full round. `share` of the connected clients, chosen at random, take part in a round, and at least
    `least` of them. `path` is the file of the server's state: where it exists, training goes on from there. An update that is
    wrong (other shapes, unknown names, numbers that are not finite, more than `most_change` times the model's norm) is refused
    with a reason, and the round goes on. `on_round` sees the report of each.
    """

    def __init__(
        self,
        method: str | Method = "pliant",
        *,
        deadline: float | None = None,
        rate: float = 0.1,
        share: float = 1.0,
        least: int = 2,
        seed: int = 0,
        path: str | os.PathLike[str] | None = None,
        most_change: float = MOST_CHANGE,
        ask_timeout: float = 600.0,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:
        if isinstance(method, str) and method not in METHODS:
            raise ValueError(f"method={method!r} is not known; one of: {', '.join(METHODS)}.")
        if not 0 < share <= 1 or least < 1:
            raise ValueError(f"share={share}, least={least}: a share in (0, 1] of the clients, and at least one.")
        self.method = METHODS[method]() if isinstance(method, str) else method
        self.share, self.least, self.seed, self.ask_timeout, self.on_round = share, least, seed, ask_timeout, on_round
        self._how: dict[str, Any] = {"deadline": deadline, "rate": rate, "seed": seed, "most_change": most_change, "path": path}
        self.fleet: Federation | None = None
        self._tasks: dict[str, Task] = {}

    def summary(self) -> None:
        log(INFO, "\t└──> Pliant: deadline %s, share of clients %.2f", self._how["deadline"] or "of the fastest", self.share)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train up to round `num_rounds`, counted from the first one; a server that was restarted goes on where it stopped."""
        self.fleet = Federation(_tensors(initial_arrays), self.method, **self._how)
        before = self.fleet.round
        if before:
            log(INFO, "\t└──> goes on after round %d, from %s", before, self.fleet.path)
        arrays = _arrays(self.fleet.model)
        if before >= num_rounds:
            return Result(arrays=arrays)
        evaluate = (lambda number, held: evaluate_fn(number + before, held)) if evaluate_fn is not None else None
        left = num_rounds - before
        return super().start(grid, arrays, left, timeout, train_config, evaluate_config, evaluate)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask clients that are new what they can do, then send each of the chosen clients the model and its task."""
        if self.fleet is None:
            self.fleet = Federation(_tensors(arrays), self.method, **self._how)
        self._meet(grid)
        nodes = sorted(int(node) for node in grid.get_node_ids())
        some = max(self.least, round(self.share * len(nodes)))
        drawn = random.Random(f"{self.seed} {self.fleet.round}").sample(nodes, min(some, len(nodes)))
        self._tasks = self.fleet.tasks(str(node) for node in drawn)
        number = self.fleet.round + 1
        messages = []
        for client, task in self._tasks.items():
            told = ConfigRecord({**config, "task": to_json(task), "server-round": number})
            content = RecordDict({_ARRAYS: arrays, _CONFIG: told})
            messages.append(Message(content, dst_node_id=int(client), message_type=MessageType.TRAIN, group_id=str(number)))
        log(INFO, "configure_train: %d of %d clients, deadline %.4g s", len(messages), len(nodes), self.fleet.deadline)
        return messages

    def _meet(self, grid: Grid) -> None:
        """Wait for enough clients, and ask those that are new what they can do."""
        fleet = self._fleet
        while len(nodes := [int(node) for node in grid.get_node_ids()]) < self.least:
            log(INFO, "waiting for clients: %d of %d", len(nodes), self.least)
            time.sleep(1)
        new = [node for node in nodes if str(node) not in fleet.abilities]
        asked = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY, group_id="ask") for node in new]
        for reply in grid.send_and_receive(asked, timeout=self.ask_timeout) if asked else ():
            client = str(reply.metadata.src_node_id)
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason)
                fleet.learn(client, from_json(Ability, str(reply.content[_CONFIG]["ability"])))
            except Exception as error:  # whatever a client sends, the others go on
                log(WARNING, "client %s does not say what it can do: %s", client, error)
        if not fleet.abilities:
            raise RuntimeError(f"none of {len(nodes)} clients said what it can do: look into their logs.")

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Refuse what is wrong, average the rest tensor by tensor, write the state."""
        fleet = self._fleet
        report = fleet.finish(self._tasks, [_reply(message) for message in replies])
        for client, reason in report.refused.items():
            log(WARNING, "client %s is refused in round %d: %s", client, report.round, reason)
        told: dict[str, int | float] = {
            "clients": report.took,
            "refused": len(report.refused),
            "late": report.late,
            "seconds": report.seconds,
            "clock": float(sum(row["seconds"] for row in fleet.history)),
            "loss": report.loss,
            "bytes-back": report.bytes_back,
        }
        if self.on_round is not None:
            self.on_round(report)
        return _arrays(fleet.model), MetricRecord(told)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Nobody: the server's own `evaluate_fn` judges the model."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    @property
    def _fleet(self) -> Federation:
        if self.fleet is None:
            raise RuntimeError("no round has begun: call start().")
        return self.fleet


def _tensors(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


def packed(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Tensors as one array, in the format of safetensors: Flower adds some 500 bytes to every array."""
    from safetensors.torch import save

    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return ArrayRecord({_PACKED: Array(np.frombuffer(content, np.uint8))})


def unpacked(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """What `packed` made. The format holds numbers alone; nothing of it is executed."""
    from safetensors.torch import load

    return load(arrays[_PACKED].numpy().tobytes())


def _arrays(tensors: dict[str, torch.Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in tensors.items()})


def _reply(message: Message) -> Reply:
    """One client's reply; what cannot be read is an error of that client alone."""
    client = str(message.metadata.src_node_id)
    if message.has_error():
        return Reply(client, error=f"it failed: {message.error.reason}")
    try:
        tensors = unpacked(message.content[_ARRAYS])
        metrics = {str(key): float(value) for key, value in message.content[_METRICS].items()}
    except Exception as error:  # a stranger's bytes: numpy and Flower stumble over them in many ways
        return Reply(client, error=f"its reply cannot be read: {error}")
    return Reply(client, tensors, metrics, tuple(tensors))
