"""Whatever runs a step: over a hundred steps with changing choices, weights end where plain freezing brings them."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_graphs import DEVICES, Stand
from torch import nn

from pliant import Budget, Policy, Session, measure, recipes, schedule, score, solve, units
from pliant.core.types import Part, Unit
from pliant.engine.cuda_graphs.graphs import Graphs
from pliant.engine.engine import Engine
from pliant.engine.prefix.feature_cache import Features
from pliant.engine.prefix.prefix import Prefix
from pliant.graph.backward import read
from pliant.runtime.optimizer_step import Update
from pliant.runtime.sample_ids import ids_of, with_ids
from pliant.runtime.sandbox import sandbox

ENGINES = ["lean", "prefix", "lean+prefix", "graphs", "lean+graphs", "prefix+graphs", "lean+prefix+graphs"]
WAYS = [(engine, cached) for engine in ENGINES for cached in (False, True) if "prefix" in engine or not cached]


class Residual(nn.Module):
    """Convolutions with norms, an in-place activation, and a branch that skips some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True))
        self.deep = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.BatchNorm2d(6), nn.Hardswish())
        self.last = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.last(self.deep(x))
        return self.head(x.mean((2, 3)))


class Words(nn.Module):
    """Token ids through attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    device = next(model.parameters()).device
    return F.cross_entropy(model(x.to(device)), y.to(device))


def samples(kind: type[nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    x = torch.randint(0, 20, (22, 5)) if kind is Words else torch.randn(22, 3, 6, 6, dtype=torch.float64)
    return list(zip(x, torch.randint(0, 4, (22,)), strict=True))


def train(
    kind: type[nn.Module],
    engine: str,
    device: str,
    steps: int,
    cached: bool,
    every: int,
    on_step: Callable[[Session], None] = lambda session: None,
    solver: solve.Solver | None = None,
    budget: Budget | None = None,
) -> tuple[list[Any], Session]:
    torch.manual_seed(0)
    model = kind().double().to(device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.9)
    words = units.tensors(), score.random(), measure.counted, solver or solve.sample(3), schedule.every(steps=every)
    policy = Policy(*words, budget or Budget(), name="by lot")
    loader = torch.utils.data.DataLoader(with_ids(samples(kind)), batch_size=5)
    features = Features("4MB", device=device) if cached else None
    session = Session(model, optimizer, classify, policy, engine=engine, cache=features, steps_per_epoch=5)
    if device == "cpu" and "graphs" in engine:
        session._engine._cuda = True
        session._engine.use_optimizer(optimizer)
    chosen = []
    with session:
        while len(chosen) < steps:
            for batch in loader:
                assert ids_of(batch) is not None
                session.step(batch)
                chosen.append(sorted(session.selection.params))
                on_step(session)
        values = [value.clone() for value in model.state_dict().values()]
    return [chosen, *values], session


@cache
def plainly(kind: type[nn.Module], device: str, every: int) -> list[Any]:
    """What was chosen for each of a hundred plain steps, and where they end."""
    return train(kind, "plain", device, 100, False, every)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("engine", "cached"), WAYS)
@pytest.mark.parametrize("kind", [Residual, Words])
def test_a_hundred_steps_end_where_plain_ones_do(
    kind: type[nn.Module], engine: str, cached: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        stand_in(monkeypatch)
    every = 20 if cached else 7
    (chosen, *mine), session = train(kind, engine, device, 100, cached, every)
    same, *plain = plainly(kind, device, every)
    assert chosen == same and len({tuple(names) for names in chosen}) > 2
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    if cached:
        assert session._engine.features is not None
        assert session._engine.features.hits > 100, session.why_not
    if "graphs" in engine:
        assert session._engine._graphs is not None
        assert session._engine._graphs.replays > 20, session.why_not


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["graphs", "prefix+graphs", "lean+prefix+graphs"])
def test_to_go_back_to_a_choice_captures_nothing(engine: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what it runs as inference was trained meanwhile."""
    if device == "cpu":
        stand_in(monkeypatch)

    def turns(problem: solve.Problem) -> Any:
        return problem.always | (np.arange(len(problem.names)) < len(problem.names) * (0.3, 1.0, 0.6)[problem.round % 3])

    captured: list[int] = []

    def on_step(session: Session) -> None:
        assert session._engine._graphs is not None
        captured.append(session._engine._graphs.captures)

    (chosen, *mine), session = train(Residual, engine, device, 120, False, 10, on_step, turns)
    (same, *plain), _ = train(Residual, "plain", device, 120, False, 10, solver=turns)
    assert chosen == same and len({tuple(names) for names in chosen}) == 3
    assert captured[29] == captured[-1] == 6, session.why_not  # three choices, and two sizes of batch
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["lean+graphs", "lean+prefix+graphs"])
def test_where_memory_is_limited_steps_of_one_choice_are_held_and_none_beside_an_eager_one(
    engine: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        stand_in(monkeypatch)
    limited, eager, watched = Budget(memory="1GB"), [0], Graphs._watched

    def alone(graphs: Graphs, *how: Any) -> torch.Tensor:
        assert not graphs._known
        eager[0] += 1
        return watched(graphs, *how)

    def on_step(session: Session) -> None:
        assert session._engine._graphs is not None
        held = [key[0][:2] for key in session._engine._graphs._known]
        assert len(held) <= 2 and set(held) <= {(frozenset(session.selection.parts), engine)}

    monkeypatch.setattr(Graphs, "_watched", alone)
    (chosen, *mine), session = train(Residual, engine, device, 100, False, 20, on_step, budget=limited)
    assert session._engine._graphs is not None and session._engine._graphs.replays > 40 and eager[0] > 5, session.why_not
    (same, *plain), _ = train(Residual, "plain", device, 100, False, 20, budget=limited)
    assert chosen == same
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_where_memory_leaves_no_room_a_step_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    _, session = train(Residual, "lean+graphs", "cpu", 20, False, 20, budget=Budget(memory="1GB"))
    assert session._engine.mode.graphs and session._engine._graphs is not None and session._engine._graphs.replays > 0
    head = session.profile.cost([Unit("*", tuple(Part(name) for name in session.profile.head))]).bytes
    few = Budget(memory=f"{head + session.profile.inference // 2}B")

    def only_the_head(problem: solve.Problem) -> Any:
        return problem.always

    _, session = train(Residual, "lean+graphs", "cpu", 20, False, 20, solver=only_the_head, budget=few)
    assert not session._engine.mode.graphs and session._engine._graphs is not None and session._engine._graphs.captures == 0
    assert "no room" in session.why_not["graphs"]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured without a GPU."""
    from pliant.engine.cuda_graphs import graphs

    made = graphs.Graphs.__init__

    def init(self: Any, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, capture: Any = None) -> None:
        made(self, model, loss, optimizer, capture or Stand(model, optimizer))

    monkeypatch.setattr(graphs.Graphs, "__init__", init)


def test_a_cache_outlives_probes_and_choices_behind_the_boundary() -> None:
    """Only a weight of the part, or another boundary, empties it."""
    model = Residual().double().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
    features = Features("4MB")
    prefix = Prefix(model, features)
    loader = list(torch.utils.data.DataLoader(with_ids(samples(Residual)), batch_size=5))

    def epoch(*trained: str) -> tuple[int, int]:
        """How many samples were in the cache, and how many were not."""
        before = features.hits, features.misses
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(trained))
        for batch in loader:
            if not prefix.knows(batch, ids_of(batch)):
                with sandbox(model):
                    prefix.run(lambda batch=batch: classify(model, batch), batch, ids_of(batch))
            prefix.run(lambda batch=batch: classify(model, batch), batch, ids_of(batch)).backward()
        return features.hits - before[0], features.misses - before[1]

    everything = units.tensors()(read(model, classify, loader[0]))
    assert epoch("last", "head") == (0, 22)
    assert epoch("last", "head") == (22, 0)
    assert score.probe(score.update_gain(), model, optimizer, classify, loader[0], everything)
    assert epoch("last", "head") == (22, 0)
    assert epoch("last.weight", "head") == (22, 0)  # the boundary is where it was
    assert epoch("deep.0", "last", "head") == (0, 22)
    with torch.no_grad():
        model.stem[0].weight.mul_(2)
    assert epoch("deep.0", "last", "head") == (0, 22)
    assert epoch("deep.0", "last", "head") == (22, 0)


def test_prices_forget_a_cache_that_a_resumed_run_lacks(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(with_ids(samples(Residual)), batch_size=5)
    for size, spared in (("4MB", 1.0), (None, 0.0)):
        model = Residual().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
        policy = recipes.only("last*", "head*")
        with Session(model, optimizer, classify, policy, cache=size, steps_per_epoch=5) as session:
            if size is None:
                session.load(tmp_path / "run.pt")
            for batch in loader:
                session.step(batch)
            assert session.profile.spared == spared
            session.save(tmp_path / "run.pt")


def test_a_batch_without_ids_is_told_of() -> None:
    model = Residual().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
    with Session(model, optimizer, classify, recipes.only("head*"), engine="prefix", cache="4MB") as session:
        session.step((torch.randn(5, 3, 6, 6, dtype=torch.float64), torch.zeros(5, dtype=torch.long)))
        assert "give ids" in session.why_not["cache"]
        session.step(next(iter(torch.utils.data.DataLoader(with_ids(samples(Residual)), batch_size=5))))
        assert "cache" not in session.why_not


@pytest.mark.parametrize(("engine", "cached"), [("lean", False), ("prefix", True), ("lean+prefix+graphs", False)])
def test_a_hundred_choices_leave_nothing_alive(engine: str, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    alive = []

    def count(session: Session) -> None:
        if session.progress.step % 20 == 19:
            gc.collect()
            alive.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))

    train(Residual, engine, "cpu", 100, cached, every=1, on_step=count)
    assert len(alive) == 5
    assert max(alive[1:]) < alive[0] + 60  # the last few programs and captures are kept; 80 choices came after the first count


@pytest.mark.parametrize("engine", ["plain", "lean", "prefix", "prefix+graphs"])
def test_the_model_is_the_users_own_at_any_moment(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps it evaluates as a plain copy of it does, and hooks see what they would have seen."""
    stand_in(monkeypatch)
    keys, seen, x = list(Residual().state_dict()), [], samples(Residual)[0][0][None]

    def look(session: Session) -> None:
        model, step = session.model, session.progress.step
        assert list(model.state_dict()) == keys
        twin = Residual().double()
        twin.load_state_dict(model.state_dict())
        modes = [module.training for module in model.modules()]
        assert torch.equal(model.eval()(x), twin.eval()(x))
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
        if step == 8:
            model.stem.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
        if step > 9:
            assert len(seen) > 2 * (step - 9)  # once in each step and once above
            assert all(torch.isfinite(out).all() and out.abs().sum() > 0 for out in seen)

    train(Residual, engine, "cpu", 15, False, every=5, on_step=look)
    assert seen


def test_in_the_callers_own_loop_the_prefix_runs_and_graphs_say_why_not() -> None:
    model = Residual().double()
    other = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(one.parameters(), lr=2**-5) for one in (model, other))
    batch = torch.randn(5, 3, 6, 6, dtype=torch.float64), torch.zeros(5, dtype=torch.long)
    with Session(model, optimizer, classify, recipes.only("head*"), engine="prefix+graphs", norm="frozen") as session:
        for _ in range(4):  # the first forward pass is recorded, later ones follow it
            session.before_step(batch)
            twin = copy.deepcopy(model)
            assert "session.step" in session.why_not["graphs"] and session.engine == "prefix"
            optimizer.zero_grad()
            loss = classify(model, batch)
            loss.backward()
            with torch.no_grad():
                for param in twin.parameters():
                    param.zero_()
            torch.testing.assert_close(classify(twin, batch).item(), math.log(4))  # a copy has a forward pass of its own
            optimizer.step()
        assert session._engine._prefix._replayed == 3 and "prefix" not in session.why_not
    assert "forward" not in vars(model)
    with Session(other, plain, classify, recipes.only("head*"), engine="plain", norm="frozen") as session:
        for _ in range(4):
            session.step(batch)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_cache_in_a_loop_of_your_own_blames_the_loop() -> None:
    model = Residual().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
    batch = next(iter(torch.utils.data.DataLoader(with_ids(samples(Residual)), batch_size=5)))
    with Session(model, optimizer, classify, recipes.only("last*", "head*"), cache="4MB") as session:
        session.before_step(batch)
        assert session.why_not == {"cache": "the loop is your own: session.step runs steps that way"}


@pytest.mark.parametrize("saves", [{"time": 0.9}, {"energy": 0.9}])
def test_captured_steps_pay_where_time_or_energy_is_limited(saves: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory alone is limited, it is better spent on training."""
    stand_in(monkeypatch)
    monkeypatch.setattr(Engine, "why_no_capture", None)
    model = Residual()
    engine = Engine(model, classify, torch.optim.SGD(model.parameters(), lr=0.1), Update())
    engine._cuda = True
    for budget, mode in ((Budget(memory=0.5), "lean"), (Budget(memory=0.5, **saves), "lean+prefix+graphs")):
        engine.settle(budget)
        assert str(engine.mode) == mode


def test_a_resumed_run_knows_that_a_capture_failed() -> None:
    """Steps would else be priced and tried as captured ones again."""
    model = Residual().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
    batch = next(iter(torch.utils.data.DataLoader(samples(Residual), batch_size=5)))
    with Session(model, optimizer, classify, recipes.head()) as session:
        session.step(batch)
        session._engine.not_captured = "capture failed: no"
        state = session.state_dict()
    with Session(model, optimizer, classify, recipes.head()) as session:
        session.load_state_dict(state)
        assert session._engine.not_captured == "capture failed: no"
