"""Steps that somebody else takes: `Session.backward`, accumulation windows, and what frameworks do in between."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import on_steady_device
from torch import nn

from pliant import Policy, Session, recipes, schedule


def net() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch_no(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=generator), torch.tensor([0, 1, 2, step % 3])


def run(policy: Policy, way: str, accumulate: int = 1, steps: int = 7, **options: Any) -> tuple[nn.Module, Session]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    usual = {"engine": "plain", "correct": False, "accumulate": accumulate, **options}
    with Session(model, optimizer, loss, policy, **usual) as session:
        for step in range(steps):
            for part in range(accumulate):
                batch = batch_no(step * accumulate + part)
                if way == "step":
                    session.step(batch)
                else:
                    session.backward(batch, first=part == 0)
            if way == "backward":
                optimizer.step()
                model.zero_grad()
                model.train()
    return model, session


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("engine", ["plain", "lean", "prefix", "lean+prefix"])
def test_backward_and_your_own_update_are_a_step(engine: str, accumulate: int) -> None:
    policy = on_steady_device(recipes.elastic_trainer(time=0.7, when=schedule.every(steps=3)))
    ours, session = run(policy, "step", accumulate)
    theirs, other = run(policy, "backward", accumulate, engine=engine)
    assert session.selection.units == other.selection.units and session.progress.step == other.progress.step == 7
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=0 if engine == "plain" else 1e-9, atol=1e-12)
    assert "forward" not in vars(theirs)


def test_norms_stay_frozen_where_a_framework_calls_train() -> None:
    """Trainer calls model.train() between before_step and the forward pass."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with Session(model, optimizer, loss, recipes.only("9.*")) as session:
        session.before_step(batch_no(0))
        model.train()
        loss(model, batch_no(0)).backward()
        optimizer.step()
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before if not name.startswith("9."))


def test_a_short_window_says_nothing_about_other_steps() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, loss, recipes.full(), accumulate=4) as session:
        for batches in (4, 1, 4):
            session.before_step(batch_no(0), batches=batches)
            loss(model, batch_no(0)).backward()
            optimizer.step()
        assert session.progress.step == 3 and session.rounds[-1].steps == 2


def test_a_loss_and_a_backward_of_your_own() -> None:
    model, calls = net().eval(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(value: torch.Tensor, **how: Any) -> None:
        calls.append(how)
        (2 * value).backward(**how)

    batch = batch_no(0)
    batch[0].requires_grad_(True)  # gradients go to parameters alone
    with Session(model, optimizer, loss, recipes.head()) as session:
        value = session.backward(batch, lambda batch: 3 * loss(model, batch), backward)
    expected = torch.autograd.grad(6 * loss(model, batch), list(model[-1].parameters()))
    assert not value.requires_grad and "inputs" in calls[0] and batch[0].grad is None
    for param, grad in zip(model[-1].parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


@pytest.mark.parametrize("engine", ["plain", "lean", "prefix"])
@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_a_copy_made_before_backward_is_a_model_like_any_other(engine: str, way: str) -> None:
    """It computes what the model did, and can be pickled, then and after the step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, loss, recipes.head(), engine=engine) as session:
        for step in range(2):
            session.before_step(batch_no(step))
            other = copy.deepcopy(model) if way == "copied" else pickle.loads(pickle.dumps(model))
            expected = loss(copy.deepcopy(model).eval(), batch_no(9))
            loss(model, batch_no(step)).backward()
            optimizer.step()
            again = pickle.loads(pickle.dumps(other)).eval()
            torch.testing.assert_close(loss(again, batch_no(9)), expected)
            assert session.progress.step == step + 1
