"""What follows a loss is what everybody writes, to the last bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import differences, snapshot
from torch import nn
from zoo import adamw, sgd

from pliant import Policy, Session, measure, recipes, schedule, score, solve, units
from pliant.runtime import fused_optimizer
from pliant.runtime.optimizer_step import Update, even_out_

Batch = tuple[torch.Tensor, torch.Tensor]


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(count: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(4)
    return [(torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw)) for _ in range(count)]


def wide(batches: list[Batch]) -> list[Batch]:
    return [(x.double(), y) for x, y in batches]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_update_is_the_plain_code(clip: float | None, accumulate: int, scaled: bool) -> None:
    model, twin = make(), make()
    optimizer, plain = adamw(model), adamw(twin)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)] if scaled else [None, None]
    update = Update(clip, scalers[0], accumulate)
    stream = iter(data(4 * accumulate))
    for _ in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        for _ in range(accumulate):
            batch = next(stream)
            update.backward(loss(model, batch))
            share = loss(twin, batch) / accumulate if accumulate > 1 else loss(twin, batch)
            (scalers[1].scale(share) if scaled else share).backward()
        update.step(optimizer)
        if scaled:
            if clip is not None:
                scalers[1].unscale_(plain)
                nn.utils.clip_grad_norm_(twin.parameters(), clip)
            scalers[1].step(plain)
            scalers[1].update()
        else:
            if clip is not None:
                nn.utils.clip_grad_norm_(twin.parameters(), clip)
            plain.step()
        assert differences(snapshot(twin, plain), snapshot(model, optimizer)) == []
    if scaled:
        assert scalers[0].get_scale() == scalers[1].get_scale() > 2.0**8  # it grew, as it should


def test_clipping_does_clip() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    update = Update(clip=1e-3)
    update.backward(loss(model, data(1)[0]))
    update.step(optimizer)
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_parameters_without_a_gradient_are_left_out_of_the_norm() -> None:
    model = make()
    model[0].requires_grad_(False)
    update = Update(clip=1e-3)
    update.backward(loss(model, data(1)[0]))
    update.step(sgd(model))
    norm = torch.stack([p.grad.norm() for p in model[2].parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_steps_apart_do_not_touch_the_users_scaler() -> None:
    model, scaler = make(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    update = Update(0.05, scaler, 2)
    before = copy.deepcopy(scaler.state_dict())
    apart = update.apart()
    assert (apart.clip, apart.accumulate, apart.scaler.get_scale()) == (0.05, 2, 2.0**8)
    x, y = data(1)[0]
    apart.backward(loss(model, (x * math.inf, y)))
    apart.step(sgd(model))
    assert apart.scaler.get_scale() == 2.0**7  # it skipped a step and backed off
    assert scaler.state_dict() == before
    assert update.scaler is scaler


def test_without_a_scaler_there_is_none_apart() -> None:
    assert Update(clip=0.5).apart() == Update(clip=0.5, on_nan="ignore")


@pytest.mark.parametrize("accumulate", [0, -1, 1.5])
def test_a_step_of_no_batch_or_of_part_of_one_is_refused(accumulate: Any) -> None:
    with pytest.raises(ValueError, match=f"accumulate={accumulate}: batches per optimizer step must be a whole number"):
        Update(accumulate=accumulate)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_clipping_to_a_norm_that_is_none_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match=f"clip={clip}: the norm to clip gradients to must be more than 0"):
        Update(clip=clip)


@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "weight_decay": 0.1}, {"maximize": True}])
def test_layers_may_join_a_fused_sgd(settings: dict[str, Any]) -> None:
    """Its kernel takes momenta of all that step or of none; a layer that is chosen later has none."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)], nn.Linear(6, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused, **settings)
        words = units.layers(), score.random(), measure.counted, solve.sample(2), schedule.every(steps=3)
        with Session(model, optimizer, loss, Policy(*words)) as session:
            chosen = [session.step(batch) is not None and session.selection.params for batch in wide(data(15))]
        assert len(set(chosen)) > 2
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        ends.append([param.detach() for param in model.parameters()])
    torch.testing.assert_close(ends[0], ends[1])


def test_slices_may_join_a_fused_sgd_in_the_callers_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    words = units.channels(), score.random(), measure.counted, solve.sample(2), schedule.every(steps=2)
    chosen = []
    with Session(model, optimizer, loss, Policy(*words)) as session:
        for batch in data(12):
            optimizer.zero_grad()
            session.before_step(batch)
            loss(model, batch).backward()
            optimizer.step()
            chosen.append(session.selection.units)
    assert len(set(chosen)) > 2


MADE: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


@pytest.mark.parametrize("name", MADE)
def test_a_fused_step_is_the_optimizers_own(name: str) -> None:
    """Parameters that join later, and one that is not contiguous, included; the optimizer is as it was found."""
    torch.manual_seed(0)
    one = nn.ParameterList([torch.randn(4, 3), torch.randn(3, 4).t(), torch.randn(5)])
    other = copy.deepcopy(one)
    ours, plain = MADE[name](one), MADE[name](other)
    before = {key: value for key, value in ours.param_groups[0].items() if key != "params"}
    attributes = set(vars(ours))
    for step in range(4):
        for k, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            is_in = k != 1 - step // 2 * 2 and (k != 2 or step > 0)  # the second joins last, the third after a step
            mine.grad = torch.randn(mine.shape) if is_in else None
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        even_out_(ours)
        with fused_optimizer.fused(ours):
            even_out_(ours)
            ours.step()
        even_out_(plain)
        plain.step()
    torch.testing.assert_close(list(one), list(other), rtol=1e-5, atol=1e-6)
    assert {key: value for key, value in ours.param_groups[0].items() if key != "params"} == before
    assert set(vars(ours)) == attributes


def test_prefix_steps_are_fused_and_plain_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    original = torch.optim.SGD.step

    def step(self: Any, *given: Any) -> Any:
        asked.append(self.param_groups[0]["fused"])
        return original(self, *given)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    for engine, wanted in (("plain", None), ("prefix", True)):
        model = make()
        with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, recipes.only("2.*"), engine=engine) as session:
            session.step(data(1)[0])
            assert asked.pop() is wanted and session.optimizer.param_groups[0]["fused"] is None
