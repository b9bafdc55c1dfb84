"""What the user freezes while a session is open stays frozen, and is as the user left it afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pliant import Budget, Policy, Session, measure, recipes, schedule, score, solve, units


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))


def everything(steps: int = 2) -> Policy:
    words = units.layers(), score.grad_norm(), measure.counted, solve.milp(), schedule.every(steps=steps)
    return replace(Policy(*words, name="everything"), head=False)


def opened(model: nn.Module, policy: Policy) -> Session:
    return Session(model, torch.optim.SGD(model.parameters(), 0.1), loss, policy)


def test_what_the_user_freezes_stays_frozen_until_unfrozen() -> None:
    model = net()
    with opened(model, everything()) as session:
        session.step(batch())
        assert len(session.selection.params) == 6
        model[2].weight.requires_grad_(False)
        was = model[2].weight.detach().clone()
        for _ in range(6):
            session.step(batch())
            assert "2.weight" not in session.selection.params, "from the first step on, and over selections"
            assert len(session.selection.params) == 5, "its bias trains on"
        assert torch.equal(model[2].weight, was)
        model[2].weight.requires_grad_(True)
        for _ in range(3):
            session.step(batch())
        assert "2.weight" in session.selection.params
        assert not torch.equal(model[2].weight, was)
        model[0].requires_grad_(False)
    assert [param.requires_grad for param in model.parameters()] == [False, False, True, True, True, True]


def test_a_choice_is_not_widened_by_unfreezing() -> None:
    """What is not chosen waits for the next selection."""
    model = net()
    with opened(model, recipes.head()) as session:
        session.step(batch())
        model.requires_grad_(True)
        was = model[0].weight.detach().clone()
        session.step(batch())
        assert torch.equal(model[0].weight, was)
    assert all(param.requires_grad for param in model.parameters())


def test_nothing_left_to_train_is_an_error() -> None:
    model = net()
    with opened(model, everything()) as session:
        session.step(batch())
        model.requires_grad_(False)
        with pytest.raises(ValueError, match="nothing to choose from"):
            session.step(batch())


def test_frozen_at_first_is_the_users_own() -> None:
    """The session never touches it, and leaves it as the user sets it meanwhile."""
    model = net()
    model[0].requires_grad_(False)
    with opened(model, everything()) as session:
        session.step(batch())
        model[0].requires_grad_(True)
        session.step(batch())
        session.step(batch())
        assert "0.weight" not in session.selection.params
    assert model[0].weight.requires_grad


def test_a_resumed_run_keeps_what_was_frozen() -> None:
    model = net()
    with opened(model, everything()) as session:
        session.step(batch())
        model[2].requires_grad_(False)
        session.step(batch())
        state = session.state_dict()
    again = net()
    with opened(again, everything()) as session:
        session.load_state_dict(state)
        for _ in range(3):
            session.step(batch())
            assert session.selection.params == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert not again[2].weight.requires_grad


@pytest.mark.parametrize("total", [None, 30])
def test_a_resumed_run_does_not_train_what_was_frozen(total: int | None, tmp_path: Path) -> None:
    """Also in a run that is too short for another selection."""
    torch.manual_seed(1)
    data = [batch() for _ in range(8)]

    def run(model: nn.Module, steps: Any) -> Session:
        policy = replace(recipes.pliant(macs=0.95), cost=measure.counted)
        session = Session(model, torch.optim.SGD(model.parameters(), 0.1), loss, policy, total_steps=total)
        for one in steps:
            session.step(one)
        return session

    whole, cut, again = net(), net(), net()
    session, other = run(whole, data[:2]), run(cut, data[:2])
    name = sorted(session.selection.params)[0]
    for model in (whole, cut):
        model.get_parameter(name).requires_grad_(False)
    was = whole.get_parameter(name).detach().clone()
    for one in data[2:]:
        session.step(one)
    other.step(data[2])
    other.save(tmp_path / "run.pt")
    third = run(again, ())
    third.load(tmp_path / "run.pt")
    for one in data[3:]:
        third.step(one)
    assert torch.equal(whole.get_parameter(name), was)
    for ours, theirs in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_budget_that_waits_does_not_train_what_was_frozen_since() -> None:
    model = net()
    policy = replace(recipes.pliant(macs=0.95), cost=measure.counted)
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), loss, policy, total_steps=100) as session:
        session.step(batch())
        session.budget = Budget(macs=0.97)
        name = sorted(session.selection.params)[0]
        model.get_parameter(name).requires_grad_(False)
        was = model.get_parameter(name).detach().clone()
        for _ in range(2):  # the budget comes first, then a selection
            session.step(batch())
        assert torch.equal(model.get_parameter(name), was) and name not in session.selection.params


def test_what_was_frozen_before_the_session_waits_for_the_next_one(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), loss, everything(), log=tmp_path / "log") as session:
        session.step(batch())
        was = model[0].weight.detach().clone()
        model[0].requires_grad_(True)
        for _ in range(4):
            session.step(batch())
        assert torch.equal(model[0].weight, was)
    assert model[0].weight.requires_grad
    assert "frozen when the session began, so not chosen in it: 0.bias, 0.weight" in (tmp_path / "log").read_text()
