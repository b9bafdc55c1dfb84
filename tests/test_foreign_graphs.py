"""Backward graphs as other people's models make them: views of strided tensors, random layers, losses that differentiate."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ENGINES as AROUND
from oracle import differences, on_steady_device, snapshot
from test_graphs import Stand
from torch import nn

from pliant import Mode, Part, Policy, Profile, Session, Unit, measure, recipes, score, units
from pliant.engine.cuda_graphs.graphs import Graphs
from pliant.graph.backward import trainable
from pliant.runtime.rng import is_same, rng_states, seed_, set_rng_states
from pliant.runtime.trainable import apply_

Loss = Callable[[nn.Module, Any], torch.Tensor]
ENGINES = ["plain", "lean", "prefix", "lean+prefix"]


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, loss: Loss, batches: Sequence[Any], policy: Policy, engine: str = "plain") -> Session:
    """Steps of a session, each held against plain autograd on the same weights, parameters and random numbers."""
    session = Session(model, sgd(model), policy=policy, loss=loss, engine=engine, steps_per_epoch=2)
    for batch in batches:
        twin, start = copy.deepcopy(model).requires_grad_(True), rng_states()
        value = session.step(batch)
        after = rng_states()
        set_rng_states(start)
        wanted = loss(twin, batch)
        wanted.backward()
        assert torch.equal(torch.get_rng_state(), after["cpu"])
        torch.testing.assert_close(value, wanted.detach())
        theirs = dict(twin.named_parameters())
        for name, param in model.named_parameters():
            mine = param.grad if name in session.selection.params else None
            assert param.grad is mine, f"{name} is not chosen"
            if mine is not None:
                torch.testing.assert_close(mine, theirs[name].grad)
    return session


class Views(nn.Module):
    """Reshapes a strided tensor. Autograd names that otherwise while a graph is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)[..., :16].reshape(-1, 16).reshape(4, 6, 16).mean(1))


class Words(nn.Module):
    """PyTorch's encoder, with its default dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


@pytest.mark.parametrize("make", [Views, Words])
def test_names_of_views_do_not_count(make: Callable[[], nn.Module]) -> None:
    """PyTorch's own encoder, GPT-2, T5, Swin and others could not be timed."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 6, 8)
    profile = measure.timed(model, sgd(model), mean_square, x, repeats=1)
    assert profile.full.seconds >= profile.base.seconds > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [Views, Words])
def test_engines_agree_on_views(make: Callable[[], nn.Module], engine: str) -> None:
    torch.manual_seed(0)
    model = make().double()
    batches = [torch.randn(4, 6, 8, dtype=torch.float64) for _ in range(3)]
    train(model, mean_square, batches, on_steady_device(recipes.pliant(time=0.7)), engine)


# ---------------------------------------------------------------- losses that differentiate


def with_penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A penalty on the slope, as WGAN-GP and others have it."""
    x = batch.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + slope.square().sum(-1).mean()


def after_one_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss after a step of its own: meta-learning differentiates with respect to parameters."""
    params = dict(model.named_parameters())
    inner = torch.func.functional_call(model, params, (batch[:2],)).square().mean()
    slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    moved = {name: param - 0.1 * slope for (name, param), slope in zip(params.items(), slopes, strict=True)}
    return (torch.func.functional_call(model, moved, (batch[2:],)) - 1).square().mean()


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()


RECIPES = {
    "pliant": recipes.pliant(time=0.9),
    "elastic_trainer": recipes.elastic_trainer(time=0.9),
    "green_trainer": recipes.green_trainer(macs=0.9),
    "lisa": recipes.lisa(),
    "last": recipes.last(0.9),
    "head": recipes.head(),
    "full": recipes.full(),
}


@pytest.mark.parametrize("loss", [with_penalty, after_one_step])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loss_may_differentiate(recipe: str, loss: Loss) -> None:
    batches = [torch.randn(6, 8, dtype=torch.float64) for _ in range(3)]
    train(smooth(), loss, batches, on_steady_device(RECIPES[recipe]))


@pytest.mark.parametrize("memory_is_short", [False, True])
@pytest.mark.parametrize("loss", [with_penalty, after_one_step])
def test_a_loss_that_differentiates_is_timed(loss: Loss, memory_is_short: bool) -> None:
    """Every recipe that measures time ended in an error."""
    model, x = smooth(), torch.randn(6, 8, dtype=torch.float64)
    cost = measure.sparing(measure.timed) if memory_is_short else measure.timed
    before = snapshot(model)
    profile = cost(model, sgd(model), loss, x, repeats=1)
    assert profile.full.seconds >= profile.base.seconds > 0 and profile.inference > 0
    assert profile.head == ("4.bias", "4.weight")
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", [with_penalty, after_one_step])
def test_engines_agree_where_a_loss_differentiates(loss: Loss, engine: str) -> None:
    batches = [torch.randn(6, 8, dtype=torch.float64) for _ in range(3)]
    session = train(smooth(), loss, batches, on_steady_device(recipes.pliant(time=0.8)), engine)
    assert 0 < len(session.selection.params) < 6
    assert ("lean" in session.why_not) == ("lean" in engine)


def test_channels_are_refused_where_a_loss_differentiates() -> None:
    model = smooth()
    session = Session(model, sgd(model), policy=recipes.tinytrain(memory=0.9, macs=0.9), loss=with_penalty)
    with pytest.raises(ValueError, match=r"loss differentiates.*units\.layers"):
        session.step(torch.randn(6, 8, dtype=torch.float64))


def test_parameters_that_the_loss_differentiates_cannot_be_left_to_backward() -> None:
    model = smooth()
    session = Session(model, sgd(model), policy=recipes.head(), loss=after_one_step)
    with pytest.raises(ValueError, match=r"Use session\.step"):
        session.before_step(torch.randn(6, 8, dtype=torch.float64))


# ---------------------------------------------------------------- inputs that require a gradient


class Listens(nn.Module):
    """Makes its input require a gradient, as the feature extractor of wav2vec 2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        x.requires_grad = True
        return self.head(self.layers(x))


class Prepared(nn.Module):
    """Frozen embeddings whose output is made to require a gradient, as peft's `enable_input_require_grads` does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.embed.register_forward_hook(lambda _, __, out: out.requires_grad_(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embed(x) + 1)


def input_gradients(model: nn.Module, session: Session, batch: torch.Tensor) -> int:
    """How many linear layers receive their input gradient in the next step."""
    received: list[torch.Tensor] = []

    def watch(module: nn.Module, given: Any) -> None:
        if given[0].requires_grad:
            given[0].register_hook(received.append)

    hooks = [module.register_forward_pre_hook(watch) for module in model.modules() if isinstance(module, nn.Linear)]
    session.step(batch)
    for hook in hooks:
        hook.remove()
    return len(received)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [Listens, Prepared])
def test_engines_agree_on_inputs_that_require_a_gradient(make: Callable[[], nn.Module], engine: str) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(6, 8, dtype=torch.float64) for _ in range(3)]
    train(make().double(), mean_square, batches, on_steady_device(recipes.pliant(time=0.7)), engine)


@pytest.mark.parametrize("make", [Listens, Prepared])
def test_backward_does_not_run_to_the_input(make: Callable[[], nn.Module]) -> None:
    """It cost 0.73 of a full step where 0.47 was predicted."""
    model, x = make(), torch.randn(6, 8)
    session = Session(model, sgd(model), policy=recipes.head(), loss=mean_square, engine="plain")
    session.step(x)
    assert input_gradients(model, session, x) == 0
    assert "input gradients" in session.why_not


@pytest.mark.parametrize("engine", ["plain", "lean"])
def test_what_an_input_that_requires_a_gradient_keeps_is_priced(engine: str) -> None:
    """The forward pass keeps for it what no choice needs."""
    torch.manual_seed(0)
    model, x = Listens(), torch.randn(2000, 8)
    profile = measure.timed(model, sgd(model), mean_square, x, repeats=1).on(Mode(lean=engine == "lean"))
    among = trainable(model)
    for chosen in (["head.bias"], ["head.weight", "layers.2.0.weight"], list(among)):
        apply_(among, sgd(model), chosen)
        peak, alone = measure.peak_bytes(model, sgd(model), mean_square, x, around=AROUND[engine])
        predicted = profile.cost([Unit("*", tuple(Part(name) for name in chosen))]).bytes
        assert predicted == pytest.approx(peak - alone, rel=0.03), chosen


def test_a_batch_that_requires_a_gradient_gets_none() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(6, 8, requires_grad=True)
    session = Session(model, sgd(model), policy=recipes.full(), loss=mean_square)
    session.step(x)
    assert x.grad is None and "your own loop" in session.why_not["input gradients"]
    session.before_step(x)
    mean_square(model, x).backward()
    assert x.grad is not None


def test_what_is_no_parameter_of_the_model_still_trains() -> None:
    """A loss may have parameters of its own; an optimizer may hold tensors that are no parameters."""
    model, scale, shift = nn.Linear(8, 3), nn.Parameter(torch.ones(())), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), shift], lr=0.1)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (scale * model(x.clone().requires_grad_()) + shift).square().mean()

    Session(model, optimizer, policy=recipes.full(), loss=loss).step(torch.randn(6, 8))
    assert scale.grad is not None and shift.grad is not None


def test_the_fisher_potential_of_a_model_whose_input_requires_a_gradient() -> None:
    def values(requires_grad: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        x = torch.randn(6, 8, dtype=torch.float64, requires_grad=requires_grad)
        named = units.layers()(measure.read_graph(model, mean_square, x))
        return list(score.probe(score.fisher(), model, sgd(model), mean_square, x, named).values())

    assert values(True) == values(False) and min(values(True)) > 0


# ---------------------------------------------------------------- random graphs


class Drops(nn.Module):
    """Leaves out layers at random, as wav2vec 2 and Whisper do; `draw` says whether one is left out."""

    def __init__(self, draw: Callable[[], bool]) -> None:
        super().__init__()
        self.first, self.draw, self.head = nn.Linear(8, 8), draw, nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            if not self.draw():
                x = x + layer(x)
        return self.head(x)


DRAWS: dict[str, Callable[[], bool]] = {
    "torch": lambda: bool(torch.rand([]) < 0.4),
    "python": lambda: random.random() < 0.4,
    "numpy": lambda: bool(np.random.uniform() < 0.4),
}
every_draw = pytest.mark.parametrize("draw", DRAWS)


@every_draw
def test_a_random_graph_is_priced_by_its_mean(draw: str) -> None:
    torch.manual_seed(0)
    model, x = Drops(DRAWS[draw]), torch.randn(6, 8)
    graph = measure.read_graph(model, mean_square, x)
    assert len({len(one.nodes) for one in graph.readings}) > 1
    assert len(graph.unused) == min(len(one.unused) for one in graph.readings)
    profile = measure.counted(model, sgd(model), mean_square, x, graph=graph)
    each = [measure.counted(model, sgd(model), mean_square, x, graph=one) for one in graph.readings]
    named = units.layers()(graph)
    for chosen in (named, named[:1], named[1:3], named[-2:]):
        wanted = sum(one.cost(chosen).macs for one in each) / len(each)
        assert profile.cost(chosen).macs == pytest.approx(wanted, abs=len(profile.charges) / 2)
        assert profile.cost(chosen).bytes == each[0].cost(chosen).bytes


@every_draw
def test_a_random_graph_is_timed(draw: str) -> None:
    torch.manual_seed(0)
    model, x = Drops(DRAWS[draw]), torch.randn(6, 8)
    before = rng_states()
    profile = measure.timed(model, sgd(model), mean_square, x, repeats=1)
    assert is_same(before, rng_states())
    assert profile.origin["readings"] > 1 and profile.full.seconds >= profile.base.seconds > 0
    assert Profile.from_json(profile.to_json()) == profile


def test_a_random_graph_whose_loss_differentiates_is_timed() -> None:
    torch.manual_seed(0)
    model, x = Drops(DRAWS["torch"]), torch.randn(6, 8)
    profile = measure.timed(model, sgd(model), with_penalty, x, repeats=1)
    assert profile.origin["readings"] > 1 and profile.origin["differentiates"] == "data"


def test_random_numbers_that_do_not_change_the_graph_change_no_price() -> None:
    torch.manual_seed(0)
    graph = measure.read_graph(Words(), mean_square, torch.randn(4, 6, 8))
    assert not graph.may_vary and not graph.others


SELDOM: dict[str, Callable[[], bool]] = {
    "torch": lambda: bool(torch.rand([]) < 0.003),
    "python": lambda: random.random() < 0.003,
    "numpy": lambda: bool(np.random.uniform() > 0.997),
}


@every_draw
def test_layers_that_are_seldom_left_out_can_be_timed(draw: str) -> None:
    """No reading shows it: every pass that is measured starts from the same random numbers. Nor is it captured."""
    model, x = Drops(SELDOM[draw]), torch.randn(6, 8)
    graph = measure.read_graph(model, mean_square, x)
    assert graph.may_vary and not graph.others
    unlucky = 0
    while seed_(unlucky) or not any(SELDOM[draw]() for _ in model.layers):
        unlucky += 1
    seed_(unlucky)  # the next pass would leave out a layer
    profile = measure.timed(model, sgd(model), mean_square, x, graph=graph, repeats=1)
    assert profile.origin["readings"] == 1


@pytest.mark.parametrize("engine", ENGINES)
@every_draw
def test_engines_agree_on_random_graphs(draw: str, engine: str) -> None:
    torch.manual_seed(0)
    model = Drops(DRAWS[draw]).double()
    batches = [torch.randn(6, 8, dtype=torch.float64) for _ in range(6)]
    session = train(model, mean_square, batches, on_steady_device(recipes.pliant(time=0.8, head_first=0)), engine)
    assert len(session.selection.params) > 2


def test_random_graphs_are_not_captured() -> None:
    """A capture would leave out the same layers in every step."""
    torch.manual_seed(0)
    model = Drops(DRAWS["torch"])
    session = Session(model, sgd(model), policy=on_steady_device(recipes.pliant(time=0.8)), loss=mean_square)
    session.step(torch.randn(6, 8))
    engine = session._engine
    engine._graphs = Graphs(model, mean_square, session.optimizer, Stand(model, session.optimizer))
    assert engine.why_no_capture == "which layers run may be random"


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize(
    ("make", "loss"),
    [(lambda: Drops(DRAWS["torch"]).double(), mean_square), (smooth, after_one_step), (smooth, with_penalty)],
    ids=["random", "parameters", "data"],
)
def test_a_resumed_run_knows_what_was_found(make: Callable[[], nn.Module], loss: Loss, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(6, 8, dtype=torch.float64) for _ in range(4)]
    policy = on_steady_device(recipes.pliant(time=0.9))

    def session() -> Session:
        torch.manual_seed(1)
        model = make()
        return Session(model, sgd(model), policy=policy, loss=loss, engine="lean")

    whole, half, rest = session(), session(), session()
    torch.manual_seed(2)
    losses = [whole.step(batch).item() for batch in batches]
    torch.manual_seed(2)
    first = [half.step(batch).item() for batch in batches[:2]]
    half.save(tmp_path / "state.pt")
    rest.load(tmp_path / "state.pt")
    assert first + [rest.step(batch).item() for batch in batches[2:]] == losses
    assert rest.why_not == whole.why_not


# ---------------------------------------------------------------- found in a review


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    value = mean_square(model, x)
    grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    return value + sum(grad.square().sum() for grad in grads)


def test_lbfgs_moves_only_what_is_chosen_where_nothing_is_frozen() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(5, 4)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with Session(model, torch.optim.LBFGS(model.parameters()), penalised, recipes.head()) as session:
        session.step(x)
        chosen = session.selection.params
    assert {name for name, param in model.named_parameters() if not torch.equal(param, before[name])} <= chosen


def test_a_given_profile_does_not_hide_that_the_loss_differentiates() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(5, 4)
    profile = measure.timed(model, sgd(model), mean_square, x, repeats=1)
    with Session(model, sgd(model), penalised, recipes.head(), profile=profile) as session:
        session.step(x)
        assert session.profile.origin["differentiates"] == "parameters"


def test_a_parameter_of_the_loss_may_come_later() -> None:
    torch.manual_seed(0)
    model, x, weight = nn.Linear(4, 2), torch.randn(5, 4, requires_grad=True), nn.Parameter(torch.zeros(()))
    steps = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = mean_square(model, x)
        return value - weight if len(steps) > 1 else value

    optimizer = torch.optim.SGD([*model.parameters(), weight], 0.1)
    with Session(model, optimizer, loss, recipes.full()) as session:
        for _ in range(4):
            session.step(x)
            steps.append(1)
    assert float(weight.detach()) > 0
