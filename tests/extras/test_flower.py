"""The strategy and the client app on the real Flower. `make test-extras`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

flwr = pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from pliant.integrations.flower import Elastic, Local, Profiles, SimulatedClock, client_app  # noqa: E402
from pliant.integrations.flower.apps import packed, unpacked  # noqa: E402


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower stamps messages with the task that runs in this process."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(client: int, seed: int) -> Iterator[Any]:
    random = torch.Generator().manual_seed(100 * client + seed % 100)
    while True:
        yield torch.randn(8, 6, generator=random), torch.randint(0, 3, (8,), generator=random)


def make(context: Context) -> Local:
    torch.manual_seed(0)
    model, client = Net(), int(context.node_config["partition-id"])
    how = {"examples": 10 + client, "steps": 12, "slowdown": 1.0 + client}
    return Local(model, torch.optim.SGD(model.parameters(), lr=0.1), classify, partial(batches, client), **how)


class Wires(Grid):
    """Flower's messages go to real ClientApps and back as bytes, without sockets. A client may answer with something else."""

    def __init__(self, clients: int, tamper: dict[int, Any] | None = None) -> None:
        self.app = client_app(make, clock=lambda context, number: SimulatedClock(), profiles=Profiles())
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config={"partition-id": node - 1}, state=RecordDict(), run_config={})
            for node in range(1, clients + 1)
        }
        self.tamper = tamper or {}
        self.sent: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            reply = self.app(message, self.contexts[node])
            if message.metadata.message_type == "train":
                self.sent.append(reply)
                if node in self.tamper:
                    self.tamper[node](reply)
            replies.append(reply)
        return replies

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


def start() -> ArrayRecord:
    torch.manual_seed(0)
    return ArrayRecord(Net().state_dict())


def wire_bytes(message: Message) -> int:
    """Bytes of a message as Flower sends it: the content of every object in it."""
    seen: dict[str, int] = {}

    def walk(thing: Any) -> None:
        seen[thing.object_id] = len(thing.deflate())
        for child in (thing.children or {}).values():
            walk(child)

    walk(message.content)
    return sum(seen.values())


@pytest.mark.parametrize("method", ["pliant", "fedavg", "last_layers", "elastic_trainer", "random_windows", "fedel"])
def test_rounds_run_and_only_what_trained_is_sent(method: str) -> None:
    grid, strategy = Wires(3), Elastic(method)
    result = strategy.start(grid, start(), num_rounds=3)
    assert set(result.arrays) == set(start()) and len(strategy.fleet.history) == 3
    assert all(row["took"] == 3 and not row["refused"] for row in strategy.fleet.history)
    for reply in grid.sent:
        assert len(reply.content.metric_records) == 1 and reply.content["metrics"]["num-examples"] >= 10
        assert wire_bytes(reply) <= 1.01 * reply.content["metrics"]["trained-bytes"] + 10_000


def spoil(reply: Message, name: str, array: Any) -> None:
    reply.content["arrays"] = packed(unpacked(reply.content["arrays"]) | {name: torch.from_numpy(array)})


def unreadable(reply: Message, content: bytes, raw: bool) -> None:
    kind = ("uint8", (len(content),), "numpy.ndarray", content)
    reply.content["arrays"]["safetensors"] = Array(*kind) if raw else Array(np.frombuffer(content, np.uint8))


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (partial(spoil, name="head.bias", array=np.zeros(4, np.float32)), "has shape"),
        (partial(spoil, name="code", array=np.zeros(4, np.float32)), "not a tensor of the model"),
        (partial(spoil, name="head.bias", array=np.full(3, np.nan, np.float32)), "not finite"),
        (partial(spoil, name="head.bias", array=np.full(3, 1e9, np.float32)), "times the norm"),
        (partial(unreadable, content=b"no array at all", raw=True), "cannot be read"),
        (partial(unreadable, content=b"no tensors", raw=False), "cannot be read"),
        (lambda reply: reply.content.__setitem__("metrics", MetricRecord({"num-examples": 0})), "its weight is 0"),
        (lambda reply: reply.content.pop("arrays"), "cannot be read"),
    ],
)
def test_a_wrong_update_is_refused_and_the_round_goes_on(tamper: Any, reason: str) -> None:
    grid, strategy = Wires(3, {2: tamper}), Elastic("fedavg")
    strategy.start(grid, start(), num_rounds=2)
    for row in strategy.fleet.history:
        assert row["took"] == 2 and list(row["refused"]) == ["2"] and reason in row["refused"]["2"]
    assert all(torch.isfinite(tensor).all() for tensor in strategy.fleet.model.values())


def test_a_server_that_is_restarted_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state"
    seen: list[int] = []

    def judge(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(number)
        return MetricRecord({"rounds": number})

    Elastic("fedavg", path=path).start(Wires(2), start(), num_rounds=2, evaluate_fn=judge)
    ended = Elastic("fedavg", path=path).start(Wires(2), start(), num_rounds=4, evaluate_fn=judge)
    whole = Elastic("fedavg").start(Wires(2), start(), num_rounds=4)
    assert seen == [0, 1, 2, 2, 3, 4]
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(ended.arrays[name].numpy(), array.numpy())
    assert len(Elastic("fedavg", path=path).start(Wires(2), start(), num_rounds=4).arrays) == 6


def test_the_reply_says_what_the_device_can_do() -> None:
    grid, strategy = Wires(2), Elastic("pliant")
    list(strategy.configure_train(1, start(), ConfigRecord(), grid))
    known = strategy.fleet.abilities
    assert known["2"].full == pytest.approx(2 * known["1"].full, rel=1e-6) and known["1"].steps == 12
    assert strategy.fleet.deadline == pytest.approx(known["1"].round)
    assert json.dumps(known["1"].device)


def test_names_of_methods_are_checked() -> None:
    with pytest.raises(ValueError, match="method='fedsgd' is not known; one of: fedavg"):
        Elastic("fedsgd")
