"""What a user gets wrong with a session is said at once: arguments, steps that it does not know of, a shared model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runlogs import Blocks, batches, loss
from torch import nn

from pliant import Session, recipes
from pliant.engine.prefix import runtimes


def given() -> tuple[Blocks, torch.optim.Optimizer]:
    model = Blocks()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def only_model(model: nn.Module) -> torch.Tensor:
    return torch.zeros(())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (nn.CrossEntropyLoss(), r"loss=CrossEntropyLoss takes outputs and labels, .* takes the model and a batch: def loss"),
        (F.cross_entropy, r"loss=cross_entropy takes outputs and labels"),
        (only_model, r"loss=only_model\(model.*\) .*cannot be called as loss\(model, batch\): too many positional arguments"),
        (lambda model, batch, more: batch, r"cannot be called as loss\(model, batch\): missing a required argument: 'more'"),
        (None, r"loss=None is not a function of model and batch: write one, like def loss\(model, batch\)"),
    ],
)
def test_a_wrong_loss_is_refused_with_a_right_one(wrong: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Session(*given(), wrong, recipes.full())


def test_swapped_arguments_are_named() -> None:
    model, optimizer = given()
    order = r"The order is Session\(model, optimizer, loss, policy\)"
    with pytest.raises(TypeError, match=rf"model=SGD\(…\) is not a torch\.nn\.Module: .* {order}"):
        Session(optimizer, model, loss, recipes.full())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"optimizer=<function loss .* is not a torch\.optim\.Optimizer: .* {order}"):
        Session(model, loss, optimizer, recipes.full())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"loss=Policy.* is not a function of model and batch: .* {order}"):
        Session(model, optimizer, recipes.full(), loss)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"policy='pliant' is not a Policy: give what a recipe returns"):
        Session(model, optimizer, loss, "pliant")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(torch.ones(2, 3), torch.ones(2)), {"x": 1}, torch.ones(2), "x", 3, [], iter([1])])
def test_what_is_no_list_of_batches_is_no_probe(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"probe= takes a list of batches, .* Write it like probe=\[batch\]\."):
        Session(*given(), loss, recipes.full(), probe=wrong)


@pytest.mark.parametrize("wrong", ["2 GBs", -3, True, 1.5])
def test_what_is_no_cache_is_told_by_its_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"cache={wrong!r} is not "):
        Session(*given(), loss, recipes.full(), cache=wrong)


@pytest.mark.parametrize("wrong", ["bf16", torch.int8, torch.complex64, 16])
def test_frozen_layers_have_floating_point_types(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"prefix_dtype=.* is not a floating-point torch\.dtype: give one such as"):
        Session(*given(), loss, recipes.full(), prefix_dtype=wrong)


def test_an_optimizer_that_takes_no_dense_gradients_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(TypeError, match="SparseAdam takes sparse gradients alone"):
        Session(model, torch.optim.SparseAdam(model.parameters()), loss, recipes.full())


INT8 = {
    "another value": ({"prefix": "int4"}, r"prefix='int4' is not known\. Use 'int8', or leave it out\."),
    "a dtype": ({"prefix": torch.int8}, r"prefix=torch\.int8 is not known"),
    "two types": ({"prefix_dtype": torch.bfloat16}, r"prefix='int8' and prefix_dtype=torch\.bfloat16 are two types"),
    "an engine": ({"engine": "lean"}, r"needs the prefix engine, and engine='lean' does without it\. Use 'auto' or 'prefix'"),
    "no prefix": ({"engine": "auto-prefix"}, r"engine='auto-prefix' does without it"),
}


@pytest.mark.parametrize("name", INT8)
def test_a_prefix_that_cannot_be_in_int8_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_has", lambda name: True)
    how, said = INT8[name]
    with pytest.raises(ValueError, match=said):
        Session(*given(), loss, recipes.head(), **{"prefix": "int8", **how})


def test_a_prefix_in_int8_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_has", lambda name: True)
    model = Blocks().to("meta")
    with pytest.raises(ValueError, match=r"prefix='int8' runs on CPUs, and this model is on 'meta'\. Leave it out"):
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, recipes.head(), prefix="int8")


def test_a_prefix_in_int8_names_the_extra_that_it_needs() -> None:
    model, optimizer = given()
    with pytest.raises(
        ImportError, match=r"prefix='int8' needs onnxruntime and onnx\. Run: pip install 'pliant\[ort\]'"
    ) as told:
        Session(model, optimizer, loss, recipes.head(), prefix="int8")
    assert told.value.name == "onnxruntime"
    Session(model, optimizer, loss, recipes.head()).close()  # nothing was left open


def own_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def test_a_forgotten_before_step_is_told_once() -> None:
    model, optimizer = given()
    with Session(model, optimizer, loss, recipes.head()) as session:
        with pytest.warns(UserWarning, match=r"the session knows nothing of: .* Call session\.before_step\(batch\)"):
            own_step(model, optimizer, batches(1)[0])
        own_step(model, optimizer, batches(1)[0])  # warnings are errors here, and there is no second one
        session.step(batches(1)[0])
    own_step(model, optimizer, batches(1)[0])


def test_a_repeated_before_step_is_told_once_and_a_skipped_step_is_none() -> None:
    model, optimizer = given()
    (batch,) = batches(1)
    with Session(model, optimizer, loss, recipes.head()) as session:
        session.before_step(batch)
        own_step(model, optimizer, batch)
        session.before_step(batch)
        loss(model, batch).backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad.fill_(float("inf"))  # and a GradScaler does not take the step
        session.before_step(batch)
        own_step(model, optimizer, batch)
        session.before_step(batch)
        loss(model, batch).backward()
        with pytest.warns(UserWarning, match=r"before_step was called twice .* once per optimizer step"):
            session.before_step(batch)
        session.before_step(batch)
        own_step(model, optimizer, batch)


def test_two_sessions_do_not_share_parameters() -> None:
    model, optimizer = given()
    whole = nn.Sequential(model, nn.Linear(3, 3))
    first = Session(model, optimizer, loss, recipes.head())
    with pytest.raises(
        ValueError, match=r"Sequential shares parameters with a Blocks that an open session trains\. Close that"
    ):
        Session(whole, torch.optim.SGD(whole.parameters(), lr=0.1), loss, recipes.head())
    first.close()
    with Session(whole, torch.optim.SGD(whole.parameters(), lr=0.1), loss, recipes.head()), warnings.catch_warnings():
        pass
    with pytest.raises(ValueError, match="DataParallel"):
        Session(nn.DataParallel(model), optimizer, loss, recipes.head())


def test_a_session_shows_what_it_does() -> None:
    model, optimizer = given()
    policy = recipes.pliant(time=1.0, memory="1GB", head_first=0)
    session = Session(model, optimizer, loss, policy, engine="plain", total_steps=3)
    assert repr(session) == (
        "<Session: pliant(time=1.0, memory='1GB') on Blocks, step 0 of 3, engine plain, nothing measured or chosen yet>"
    )
    for batch in batches(2):
        session.step(batch)
    shown = repr(session)
    assert "step 2 of 3, engine plain, round 0: " in shown and " of 10 units" in shown and " of a full step)>" in shown
    session.close()
    assert repr(session).startswith("<Session (closed): pliant(")
    assert "lambda" not in repr(Session(model, optimizer, loss, recipes.pliant(time=lambda now: 0.5)))
