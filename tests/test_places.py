"""From the second pass of a choice on, the lean engine looks only where there is something to do, and does what it did."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import ZOO

from pliant import measure
from pliant.engine import lean
from pliant.engine.lean import Lean
from pliant.engine.places import Places

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
    assert third == []


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


def test_what_is_done_outside_of_modules_is_looked_for_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.conv(x)).mean((2, 3))

    model = Bare()
    places = Places(model)
    batch = torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))
    for _ in range(3):
        with looked_at(monkeypatch) as seen:
            run(model, classify, batch, Lean(None, places))
        assert "relu" in seen and "cross_entropy" in seen


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
