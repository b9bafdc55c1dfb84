"""From the second pass of a choice on, the lean engine looks only where there is something to do, and does what it did."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import ZOO

from pliant import Session, measure, recipes
from pliant.engine.lean import lean
from pliant.engine.lean.lean import Lean
from pliant.engine.lean.places import Places

Batch = tuple[torch.Tensor, torch.Tensor]


class Residual(nn.Module):
    """All that is called directly, a norm that rests, one that trains, and functions outside of any module of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.first, self.rests = nn.Conv2d(8, 8, 3, padding="same", groups=4), nn.BatchNorm2d(8)
        self.act, self.second = nn.ReLU6(inplace=True), nn.Conv2d(8, 8, 1, bias=False)
        self.trains, self.relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.block = Functional()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.act(self.rests(self.first(x)))
        x = self.relu(self.trains(self.second(x)))
        return self.head(self.block(x).mean((2, 3)))


class Functional(nn.Module):
    """Its own function, beside those of modules inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.hardtanh(self.conv(x), -0.5, 0.5), 0.3)


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make() -> tuple[nn.Module, Callable[..., torch.Tensor], Batch]:
    torch.manual_seed(0)
    model = Residual()
    model.rests.eval()
    return model, classify, (torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,)))


def choose(model: nn.Module, seed: int) -> None:
    draw = random.Random(seed)
    params = list(model.parameters())
    for param in params:
        param.requires_grad_(draw.random() < 0.5)
    params[-1].requires_grad_(True)


def run(model: nn.Module, loss: Any, batch: Any, around: Any) -> dict[str, torch.Tensor | None]:
    """One pass: the loss, gradients and buffers."""
    torch.manual_seed(5)
    model.zero_grad()
    with around:
        value = loss(model, batch)
    value.backward()
    grads = {name: param.grad.clone() if param.grad is not None else None for name, param in model.named_parameters()}
    return {"": value.detach(), **grads, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def same(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> bool:
    def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))

    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


@contextmanager
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The functions that the watcher is told of."""
    seen: list[str] = []
    own = lean._Watcher.__torch_function__

    def note(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(getattr(func, "__name__", str(func)))
        return own(self, func, types, args, kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(lean._Watcher, "__torch_function__", note)
        yield seen


def untouched(model: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in model.modules())


CASES = {"residual": make, **{name: ZOO[name].make for name in ("conv_net", "branches", "thrice", "transformer", "functional")}}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_later_passes_do_what_the_first_one_did(name: str, seed: int) -> None:
    """Losses, gradients and statistics of norms, to the last bit; and they keep no more."""
    model, loss, batch = CASES[name]()
    choose(model, seed)
    twin, places = copy.deepcopy(model), Places(model)
    for _ in range(3):
        assert same(run(model, loss, batch, Lean(None, places, seed)), run(twin, loss, batch, Lean()))
        assert untouched(model)
    kept = [measure.kept_bytes(model, loss, batch, around=lambda: Lean(None, places, seed)) for _ in range(2)]
    assert kept == [measure.kept_bytes(twin, loss, batch, around=Lean)] * 2


def test_where_there_is_nothing_to_do_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, batch = make()
    choose(model, 1)
    places = Places(model)
    with looked_at(monkeypatch) as first:
        run(model, loss, batch, Lean(None, places))
    with looked_at(monkeypatch) as second:
        run(model, loss, batch, Lean(None, places))
    assert {"conv2d", "batch_norm", "hardtanh", "relu", "mean", "cross_entropy"} <= set(first)
    assert not {"batch_norm", "relu", "mean", "cross_entropy", "linear"} & set(second)
    assert "hardtanh" in second  # of a module with other functions beside it
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    run(model, loss, batch, Lean(None, places, "head"))
    with looked_at(monkeypatch) as third:
        run(model, loss, batch, Lean(None, places, "head"))
    assert third == ["pad", "conv2d"]  # the first is a function that has no rule


def test_another_choice_and_other_modes_are_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, batch = make()
    places, known = Places(model), set()
    for choice, mode in ((1, True), (2, True), (2, False), (1, True), (2, False)):
        choose(model, choice)
        model.relu.train(mode)
        with looked_at(monkeypatch) as seen:
            run(model, loss, batch, Lean(None, places, choice))
        assert ("cross_entropy" in seen) == ((choice, mode) not in known)
        known.add((choice, mode))


def test_old_choices_are_forgotten() -> None:
    model, loss, batch = make()
    places = Places(model)
    for choice in range(20):
        choose(model, choice)
        run(model, loss, batch, Lean(None, places, choice))
    assert len(places._known) == 8
    assert all(choice >= 12 for choice, _ in places._known)


class Bare(nn.Module):
    """Functions of its own between modules, as many write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu6(self.second(F.relu6(self.norm(self.first(x))))).mean((2, 3))


def test_what_is_done_outside_of_modules_is_looked_for_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Bare()
    model.first.requires_grad_(False)
    twin, places = copy.deepcopy(model), Places(model)
    batch = torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))
    for number in range(3):
        plain = run(twin, classify, batch, nullcontext())
        with looked_at(monkeypatch) as seen:
            assert same(run(model, classify, batch, Lean(None, places)), plain)
        assert {"relu6", "mean", "cross_entropy"} <= set(seen)
        assert ({"conv2d", "batch_norm"} <= set(seen)) == (number == 0)
        assert not number or not {"conv2d", "batch_norm"} & set(seen)
        assert untouched(model) and torch._C._len_torch_function_stack() == 0
    kept, least = (measure.kept_bytes(each, classify, batch, around=around) for each, around in (
        (model, partial(Lean, None, places)), (twin, Lean)))  # fmt: skip
    assert kept == least + 4 * 8 * 12 * 12 // 8  # bits of the first one too: of two in one module just the first is kept anyway


def test_a_mode_of_the_users_inside_of_a_watched_forward_sees_all_that_runs_there() -> None:
    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Under(Bare):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu6(self.norm(self.first(x)))
            with Sees():
                x = self.second(x)
            return F.relu6(x).mean((2, 3))

    torch.manual_seed(0)
    model = Under()
    twin, places = copy.deepcopy(model), Places(model)
    batch = torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))
    for choice in ("all", "second"):
        model.first.requires_grad_(choice == "all")
        twin.first.requires_grad_(choice == "all")
        for _ in range(3):
            seen: list[Any] = []
            ours = run(model, classify, batch, Lean(None, places, choice))
            assert seen == [torch.conv2d]
            assert same(ours, run(twin, classify, batch, nullcontext()))


class Squeezed(nn.Module):
    """Clips twice with one module: what the next layer keeps, and what is changed in place."""

    def __init__(self, inside: Any = nullcontext) -> None:
        super().__init__()
        self.act, self.inside = nn.ReLU6(), inside
        self.stem, self.sub = nn.Conv2d(3, 16, 1), nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1))
        self.fc1, self.fc2, self.conv = (nn.Conv2d(16, 16, 1) for _ in range(3))
        self.head, self.skips = nn.Linear(16, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        with self.inside():
            x = self.sub(x)
        gate = x.mean((2, 3), keepdim=True)
        if not self.skips:
            gate = self.fc2(self.act(self.fc1(gate)))
        y = self.act(self.conv(x))
        y += x
        return self.head((y * gate).mean((2, 3)))


class _Idle(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo, whatever it compiles
@pytest.mark.filterwarnings("ignore:\\s*Dynamo does not know how to trace the builtin")  # it breaks the graph where we look
@pytest.mark.parametrize("case", ["a smaller batch", "a mode inside", "another way", "autocast", "compiled"])
def test_what_is_changed_in_place_after_clipping_is_no_error(case: str) -> None:
    """Where it is none without the engine: in later passes that are like the first one, and in others."""
    torch.manual_seed(0)
    model = Squeezed(_Idle if case == "a mode inside" else nullcontext)
    twin = copy.deepcopy(model)
    if case == "compiled":
        model.sub = torch.compile(model.sub, backend="eager")  # type: ignore[assignment]
    places = Places(model)
    for number in range(4):
        size = 3 if case == "a smaller batch" and number == 2 else 32
        batch = torch.randn(size, 3, 8, 8), torch.randint(0, 4, (size,))
        model.skips = twin.skips = case == "another way" and number >= 2
        halves = case == "autocast" and number >= 2

        def loss(model: nn.Module, batch: Batch, halves: bool = halves) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=halves):
                return classify(model, batch)

        ours, plain = run(model, loss, batch, Lean(None, places)), run(twin, loss, batch, nullcontext())
        assert same({name.replace("_orig_mod.", ""): value for name, value in ours.items()}, plain)


def test_a_pass_inside_of_another_one_takes_no_notes_for_it() -> None:
    """A model that runs itself under the engine, inside of a pass."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.head = (*(nn.Conv2d(8, 8, 1) for _ in range(3)), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            if not depth:
                return self.c(F.relu6(self.a(x)))
            with Lean(None, places) if lean else nullcontext():
                x = self(x, 0)
            y = F.relu6(self.a(x))
            y += 1
            return self.head(self.c(F.relu6(self.b(y))).mean((2, 3)))

    torch.manual_seed(0)
    model = Twice()
    places = Places(model)
    batch = torch.randn(4, 8, 8, 8), torch.randint(0, 4, (4,))
    lean = False
    plain = run(model, classify, batch, nullcontext())
    lean = True
    for _ in range(3):
        assert same(run(model, classify, batch, Lean(None, places)), plain)


def test_an_activation_whose_result_the_next_layer_keeps_is_left_alone() -> None:
    """A ReLU keeps its result and nothing else: there is nothing to do for it where that is kept anyway."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten())
    batch = torch.randn(2, 3, 12, 12), torch.randint(0, 4, (2,))
    places = Places(model)
    for chosen, at in ((("0", "2", "4"), []), (("0", "2"), ["3", "4"]), (("0", "4"), ["1", "2"])):
        for name, param in model.named_parameters():
            param.requires_grad_(name.split(".")[0] in chosen)
        twin = copy.deepcopy(model)
        for _ in range(2):
            ours = run(model, classify, batch, Lean(None, places, chosen))
            assert same(ours, run(twin, classify, batch, nullcontext()))
        known = next(known for (choice, _), known in places._known.items() if choice == chosen)
        names = {module: name for name, module in model.named_modules()}
        assert [names[place.module] for place in known.places] == at
        known_places = partial(Lean, None, places, chosen)
        assert measure.kept_bytes(model, classify, batch, around=known_places) == measure.kept_bytes(
            twin, classify, batch, around=Lean
        )


def test_a_pass_that_fails_leaves_the_model_as_it_was_and_tells_nothing() -> None:
    model, loss, batch = make()
    places = Places(model)
    wrong = batch[0][:, :2], batch[1]
    for _ in range(2):
        with pytest.raises(RuntimeError), Lean(None, places):
            loss(model, wrong)
        assert untouched(model)
        with pytest.raises(RuntimeError), Lean(None, places):
            loss(model, wrong)
        run(model, loss, batch, Lean(None, places))


def test_a_forward_of_the_users_own_stays_and_counts() -> None:
    model, loss, batch = make()
    places = Places(model)
    run(model, loss, batch, Lean(None, places))
    calls: list[int] = []

    def own(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clamp(0, 1)

    model.act.forward = own
    for count in range(1, 4):
        run(model, loss, batch, Lean(None, places))
        assert len(calls) == count
        assert model.act.__dict__["forward"] is own
    del model.act.forward
    run(model, loss, batch, Lean(None, places))
    assert len(calls) == 3 and untouched(model)


class Standardised(nn.Conv2d):
    """A convolution that overrides what its forward calls."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class InPlace(nn.Module):
    """What is clipped is changed in place, where nobody looks."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(3, 3, 3, padding=1), act, nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.conv(x))
        y += x
        return self.head(y.mean((2, 3)))


class Keywords(nn.Module):
    """Called by name, with another padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", bias=False)
        self.last, self.act, self.head = nn.Conv2d(8, 8, 1, bias=False), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(input=self.last(input=self.conv(self.first(x))))
        return self.head(x.mean((2, 3)))


class Static(nn.Module):
    """Its forward is no method."""

    class Tanh(nn.Module):
        forward = staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(3, 8, 1), Static.Tanh(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(F.relu6(self.conv(x))).mean((2, 3)))


ODD: dict[str, Callable[[], nn.Module]] = {
    "another convolution": lambda: nn.Sequential(Standardised(3, 4, 3), nn.ReLU(), Standardised(4, 4, 10), nn.Flatten()),
    "ReLU6, then in place": lambda: InPlace(nn.ReLU6(inplace=True)),
    "Hardtanh, then in place": lambda: InPlace(nn.Hardtanh(-0.5, 0.5)),
    "by keyword": Keywords,
    "static": Static,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_modules_have_the_gradients_of_plain_autograd_in_every_pass(name: str) -> None:
    torch.manual_seed(0)
    model = ODD[name]()
    list(model.parameters())[2].requires_grad_(False)
    batch = torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))
    twin, places, kept = copy.deepcopy(model), Places(model), []
    for _ in range(3):
        assert same(run(model, classify, batch, Lean(None, places)), run(twin, classify, batch, nullcontext()))
        kept.append(measure.kept_bytes(model, classify, batch, around=lambda: Lean(None, places)))
        assert untouched(model)
    assert set(kept) == {measure.kept_bytes(twin, classify, batch, around=Lean)}


def test_a_copy_that_is_made_inside_of_a_pass_is_one_of_its_own() -> None:
    """As of a teacher that the loss makes when it is first called."""
    model, _, batch = make()
    places, teachers, saved = Places(model), [], []

    def distil(model: nn.Module, batch: Batch) -> torch.Tensor:
        teachers.append(copy.deepcopy(model))
        saved.append(pickle.loads(pickle.dumps(model)))
        for teacher in (teachers[-1], saved[-1]):
            with torch.no_grad():
                teacher.head.weight.zero_()
                teacher.first.weight.mul_(3)
        return classify(model, batch) + teachers[-1](batch[0]).square().mean()

    alone = copy.deepcopy(model)
    for _ in range(3):
        assert same(run(model, distil, batch, Lean(None, places)), run(alone, distil, batch, Lean()))
    with torch.no_grad():
        for teacher in (*teachers, *saved):
            assert torch.equal(teacher(batch[0]), teacher.head.bias.expand(4, 4))


def test_a_forward_that_is_set_inside_of_a_pass_stays() -> None:
    model, loss, batch = make()
    places = Places(model)

    def patching(model: nn.Module, batch: Batch) -> torch.Tensor:
        model.act.forward = torch.tanh
        return loss(model, batch)

    run(model, patching, batch, Lean(None, places))
    assert model.act.__dict__["forward"] is torch.tanh


def test_hooks_of_modules_run_as_ever() -> None:
    model, loss, batch = make()
    places, calls = Places(model), []
    model.first.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    for count in range(1, 4):
        run(model, loss, batch, Lean(None, places))
        assert len(calls) == count


def test_another_thread_is_not_watched() -> None:
    """It may use the same model meanwhile."""
    model, loss, batch = make()
    places = Places(model)
    run(model, loss, batch, Lean(None, places))
    out: list[torch.Tensor] = []

    def elsewhere() -> None:
        with torch.no_grad():
            out.append(model.act(torch.full((1, 8, 2, 2), 7.0)))

    inside = Lean(None, places)
    with inside:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert inside.clipped is None
    assert torch.equal(out[0], torch.full((1, 8, 2, 2), 6.0))


def test_a_pass_of_the_callers_that_fails_halfway_tells_nothing() -> None:
    """As where memory runs out, and the next batch is smaller."""
    model, loss, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    with Session(model, optimizer, loss, recipes.full(), engine="lean") as session:
        session.before_step(batch)
        handle = model.block.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            loss(model, batch)
        handle.remove()
        known = session._engine._places._known
        assert not known and untouched(model)
        session.before_step(batch)
        loss(model, batch).backward()
        assert len(known) == 1 and untouched(model)
