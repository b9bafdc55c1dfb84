"""Which norms move: with the choice, with the user's own modes, and by what a first batch shows."""

from __future__ import annotations

import pytest
import torch
from oracle import differences, snapshot
from torch import nn

from pliant.runtime.batchnorm import ENOUGH, BatchNormModes


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
    norms = BatchNormModes(model, rule)
    norms.hold_(AMONG, chosen)
    # A norm without running statistics has no other mode to run in, and a layer norm has none at all.
    assert modes(model) == {**expected, "batchwise": True, "layer": True}
    norms.release_()
    assert all(modes(model).values())


def test_train_mode_is_taken_back_and_eval_mode_is_respected() -> None:
    model = TwoNorms()
    norms = BatchNormModes(model)
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
    norms = BatchNormModes(model)
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


def looked_at(model: TwoNorms, rows: int) -> BatchNormModes:
    norms = BatchNormModes(model, "auto")
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
    for side, rests in ((22, True), (23, False)):
        norms, batch = BatchNormModes(model, "auto"), alike(side * side, 2).T.reshape(1, 2, side, side)
        assert (norms.settle_(lambda batch=batch: model(batch)) is not None) == rests


@pytest.mark.parametrize(("scale", "rests"), [(1.0, True), (1.2, True), (0.85, True), (1.6, False), (0.6, False)])
def test_auto_lets_norms_move_where_a_batch_is_not_like_their_statistics(scale: float, rests: bool) -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(0.5)
    assert (BatchNormModes(model, "auto").settle_(lambda: model(scale * alike(200))) is not None) == rests


@pytest.mark.parametrize("rows", [2, 3])
def test_auto_rests_where_too_few_samples_tell_what_they_are_like(rows: int) -> None:
    model = pretrained()
    torch.manual_seed(0)
    for _ in range(20):
        batch = 5 * torch.randn(rows, 3)
        assert BatchNormModes(model, "auto").settle_(lambda batch=batch: model.bare(model.b(model.a(batch))))


def test_auto_rests_those_that_the_pass_gets_to() -> None:
    model = pretrained()
    norms = BatchNormModes(model, "auto")
    assert str(norms.settle_(lambda: model.a(alike(50)))).startswith("1 of 3 norms keep their running statistics")
    assert norms.state() == ["a"] and norms.priced == "chosen"


@pytest.mark.parametrize("rows", [(ENOUGH, ENOUGH - 1), (ENOUGH - 1, ENOUGH)])
def test_a_norm_that_runs_twice_is_judged_by_the_smaller_batch(rows: tuple[int, int]) -> None:
    model = pretrained()
    norms = BatchNormModes(model, "auto")
    norms.settle_(lambda: [model.a(alike(many)) for many in rows])
    assert norms.state() == ["a"]


def test_auto_rests_each_norm_that_sees_few_values() -> None:
    model = pretrained()
    norms = BatchNormModes(model, "auto")
    norms.settle_(lambda: (model.a(alike(ENOUGH)), model.b(alike(ENOUGH - 1)), model.bare(alike(4))))
    assert norms.state() == ["b", "bare"] and norms.priced == "chosen"
    norms.hold_(AMONG, AMONG)
    assert (model.a.training, model.b.training, model.bare.training) == (True, False, False)


@pytest.mark.parametrize(("priced", "rests"), [(None, True), ("frozen", True), ("chosen", False)])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_auto_is_what_steps_were_priced_as(priced: str | None, rests: bool, scale: float) -> None:
    model = pretrained()
    norms = BatchNormModes(model, "auto")
    norms.settle_(lambda: model.bare(model.b(model.a(scale * alike(50)))), priced)
    assert norms.priced == (("frozen" if scale == 1.0 else "chosen") if priced is None else priced)
    assert bool(norms.state()) == (rests and (scale == 1.0 or priced == "frozen"))


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
    assert (BatchNormModes(model, "auto").settle_(lambda: model(alike(4))) is not None) == rests


def test_auto_goes_by_what_a_pass_shows_that_cannot_end_without_gradients() -> None:
    model = pretrained()

    def run(*norms: nn.Module) -> None:
        value = alike(4)
        for norm in norms:
            value = norm(input=value)
        value.sum().backward()

    assert BatchNormModes(model, "auto").settle_(lambda: run(model.a, model.b, model.bare)) is not None
    norms = BatchNormModes(model, "auto")
    assert norms.settle_(lambda: run(model.a)) is None  # not all were seen: as chosen
    norms.hold_(AMONG, {"a.weight"})
    assert model.a.training


def test_auto_asks_norms_in_eval_mode_too_and_none_that_do_not_look_at_a_batch() -> None:
    model = pretrained().eval()
    norms = BatchNormModes(model, "auto")
    model.train()
    norms.settle_(lambda: model.bare(model.b(model.a(alike(4)))))
    norms.hold_(AMONG, {"a.weight"})
    assert not model.a.training and norms.priced == "frozen"
    instance = nn.InstanceNorm1d(3, track_running_stats=True)
    instance.running_mean.fill_(0.5)
    assert BatchNormModes(instance, "auto").settle_(lambda: instance(torch.randn(2, 3, 4))) is None


def test_other_rules_are_not_moved_by_what_auto_settled() -> None:
    model = pretrained()
    norms = BatchNormModes(model, "chosen")
    norms.load(looked_at(model, 4).state())
    norms.hold_(AMONG, {"a.weight"})
    assert model.a.training
    with pytest.raises(ValueError, match="norm='sometimes'"):
        BatchNormModes(TwoNorms(), "sometimes")  # type: ignore[arg-type]
