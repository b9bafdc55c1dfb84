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

from pliant import Policy, Session, measure, schedule, score, solve, units
from pliant.runtime.optimizer_step import Update

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


@pytest.mark.parametrize("accumulate", [0, -1])
def test_a_step_of_no_batch_is_refused(accumulate: int) -> None:
    with pytest.raises(ValueError, match=f"accumulate={accumulate}: at least one"):
        Update(accumulate=accumulate)


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
