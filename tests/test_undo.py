"""What changed since the start, and the way back."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path

import pytest
import torch
from oracle import differences, on_steady_device, plain_step, snapshot
from safetensors.torch import load_file
from torch import nn
from zoo import ZOO, adamw, sgd

from pliant import Session, recipes, schedule
from pliant.session.delta import Undo


def kept(what: dict[str, object]) -> list[object]:
    """What a rollback has to bring back."""
    return [what["weights"], what["buffers"], what["optimizer"]]


# ---------------------------------------------------------------- Undo by itself


def test_only_what_differs_is_listed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    undo = Undo(model, sgd(model))
    undo.keep({name: param for name, param in model.named_parameters() if name.startswith(("1", "2"))})
    assert undo.changed() == {}
    with torch.no_grad():
        model[2].bias.add_(1)
        model[1].running_mean.add_(1)
    assert set(undo.changed()) == {"2.bias", "1.running_mean"}


def test_a_weight_that_is_not_a_number_has_changed_once() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    undo = Undo(model, sgd(model))
    undo.keep(dict(model.named_parameters()))
    assert undo.changed() == {}
    with torch.no_grad():
        model.weight[0, 1] = float("nan")
    assert set(undo.changed()) == {"weight"}


def test_the_first_copy_counts() -> None:
    model = nn.Linear(2, 1)
    undo = Undo(model, sgd(model))
    start = model.weight.detach().clone()
    for _ in range(2):
        undo.keep({"weight": model.weight})
        with torch.no_grad():
            model.weight.add_(1)
    undo.rollback_()
    assert torch.equal(model.weight, start)


def test_buffers_outside_the_state_dict_are_rolled_back_but_not_handed_out() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    undo = Undo(model, sgd(model))
    model.scratch.add_(1)
    assert undo.changed() == {}
    undo.rollback_()
    assert torch.equal(model.scratch, torch.zeros(2))


# ---------------------------------------------------------------- through a session


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", ["conv_net", "tied", "branches"])
def test_rollback_brings_back_weights_buffers_and_optimizer_state(name: str, make_optimizer: type) -> None:
    case = ZOO[name]
    model, loss, batch = case.make()
    optimizer = make_optimizer(model)
    plain_step(model, optimizer, loss, batch)  # so that there is optimizer state to come back to
    before = snapshot(model, optimizer)
    policy = on_steady_device(recipes.random(time=0.9, when=schedule.every(steps=1)))
    with Session(model, optimizer, loss, policy) as session:
        for _ in range(4):
            session.step(batch)
        assert differences(kept(before), kept(snapshot(model, optimizer))) != []
        session.rollback()
        assert differences(kept(before), kept(snapshot(model, optimizer))) == []
        assert session.delta() == {}
        session.step(batch)  # and the run goes on


def test_rollback_after_a_resume_goes_to_the_start_of_the_whole_run(tmp_path: Path) -> None:
    case = ZOO["conv_net"]
    model, loss, batch = case.make()
    before = snapshot(model)["weights"]
    with Session(model, adamw(model), loss, on_steady_device(recipes.full())) as session:
        session.step(batch)
        session.save(tmp_path / "run.pt")
    model, loss, batch = case.make(seed=9)
    optimizer = adamw(model)
    with Session(model, optimizer, loss, on_steady_device(recipes.full())) as session:
        session.load(tmp_path / "run.pt")
        session.step(batch)
        session.rollback()
    assert differences(before, snapshot(model)["weights"]) == []
    assert not any(optimizer.state.values())


def test_a_delta_is_small_and_brings_a_fresh_model_along(tmp_path: Path) -> None:
    case = ZOO["conv_net"]
    model, loss, batch = case.make()
    with Session(model, adamw(model), loss, on_steady_device(recipes.only("4.*", "10.*"))) as session:
        for _ in range(3):
            session.step(batch)
        delta = session.delta(tmp_path / "delta.safetensors")
    statistics = {"4.running_mean", "4.running_var", "4.num_batches_tracked"}
    assert set(delta) == {"4.weight", "4.bias", "10.weight", "10.bias"} | statistics
    fresh, _, _ = case.make()
    left_out = fresh.load_state_dict(load_file(tmp_path / "delta.safetensors"), strict=False)
    assert left_out.unexpected_keys == []
    images, _ = batch
    assert torch.equal(fresh.eval()(images), model.eval()(images))


def test_a_delta_of_tied_weights_keeps_them_tied(tmp_path: Path) -> None:
    case = ZOO["tied"]
    model, loss, batch = case.make()
    with Session(model, adamw(model), loss, on_steady_device(recipes.full())) as session:
        session.step(batch)
        session.delta(tmp_path / "delta.safetensors")
    fresh, _, _ = case.make()
    fresh.load_state_dict(load_file(tmp_path / "delta.safetensors"), strict=False)
    assert fresh.out.weight is fresh.embed.weight
    assert torch.equal(fresh(batch), model(batch))


def test_an_interrupted_delta_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, batch = ZOO["unused"].make()
    path = tmp_path / "delta.safetensors"
    with Session(model, sgd(model), loss, on_steady_device(recipes.head())) as session:
        session.step(batch)
        session.delta(path)
        old = path.read_bytes()
        session.step(batch)

        def fail(*_: object) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            session.delta(path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["delta.safetensors"]


def test_without_undo_there_is_no_way_back() -> None:
    model, loss, batch = ZOO["unused"].make()
    with Session(model, sgd(model), loss, on_steady_device(recipes.head()), undo=False) as session:
        session.step(batch)
        before = snapshot(model)
        for ask in (session.delta, session.rollback):
            with pytest.raises(RuntimeError, match=r"keeps no copies for delta and rollback\. Open it with undo=True"):
                ask()
        assert differences(before, snapshot(model)) == []
        assert copy.deepcopy(session.state_dict())["undo"] is None


def test_a_run_that_began_without_copies_has_none_later(tmp_path: Path) -> None:
    model, loss, batch = ZOO["unused"].make()
    with Session(model, sgd(model), loss, on_steady_device(recipes.head()), undo=False) as session:
        session.step(batch)
        session.save(tmp_path / "run.pt")
    with Session(model, sgd(model), loss, on_steady_device(recipes.head())) as session:
        session.load(tmp_path / "run.pt")
        session.step(batch)
        for ask in (session.delta, session.rollback):
            with pytest.raises(RuntimeError, match="begun without them has none after a resume"):
                ask()
        session.save(tmp_path / "run.pt")


def test_complex_weights_are_told_apart() -> None:
    model = nn.Linear(2, 2, dtype=torch.cfloat)
    undo = Undo(model, sgd(model))
    undo.keep(dict(model.named_parameters()))
    with torch.no_grad():
        model.weight[0, 0] = complex(0, math.nan)
    assert set(undo.changed()) == {"weight"}
    undo = Undo(model, sgd(model))
    undo.keep(dict(model.named_parameters()))
    assert undo.changed() == {}


def test_a_delta_is_a_value_that_later_steps_do_not_change() -> None:
    model, loss, batch = ZOO["unused"].make()
    with Session(model, sgd(model), loss, on_steady_device(recipes.head())) as session:
        session.step(batch)
        delta = session.delta()
        trained = snapshot(model)["weights"]
        session.rollback()
        model.load_state_dict(delta, strict=False)
        assert differences(trained, snapshot(model)["weights"]) == []


def test_rollback_brings_back_optimizer_state_that_was_dropped() -> None:
    model, loss, batch = ZOO["unused"].make()
    optimizer = adamw(model)
    plain_step(model, optimizer, loss, batch)
    before = snapshot(model, optimizer)
    policy = on_steady_device(recipes.head(), state="drop")
    with Session(model, optimizer, loss, policy) as session:
        session.step(batch)
        session.rollback()
    assert differences(kept(before), kept(snapshot(model, optimizer))) == []


def test_rollback_with_another_optimizer_starts_it_afresh() -> None:
    model, loss, batch = ZOO["unused"].make()
    optimizer = sgd(model)
    plain_step(model, optimizer, loss, batch)
    before = snapshot(model)["weights"]
    with Session(model, optimizer, loss, on_steady_device(recipes.head())) as session:
        session.step(batch)
        session.optimizer = adamw(model)
        session.step(batch)
        session.rollback()
        assert differences(before, snapshot(model)["weights"]) == []
        session.step(batch)


def test_rollback_forgets_the_history_of_lbfgs() -> None:
    """It is one for all parameters, and kept with the first of them, chosen or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(5, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with Session(model, torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2), loss, recipes.head(), undo=True) as session:
        first = [float(session.step(x)) for _ in range(3)]
        session.rollback()
        assert [float(session.step(x)) for _ in range(3)] == first
