"""Parts that torch.compile has compiled, or torch.jit has scripted: they run as such in plain steps, and after a session."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from pliant import Budget, Policy, Session, measure, recipes, score, units
from pliant.engine import compiled_parts
from pliant.runtime.compiled import eager, notices_frozen_parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # dynamo reads it
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # so dynamo's own imports, and what is tested here
]

STALE = {"compile": "compiled code of this PyTorch does not notice what is frozen: use a later version"}

KINDS = ("attribute", "in place", "all in place", "whole", "function in the loss", "loss")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def stays_compiled() -> None:
    """PyTorch 2.11 would go on with the gradients of another selection, so that its compiled code runs eagerly in a session."""
    if not notices_frozen_parameters():
        pytest.skip(STALE["compile"])


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Body(), nn.Linear(8, 3)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(5, 6, generator=numbers, dtype=torch.float64), torch.randint(0, 3, (5,), generator=numbers)


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def counting(runs: Counter[str]) -> Callable[..., Any]:
    """A backend that compiles nothing, and counts its graphs and their runs."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        runs["graphs"] += 1

        def run(*args: Any) -> Any:
            runs["runs"] += 1
            return graph.forward(*args)

        return run

    return backend


def compiled(kind: str, backend: Any) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    model, loss = net(), plain_loss
    if kind == "attribute":
        model[1] = torch.compile(model[1], backend=backend)
    elif kind == "in place":
        model[1].compile(backend=backend)
    elif kind == "all in place":
        model = Wrapped(model)  # PyTorch does not compile an nn.Sequential in place
        model.compile(backend=backend)
    elif kind == "whole":
        model = torch.compile(model, backend=backend)
    elif kind == "function in the loss":
        entropy = torch.compile(nn.functional.cross_entropy, backend=backend)

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return entropy(model(batch[0]), batch[1])

    else:
        loss = torch.compile(plain_loss, backend=backend)
    return model, loss


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def by_turns(steps: int = 2, **more: Any) -> Policy:
    """A layer at a time, with all that is measured and probed for other recipes."""
    return replace(recipes.badam(steps), units=units.layers(), signal=score.update_gain(), cost=measure.timed, **more)


def train(model: nn.Module, loss: Any, steps: int, policy: Policy, **how: Any) -> Session:
    """A session after some steps, still open."""
    session = Session(model, torch.optim.SGD(model.parameters(), 0.1), loss, policy, **how)
    for _ in range(steps):
        session.step(batch())
    return session


@pytest.mark.usefixtures("stays_compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_plain_steps_run_compiled_graphs_and_so_does_the_model_afterwards(kind: str) -> None:
    runs: Counter[str] = Counter()
    model, loss = compiled(kind, counting(runs))
    session = train(model, loss, 4, by_turns(), engine="plain")
    assert runs["runs"] == 4, "one graph per step; measuring and probing run none"
    assert "compile" not in session.why_not
    session.close()
    loss(model, batch()).backward()
    assert runs["runs"] == 5
    assert runs["graphs"] <= 3, "one for each selection, and one for everything"


@pytest.mark.parametrize(("kind", "engine"), [("attribute", "lean"), ("all in place", "prefix"), ("loss", "lean+prefix")])
def test_other_engines_keep_dynamo_out_and_say_so(kind: str, engine: str) -> None:
    runs: Counter[str] = Counter()
    model, loss = compiled(kind, counting(runs))
    session = train(model, loss, 6, by_turns(), engine=engine)
    assert not runs
    assert session.why_not["compile"] == f"compiled code runs eagerly in {engine} steps: use engine='plain'"
    session.close()
    loss(model, batch()).backward()
    assert runs == {"graphs": 1, "runs": 1}


@pytest.mark.usefixtures("stays_compiled")
def test_a_memory_limit_leaves_compiled_parts_compiled() -> None:
    runs: Counter[str] = Counter()
    model, loss = compiled("attribute", counting(runs))
    policy = replace(by_turns(1), budget=Budget(memory="1MB"))
    train(model, loss, 4, policy, engine="plain")
    assert runs["runs"] == 0, "every step was the first of a selection, whose bytes are measured"
    session = train(model, loss, 4, replace(policy, when=by_turns(4).when), engine="plain")
    assert runs["runs"] == 3
    session.close()


@pytest.mark.parametrize(("kind", "limit"), [("attribute", 1), ("attribute", 8)])
def test_compiled_gradients_follow_the_selection(kind: str, limit: int) -> None:
    """Also after PyTorch stops to compile for further selections."""
    runs: Counter[str] = Counter()
    backend = counting(runs)
    boxed = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(backend(graph, inputs)))
    model, loss = compiled(kind, boxed)
    reference = net()
    plain = train(reference, plain_loss, 0, by_turns(1), engine="plain")
    with torch._dynamo.config.patch(recompile_limit=limit):
        session = train(model, loss, 0, by_turns(1), engine="plain")
        for _ in range(3):
            torch.testing.assert_close(session.step(batch()), plain.step(batch()), rtol=1e-12, atol=1e-12)
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        said = "each selection is compiled anew, at most 1 of them: raise torch._dynamo.config.recompile_limit"
        known = {"compile": said} if limit == 1 else {}
        assert session.why_not == (known if notices_frozen_parameters() else STALE)
    assert bool(runs["runs"]) == notices_frozen_parameters()
    session.close()


@pytest.mark.parametrize("own_loop", [False, True])
def test_compiled_code_that_does_not_notice_flags_runs_eagerly(own_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of PyTorch 2.11, which would go on with the gradients of another selection."""
    monkeypatch.setattr(compiled_parts, "notices_frozen_parameters", lambda: False)
    runs: Counter[str] = Counter()
    model, loss = compiled("attribute", counting(runs))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, loss, by_turns(1), engine="plain") as session:
        for _ in range(3):
            if own_loop:
                session.before_step(batch())
                optimizer.zero_grad()
                loss(model, batch()).backward()
                optimizer.step()
            else:
                session.step(batch())
        assert session.why_not == STALE and not runs["runs"]
    loss(model, batch())
    assert runs["runs"] == 1


def test_a_loop_of_your_own_with_hooks_runs_eagerly() -> None:
    """A model compiled in place has the hooks of the lean engine in what is compiled."""
    runs: Counter[str] = Counter()
    model, loss = compiled("all in place", counting(runs))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, optimizer, loss, by_turns(), engine="lean") as session:
        for _ in range(3):
            session.before_step(batch())
            optimizer.zero_grad()
            loss(model, batch()).backward()
            optimizer.step()
        assert not runs
    loss(model, batch()).backward()
    assert runs["runs"] == 1


@pytest.mark.usefixtures("stays_compiled")
def test_compiled_code_may_take_steps() -> None:
    """Dynamo does not look into the library; what is compiled of the model stays so."""
    runs: Counter[str] = Counter()
    model, loss = compiled("attribute", counting(runs))
    session = train(model, loss, 0, by_turns(), engine="plain")
    step = torch.compile(lambda batch: session.step(batch), backend=counting(Counter()))
    for _ in range(3):
        step(batch())
    assert runs["runs"] == 3
    session.close()


def test_to_look_whether_flags_are_noticed_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.runtime.compiled._notices", None)
    state = torch.get_rng_state()
    known = notices_frozen_parameters()
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr("pliant.runtime.compiled._notices", None)
    with torch.no_grad():
        assert notices_frozen_parameters() == known


def test_threads_that_end_in_another_order_leave_compiled_code_compiled() -> None:
    runs: Counter[str] = Counter()
    square = torch.compile(lambda x: x * x, backend=counting(runs))
    first, second = eager(), eager()
    with first:
        thread = threading.Thread(target=second.__enter__)
        thread.start()
        thread.join()
    square(torch.ones(2))
    assert not runs
    second.__exit__(None, None, None)
    square(torch.ones(2))
    assert runs["runs"] == 1


# ------------------------------------------------------------ TorchScript


def scripted(kind: str) -> nn.Module:
    model = net()
    with warnings.catch_warnings():  # torch.jit is deprecated
        warnings.simplefilter("ignore")
        if kind == "traced":
            model[1] = torch.jit.trace(model[1], torch.randn(2, 8, dtype=torch.float64))
        elif kind == "scripted":
            model[1] = torch.jit.script(model[1])
        else:
            model = torch.jit.script(model)
    return model


@pytest.mark.parametrize("engine", ["plain", "lean", "prefix"])
@pytest.mark.parametrize("kind", ["scripted", "traced", "all scripted"])
def test_scripted_parts_train_like_others(kind: str, engine: str) -> None:
    model, reference = scripted(kind), net()
    session = train(model, plain_loss, 0, by_turns(1), engine=engine)
    plain = train(reference, plain_loss, 0, by_turns(1), engine="plain")
    for _ in range(4):
        torch.testing.assert_close(session.step(batch()), plain.step(batch()), rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    said = {"lean": "scripted modules keep what plain autograd keeps"} if engine == "lean" else {}
    assert {name: why for name, why in session.why_not.items() if name == "lean"} == said
    session.close()


@pytest.mark.parametrize("kind", ["scripted", "traced", "all scripted"])
def test_costs_of_scripted_parts_do_not_depend_on_passes_before(kind: str) -> None:
    """TorchScript joins operations after a few passes, and a joined one hides what is in it."""
    costs = []
    for passes in (0, 1, 3):
        model = scripted(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(passes):
            plain_loss(model, batch()).backward()
        optimizer.zero_grad()
        for _ in range(2):
            with Session(model, optimizer, plain_loss, recipes.pliant(macs=1.0, head_first=0)) as session:
                session.step(batch())
                costs.append(session.profile.full.macs)
    assert len(set(costs)) == 1


def test_buffers_of_scripted_parts_are_put_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1
            return x

    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.insert(0, torch.jit.script(Counts()))
    train(model, plain_loss, 2, by_turns(1), engine="plain").close()
    assert model[0].seen == 2


def test_a_scripted_model_in_a_loop_of_your_own() -> None:
    """It takes no hooks, so that its steps are plain."""
    model = scripted("all scripted")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, optimizer, plain_loss, by_turns(), engine="lean") as session:
        session.before_step(batch())
        plain_loss(model, batch()).backward()
        optimizer.step()
        assert session.engine == "plain"
        assert session.progress.step == 1
