"""Gradients that are not finite, though the loss is: no step is taken with them, and nothing is chosen by them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pliant import ProbeError, Session, recipes
from pliant.engine.engine import Engine
from pliant.runtime.optimizer_step import Update

GOOD, BAD = torch.ones(5, 4, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)).double()


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Finite also for zeros, where the root has no gradient."""
    return model(x).square().sum().sqrt()


def opened(model: nn.Module, **how: Any) -> Session:
    return Session(model, torch.optim.AdamW(model.parameters(), 0.1), loss, recipes.full(), **how)


def state_of(session: Session) -> list[torch.Tensor]:
    state = [value for one in session.optimizer.state.values() for value in one.values()]
    return [tensor.detach().clone() for tensor in (*session.model.parameters(), *state)]


@pytest.mark.parametrize("how", [{}, {"clip": 1.0}, {"accumulate": 2}, {"engine": "lean"}])
def test_such_a_step_is_skipped_and_noted(how: dict[str, Any], tmp_path: Path) -> None:
    with opened(net(), log=tmp_path / "run.jsonl", **how) as session:
        batches = how.get("accumulate", 1)
        for _ in range(batches):
            session.step(GOOD)
        before = state_of(session)
        for k in range(batches):
            assert torch.isfinite(session.step(GOOD if k else BAD))
        assert all(map(torch.equal, state_of(session), before))
        assert session.progress.step == 2, "it counts as a step"
        for _ in range(batches):
            session.step(GOOD)
        assert all(bool(tensor.isfinite().all()) for tensor in state_of(session))
        assert not torch.equal(state_of(session)[0], before[0])
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [e["text"] for e in events if e["event"] == "note"] == ["step skipped: its gradients are not finite"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_or_it_raises_and_changes_nothing(accumulate: int) -> None:
    with opened(net(), on_nan="raise", accumulate=accumulate) as session:
        for _ in range(accumulate):
            session.step(GOOD)
        before = state_of(session)
        with pytest.raises(FloatingPointError, match="not finite"):
            for _ in range(accumulate):
                session.step(BAD)
        assert all(map(torch.equal, state_of(session), before))
        for _ in range(accumulate):
            session.step(GOOD)
        assert session.progress.step == 2


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on_nan='halt' is not known: give 'skip', 'raise' or 'ignore'"):
        opened(net(), on_nan="halt")


def test_or_it_is_taken_as_plain_pytorch_does() -> None:
    with opened(net(), on_nan="ignore") as session:
        session.step(BAD)
        assert not bool(session.model[0].weight.isfinite().all())


def test_sparse_and_empty_gradients_are_looked_at() -> None:
    table, empty = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.zeros(0))
    optimizer = torch.optim.SGD([*table.parameters(), empty], 0.1)
    for factor, taken in ((1.0, True), (math.inf, False)):
        empty.grad = None
        optimizer.zero_grad()
        (table(torch.tensor([1, 1])).sum() * factor).backward()
        empty.grad = torch.zeros(0)
        assert Update(on_nan="skip").step(optimizer) is taken


def test_large_gradients_are_finite() -> None:
    """Though their norm is not."""
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 1e30)
    optimizer = torch.optim.SGD([weight], 1e-30)
    assert Update(on_nan="skip").step(optimizer)
    assert torch.equal(weight, torch.full((4,), -1.0))


def test_captured_steps_are_not_looked_at_unless_asked_for() -> None:
    model = net()
    engine = Engine(model, loss, torch.optim.SGD(model.parameters(), 0.1), Update(on_nan="skip"))
    engine._graphs = object()
    assert engine.why_no_capture == "on_nan reads every step's gradients"
    assert not Update().reads_gradients


def test_a_probe_without_a_finite_gradient_is_none() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        Session(model, optimizer, loss, recipes.pliant(macs=1.0, head_first=0), engine="plain") as session,
        pytest.raises(ProbeError, match="finite, but no gradient is"),
    ):
        session.step(BAD)


def test_a_scaler_that_is_switched_off_does_not_hide_them() -> None:
    with opened(net(), scaler=torch.amp.GradScaler("cpu", enabled=False), on_nan="raise") as session:
        session.step(GOOD)
        with pytest.raises(FloatingPointError, match="not finite"):
            session.step(BAD)


def test_a_norm_that_overflows_is_no_reason_to_skip() -> None:
    """Clipping makes zeros of such gradients, as in plain PyTorch."""
    update, layer = Update(clip=1.0), nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.full_like(layer.weight, 3e38)
    assert update.step(torch.optim.SGD(layer.parameters(), 0.1))


@pytest.mark.parametrize("on_nan", [None, "skip", "raise"])
def test_optimizers_that_evaluate_the_loss_themselves_skip_them_too(on_nan: Any) -> None:
    model = net()
    with Session(model, torch.optim.LBFGS(model.parameters(), 0.1), loss, recipes.full(), on_nan=on_nan) as session:
        session.step(GOOD)
        before = [param.detach().clone() for param in model.parameters()]
        if on_nan == "raise":
            with pytest.raises(FloatingPointError, match="not finite"):
                session.step(BAD)
        else:
            session.step(BAD)
        assert all(map(torch.equal, model.parameters(), before))
        session.step(GOOD)
        assert not torch.equal(next(model.parameters()), before[0])
