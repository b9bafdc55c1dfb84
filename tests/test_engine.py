"""Engines in a session: every way to run a step trains alike, keeps what it says that it keeps, and leaves nothing behind."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import ENGINES, differences, on_steady_device, plain_step, snapshot, steady
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from zoo import ZOO, Case, adamw, sgd

from pliant import Budget, BudgetError, Mode, Part, Policy, Session, Unit, measure, recipes, schedule, score, solve, units
from pliant.engine import modes
from pliant.engine.slices.slices import Slices
from pliant.graph.backward import read, trainable
from pliant.runtime.batchnorm import BatchNormModes
from pliant.runtime.memory import LiveBytes
from pliant.runtime.trainable import apply_

Batch = tuple[torch.Tensor, torch.Tensor]
OFTEN = schedule.every(steps=3)

# Recipes that need no clock.
RECIPES: dict[str, Callable[[], Policy]] = {
    "full": recipes.full,
    "head": recipes.head,
    "bias": recipes.bias,
    "norm": recipes.norm,
    "only": lambda: recipes.only("*w*"),
    "random": lambda: on_steady_device(replace(recipes.random(when=OFTEN), budget=Budget(macs=0.9))),
    "green_trainer": lambda: recipes.green_trainer(macs=0.9, when=OFTEN),
}
AT_REST = ("conv_net", "branches")  # models with batch norms, whose backward pass at rest is written out
ROWS = [(recipe, model) for recipe in RECIPES for model in ZOO if (recipe, model) != ("bias", "functional")]


def stream_of(case: Case, count: int = 4) -> list[Any]:
    torch.manual_seed(100)
    return [case.batch() for _ in range(count)]


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Every hook on the model and its optimizer, every mode, every hook on what is kept, and who stands in the groups."""
    modules = [[len(v) for k, v in sorted(vars(module).items()) if k.endswith("hooks")] for module in model.modules()]
    steps = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    groups = [id(param) for group in optimizer.param_groups for param in group["params"]]
    packing = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return [modules, steps, groups, len(_get_current_function_mode_stack()), packing]


def flags_of(model: nn.Module) -> list[Any]:
    return [[param.requires_grad for param in model.parameters()], [module.training for module in model.modules()]]


def alike(a: Any, b: Any) -> None:
    """The same up to rounding."""
    for kind in ("weights", "buffers", "optimizer"):
        torch.testing.assert_close(a[kind], b[kind], rtol=1e-4, atol=1e-5, equal_nan=True)


# ---------------------------------------------------------------- engines train alike


def run(case: Case, policy: Policy, make_optimizer: Callable[..., Any], engine: str, steps: int = 20) -> tuple[Any, Any]:
    """What a model, its optimizer and the choices are after some steps."""
    model, loss, _ = case.make()
    optimizer = make_optimizer(model)
    stream, chosen = stream_of(case), []
    found, hooks = flags_of(model), hooks_of(model, optimizer)
    torch.manual_seed(7)
    with Session(model, optimizer, loss, policy, engine=engine) as session:
        for k in range(steps):
            session.step(stream[k % 4])
            chosen.append(session.selection.params)
        assert session.engine == engine
    assert flags_of(model) == found
    assert hooks_of(model, optimizer) == hooks
    return snapshot(model, optimizer), chosen


@pytest.mark.parametrize(("recipe", "model_name"), ROWS, ids=[f"{r}-{m}" for r, m in ROWS])
def test_law_8_lean_steps_are_plain_steps(recipe: str, model_name: str) -> None:
    make_optimizer = (sgd, adamw)[(list(RECIPES).index(recipe) + list(ZOO).index(model_name)) % 2]
    steps = 20 if recipe in ("random", "green_trainer") else 8  # the others choose once
    (plain, first), (lean, second) = (
        run(ZOO[model_name], RECIPES[recipe](), make_optimizer, engine, steps) for engine in ("plain", "lean")
    )
    if model_name not in AT_REST or recipe == "full":
        assert first == second
        assert differences(plain, lean) == []
    elif first == second:  # what rounding did to a gradient may decide a draw between two choices
        alike(plain, lean)
    if recipe in ("random", "green_trainer") and model_name in ("transformer", "misordered", "branches"):
        assert len(set(second)) > 1, "the choice did change"


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("model_name", ZOO)
def test_law_8_full_under_lean_is_plain_pytorch(model_name: str, make_optimizer: Callable[..., Any]) -> None:
    case = ZOO[model_name]
    model, loss, _ = case.make()
    optimizer, stream = make_optimizer(model), stream_of(case)
    torch.manual_seed(7)
    for k in range(8):
        plain_step(model, optimizer, loss, stream[k % 4])
    lean, _ = run(case, recipes.full(), make_optimizer, "lean", steps=8)
    assert differences(snapshot(model, optimizer), lean) == []


# ---------------------------------------------------------------- the caller's own loop


def channel_policy(axis: Any = "out", budget: float = 0.75, **changes: Any) -> Policy:
    words = (units.channels(axis, group=2), score.grad_norm(), measure.counted, solve.knapsack(), schedule.every(steps=5))
    return replace(Policy(*words, Budget(macs=budget)), **changes)


def conv() -> nn.Module:
    """Convolutions with and without groups, no norm: slices train along either axis."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 12), nn.ReLU(), *layers, nn.Linear(12, 4))


BUILD = {"conv": conv, "mlp": mlp}


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def data(count: int = 6, size: int = 4) -> list[Batch]:
    draw = torch.Generator().manual_seed(4)
    return [(torch.randn(size, 3, 6, 6, generator=draw), torch.randint(0, 4, (size,), generator=draw)) for _ in range(count)]


def make(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return BUILD[kind]()


def own_step(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Any = classify) -> Any:
    session.before_step(batch)
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return value.detach()


def begun_twice() -> Any:
    """A step begins though the last one never came: that is said once."""
    return pytest.warns(UserWarning, match="before_step was called twice")


WAYS = [("lean", None), ("lean", "out"), ("lean", "in"), ("plain", "out"), ("plain", "in")]
ways = pytest.mark.parametrize(("engine", "axis"), WAYS, ids=[f"{e}, {a or 'whole'}" for e, a in WAYS])


def policy_of(axis: str | None) -> Policy:
    return channel_policy(axis) if axis else recipes.green_trainer(macs=0.7, when=schedule.every(steps=5))


@ways
@pytest.mark.parametrize("kind", BUILD)
def test_the_callers_own_loop_trains_as_step_does(kind: str, engine: str, axis: str | None) -> None:
    ends, losses = [], []
    for own in (True, False):
        model = make(kind)
        optimizer = adamw(model)
        with Session(model, optimizer, classify, policy_of(axis), engine=engine) as session:
            found = hooks_of(model, optimizer)
            values = []
            for batch in data(12):
                values.append(own_step(session, model, optimizer, batch) if own else session.step(batch))
                assert hooks_of(model, optimizer) == found, "after each step nothing hangs on the model"
                assert axis is None or session.state_dict()["slices"]
            assert session.progress.step == 12
            ends.append({**snapshot(model, optimizer), "grads": None, "slices": session.state_dict()["slices"]})
        losses.append(torch.stack(values))
    assert torch.equal(*losses)
    assert differences(*ends) == []


@ways
def test_a_callers_step_may_gather_several_batches(engine: str, axis: str | None) -> None:
    ends = []
    for own in (True, False):
        model = make("conv")
        optimizer = sgd(model)
        with Session(model, optimizer, classify, policy_of(axis), engine=engine, accumulate=1 if own else 2) as session:
            stream = data(8)
            for a, b in zip(stream[::2], stream[1::2], strict=True):
                if own:
                    session.before_step(a)
                    optimizer.zero_grad()
                    for batch in (a, b):
                        (classify(model, batch) / 2).backward()
                    optimizer.step()
                else:
                    session.step(a), session.step(b)
        ends.append(snapshot(model, optimizer)["weights"])
    assert differences(*ends) == []


@ways
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_callers_forward_that_raises_leaves_nothing_behind(engine: str, axis: str | None, error: type[BaseException]) -> None:
    model = make("conv")
    optimizer = adamw(model)
    found, hooks, broken = flags_of(model), hooks_of(model, optimizer), [False]

    def fail(*_: Any) -> None:
        if broken[0]:
            raise error

    model[5].register_forward_pre_hook(fail)
    hooks = hooks_of(model, optimizer)
    with Session(model, optimizer, classify, policy_of(axis), engine=engine) as session:
        session.step(data()[0])
        between = hooks_of(model, optimizer)
        session.before_step(data()[1])
        broken[0] = True
        with pytest.raises(error):
            classify(model, data()[1]).backward()
        broken[0] = False
        if error is ZeroDivisionError:
            assert hooks_of(model, optimizer)[2:] == between[2:], "modes and groups at once"
        with begun_twice():
            own_step(session, model, optimizer, data()[2])  # and one may go on
        assert hooks_of(model, optimizer) == between
        session.before_step(data()[1])
        broken[0] = True
        with pytest.raises(error):
            classify(model, data()[1]).backward()
    assert hooks_of(model, optimizer) == hooks
    assert flags_of(model) == found


@ways
def test_a_callers_optimizer_that_raises_leaves_nothing_behind(engine: str, axis: str | None) -> None:
    model = make("conv")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, hooks = flags_of(model), hooks_of(model, optimizer)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with Session(model, optimizer, classify, policy_of(axis), engine=engine) as session:
        session.before_step(data()[0])
        handle = optimizer.register_step_pre_hook(fail)
        classify(model, data()[0]).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        handle.remove()
    assert hooks_of(model, optimizer) == hooks
    assert flags_of(model) == found


@ways
def test_a_step_that_never_comes_leaves_nothing_behind(engine: str, axis: str | None) -> None:
    ends = []
    for skips in (True, False):
        model = make("mlp")
        optimizer = adamw(model)
        found, hooks = flags_of(model), hooks_of(model, optimizer)
        policy = replace(policy_of(axis), when=schedule.once())
        with Session(model, optimizer, classify, policy, engine=engine) as session:
            own_step(session, model, optimizer, data()[0])
            if skips:
                session.before_step(data()[1])
                classify(model, data()[1]).backward()
            with begun_twice() if skips else nullcontext():
                own_step(session, model, optimizer, data()[2])
            if skips:
                session.before_step(data()[3])
        assert flags_of(model) == found
        assert hooks_of(model, optimizer) == hooks
        ends.append(snapshot(model, optimizer)["weights"])
    assert differences(*ends) == [], "gradients of the step that did not come do not count"


@ways
def test_evaluation_between_and_within_steps_is_untouched(engine: str, axis: str | None) -> None:
    model = make("conv")
    optimizer, images = adamw(model), data()[5][0]
    with Session(model, optimizer, classify, policy_of(axis), engine=engine) as session:
        for k, batch in enumerate(data(4)):
            twin = make("conv")
            twin.load_state_dict(model.state_dict())
            if k % 2:
                session.before_step(batch)
            with torch.no_grad():
                assert torch.equal(model.eval()(images), twin.eval()(images))
            with torch.inference_mode():
                assert torch.equal(model(images), twin(images))
            model.train()
            if not k % 2:
                session.before_step(batch)
            classify(model, batch).backward()
            optimizer.step()
        assert session.progress.step == 4


@ways
def test_a_copy_of_the_model_has_no_tie_to_the_session(engine: str, axis: str | None) -> None:
    model = make("conv")
    optimizer, ends = adamw(model), []
    with Session(model, optimizer, classify, policy_of(axis), engine=engine) as session:
        own_step(session, model, optimizer, data()[0])
        session.before_step(data()[1])
        twin = copy.deepcopy(model)
        before = snapshot(model)["weights"]
        twin.requires_grad_()
        modes: list[int] = []
        counting = twin.register_forward_pre_hook(lambda *_: modes.append(torch._C._len_torch_function_stack()))
        twin_value = classify(twin, data()[1])
        counting.remove()
        assert modes == [0], "the copy runs in plain autograd"
        twin_value.backward()
        plain_step(twin, adamw(twin), classify, data()[1])
        assert differences(before, snapshot(model)["weights"]) == []
        fresh = make("conv")
        fresh.load_state_dict(before)
        plain_step(fresh, adamw(fresh), classify, data()[1])
        assert differences(snapshot(fresh)["weights"], snapshot(twin)["weights"]) == []
        optimizer.zero_grad()
        classify(model, data()[1]).backward()
        optimizer.step()
        ends.append(session.progress.step)
    assert ends == [2]


# ---------------------------------------------------------------- which engine


@pytest.mark.parametrize(
    ("engine", "how", "mode"),
    [
        ("auto", {}, "plain"),
        ("auto", {"custom_kernels": True}, "prefix"),
        ("auto", {"runtime": True}, "prefix"),
        ("auto", {"runtime": True, "memory_is_limited": True}, "lean"),
        ("auto", {"caches": True}, "prefix, cache"),
        ("auto", {"memory_is_limited": True}, "lean"),
        ("auto", {"memory_is_limited": True, "caches": True}, "lean+prefix, cache"),
        ("auto", {"cuda": True}, "prefix+graphs"),
        ("auto", {"cuda": True, "caches": True}, "prefix+graphs, cache"),
        ("auto", {"cuda": True, "captures": False}, "plain"),
        ("auto", {"cuda": True, "memory_is_limited": True}, "lean+prefix+graphs"),
        ("auto", {"cuda": True, "memory_is_limited": True, "captures": False}, "lean"),
        ("auto-graphs", {"cuda": True}, "plain"),
        ("auto-prefix", {"cuda": True, "caches": True}, "graphs"),
        ("auto-lean", {"memory_is_limited": True}, "plain"),
        ("plain", {"cuda": True, "caches": True}, "plain"),
        ("lean+prefix", {"caches": True}, "lean+prefix, cache"),
        ("prefix+graphs", {"cuda": True, "captures": False}, "prefix"),
    ],
)
def test_one_rule_picks_the_mode(engine: str, how: dict[str, bool], mode: str) -> None:
    assert str(modes.pick(modes.parse(engine), **how)) == mode


@pytest.mark.parametrize("engine", ["fast", "lean+lean", "auto-fast", "plain+lean", ""])
def test_an_engine_that_is_not_there_is_refused(engine: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        modes.parse(engine)


def memory_policy(memory: Any, **changes: Any) -> Policy:
    words = (units.tensors(), score.grad_norm(), steady, solve.knapsack(), schedule.every(steps=4))
    return replace(Policy(*words, Budget(memory=memory)), **changes)


@pytest.mark.parametrize("before_the_first_step", [True, False])
def test_the_engine_follows_the_budget(before_the_first_step: bool) -> None:
    model = make("conv")
    with Session(model, adamw(model), classify, memory_policy(None)) as session:
        for memory, engine in ((None, "plain"), (0.8, "lean"), (None, "plain"), ("64KB", "lean")):
            if not before_the_first_step:
                session.step(data()[0])
            session.budget = Budget(memory=memory)
            assert session.engine == engine
            session.step(data()[1])
            assert session.profile.mode.lean == (engine == "lean")
            assert session.selection.cost == session.profile.cost(session.selection.units)
            before_the_first_step = False


def test_an_engine_that_was_asked_for_stays() -> None:
    for engine in ENGINES:
        model = make("conv")
        with Session(model, adamw(model), classify, memory_policy(0.9), engine=engine) as session:
            session.step(data()[0])
            session.budget = Budget(macs=0.9)
            session.step(data()[1])
            assert session.engine == engine and session.profile.mode.lean == (engine == "lean")


def test_a_full_step_is_a_plain_one_for_every_engine() -> None:
    fulls = []
    for engine in ENGINES:
        model = make("conv")
        with Session(model, adamw(model), classify, memory_policy(0.9), engine=engine) as session:
            session.step(data()[0])
            fulls.append(session.profile.full)
    assert fulls[0] == fulls[1]


def test_the_engine_of_a_resumed_run_is_that_of_its_budget(tmp_path: Path) -> None:
    model = make("conv")
    with Session(model, adamw(model), classify, memory_policy(None)) as session:
        session.step(data()[0])
        session.budget = Budget(memory=0.8)
        session.step(data()[1])
        session.save(tmp_path / "run.pt")
    for asked, engine in (("auto", "lean"), ("plain", "plain")):
        model = make("conv", 3)
        with Session(model, adamw(model), classify, memory_policy(None), engine=asked) as session:
            session.load(tmp_path / "run.pt")
            assert session.engine == engine and session.profile.mode.lean == (engine == "lean")
            session.step(data()[2])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("own", [True, False])
def test_what_is_not_lean_is_told_once(tmp_path: Path, own: bool) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return torch.logsumexp(torch.cumprod(model(batch[0]).sigmoid(), 1), 1).mean()

    class Odd(nn.Module):
        """Cycles through functions that have no rule."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(108, 120), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.layer(x.flatten(1))
            return torch.cumprod(x, 1) if self.calls % 2 else torch.cosh(x)

    model = Odd()
    optimizer = sgd(model)
    with Session(model, optimizer, loss, recipes.full(), engine="lean", log=tmp_path / "run.jsonl") as session:
        for batch in data(6):
            own_step(session, model, optimizer, batch, loss) if own else session.step(batch)
    notes = [line["text"] for line in lines(tmp_path / "run.jsonl") if line["event"] == "note"]
    assert notes
    assert all(note.startswith("not lean: ") for note in notes)
    told = [name for note in notes for name in note.removeprefix("not lean: ").split(" keep")[0].split(", ")]
    assert {"cosh", "cumprod"} <= set(told)
    assert len(told) == len(set(told)), "each is told once"
    plain = make("conv")
    with Session(plain, sgd(plain), classify, recipes.full(), engine="lean", log=tmp_path / "plain.jsonl") as session:
        session.step(data()[0])
    assert not [line for line in lines(tmp_path / "plain.jsonl") if line["event"] == "note"]


# ---------------------------------------------------------------- what is kept is what was predicted


def many(batch: Any, times: int = 40) -> Any:
    """The same batch several times over, so that activations outweigh everything else."""
    if isinstance(batch, torch.Tensor):
        return batch.repeat(times, *[1] * (batch.dim() - 1))
    if isinstance(batch, dict):
        return {key: many(value, times) for key, value in batch.items()}
    if is_dataclass(batch):
        return type(batch)(*(many(getattr(batch, f.name), times) for f in fields(batch)))
    return tuple(many(value, times) for value in batch)


def some_choices(model: nn.Module, case: Case, count: int = 6) -> Iterator[list[str]]:
    names, draw = [name for name in trainable(model) if name not in case.unused], random.Random(case.name)
    yield names
    yield list(case.head)
    for _ in range(count):
        some = draw.sample(names, draw.randint(1, len(names)))
        yield [name for name in names if name in some]


def whole(names: list[str]) -> list[Unit]:
    return [Unit(name, (Part(name),)) for name in names]


# Where prediction and measurement differ by more than two parts in a hundred, by how much at most, and why.
KEPT_BEYOND = {
    "conv_net": 0.05,  # over: on the CPU, dropout's own factors are taken for whole numbers in place of bits
}
# How much of a measured peak may be missing in the predicted one.
PEAKS_BELOW = {"two_inputs": 0.02}  # the loss itself is not counted during the backward pass, and mse_loss leaves a large one


@pytest.mark.parametrize("case", [case for name, case in ZOO.items() if name != "checkpointed"])
def test_the_lean_engine_keeps_what_was_predicted(case: Case) -> None:
    model, loss, batch = case.make()
    batch = many(batch)
    optimizer, among, norms = sgd(model), trainable(model), BatchNormModes(model, "chosen")
    profile = measure.counted(model, optimizer, loss, batch).on(Mode(lean=True))
    for chosen in [*some_choices(model, case)]:
        apply_(among, optimizer, chosen)
        norms.hold_(among, chosen)
        kept = measure.kept_bytes(model, loss, batch, around=ENGINES["lean"])
        predicted = profile.kept(whole(chosen))
        assert kept - 4096 <= predicted * 1.02, chosen
        assert predicted - 4096 <= kept * (1 + KEPT_BEYOND.get(case.name, 0.02)), chosen


@pytest.mark.parametrize("case", [case for name, case in ZOO.items() if name != "checkpointed"])
def test_the_peak_of_a_lean_step_is_not_above_the_predicted_one(case: Case) -> None:
    model, loss, batch = case.make()
    batch = many(batch)
    optimizer, among, norms = sgd(model), trainable(model), BatchNormModes(model, "chosen")
    profile = measure.timed(model, optimizer, loss, batch, repeats=1).on(Mode(lean=True))
    for chosen in [*some_choices(model, case, count=3)]:
        apply_(among, optimizer, chosen)
        norms.hold_(among, chosen)
        peak, _ = measure.peak_bytes(model, optimizer, loss, batch, around=ENGINES["lean"])
        predicted = profile.cost(whole(chosen)).bytes + max(profile.moments)
        assert predicted >= (0.9 - PEAKS_BELOW.get(case.name, 0.0)) * peak, (chosen, predicted, peak)


def test_inside_a_checkpoint_gradients_are_the_plain_ones() -> None:
    """The engine steps aside there and keeps what a checkpoint keeps."""
    model, loss, batch = ZOO["checkpointed"].make()
    batch, among, choices = many(batch), trainable(model), [*some_choices(model, ZOO["checkpointed"])]
    for chosen in choices:
        apply_(among, sgd(model), chosen)
        found = []
        for engine in ENGINES.values():
            with engine():
                value = loss(model, batch)
            found.append([value.detach(), *torch.autograd.grad(value, [model.get_parameter(name) for name in chosen])])
        assert differences(*found) == []


# ---------------------------------------------------------------- memory that is limited


def measured_peak(session: Session, batch: Any) -> int:
    """Bytes that a real step of a session needs on top of inference, optimizer state and all."""
    model, optimizer = session.model, session.optimizer
    with LiveBytes(torch.device("cpu")) as live:
        with torch.no_grad():
            session.loss(model, batch)
        alone = live.peak
    with LiveBytes(torch.device("cpu")) as live:
        session.step(batch)
    state = sum(t.nbytes for held in optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor))
    return live.peak + state - alone


class Wide(nn.Module):
    """Convolutions, norms and activations whose inputs outweigh the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(i, 8, 3, padding=1, bias=False) for i in (3, 8, 8, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in self.layers)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.head(x.mean((2, 3)))


MEMORY: dict[str, Callable[[Any], Policy]] = {
    "pliant": lambda memory: on_steady_device(recipes.pliant(memory=memory, when=schedule.every(steps=3), head_first=0)),
    "knapsack": memory_policy,
    "timed": lambda memory: memory_policy(memory, cost=partial(measure.timed, repeats=1)),
}


@pytest.mark.parametrize("memory", [0.3, 0.6, "120KB"])
@pytest.mark.parametrize("recipe", MEMORY)
def test_steps_stay_within_the_memory_that_was_asked(recipe: str, memory: Any) -> None:
    torch.manual_seed(0)
    model = Wide()
    with Session(model, sgd(model), classify, MEMORY[recipe](memory)) as session:
        for batch in data(10, size=16):  # and after the last of them nothing is due
            session.step(batch)
            limit = session.selection.limit["bytes"]
            assert session.selection.cost.bytes <= limit
        assert session.engine == "lean"
        peak = measured_peak(session, data(1, size=16)[0])
        assert peak <= 1.1 * limit, (peak, limit, session.selection)


@pytest.mark.parametrize("memory", [0.001, "0.1KB"])
def test_a_memory_budget_below_the_floor_names_it_and_changes_nothing(memory: Any) -> None:
    torch.manual_seed(0)
    model = Wide()
    optimizer, batch = adamw(model), data(1, size=16)[0]
    before, hooks = snapshot(model, optimizer), hooks_of(model, optimizer)
    with Session(model, optimizer, classify, memory_policy(memory)) as session:
        with pytest.raises(BudgetError, match=r"memory=.* is below the floor of .* KB.*Use memory>="):
            session.step(batch)
        session.budget = Budget(memory=0.9)
        session.step(batch)
        chosen, engine = session.selection, session.engine
        with pytest.raises(BudgetError, match="is below the floor of"):
            session.budget = Budget(memory=memory)
        assert (session.selection, session.engine, session.budget) == (chosen, engine, Budget(memory=0.9))
    after = snapshot(model)
    assert differences([before["flags"], before["modes"]], [after["flags"], after["modes"]]) == []
    assert hooks_of(model, optimizer) == hooks


def test_a_refused_memory_budget_leaves_the_plain_engine() -> None:
    model = make("conv")
    with Session(model, sgd(model), classify, memory_policy(None)) as session:
        session.step(data()[0])
        with pytest.raises(BudgetError):
            session.budget = Budget(memory=0.001)
        assert session.engine == "plain" and not session.profile.mode.lean


# ---------------------------------------------------------------- slices in a session

axes = pytest.mark.parametrize("axis", ["out", "in"])
kinds = pytest.mark.parametrize("kind", BUILD)
GAIN = score.update_gain()


def chosen_elements(session: Session, model: nn.Module) -> dict[str, torch.Tensor]:
    """For each parameter, which of its elements are chosen."""
    out = {name: torch.zeros(param.shape, dtype=torch.bool) for name, param in model.named_parameters()}
    for unit in session.selection.units:
        for part in unit.parts:
            index: list[Any] = [slice(None)] * (0 if part.dim is None else part.dim)
            out[part.param][(*index, list(part.index or ()))] = True
    return out


@axes
@kinds
@pytest.mark.parametrize("signal", [GAIN, score.grad_norm()])
@pytest.mark.parametrize("engine", ENGINES)
def test_channels_that_are_not_chosen_never_move(kind: str, axis: str, signal: score.Signal, engine: str) -> None:
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    found, hooks, sliced, seen = flags_of(model), hooks_of(model, optimizer), 0, set()
    with Session(model, optimizer, classify, channel_policy(axis, signal=signal), engine=engine) as session:
        for batch in data(11):
            before = snapshot(model)["weights"]
            session.step(batch)
            seen.add(session.selection.units)
            for name, mask in chosen_elements(session, model).items():
                now = model.get_parameter(name).detach()
                assert torch.equal(now[~mask], before[name][~mask]), name
                if mask.any():
                    assert (now[mask] != before[name][mask]).all(), name  # weight decay moves even what has no gradient
                sliced += bool(mask.any() and not mask.all())
            whole_ones = {id(param) for param in model.parameters()}
            assert {id(param) for param in optimizer.state} <= whole_ones
            held = optimizer.state_dict()["state"].values()
            shapes = [tuple(p.shape) for p in model.parameters()] + [()]
            assert all(tuple(t.shape) in shapes for state in held for t in state.values()), "no slice between steps"
    assert sliced
    assert len(seen) > 1 or (kind, signal) == ("conv", GAIN), "the choice did change"
    assert flags_of(model) == found
    assert hooks_of(model, optimizer) == hooks


def masked_twin_step(twin: nn.Module, optimizer: Any, batches: list[Batch], masks: Any, clip: float | None = None) -> None:
    """A whole step whose gradients are zero outside the slices: what slices must do under SGD without decay."""
    optimizer.zero_grad()
    for batch in batches:
        (classify(twin, batch) / len(batches)).backward()
    for name, param in twin.named_parameters():
        param.grad = None if param.grad is None or not masks[name].any() else param.grad * masks[name]
    if clip is not None:
        nn.utils.clip_grad_norm_(twin.parameters(), clip)
    optimizer.step()


@axes
@kinds
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (1, 0.05), (2, 0.05)])
def test_slices_move_as_they_would_inside_the_whole(kind: str, axis: str, accumulate: int, clip: float | None) -> None:
    model = make(kind)
    twin = copy.deepcopy(model)
    optimizer, plain = sgd(model), sgd(twin)
    policy = channel_policy(axis, when=schedule.once())
    with Session(model, optimizer, classify, policy, accumulate=accumulate, clip=clip) as session:
        for _ in range(4):
            batches = data(accumulate)
            for batch in batches:
                session.step(batch)
            masked_twin_step(twin, plain, batches, chosen_elements(session, model), clip)
            for name, param in twin.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), param, rtol=1e-4, atol=1e-6)
        assert session.progress.step == 4


@axes
def test_what_stays_chosen_keeps_its_state(axis: str) -> None:
    """Momentum of channels that stay goes on; that of channels that come starts from nothing."""
    model = make("mlp")
    optimizer = sgd(model)
    stayed = 0
    with Session(model, optimizer, classify, channel_policy(axis, when=schedule.every(steps=2))) as session:
        for batch in data(12):
            before, was = session._engine.slices, copy.deepcopy(session.state_dict()["slices"]) or {}
            session.before_step(batch)
            if session._engine.slices is before:
                session.step(batch)
                continue
            for name, one in (session.state_dict()["slices"] or {}).items():
                if name not in was or was[name]["dim"] != one["dim"]:
                    continue
                mine, theirs = (s["state"]["momentum_buffer"].movedim(s["dim"], 0) for s in (one, was[name]))
                for row, channel in zip(mine, one["index"], strict=True):
                    known = channel in was[name]["index"]
                    stayed += known
                    expected = theirs[was[name]["index"].index(channel)] if known else torch.zeros_like(row)
                    assert torch.equal(row, expected)
            session.step(batch)
    assert stayed


@axes
@kinds
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_stop_and_go_on_with_slices(kind: str, axis: str, make_optimizer: Callable[..., Any], tmp_path: Path) -> None:
    ends = []
    for stop in (None, 7):
        model = make(kind)
        optimizer = make_optimizer(model)
        session = Session(model, optimizer, classify, channel_policy(axis))
        for k, batch in enumerate(data(9)):
            if k == stop:
                session.save(tmp_path / "run.pt")
                session.close()
                model = make(kind, seed=5)
                optimizer = make_optimizer(model)
                session = Session(model, optimizer, classify, channel_policy(axis))
                session.load(tmp_path / "run.pt")
            session.step(batch)
        ends.append({**snapshot(model, optimizer), "units": session.selection.units, "slices": session.state_dict()["slices"]})
        session.close()
    assert ends[0]["slices"]
    assert differences(*ends) == []


def test_going_back_in_the_same_session_forgets_what_slices_learned_since(tmp_path: Path) -> None:
    model = make("mlp")
    optimizer = adamw(model)
    with Session(model, optimizer, classify, channel_policy()) as session:
        session.save(tmp_path / "start.pt")
        ends = []
        for _ in range(2):
            for batch in data(4):
                session.step(batch)
            ends.append({**snapshot(model, optimizer), "slices": copy.deepcopy(session.state_dict()["slices"])})
            session.load(tmp_path / "start.pt")
    assert differences(*ends) == []


@axes
@kinds
def test_rollback_with_slices_begins_anew(kind: str, axis: str) -> None:
    model = make(kind)
    optimizer, policy = adamw(model), channel_policy(axis, when=schedule.once())
    start = snapshot(model, optimizer)
    with Session(model, optimizer, classify, policy) as session:
        ends = []
        for _ in range(2):
            for batch in data(4):
                session.step(batch)
            ends.append({**snapshot(model, optimizer), "slices": copy.deepcopy(session.state_dict()["slices"])})
            assert set(session.delta()) == session.selection.params
            session.rollback()
            now = snapshot(model, optimizer)
            assert differences([start["weights"], start["optimizer"]], [now["weights"], now["optimizer"]]) == []
            assert session.delta() == {}
    assert differences(*ends) == []


class Lines(torch.optim.Optimizer):
    """Divides each parameter's gradient by its norm: no element moves by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * param.grad / param.grad.norm()


@pytest.mark.parametrize("own", [True, False])
def test_an_optimizer_that_is_not_elementwise_is_refused_for_slices(own: bool) -> None:
    model = make("conv")
    optimizer = Lines(model.parameters())
    before, hooks = snapshot(model, optimizer), hooks_of(model, optimizer)
    with Session(model, optimizer, classify, channel_policy()) as session:
        inside = hooks_of(model, optimizer)
        with pytest.raises(ValueError, match="Lines cannot train slices of a parameter"):
            session.before_step(data()[0]) if own else session.step(data()[0])
        assert differences(before, snapshot(model, optimizer)) == [], "nothing is half applied"
        assert hooks_of(model, optimizer) == inside
    assert differences(before, snapshot(model, optimizer)) == []
    assert hooks_of(model, optimizer) == hooks


def test_another_optimizer_for_slices_starts_afresh_and_is_checked() -> None:
    model = make("mlp")
    first = sgd(model)
    with Session(model, first, classify, channel_policy()) as session:
        session.step(data()[0])
        with pytest.raises(ValueError, match="Lines cannot train slices"):
            session.optimizer = Lines(model.parameters())
        assert session.optimizer is first
        session.step(data()[1])
        session.optimizer = adamw(model)
        session.step(data()[2])
        assert session.state_dict()["slices"]
        assert all("exp_avg" in held["state"] for held in session.state_dict()["slices"].values())


@axes
def test_slices_keep_what_was_predicted(axis: Any) -> None:
    """At least what is kept; in plain steps a layer's input is taken for kept whole."""
    model = make("conv")
    batch, params = data(1, size=32)[0], trainable(model)
    optimizer = sgd(model)
    graph_units = {unit.name: unit for unit in all_channels(model, batch, axis)}
    for engine in ENGINES:
        profile = measure.counted(model, optimizer, classify, batch).on(Mode(lean=engine == "lean"))
        for names in (["4"], ["2"], *([["2", "4"]] if engine == "lean" else [])):
            chosen = [u for n, u in graph_units.items() if n.split("[")[0] in names and n.endswith(("0:2]", "2:4]"))]
            parts = [part for unit in chosen for part in unit.parts]
            apply_(params, optimizer, [])
            slices = Slices(params, parts)
            apply_(params, optimizer, {part.param for part in parts} - set(slices.parts))
            kept = measure.kept_bytes(model, classify, batch, around=partial(ENGINES[engine], slices))
            assert profile.kept(chosen) >= 0.98 * kept - 4096, (engine, names)
        apply_(params, optimizer, list(params))


def all_channels(model: nn.Module, batch: Any, axis: Any, group: int = 2) -> tuple[Unit, ...]:
    return units.channels(axis, group=group)(read(model, classify, batch))
