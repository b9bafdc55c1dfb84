"""What changes the user's objects: flags and optimizer state; and what must leave no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from oracle import differences, plain_step, snapshot
from torch import nn
from zoo import ZOO, adamw, sgd

from pliant.graph.backward import trainable
from pliant.runtime.rng import rng_states, set_rng_states
from pliant.runtime.sandbox import sandbox, scratch, scratch_step
from pliant.runtime.trainable import apply_, check_in_groups, found, restore_


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


BATCH = torch.linspace(-1, 1, 12).reshape(4, 3)


# ---------------------------------------------------------------- apply_ and restore_


def test_just_the_chosen_are_trainable_and_have_gradients() -> None:
    model = two_layers()
    optimizer = sgd(model)
    plain_step(model, optimizer, mean_square, BATCH)
    apply_(trainable(model), optimizer, {"2.weight"})
    after = snapshot(model)
    assert [name for name, flag in after["flags"].items() if flag] == ["2.weight"]
    assert [name for name, grad in after["grads"].items() if grad is not None] == ["2.weight"]


@pytest.mark.parametrize(("state", "left"), [("keep", 4), ("drop", 1)])
def test_optimizer_state_of_what_leaves_is_kept_or_dropped(state: str, left: int) -> None:
    model = two_layers()
    optimizer = adamw(model)
    plain_step(model, optimizer, mean_square, BATCH)
    apply_(trainable(model), optimizer, {"2.weight"}, state)
    assert len(optimizer.state) == left
    assert model[2].weight in optimizer.state


@pytest.mark.parametrize("chosen", [{"2.weight", "nowhere.bias"}, {"2.weight", "0.weight"}])
def test_an_error_leaves_everything_as_it_was(chosen: set[str]) -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW([model[2].weight, model[2].bias])  # not the first layer's
    plain_step(model, optimizer, mean_square, BATCH)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"nowhere\.bias|0\.weight"):
        apply_(trainable(model), optimizer, chosen, "drop")
    assert differences(before, snapshot(model, optimizer)) == []


def test_chosen_but_in_no_param_group_names_the_parameter() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    check_in_groups(trainable(model), optimizer, {"2.weight"})
    with pytest.raises(ValueError, match=r"'0\.weight' was chosen but is in no param group"):
        check_in_groups(trainable(model), optimizer, {"0.weight"})


def test_restore_brings_back_flags_also_of_what_the_user_froze() -> None:
    model = two_layers()
    model[0].bias.requires_grad_(False)
    was, before = found(model), snapshot(model)
    for param in model.parameters():
        param.requires_grad_(not param.requires_grad)
    restore_(was)
    assert differences(before, snapshot(model)) == []


# ---------------------------------------------------------------- sandbox


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_nothing_done_in_the_sandbox_can_be_seen_afterwards(name: str, raises: bool) -> None:
    model, loss, batch = ZOO[name].make()
    optimizer = adamw(model)
    plain_step(model, optimizer, loss, batch)
    before = snapshot(model, optimizer)
    grads = {param: param.grad for param in model.parameters()}
    try:
        with sandbox(model, train=[next(iter(trainable(model)))]):
            assert all(param.grad is None for param in model.parameters())
            assert sum(param.requires_grad for param in model.parameters()) == 1
            model.requires_grad_(True)
            loss(model, batch).backward()
            model.eval()
            for buffer_name in [n for n, _ in model.named_buffers()]:
                owner = model.get_submodule(buffer_name.rpartition(".")[0])
                setattr(owner, buffer_name.rpartition(".")[2], torch.full_like(model.get_buffer(buffer_name), 5))
            random.random(), np.random.rand(), torch.rand(1)
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert raises
    assert differences(before, snapshot(model, optimizer)) == []
    assert all(param.grad is grad for param, grad in grads.items())  # the very same tensors, not copies


def test_random_states_go_around_through_a_file(tmp_path: object) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    np.random.standard_normal()  # leaves a second number waiting, which is part of the state
    torch.save(rng_states(), f"{tmp_path}/random.pt")
    drawn = random.random(), np.random.standard_normal(), np.random.rand(), float(torch.rand(1))
    set_rng_states(torch.load(f"{tmp_path}/random.pt", weights_only=True))
    assert drawn == (random.random(), np.random.standard_normal(), np.random.rand(), float(torch.rand(1)))


# ---------------------------------------------------------------- scratch


def test_a_scratch_step_is_the_users_step_from_a_fresh_state_and_touches_nothing() -> None:
    model = two_layers()
    slow, fast = {"params": model[0].parameters(), "lr": 0.001}, {"params": model[2].parameters(), "lr": 0.5}
    optimizer = torch.optim.AdamW([slow, fast], weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen: list[object] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    plain_step(model, optimizer, mean_square, BATCH)
    scheduler.step()
    before, steps = snapshot(model, optimizer), len(seen)
    like, copies = scratch(optimizer, [model[0].weight, model[2].weight])
    for param in copies:
        param.grad = torch.ones_like(param)
    scratch_step(like)
    assert differences(before, snapshot(model, optimizer)) == []
    assert len(seen) == steps
    for param, moved, lr in ((model[0].weight, copies[0], 0.0005), (model[2].weight, copies[1], 0.25)):
        alone = nn.Parameter(param.detach().clone())
        alone.grad = torch.ones_like(alone)
        torch.optim.AdamW([alone], lr=lr, weight_decay=0.1).step()
        assert torch.equal(alone, moved)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = two_layers()
    with pytest.raises(ValueError, match="LBFGS"):
        scratch(torch.optim.LBFGS(model.parameters()), list(model.parameters()))
