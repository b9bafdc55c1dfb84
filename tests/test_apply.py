"""What changes the user's objects: flags, optimizer state, norm modes; and what must leave no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from oracle import differences, plain_step, snapshot
from torch import nn
from zoo import ZOO, adamw, sgd

from pliant.apply import apply_, check_in_groups, found, restore_, rng_states, sandbox, scratch, scratch_step, set_rng_states
from pliant.graph import trainable
from pliant.norms import ENOUGH, Norms


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


# ---------------------------------------------------------------- norms


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.bare = nn.BatchNorm1d(3, affine=False)
        self.batchwise = nn.BatchNorm1d(3, track_running_stats=False)
        self.layer = nn.LayerNorm(3)


AMONG = ("a.weight", "a.bias", "b.weight", "b.bias")


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_children()}


@pytest.mark.parametrize(
    ("rule", "chosen", "expected"),
    [
        ("chosen", {"a.weight"}, {"a": True, "b": False, "bare": False}),
        ("chosen", {"b.bias"}, {"a": False, "b": True, "bare": False}),
        ("chosen", set(AMONG), {"a": True, "b": True, "bare": True}),
        ("frozen", set(AMONG), {"a": False, "b": False, "bare": False}),
        ("as-is", {"a.weight"}, {"a": True, "b": True, "bare": True}),
    ],
)
def test_modes_follow_the_choice(rule: str, chosen: set[str], expected: dict[str, bool]) -> None:
    model = TwoNorms()
    norms = Norms(model, rule)
    norms.hold_(AMONG, chosen)
    # A norm without running statistics has no other mode to run in, and a layer norm has none at all.
    assert modes(model) == {**expected, "batchwise": True, "layer": True}
    norms.release_()
    assert all(modes(model).values())


def test_train_mode_is_taken_back_and_eval_mode_is_respected() -> None:
    model = TwoNorms()
    norms = Norms(model)
    norms.hold_(AMONG, {"a.weight"})
    model.train()
    norms.hold_(AMONG, {"a.weight"})
    assert (model.a.training, model.b.training) == (True, False)
    model.eval()
    norms.hold_(AMONG, {"a.weight"})
    assert (model.a.training, model.b.training) == (False, False)
    norms.hold_(AMONG, {"b.weight"})
    assert (model.a.training, model.b.training) == (False, False)
    norms.release_()
    assert not any(modes(model).values())
    norms.hold_(AMONG, {"a.weight"})
    model.train()
    norms.hold_(AMONG, {"b.weight"})
    assert (model.a.training, model.b.training) == (False, True)
    norms.release_()
    assert all(modes(model).values())


def test_a_norm_that_the_user_holds_in_eval_mode_stays_there() -> None:
    model = TwoNorms()
    model.a.eval()
    norms = Norms(model)
    norms.hold_(AMONG, {"a.weight", "b.weight"})
    assert (model.a.training, model.b.training) == (False, True)
    model.b.eval()  # and one that is taken out of training while it is chosen
    norms.hold_(AMONG, {"a.weight", "b.weight"})
    assert (model.a.training, model.b.training) == (False, False)
    norms.release_()
    assert (model.a.training, model.b.training) == (False, False)


def pretrained() -> TwoNorms:
    model = TwoNorms()
    for norm in (model.a, model.b, model.bare):
        norm.running_mean.fill_(0.5)
    return model


def alike(rows: int, features: int = 3) -> torch.Tensor:
    """With a variance of one, as norms have it to begin with."""
    return torch.tensor([1.0, -1.0]).repeat(rows)[:rows, None].expand(rows, features)


def looked_at(model: TwoNorms, rows: int) -> Norms:
    norms = Norms(model, "auto")
    norms.settle_(lambda: model.bare(model.b(model.a(alike(rows)))))
    return norms


def test_auto_keeps_norms_at_rest_where_a_batch_is_small_and_something_is_not_chosen() -> None:
    model = pretrained()
    before, norms = snapshot(model), looked_at(model, ENOUGH - 1)
    assert differences(before, snapshot(model)) == []  # the look left no trace
    assert not model.a._forward_pre_hooks
    norms.hold_(AMONG, {"a.weight"})
    assert not model.a.training and not model.b.training
    assert norms.priced == "frozen"
    norms.hold_(AMONG, AMONG)
    assert not any(norm.training for norm in (model.a, model.b, model.bare))  # within a budget
    norms.hold_(AMONG, AMONG, limited=False)
    assert model.a.training and model.b.training and model.bare.training  # plain training
    norms.release_()
    assert all(modes(model).values())


def test_auto_lets_chosen_norms_move_where_a_batch_is_large_enough() -> None:
    model = pretrained()
    norms = looked_at(model, ENOUGH)
    norms.hold_(AMONG, {"a.weight"})
    assert model.a.training and not model.b.training
    assert norms.priced == "chosen"


def test_auto_counts_what_a_channel_sees_not_samples() -> None:
    model = nn.BatchNorm2d(2)
    model.running_mean.fill_(0.5)
    for side, rests in ((31, True), (32, False)):
        norms, batch = Norms(model, "auto"), alike(side * side, 2).T.reshape(1, 2, side, side)
        assert (norms.settle_(lambda batch=batch: model(batch)) is not None) == rests


@pytest.mark.parametrize(("scale", "rests"), [(1.0, True), (1.2, True), (0.85, True), (1.6, False), (0.6, False)])
def test_auto_lets_norms_move_where_a_batch_is_not_like_their_statistics(scale: float, rests: bool) -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(0.5)
    assert (Norms(model, "auto").settle_(lambda: model(scale * alike(200))) is not None) == rests


def test_auto_lets_new_norms_move() -> None:
    model = TwoNorms()
    norms = looked_at(model, 4)
    norms.hold_(AMONG, {"a.weight"})
    assert model.a.training and norms.priced == "chosen"
    model.b.running_mean.fill_(0.5)  # one of them has learned something: that one rests
    norms = looked_at(model, 4)
    norms.hold_(AMONG, {"a.weight", "b.weight"})
    assert model.a.training and not model.b.training
    assert norms.priced == "chosen"  # the dearer one


@pytest.mark.parametrize(
    ("momentum", "batches", "rests"), [(0.1, 43, False), (0.1, 44, True), (0.01, 400, False), (None, 1, True)]
)
def test_auto_lets_norms_move_that_have_just_begun(momentum: float | None, batches: int, rests: bool) -> None:
    model = nn.BatchNorm1d(3, momentum=momentum)
    for _ in range(batches):
        model(0.1 + alike(4))
    assert (Norms(model, "auto").settle_(lambda: model(alike(4))) is not None) == rests


def test_auto_goes_by_what_a_pass_shows_that_cannot_end_without_gradients() -> None:
    model = pretrained()

    def run(*norms: nn.Module) -> None:
        value = alike(4)
        for norm in norms:
            value = norm(input=value)
        value.sum().backward()

    assert Norms(model, "auto").settle_(lambda: run(model.a, model.b, model.bare)) == 4
    norms = Norms(model, "auto")
    assert norms.settle_(lambda: run(model.a)) is None  # not all were seen: as chosen
    norms.hold_(AMONG, {"a.weight"})
    assert model.a.training


def test_auto_asks_norms_that_are_in_eval_mode_too() -> None:
    model = pretrained().eval()
    norms = Norms(model, "auto")
    model.train()
    norms.settle_(lambda: model.bare(model.b(model.a(alike(4)))))
    norms.hold_(AMONG, {"a.weight"})
    assert not model.a.training and norms.priced == "frozen"


def test_auto_leaves_norms_alone_that_do_not_look_at_a_batch() -> None:
    model = nn.InstanceNorm1d(3, track_running_stats=True)
    model.running_mean.fill_(0.5)
    assert Norms(model, "auto").settle_(lambda: model(torch.randn(2, 3, 4))) is None


def test_other_rules_are_not_moved_by_what_auto_settled() -> None:
    model = pretrained()
    norms = Norms(model, "chosen")
    norms.load(looked_at(model, 4).state())
    norms.hold_(AMONG, {"a.weight"})
    assert model.a.training


def test_unknown_norm_rule() -> None:
    with pytest.raises(ValueError, match="norm='sometimes'"):
        Norms(TwoNorms(), "sometimes")  # type: ignore[arg-type]


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
