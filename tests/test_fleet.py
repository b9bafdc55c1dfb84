"""Fleets without Flower: what clients send, what servers refuse, how windows move, and what a killed process loses."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pliant import BudgetError, Session, solve
from pliant.core.budget import Progress
from pliant.core.types import Part, Unit
from pliant.integrations.flower import (
    METHODS,
    Ability,
    Federation,
    Local,
    Profiles,
    Reply,
    SimulatedClock,
    Situation,
    Task,
    Update,
    ability,
    aggregate,
    refusal,
    slowed,
    train_round,
)
from pliant.integrations.flower.importance import blended, of_change
from pliant.integrations.flower.messages import from_json, to_json
from pliant.integrations.flower.pace import Pace, paced
from pliant.integrations.flower.windows import deepest, drawn, slid, widest
from pliant.planning.solve import Problem
from pliant.signals import Seen, grad_norm

MODEL = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5]), "count": torch.tensor(3)}


class Exits(nn.Module):
    """Three linear blocks with an exit after each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, block: int = 2) -> torch.Tensor:
        for each in self.blocks[: block + 1]:
            x = torch.tanh(each(x))
        return self.exits[block](x)


def classify(model: nn.Module, batch: Any, block: int = 2) -> torch.Tensor:
    return F.cross_entropy(model(batch[0], block), batch[1])


def batches(seed: int) -> Iterator[Any]:
    random = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 6, generator=random), torch.randint(0, 3, (8,), generator=random)


def local(slowdown: float = 1.0, steps: int = 4) -> Local:
    torch.manual_seed(0)
    model = Exits()
    return Local(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        classify,
        batches,
        examples=20,
        steps=steps,
        blocks=(("blocks.0.*",), ("blocks.1.*",), ("blocks.2.*", "exits.2.*")),
        exits=(("exits.0.*",), ("exits.1.*",), ("exits.2.*",)),
        loss_at=lambda block: partial(classify, block=block),
        slowdown=slowdown,
    )


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    known = Profiles()
    ability(local(), known)
    return known


def able(slowdown: float = 1.0) -> Ability:
    """Four blocks: forward one second each, backward two, an exit nothing."""
    windows = tuple(tuple(slowdown * (last + 1 + 2 * (last - first + 1)) for last in range(first, 4)) for first in range(4))
    names = tuple((f"blocks.{i}",) for i in range(4))
    exits = tuple((f"exits.{i}",) for i in range(4))
    return Ability(12 * slowdown, 10, 50, windows, (2.0 * slowdown,) * 4, names, exits, 4.0 * slowdown)


# ---------------------------------------------------------------- aggregation


def test_each_tensor_is_the_mean_over_the_clients_that_trained_it() -> None:
    one = Update("one", {"w": torch.tensor([2.0, 2.0])}, 1)
    two = Update("two", {"w": torch.tensor([5.0, 2.0]), "count": torch.tensor(6)}, 3)
    new, refused = aggregate(MODEL, [one, two])
    assert not refused and new["b"] is MODEL["b"]
    assert new["w"].tolist() == [1 + (1 * 1 + 4 * 3) / 4, 2.0] and new["count"].item() == 6
    assert {name: tensor.dtype for name, tensor in new.items()} == {name: tensor.dtype for name, tensor in MODEL.items()}


def test_the_order_of_the_clients_does_not_matter() -> None:
    updates = [Update(str(i), {"w": torch.randn(2)}, i + 1) for i in range(4)]
    results = [aggregate(MODEL, some)[0]["w"] for some in itertools.permutations(updates)]
    assert all(torch.allclose(result, results[0], rtol=0, atol=1e-6) for result in results)


@pytest.mark.parametrize(
    ("tensors", "weight", "reason"),
    [
        ({"w": torch.zeros(3)}, 1, "'w' has shape (3,), not (2,)"),
        ({"v": torch.zeros(2)}, 1, "'v' is not a tensor of the model"),
        ({"w": torch.tensor([float("nan"), 0.0])}, 1, "'w' holds numbers that are not finite"),
        ({"w": torch.tensor([float("inf"), 0.0])}, 1, "'w' holds numbers that are not finite"),
        ({"w": torch.tensor([1e6, 0.0])}, 1, "it moves by 1e+06, more than 10 times the norm of the model (3.77)"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, 1, "'w' is torch.float64, not torch.float32"),
        ({"w": torch.zeros(2)}, 0, "its weight is 0: the number of its examples must be more than 0"),
        ({"w": torch.zeros(2)}, float("nan"), "its weight is nan: the number of its examples must be more than 0"),
    ],
)
def test_a_wrong_update_is_refused_with_a_reason_and_the_others_count(
    tensors: dict[str, torch.Tensor], weight: float, reason: str
) -> None:
    good = Update("good", {"b": torch.tensor([1.0])}, 1)
    new, refused = aggregate(MODEL, [Update("bad", tensors, weight), good])
    assert refused == {"bad": reason} and new["b"].item() == 1.0 and torch.equal(new["w"], MODEL["w"])
    assert refusal(good, MODEL) is None


# ---------------------------------------------------------------- windows, values, pace


def test_the_widest_windows_fit_and_one_block_more_does_not() -> None:
    ability, seconds = able(), 7.0
    found = widest(ability, seconds)
    assert found == [(0, 0), (0, 1), (1, 2), (3, 3)]
    assert all(ability.window(*w) <= seconds for w in found)
    assert all(first == 0 or ability.window(first - 1, last) > seconds for first, last in found)
    assert deepest(ability, seconds) == (0, 1) and deepest(ability, 2.0) is None
    rng = np.random.default_rng(0)
    assert {drawn(ability, seconds, rng) for _ in range(50)} == set(found)
    assert drawn(ability, 12.0, rng) == (0, 3) and drawn(ability, 2.0, rng) is None


@pytest.mark.parametrize("name", ["depth", "random_windows", "exact_windows"])
def test_the_fastest_client_trains_the_whole_model_in_its_own_full_round(name: str) -> None:
    fastest = able(0.47 / 12)
    assert fastest.round / fastest.steps < fastest.full  # by rounding alone
    fleet = Federation(MODEL, METHODS[name]())
    fleet.learn("one", fastest)
    task = fleet.tasks(["one"])["one"]
    assert task.exit in (None, 3) and (not task.params or set(task.params) == set(fastest.params(0, 3)))


def test_the_window_of_fedel_slides_over_every_block_and_begins_again() -> None:
    backward, window, seen = [2.0] * 7, None, []
    for _ in range(6):
        window = slid(backward, window, range(7) if window is None else (window[1],), 4.0)
        seen.append(window)
    assert seen == [(0, 1), (1, 3), (3, 5), (5, 6), (0, 1), (1, 3)]
    assert slid(backward, (0, 1), (), 4.0) == (2, 3)  # nothing was chosen: all of it is left behind


def test_importance_blends_what_client_and_server_know() -> None:
    seen = Seen("w", torch.zeros(2), grad=torch.tensor([1.0, 2.0]))
    assert blended(grad_norm(), {"w": 10.0}, 0.6).worth(seen).tolist() == pytest.approx([0.6 * 5 + 0.4 * 10])
    alone = blended(grad_norm(), {"w": 10.0}, 0.0)
    assert alone.worth(seen).tolist() == [10.0] and alone.needs == "nothing"
    assert blended(grad_norm(), {}, 0.6).name == "grad_norm"
    old = {"w": torch.tensor([1.0, 1.0], dtype=torch.float64)}
    assert of_change({"w": torch.tensor([1.0, 3.0], dtype=torch.float64)}, old, 0.1) == {"w": pytest.approx(40.0)}


def test_the_pace_is_that_of_most_value_in_the_round() -> None:
    rng = np.random.default_rng(3)
    for _ in range(4):
        values, price = rng.random(5), rng.random((1, 5))
        always = np.array([True, False, False, False, False])
        problem = Problem(tuple("abcde"), values, np.eye(5, dtype=bool), price, np.array([9.0]), always)
        seconds, steps, forward = 8 * rng.random() + 1, 6, 0.5

        def worth(mask: Any, problem: Problem = problem, seconds: float = seconds) -> float:
            return min(6.0, seconds / (0.5 + problem.cost(mask)[0])) * problem.value(mask)

        masks = [np.array(bits) for bits in itertools.product([False, True], repeat=5) if bits[0]]
        best, found = max(map(worth, masks)), worth(paced(solve.milp(), seconds, steps, forward)(problem))
        assert 0.9 * best <= found <= best * (1 + 1e-9)


def test_time_that_holds_no_more_such_step_goes_to_cheaper_ones() -> None:
    problem = Problem(
        tuple("abc"), np.array([5.0, 4.0, 3.0]), np.eye(3, dtype=bool), np.ones((1, 3)), np.array([3.0]), np.arange(3) == 0
    )
    for slow in (1.0, 1.2):
        pace = Pace(10.0, lambda units: 1.0 + len(units))
        solver, due = pace.solver(solve.milp(), 3), lambda pace=pace: pace.when().due(Progress(), Progress(), None)
        everything = solver(problem)
        assert everything.tolist() == [True, True, True] and not due()
        units = tuple(Unit(name, (Part(name),)) for name in "abc")
        for _ in range(2):
            pace.stepped(units, 4.0 * slow)
            pace.left -= 4.0 * slow
        assert pace.slow == slow and not pace.fits() and pace.fits_less() is (slow == 1.0) and due() is (slow == 1.0)
    pace.left = 3.7  # seconds hold a step of two units, which takes 3.6
    assert due() and solver(problem).tolist() == [True, True, False]


def test_a_step_may_take_longer_than_the_longest_by_as_much_as_steps_differ() -> None:
    pace, units = Pace(100.0, lambda units: 2.0 * len(units)), tuple(Unit(name, (Part(name),)) for name in "abc")
    known = []
    for trained, seconds in ((units[:1], 8.0), (units[:1], 2.0), (units[:1], 4.0), (units[:2], 9.0), (units[:2], 4.0)):
        pace.stepped(trained, seconds)
        known.append((pace.slow, pace.opening))
    # seconds per price: 4 while choosing, then 1 and 2; 9 s for a step of 4 s or more are due to choosing
    assert known == [(4.0, 0.0), (4.0, 6.0), (3.0, 6.0), (3.0, 5.0), (3.0, 5.0)]
    for left, fits in ((12.0, True), (11.9, False)):  # three times the price of two units
        pace.left = left
        assert pace.fits() is fits


def test_the_time_to_collect_what_changed_is_kept_free(profiles: Profiles, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, collect, full = SimulatedClock(), Session.delta, profiles.of(local()).full.seconds

    def takes_time(session: Session) -> dict[str, torch.Tensor]:
        clock.elapsed += 1.5 * full
        return collect(session)

    monkeypatch.setattr(Session, "delta", takes_time)
    trained = train_round(local(steps=20), Task(20, 8.2 * full), profiles, clock)
    assert trained.metrics["seconds"] == pytest.approx(8 * full) and trained.metrics["steps"] == 5


def test_a_device_that_is_too_slow_for_a_full_step_trains_some_layers(profiles: Profiles) -> None:
    prices = profiles.of(local())
    seconds = 0.5 * (ability(local(), profiles).floor + prices.full.seconds)
    with pytest.raises(BudgetError, match="holds no step"):
        train_round(local(), Task(4, 0.9 * prices.full.seconds), profiles, SimulatedClock())
    for importance in ({}, {"blocks.2.weight": 1.0}):
        task = Task(4, seconds, choose="pace", importance=importance, beta=0.0)
        trained = train_round(local(), task, profiles, SimulatedClock())
        assert trained.metrics["steps"] >= 1 and trained.metrics["seconds"] <= seconds * (1 + 1e-9)
        assert 0 < len(trained.tensors) < len(local().model.state_dict())


def test_messages_survive_the_way_and_strange_ones_are_refused() -> None:
    task = Task(3, 1.5, 1, ("a", "b"), "pace", {"a": 1.0}, 0.5)
    assert from_json(Task, to_json(task)) == task and from_json(Ability, to_json(able())) == able()
    with pytest.raises(ValueError, match="unknown \\['code'\\]"):
        from_json(Task, '{"steps": 1, "code": "x"}')
    with pytest.raises(ValueError, match="this is not a Task"):
        from_json(Task, "{}")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_tasks_that_its_clients_can_keep(name: str) -> None:
    fleet = {f"{i}": able(1.0 + i) for i in range(4)}
    memory: dict[str, Any] = {}
    for number in range(5):
        now = Situation(number, fleet, 120.0, {"blocks.1": 1.0}, {"2": ("blocks.0",)}, memory)
        tasks, more = METHODS[name]()(now)
        assert METHODS[name]()(now) == (tasks, more)  # the same situation, the same tasks
        memory |= more
        given = {client: task for client, task in tasks.items() if task is not None}
        assert "0" in given and set(given) <= set(fleet)
        for client, task in given.items():
            known = {p for i in range(4) for p in fleet[client].blocks[i] + fleet[client].exits[i]}
            assert task.steps == 10 and set(task.params) <= known
            assert task.seconds is None if name == "fedavg" else task.seconds == 120.0
            assert task.exit is None or f"exits.{task.exit}" in task.params


# ---------------------------------------------------------------- a client's round


def test_a_client_says_what_every_window_costs(profiles: Profiles) -> None:
    fast, slow = ability(local(), profiles), ability(local(slowdown=3.0), profiles)
    assert slow.full == pytest.approx(3 * fast.full) and slow.windows[0][2] == pytest.approx(3 * fast.windows[0][2])
    assert fast.blocks[2] == ("blocks.2.weight", "blocks.2.bias", "exits.2.weight", "exits.2.bias")
    for first in range(3):
        assert fast.window(first, 2) >= fast.window(min(first + 1, 2), 2)  # further back costs more
    assert sum(fast.backward) == pytest.approx(fast.windows[0][2] - profiles.of(local()).base.seconds)


def test_a_full_step_is_one_of_a_session_not_of_plain_pytorch(profiles: Profiles) -> None:
    prices = profiles.of(local())
    other = Profiles({None: replace(prices, plain=replace(prices.full, seconds=1.3 * prices.full.seconds))})
    other.by_exit |= {exit: profile for exit, profile in profiles.by_exit.items() if exit is not None}
    able = ability(local(), other)
    assert able.full == able.window(0, 2) == prices.full.seconds
    trained = train_round(local(), Task(4, able.round), other, SimulatedClock())
    assert trained.metrics["steps"] == 4 and trained.metrics["share"] == pytest.approx(1.0)


def test_only_what_trained_is_sent_and_blocks_after_the_exit_are_skipped(profiles: Profiles) -> None:
    client = local()
    before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
    task = Task(3, exit=1, params=("blocks.1.weight", "blocks.1.bias", "exits.1.weight", "exits.1.bias"))
    trained = train_round(client, task, profiles, SimulatedClock())
    assert set(trained.tensors) == set(task.params) and trained.metrics["steps"] == 3
    after = client.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name not in task.params)
    assert trained.metrics["trained-bytes"] == sum(4 * before[name].numel() for name in task.params)
    assert all(param.requires_grad for param in client.model.parameters())  # left as it was found


@pytest.mark.parametrize("choose", ["all", "pace", "layers", "tensors", "last", "random"])
def test_no_step_ends_after_the_deadline(choose: Any, profiles: Profiles) -> None:
    client = local(slowdown=2.0, steps=20)
    full = profiles.of(client).full.seconds
    task = Task(20, 6.5 * full, choose=choose, importance={"blocks.1.weight": 1.0}, beta=0.5)
    trained = train_round(client, task, profiles, SimulatedClock())
    assert 0 < trained.metrics["seconds"] <= task.seconds * (1 + 1e-9) and 1 <= trained.metrics["steps"] <= 20
    busy = train_round(local(slowdown=2.0, steps=20), task, profiles, SimulatedClock(jitter=0.3, seed=1))
    assert busy.metrics["seconds"] <= 1.6 * task.seconds  # at least one step runs, whatever happens


def test_a_round_that_holds_no_step_is_refused(profiles: Profiles) -> None:
    with pytest.raises(BudgetError, match="holds no step"):
        train_round(local(), Task(4, 0.1 * profiles.of(local()).base.seconds), profiles, SimulatedClock())


def test_a_round_keeps_to_its_memory(profiles: Profiles) -> None:
    with pytest.raises(BudgetError, match="more than the limit"):  # everything is asked for, and does not fit
        train_round(local(), Task(2, memory="1B"), profiles, SimulatedClock())
    everything = train_round(local(), Task(2, choose="layers"), profiles, SimulatedClock())
    some = train_round(local(), Task(2, choose="layers", memory=0.6), profiles, SimulatedClock())
    assert 0 < len(some.tensors) < len(everything.tensors)


def test_an_exit_that_the_client_does_not_have_is_an_error(profiles: Profiles) -> None:
    client = replace(local(), exits=(), loss_at=None)
    with pytest.raises(ValueError, match="asks for an exit after block 1"):
        train_round(client, Task(1, exit=1), Profiles(), SimulatedClock())
    with pytest.raises(ValueError, match="belong together"):
        replace(local(), loss_at=None)


def test_a_slower_device_takes_longer_for_everything(profiles: Profiles) -> None:
    profile = profiles.of(local())
    twice = slowed(profile, 2.0)
    assert twice.full.seconds == pytest.approx(2 * profile.full.seconds) and twice.full.bytes == profile.full.bytes
    with pytest.raises(ValueError, match="factor=0"):
        slowed(profile, 0)


# ---------------------------------------------------------------- the server


def rounds(fleet: Federation, known: Profiles, until: int) -> Federation:
    """Two clients train until this round; a third one always sends nonsense."""
    for name, slowdown in (("fast", 1.0), ("slow", 4.0), ("wild", 1.0)):
        fleet.learn(name, ability(local(slowdown), known))
    while fleet.round < until:
        tasks, replies = fleet.tasks(fleet.abilities), []
        for name, task in tasks.items():
            client = local(4.0 if name == "slow" else 1.0)
            client.model.load_state_dict(fleet.model)
            if name == "wild":
                replies.append(Reply(name, {"blocks.0.bias": torch.full((6,), float("nan"))}, {"num-examples": 5.0}))
                continue
            trained = train_round(client, task, known, SimulatedClock())
            replies.append(Reply(name, trained.tensors, {"num-examples": 20.0, **trained.metrics}, tuple(trained.tensors)))
        fleet.finish(tasks, replies)
    return fleet


@pytest.mark.parametrize("method", ["pliant", "fedel"])
def test_a_server_that_stops_goes_on_as_if_it_had_not(method: str, profiles: Profiles, tmp_path: Path) -> None:
    start = local().model.state_dict()
    whole = rounds(Federation(start, METHODS[method]()), profiles, 5)
    path = tmp_path / "state"
    rounds(Federation(start, METHODS[method](), path=path), profiles, 2)
    again = Federation(start, METHODS[method](), path=path)
    assert again.round == 2
    rounds(again, profiles, 5)
    assert all(torch.equal(tensor, whole.model[name]) for name, tensor in again.model.items())
    assert again.history == whole.history and all(set(row["refused"]) == {"wild"} for row in again.history)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_a_damaged_or_foreign_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    Federation(MODEL, METHODS["fedavg"]()).save(path)
    with pytest.raises(ValueError, match="another model: 'w' differs"):
        Federation(MODEL | {"w": torch.zeros(3)}, METHODS["fedavg"](), path=path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="Move it away to begin anew"):
        Federation(MODEL, METHODS["fedavg"](), path=path)


def test_replies_that_nobody_asked_for_and_lost_clients_change_nothing() -> None:
    fleet = Federation(MODEL, METHODS["fedavg"]())
    fleet.learn("one", able())
    tasks = fleet.tasks(["one", "stranger"])
    assert list(tasks) == ["one"]
    stranger = Reply("stranger", {"w": torch.zeros(2)}, {"num-examples": 1.0})
    report = fleet.finish(tasks, [Reply("one", error="it failed: killed"), stranger])
    assert report.refused == {"one": "it failed: killed", "stranger": "nobody asked it"} and report.took == 0
    assert all(torch.equal(tensor, MODEL[name]) for name, tensor in fleet.model.items())


# ---------------------------------------------------------------- kill -9

SERVER = """
import sys, torch
from pliant.integrations.flower import METHODS, Ability, Federation, Reply
fleet = Federation({"w": torch.ones(20_000)}, METHODS["fedavg"](), path=sys.argv[1])
fleet.learn("one", Ability(1.0, 1, 1, ((1.0,),), (1.0,), (("w",),), ()))
while fleet.round < 100_000:
    w = fleet.model["w"] + 1
    fleet.finish(fleet.tasks(["one"]), [Reply("one", {"w": w}, {"num-examples": 1.0})])
    print(fleet.round, flush=True)
"""
CLIENT = """
import sys, torch
from pliant.runtime.files import write_aside
print("training", flush=True)
while True:
    write_aside(sys.argv[1], bytes(1_000_000))
"""


def killed(code: str, path: Path, lines: int) -> None:
    """Run this code and kill it, without a warning, as soon as it has printed so many lines."""
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_server_that_is_killed_loses_at_most_the_round_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "state"
    killed(SERVER, path, 7)
    fleet = Federation({"w": torch.ones(20_000)}, METHODS["fedavg"](), rate=0.1, seed=0, path=path)
    assert fleet.round >= 7 and torch.equal(fleet.model["w"], torch.full((20_000,), 1.0 + fleet.round))
    assert len(fleet.history) == fleet.round


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_client_that_is_killed_takes_nothing_from_the_others(tmp_path: Path, profiles: Profiles) -> None:
    killed(CLIENT, tmp_path / "update", 1)
    fleet = Federation(local().model.state_dict(), METHODS["fedavg"]())
    for name in ("one", "two"):
        fleet.learn(name, ability(local(), profiles))
    tasks = fleet.tasks(fleet.abilities)
    trained = train_round(local(), tasks["two"], profiles, SimulatedClock())
    two = Reply("two", trained.tensors, {"num-examples": 20.0, **trained.metrics})
    report = fleet.finish(tasks, [Reply("one", error="it failed: killed"), two])
    assert report.took == 1 and all(torch.equal(fleet.model[name], tensor) for name, tensor in trained.tensors.items())


def test_without_flower_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import pliant.integrations.flower as fleets

    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, "pliant.integrations.flower.apps", raising=False)
    with pytest.raises(ImportError, match="pip install 'pliant\\[flower\\]'"):
        _ = fleets.Elastic


def test_a_round_that_brings_nothing_back_changes_no_importance() -> None:
    fleet = Federation(MODEL, METHODS["fedavg"]())
    fleet.importance = dict.fromkeys(MODEL, 1.0)
    report = fleet.finish({}, [Reply("1", error="lost")])
    assert report.refused and fleet.importance == dict.fromkeys(MODEL, 1.0)
