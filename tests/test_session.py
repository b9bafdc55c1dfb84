"""A session: elastic for real, faithful to the user's loop and objects, and whole after every error."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import pickle
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import differences, freeze_by_hand, on_steady_device, plain_step, snapshot, steady
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO, adamw, sgd

from pliant import (
    Budget,
    BudgetError,
    Cost,
    Part,
    Policy,
    ProbeError,
    Profile,
    ProfileMismatch,
    Session,
    Unit,
    measure,
    plan,
    recipes,
    schedule,
    score,
    solve,
    units,
    within,
)
from pliant.core.mode import Mode
from pliant.cost.measure import counted
from pliant.cost.profile import Charge, ChargeKind
from pliant.runtime.energy import MeterError

Batch = tuple[torch.Tensor, torch.Tensor]


class Chain(nn.Module):
    """Four equal layers and a head: unit names say how deep they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.b, self.norm_b = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm_a(self.a(x)))
        return self.head(self.drop(F.relu(self.norm_b(self.b(x)))))


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def make(kind: Callable[[], nn.Module] = Chain, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def data(count: int = 8, size: int = 8) -> list[Batch]:
    draw = torch.Generator().manual_seed(4)
    return [(torch.randn(size, 6, generator=draw), torch.randint(0, 3, (size,), generator=draw)) for _ in range(count)]


def fixed(*globs: str, head: bool = False, **changes: Any) -> Policy:
    return on_steady_device(Policy(units.tensors(), score.nearness(), steady, solve.fixed(*globs), head=head), **changes)


def cycling(every: int = 1, **changes: Any) -> Policy:
    """The next layer each round, from the loss outwards, and nothing else."""
    words = (units.layers(), score.nearness(), steady, solve.cycle(), schedule.every(steps=every))
    return Policy(*words, head=False, **changes)


def by_gain(when: schedule.Schedule, budget: Budget) -> Policy:
    return Policy(units.layers(), score.update_gain(), steady, solve.knapsack(), when, budget)


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: param.requires_grad for name, param in model.named_parameters()}


def names(session: Session) -> set[str]:
    return {unit.name for unit in session.selection.units}


def nodes_behind(value: torch.Tensor) -> list[Any]:
    """Every autograd node that a backward pass from here could run."""
    stack, seen = [value.grad_fn], {value.grad_fn: None}
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                stack.append(node)
    return list(seen)


# ---------------------------------------------------------------- elastic for real


def test_tensors_leave_and_come_back() -> None:
    model = make()
    policy = on_steady_device(recipes.random(time=0.7, when=schedule.every(steps=2)))
    came_back, seen = set(), []
    with Session(model, adamw(model), classify, policy) as session:
        for batch in data(24):
            before = snapshot(model)["weights"]
            session.step(batch)
            moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
            assert moved == session.selection.params == {name for name, flag in flags(model).items() if flag}
            came_back |= {p for p in moved if seen and p not in seen[-1] and any(p in earlier for earlier in seen)}
            seen.append(moved)
    assert [seen[i] == seen[i + 1] for i in range(0, 24, 2)] == [True] * 12  # two steps with each choice
    assert came_back


@pytest.mark.filterwarnings("ignore:session.before_step was called twice")  # nothing needs to be learned here
def test_what_is_not_chosen_and_not_on_the_way_does_not_run() -> None:
    model, ran = make(), Counter[str]()

    def count(name: str, _: object) -> None:
        ran[name] += 1

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        value = classify(model, batch)
        for node in nodes_behind(value):
            node.register_prehook(partial(count, node.name()))
        return value

    with Session(model, sgd(model), loss, cycling()) as session:
        for depth, name in enumerate(["head", "layers.3", "layers.2", "layers.1", "layers.0", "head"]):
            session.before_step(data()[0])
            ran.clear()
            loss(model, data()[0]).backward()
            assert names(session) == {name}
            down_to = depth % 5
            assert ran["AddmmBackward0"] == down_to + 1  # the layers from the loss down to the chosen one
            assert ran["TanhBackward0"] == down_to
            assert ran["torch::autograd::AccumulateGrad"] == 2  # its weight and its bias


@pytest.mark.parametrize("state", ["drop", "keep"])
def test_optimizer_state_of_what_leaves_is_freed_or_waits(state: str) -> None:
    model = make()
    optimizer = adamw(model)
    with Session(model, optimizer, classify, cycling(2, state=state)) as session:
        for batch in data(2):
            session.step(batch)
        assert names(session) == {"head"}
        average = weakref.ref(optimizer.state[model.head.weight]["exp_avg"])
        then = average().clone()
        session.step(data()[2])
        assert names(session) == {"layers.3"}
        if state == "drop":
            assert average() is None
            assert set(optimizer.state) == set(model.layers[3].parameters())
        else:
            assert torch.equal(average(), then)
            assert optimizer.state[model.head.weight]["step"] == 2


def test_weights_that_left_do_not_move_under_adamw_in_the_users_own_loop() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    with Session(model, optimizer, classify, cycling(2)) as session:
        for batch in data(8):
            session.before_step(batch)
            before = snapshot(model)["weights"]
            optimizer.zero_grad(set_to_none=False)
            classify(model, batch).backward()
            optimizer.step()
            moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
            assert moved == session.selection.params


@pytest.mark.parametrize("head", [True, False])
def test_the_head_and_what_is_always_chosen(head: bool) -> None:
    model = make()
    with Session(model, sgd(model), classify, fixed("layers.1.weight", head=head, always=("layers.0.b*",))) as session:
        session.step(data()[0])
        also = {"head.weight", "head.bias"} if head else set()
        assert names(session) == {"layers.1.weight", "layers.0.bias"} | also


# ---------------------------------------------------------------- faithful to the plain loop


def frozen_twin(model: nn.Module, chosen: set[str]) -> nn.Module:
    twin = copy.deepcopy(model)
    freeze_by_hand(twin, chosen, set(flags(model)))
    return twin


CHOSEN = {"layers.2.weight", "head.weight", "head.bias"}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_and_clipping_are_the_plain_ones(accumulate: int, clip: float | None) -> None:
    model = make()
    twin = frozen_twin(model, CHOSEN)
    optimizer, plain = adamw(model), adamw(twin)
    with Session(model, optimizer, classify, fixed(*CHOSEN), accumulate=accumulate, clip=clip) as session:
        for k, batch in enumerate(data(6)):
            if k % accumulate == 0:
                plain.zero_grad()
            value = classify(twin, batch)
            (value / accumulate).backward()
            if (k + 1) % accumulate == 0:
                if clip is not None:
                    assert nn.utils.clip_grad_norm_(twin.parameters(), clip) > clip  # it does clip
                plain.step()
            assert torch.equal(session.step(batch), value)
            assert session.progress.step == (k + 1) // accumulate
            after, expected = snapshot(model, optimizer), snapshot(twin, plain)
            assert differences(expected["weights"], after["weights"]) == []
            assert differences(expected["optimizer"], after["optimizer"]) == []


def test_a_step_that_is_half_collected_cannot_be_saved() -> None:
    model = make()
    with Session(model, sgd(model), classify, fixed("head.*"), accumulate=2) as session:
        session.step(data()[0])
        with pytest.raises(RuntimeError, match="1 of 2 batches"):
            session.state_dict()
        session.step(data()[1])
        assert session.state_dict()["step"] == 1


def test_going_back_to_a_checkpoint_forgets_a_half_collected_step(tmp_path: Path) -> None:
    model = make()
    optimizer, stream = sgd(model), data(4)
    ends = []
    with Session(model, optimizer, classify, fixed("head.*"), accumulate=2) as session:
        session.step(stream[0]), session.step(stream[1])
        session.save(tmp_path / "run.pt")
        for astray in (False, True):
            if astray:
                session.step(stream[0])
            session.load(tmp_path / "run.pt")
            session.step(stream[2]), session.step(stream[3])
            assert session.progress.step == 2
            ends.append(snapshot(model, optimizer))
    assert differences(*ends) == []


def test_a_skipped_step_of_an_own_loop_counts_after_a_stop_too(tmp_path: Path) -> None:
    images, labels = data()[0]
    progress = []
    for stop in (False, True):
        model = make()
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
        session = Session(model, optimizer, classify, fixed("head.*"), scaler=scaler)
        session.before_step((images, labels))
        optimizer.zero_grad()
        scaler.scale(classify(model, (images, labels))).backward()
        model.head.bias.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        if stop:
            session.save(tmp_path / "run.pt")
            session.close()
            session = Session(model, optimizer, classify, fixed("head.*"), scaler=scaler)
            session.load(tmp_path / "run.pt")
        session.step(data()[1])
        progress.append(session.progress)
    assert progress[0] == progress[1]
    assert progress[0].step == 2


def autocast_inside(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return classify(model, batch)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_inside_the_loss_and_around_the_step(inside: bool) -> None:
    model = make()
    twin = frozen_twin(model, CHOSEN)
    optimizer, plain = adamw(model), adamw(twin)
    with Session(model, optimizer, autocast_inside if inside else classify, fixed(*CHOSEN)) as session:
        for batch in data(4):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
                value = session.step(batch)
            assert torch.equal(value, plain_step(twin, plain, autocast_inside, batch))
            assert differences(snapshot(twin, plain)["weights"], snapshot(model)["weights"]) == []


def test_a_session_that_nobody_holds_any_more_is_closed() -> None:
    model = make()
    optimizer = adamw(model)
    was = [param.requires_grad for param in model.parameters()]

    def some_steps() -> None:
        session = Session(model, optimizer, classify, fixed(*CHOSEN))
        session.step(data(1)[0])

    some_steps()
    gc.collect()
    assert [param.requires_grad for param in model.parameters()] == was
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("bad", [{"engine": "lena"}, {"profile": "missing.json"}, {"on_nan": "x"}], ids=str)
def test_a_session_that_is_refused_leaves_the_one_before_open(bad: dict[str, Any]) -> None:
    model = make()
    optimizer = adamw(model)
    with Session(model, optimizer, classify, fixed(*CHOSEN)) as session:
        session.step(data(1)[0])
        with pytest.raises((ValueError, OSError)):
            Session(model, optimizer, classify, recipes.full(), **bad)
        session.step(data(1)[0])


def test_two_sessions_with_the_same_recipe_know_nothing_of_each_other() -> None:
    policy, found = recipes.gala(), []
    for _ in range(2):
        model = make()
        with Session(model, adamw(model), classify, policy) as session:
            found.append([(session.step(batch), session.selection.params)[1] for batch in data(3)])
    assert found[0] == found[1]


def test_costs_are_measured_where_the_caller_casts_too() -> None:
    """Casts of weights are kept until the caller's region ends; then the graph of a second pass would look otherwise."""
    model = make()
    policy = replace(recipes.last(time=1.0), cost=measure.timed)
    with Session(model, adamw(model), classify, policy) as session, torch.autocast("cpu", dtype=torch.bfloat16):
        session.step(data(1)[0])
        assert session.profile.full.seconds > 0


@pytest.mark.parametrize("limit", [lambda: within("1000s"), lambda: schedule.ramp(1.0, 1.0)], ids=["within", "ramp"])
def test_a_time_limit_may_follow_the_length_of_the_run_from_the_first_step(limit: Any) -> None:
    model = make()
    policy = replace(recipes.last(time=limit()), cost=measure.timed)
    with Session(model, adamw(model), classify, policy, total_steps=3) as session:
        for batch in data(3):
            session.step(batch)
        assert session.selection.asked["seconds"] > 0


def test_a_batch_that_reaches_nothing_of_the_model_trains_what_else_the_loss_has() -> None:
    model, scale = make(), torch.ones((), requires_grad=True)

    def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
        value = classify(model, batch)
        return scale * (value.detach() if len(batch[0]) == 1 else value)

    batches = data(2)
    with Session(model, adamw(model), scaled, fixed(*CHOSEN)) as session:
        session.step(batches[0])
        before = snapshot(model)["weights"]
        session.step(tuple(part[:1] for part in batches[1]))
        assert differences(before, snapshot(model)["weights"]) == []


def test_autocast_around_the_whole_run_hands_no_gradient_to_what_left() -> None:
    # Within one autocast region the casts of weights are cached, together with their way back to the weight.
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Session(model, optimizer, classify, cycling()) as session, torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in data(7):
            before = snapshot(model)["weights"]
            session.step(batch)
            with_grad = {name for name, param in model.named_parameters() if param.grad is not None}
            moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
            assert with_grad == session.selection.params
            assert moved == with_grad


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_steps_as_in_a_plain_loop(enabled: bool, clip: float | None) -> None:
    model = make()
    twin = frozen_twin(model, CHOSEN)
    optimizer, plain = adamw(model), adamw(twin)
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=enabled) for _ in range(2))
    with Session(model, optimizer, classify, fixed(*CHOSEN), scaler=scaler, clip=clip) as session:
        for batch in data(4):
            session.step(batch)
            plain.zero_grad()
            plain_scaler.scale(classify(twin, batch)).backward()
            if clip is not None:
                plain_scaler.unscale_(plain)
                nn.utils.clip_grad_norm_(twin.parameters(), clip)
            plain_scaler.step(plain)
            plain_scaler.update()
            after, expected = snapshot(model, optimizer), snapshot(twin, plain)
            assert differences(expected["weights"], after["weights"]) == []
            assert differences(expected["optimizer"], after["optimizer"]) == []
            assert scaler.get_scale() == plain_scaler.get_scale()


def test_the_scale_is_taken_out_of_values_and_a_skipped_step_counts() -> None:
    values = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = by_gain(schedule.once(), Budget(time=0.8))
        with Session(model, optimizer, classify, policy, scaler=scaler) as session:
            session.step(data()[0])
            values.append(session.selection.values)
            if scaler is not None:
                before = snapshot(model)["weights"]
                images, labels = data()[1]
                session.step((images * math.inf, labels))  # infinite gradients: the scaler skips the step
                assert session.progress.step == 2
                assert differences(before, snapshot(model)["weights"]) == []
                assert scaler.get_scale() == 2.0**9
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_checkpointed_segments_train_as_in_a_plain_loop() -> None:
    class Recomputed(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda t: F.relu(self.drop(self.a(t))), x, use_reentrant=False)
            x = checkpoint(lambda t: F.relu(self.drop(self.b(t))), x, use_reentrant=False)
            return self.head(x)

    model = make(Recomputed)
    optimizer = adamw(model)
    policy = on_steady_device(recipes.random(time=0.8, when=schedule.every(steps=1)))
    twin = copy.deepcopy(model)
    plain = adamw(twin)
    with Session(model, optimizer, classify, policy) as session:
        for k, batch in enumerate(data(5)):
            torch.manual_seed(k)
            session.step(batch)
            freeze_by_hand(twin, session.selection.params, set(flags(twin)))
            torch.manual_seed(k)
            plain_step(twin, plain, classify, batch)
            assert differences(snapshot(twin, plain), snapshot(model, optimizer)) == []


def test_learning_rate_schedulers_run_beside_it() -> None:
    model = make()
    twin = copy.deepcopy(model)
    optimizer, plain = sgd(model), sgd(twin)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=8) for o in (optimizer, plain)]
    policy = by_gain(schedule.every(steps=1), Budget(time=1.0))
    with Session(model, optimizer, classify, policy) as session:
        for batch in data(8)[:7]:
            session.step(batch)
            freeze_by_hand(twin, session.selection.params, set(flags(twin)))
            plain_step(twin, plain, classify, batch)
            for scheduler in schedulers:
                scheduler.step()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            assert differences(snapshot(twin, plain), snapshot(model, optimizer)) == []
    assert optimizer._opt_called  # its step was seen by the scheduler, that of no probe


def test_the_users_own_loop_is_the_same_as_step() -> None:
    ends = []
    for own in (False, True):
        model = make(Normed)
        optimizer = adamw(model)
        policy = by_gain(schedule.every(steps=2), Budget(time=0.8))
        torch.manual_seed(1)
        with Session(model, optimizer, classify, policy) as session:
            for batch in data(6):
                if own:
                    session.before_step(batch)
                    plain_step(model, optimizer, classify, batch)
                else:
                    session.step(batch)
            ends.append([snapshot(model, optimizer), session.progress, session.selection])
    assert differences(*ends) == []


def test_a_model_in_eval_mode_stays_there() -> None:
    model = make(Normed).eval()
    before = snapshot(model)
    with Session(model, sgd(model), classify, on_steady_device(recipes.full())) as session:
        for batch in data(3):
            session.step(batch)
            assert not any(module.training for module in model.modules())
    after = snapshot(model)
    assert differences([before["buffers"], before["modes"]], [after["buffers"], after["modes"]]) == []


# ---------------------------------------------------------------- norms


def test_unchosen_norms_run_on_their_statistics_whatever_train_says() -> None:
    model = make(Normed)
    before = snapshot(model)["buffers"]
    with Session(model, sgd(model), classify, fixed("norm_b.weight", "head.*")) as session:
        for batch in data(3):
            model.train()
            session.step(batch)
            assert (model.norm_a.training, model.norm_b.training, model.drop.training) == (False, True, True)
        after = snapshot(model)["buffers"]
        assert {name.split(".")[0] for name in differences(before, after)} == {"/norm_b"}
        model.eval()
        session.step(data()[3])
        assert not model.norm_b.training
        assert differences(after, snapshot(model)["buffers"]) == []
        model.train()
        session.step(data()[4])
        assert (model.norm_a.training, model.norm_b.training) == (False, True)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(("rule", "moving"), [("chosen", {"/norm_b"}), ("frozen", set()), ("as-is", {"/norm_a", "/norm_b"})])
def test_norm_rules(rule: str, moving: set[str]) -> None:
    model = make(Normed)
    before = snapshot(model)
    with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*"), norm=rule) as session:
        for batch in data(2):
            session.step(batch)
    after = snapshot(model)
    assert {name.split(".")[0] for name in differences(before["buffers"], after["buffers"])} == moving
    assert before["modes"] == after["modes"]


def learned() -> nn.Module:
    """With statistics that are of the data."""
    model = make(Normed)
    with torch.no_grad():
        for _ in range(20):
            for x, _ in data(3):
                model(x)
    return model


def test_norms_that_have_learned_rest_where_batches_are_small(tmp_path: Path) -> None:
    model = learned()
    before, log = snapshot(model)["buffers"], tmp_path / "run.jsonl"
    with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*"), log=log) as session:
        session.step(data()[0])
        assert not model.norm_b.training
        assert session.profile.origin["norms"] == "frozen"
    assert differences(before, snapshot(model)["buffers"]) == []
    assert all(module.training for module in model.modules())
    assert "norms keep their running statistics" in log.read_text()
    with Session(model, sgd(model), classify, recipes.full()) as session:
        session.step(data()[0])
    assert differences(before, snapshot(model)["buffers"])  # plain training


def test_a_norm_at_rest_rests_after_a_stop_whatever_came_of_its_statistics(tmp_path: Path) -> None:
    model = learned()
    with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*")) as session:
        session.step(data()[0])
        for norm in (model.norm_a, model.norm_b):
            norm.reset_running_stats()
        session.save(tmp_path / "stopped")
    with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*")) as session:
        session.load(tmp_path / "stopped")
        session.step(data()[1])
        assert not model.norm_b.training


def test_what_auto_settled_is_for_auto_alone_and_a_run_goes_on_as_it_was_priced(tmp_path: Path) -> None:
    for saved, loaded, moves in (("auto", "chosen", True), ("chosen", "auto", True), ("frozen", "auto", False)):
        model = learned()
        with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*"), norm=saved) as session:
            session.step(data()[0])
            session.save(tmp_path / "stopped")
        model = learned()
        with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*"), norm=loaded) as session:
            session.load(tmp_path / "stopped")
            session.step(data()[1])
            assert model.norm_b.training == moves


def test_norms_are_settled_by_the_batch_that_trains_not_by_one_that_failed() -> None:
    model = learned()
    with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*")) as session:
        with pytest.raises(RuntimeError):
            session.step((torch.randn(4, 5), torch.zeros(4, dtype=torch.long)))
        session.step(data()[0])
        assert not model.norm_b.training


def test_a_choice_of_everything_within_a_budget_has_norms_at_rest() -> None:
    model = learned()
    policy = replace(recipes.full(), cost=counted, budget=Budget(macs=1.0))
    with Session(model, sgd(model), classify, policy) as session:
        session.step(data()[0])
        assert len(session.selection.params) == len(list(model.parameters())) and not model.norm_b.training


def test_a_profile_settles_what_norms_do_whatever_the_first_batch_is_like() -> None:
    model = learned()
    profile = counted(model, sgd(model), classify, data()[0])
    assert profile.origin["norms"] == "frozen"
    x, y = data()[0]
    for first in ((x, y), (10 * x, y)):
        with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*"), profile=profile) as session:
            session.step(first)
            assert not model.norm_b.training
    with Session(model, sgd(model), classify, fixed("head.*"), profile=replace(profile, origin={})) as session:
        session.step((x, y))  # one that does not tell is no obstacle


def test_a_budget_that_is_refused_leaves_norms_as_steps_were_priced() -> None:
    model = learned()
    x, y = data()[0]
    with Session(model, sgd(model), classify, by_gain(schedule.once(), Budget(memory="1B"))) as session:
        with pytest.raises(BudgetError):
            session.step((x, y))
        session.budget = Budget(memory="1MB")
        session.step((10 * x, y))
        assert session.profile.origin["norms"] == "frozen" and not model.norm_b.training


def test_each_run_of_a_log_tells_of_norms_at_rest(tmp_path: Path) -> None:
    model, log = learned(), tmp_path / "run.jsonl"
    for _ in range(2):
        with Session(model, sgd(model), classify, fixed("head.*"), log=log) as session:
            session.step(data()[0])
    kinds = [line["event"] for line in map(json.loads, log.read_text().splitlines())]
    assert kinds.count("note") == 2
    assert all(kinds[at - 1] == "start" for at, kind in enumerate(kinds) if kind == "note")


def test_a_new_norm_goes_on_moving_after_a_stop(tmp_path: Path) -> None:
    model = make(Normed)
    with Session(model, sgd(model), classify, fixed("norm_b.*", "head.*")) as session:
        session.step(data()[0])
        session.save(tmp_path / "stopped")
    again = make(Normed)
    with Session(again, sgd(again), classify, fixed("norm_b.*", "head.*")) as session:
        session.load(tmp_path / "stopped")
        for norm in (again.norm_a, again.norm_b):
            norm.load_state_dict(learned().norm_b.state_dict())  # statistics like those of a session that would rest
        before = again.norm_b.running_mean.clone()
        session.step(data()[1])
        assert again.norm_b.training and not torch.equal(before, again.norm_b.running_mean)


# ---------------------------------------------------------------- budgets, schedules, signals


def test_a_new_budget_takes_effect_at_the_next_step() -> None:
    model = make()
    with Session(model, sgd(model), classify, by_gain(schedule.once(), Budget(time=0.5))) as session:
        session.step(data()[0])
        few = names(session)
        session.budget = Budget(time=0.9)
        assert names(session) == few
        session.step(data()[1])
        assert few < names(session)
        assert session.selection.share("seconds") <= 0.9
        assert session.progress.round == 1
        before = snapshot(model)
        with pytest.raises(BudgetError):
            session.budget = Budget(time=0.01)
        assert session.budget == Budget(time=0.9)
        assert differences(before, snapshot(model)) == []
        session.step(data()[2])
        assert session.progress.round == 1


def test_a_new_budget_survives_a_stop(tmp_path: Path) -> None:
    ends = []
    for stop in (False, True):
        model = make()
        optimizer, policy = adamw(model), by_gain(schedule.once(), Budget(time=0.5))
        session = Session(model, optimizer, classify, policy)
        session.step(data()[0])
        session.budget = Budget(time=0.9)  # decided, not applied yet
        if stop:
            session.save(tmp_path / "run.pt")
            model = make(seed=3)
            optimizer = adamw(model)
            session = Session(model, optimizer, classify, policy)
            session.load(tmp_path / "run.pt")
        session.step(data()[1])
        assert session.budget == Budget(time=0.9)
        ends.append([snapshot(model, optimizer), session.selection])
    assert differences(*ends) == []


def test_a_budget_may_move_with_progress() -> None:
    model = make()
    policy = by_gain(schedule.once(), Budget(time=schedule.ramp(1.0, 0.5)))
    shares = []
    with Session(model, sgd(model), classify, policy, total_steps=60, correct=False) as session:
        for k, batch in enumerate(data(60)):
            session.step(batch)
            shares.append(session.selection.share("seconds"))
            assert shares[-1] <= schedule.ramp(1.0, 0.5)(replace(session.progress, step=max(k - 20, 0))) * 1.001
        assert session.progress.round == 0  # planned again within the round
    assert shares[0] == 1.0
    assert shares[-1] < 0.6


@pytest.mark.parametrize("larger", [Budget(macs=1.0), Budget()], ids=["more MACs", "no limit"])
def test_what_a_larger_budget_brings_within_reach_is_scored_and_chosen(larger: Budget) -> None:
    model = make()
    with Session(model, sgd(model), classify, by_gain(schedule.once(), Budget(macs=0.6))) as session:
        session.step(data()[0])
        unscored = {name for name, value in session.selection.values.items() if value == 0.0}
        assert unscored and not unscored & names(session)
        session.budget = larger
        session.step(data()[1])
        session.step(data()[2])  # the first batch after the change of plan scores them
        assert names(session) == set(session.selection.values) and session.progress.round == 2
        session.budget = Budget(macs=0.9)
        session.step(data()[3])
        session.step(data()[4])
        assert session.progress.round == 3  # everything was scored already


def test_what_a_moving_budget_brings_within_reach_is_scored_and_chosen() -> None:
    model = make()
    policy = by_gain(schedule.once(), Budget(macs=lambda now: 0.6 if now.step < 5 else 1.0))
    with Session(model, sgd(model), classify, policy, total_steps=20) as session:
        session.step(data()[0])
        few = names(session)
        for batch in data(19):
            session.step(batch)
        assert few < names(session) == set(session.selection.values)


def test_a_budget_over_a_run_of_unknown_length_is_refused() -> None:
    model = make()
    before = snapshot(model)
    with Session(model, sgd(model), classify, by_gain(schedule.once(), Budget(time=schedule.ramp(1.0, 0.5)))) as session:
        with pytest.raises(ValueError, match="total_steps"):
            session.step(data()[0])
        assert differences(before, snapshot(model)) == []


class Switch(nn.Module):
    """Three branches; the batch says how much each counts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x), self.b(x), self.c(x)], dim=1)


def weighted(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, weight = batch
    return (model(x) * weight).sum(dim=1).mean()


def switching(model: nn.Module) -> tuple[torch.optim.Optimizer, Policy]:
    policy = by_gain(schedule.on_drift(0.3, at_least=3), Budget(macs=0.85))
    return torch.optim.SGD(model.parameters(), lr=1e-3), replace(policy, cost=measure.counted, head=False)


def counting(*shares: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 4), torch.tensor([shares]).expand(4, 3)


A_COUNTS, C_COUNTS = counting(3.0, 1.0, 0.1), counting(0.1, 1.0, 3.0)


@pytest.mark.parametrize("turns", [True, False])
def test_values_that_turn_bring_a_new_choice(turns: bool) -> None:
    model = make(Switch)
    optimizer, policy = switching(model)
    with Session(model, optimizer, weighted, policy) as session:
        for _ in range(40):
            session.step(A_COUNTS)
        assert names(session) == {"a", "b"}
        assert session.progress.round == 0
        for _ in range(80):
            session.step(C_COUNTS if turns else A_COUNTS)
        assert names(session) == ({"b", "c"} if turns else {"a", "b"})
        assert (session.progress.round > 0) == turns


def test_what_was_watched_survives_a_stop(tmp_path: Path) -> None:
    changed_at = []
    for stop in (None, 44):
        model = make(Switch)
        optimizer, policy = switching(model)
        session = Session(model, optimizer, weighted, policy)
        for k in range(120):
            if k == stop:
                session.save(tmp_path / "run.pt")
                model = make(Switch, seed=3)
                optimizer, policy = switching(model)
                session = Session(model, optimizer, weighted, policy)
                session.load(tmp_path / "run.pt")
            session.step(A_COUNTS if k < 40 else C_COUNTS)
            if session.progress.round == 1:
                break
        changed_at.append(k)
    assert 44 < changed_at[0] < 119
    assert changed_at[0] == changed_at[1]


# ---------------------------------------------------------------- fit


def test_fit_is_the_loop_over_epochs() -> None:
    ends: list[Any] = []
    seen: list[int] = []
    for fit in (True, False):
        model = make(Normed)
        optimizer = adamw(model)
        policy = on_steady_device(recipes.elastic_layers(time=0.8, when=schedule.every(epochs=1)))
        torch.manual_seed(1)
        with Session(model, optimizer, classify, policy, steps_per_epoch=None if fit else 4) as session:
            if fit:
                means = session.fit(data(4), epochs=3, on_step=lambda progress, value: seen.append(progress.step))
                assert seen == list(range(1, 13))
                assert session.progress.fraction == 1.0
            else:
                losses = [[session.step(batch) for batch in data(4)] for _ in range(3)]
                means = [float(torch.stack(epoch).mean()) for epoch in losses]
            assert session.progress.round == 2
            ends.append([snapshot(model, optimizer), means, session.selection])
    assert differences(*ends) == []


def test_fit_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def session_of(seed: int) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
        model = make(Normed, seed)
        optimizer = adamw(model)
        policy = on_steady_device(recipes.random(time=0.8, when=schedule.every(steps=3)))
        return Session(model, optimizer, classify, policy, accumulate=2), model, optimizer

    whole, model, optimizer = session_of(0)
    torch.manual_seed(1)
    whole.fit(data(8), epochs=3)
    assert whole.progress.step == 12
    expected = snapshot(model, optimizer)

    def stop(progress: Any, _: object) -> None:
        if progress.step == 6 and not (tmp_path / "run.pt").exists():
            first.save(tmp_path / "run.pt")
            raise Enough

    first, _, _ = session_of(0)
    torch.manual_seed(1)
    with first, pytest.raises(Enough):
        first.fit(data(8), epochs=3, on_step=stop)
    second, model, optimizer = session_of(5)
    second.load(tmp_path / "run.pt")
    second.fit(data(8), epochs=3)
    assert second.progress.step == 12
    assert differences(expected, snapshot(model, optimizer)) == []
    assert second.fit(data(8), epochs=3) == []  # done is done


@pytest.mark.parametrize(("how", "said"), [({"accumulate": 4}, "3 batches"), ({"steps_per_epoch": 5}, "steps_per_epoch=5")])
def test_fit_with_fewer_batches_than_a_step_takes_or_were_promised(how: dict[str, int], said: str) -> None:
    model = make()
    with (
        Session(model, sgd(model), classify, fixed("head.*"), **how) as session,
        pytest.raises(ValueError, match=said),
    ):
        session.fit(data(3), epochs=2)


class Stream(torch.utils.data.IterableDataset[Any]):
    """A dataset without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(data(self.count))


def test_fit_reads_a_loader_without_a_length_to_its_end() -> None:
    ends: list[Any] = []
    for fit in (True, False):
        model = make(Normed)
        optimizer = adamw(model)
        policy = on_steady_device(recipes.random(time=0.8, when=schedule.every(steps=3)))
        torch.manual_seed(1)
        with Session(model, optimizer, classify, policy, accumulate=2) as session:
            if fit:
                means = session.fit(Stream(5), epochs=3)  # of five batches, the last is too few for a step
                assert len(means) == 3
                assert session.total_steps is None
            else:
                for _ in range(3):
                    for batch in data(5)[:4]:
                        session.step(batch)
            assert session.progress.step == 6
            ends.append([snapshot(model, optimizer), session.selection])
    assert differences(*ends) == []


def test_fit_knows_the_length_of_a_stream_if_it_is_given() -> None:
    model = make()
    with Session(model, sgd(model), classify, fixed("head.*"), steps_per_epoch=3) as session:
        session.fit(torch.utils.data.DataLoader(Stream(5), batch_size=None), epochs=2)
        assert (session.progress.step, session.total_steps) == (6, 6)


@pytest.mark.parametrize(
    ("policy", "stream", "says"),
    [
        (fixed("head.*"), iter(data(3)), "only once"),
        (fixed("head.*"), Stream(0), "gave too few batches in epoch 1"),
        (on_steady_device(recipes.elastic_layers(time=0.9)), Stream(3), "steps_per_epoch"),
        (on_steady_device(recipes.freeze_out()), Stream(3), "total_steps"),
    ],
    ids=["a generator", "nothing in it", "a schedule of epochs", "a schedule of the whole run"],
)
def test_what_fit_cannot_do_without_a_length_is_said(policy: Policy, stream: Any, says: str) -> None:
    model = make()
    with Session(model, sgd(model), classify, policy) as session, pytest.raises(ValueError, match=says):
        session.fit(stream, epochs=2)


def test_fit_cannot_go_on_in_a_stream_of_unknown_length() -> None:
    model = make()
    with Session(model, sgd(model), classify, fixed("head.*")) as session:
        session.fit(Stream(3), epochs=1)
        with pytest.raises(ValueError, match=r"the epoch of step 3 is unknown: give Session\(steps_per_epoch"):
            session.fit(Stream(3), epochs=2)


# ---------------------------------------------------------------- log, checkpoint


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_tells_the_whole_run(tmp_path: Path) -> None:
    model, log = make(), tmp_path / "run.jsonl"
    policy = on_steady_device(recipes.random(time=0.7, when=schedule.every(steps=3)))
    losses = []
    with Session(model, sgd(model), classify, policy, log=log) as session:
        for batch in data(7):
            losses.append(float(session.step(batch)))
        last = session.selection
    told = lines(log)
    events = [line["event"] for line in told]
    assert events == ["start", "round", *["step"] * 3, "round", *["step"] * 3, "round", "step", "end"]
    steps = [line for line in told if line["event"] == "step"]
    assert [line["loss"] for line in steps] == pytest.approx(losses)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["round"] for line in steps] == [0, 0, 0, 1, 1, 1, 2]
    assert all(line["seconds"] >= 0 for line in steps)
    start, final = told[0], [line for line in told if line["event"] == "round"][-1]
    assert start["policy"] == "random"
    assert start["units"]["head"] == ["head.weight", "head.bias"]
    assert start["full"]["macs"] == last.full.macs
    assert [unit["name"] for unit in final["units"]] == [unit.name for unit in last.units]
    assert final["cost"]["seconds"] <= final["limit"]["seconds"]
    assert (told[-1]["step"], told[-1]["round"]) == (7, 2)


def test_an_own_loop_is_logged_too_without_losses(tmp_path: Path) -> None:
    model = make()
    optimizer = sgd(model)
    with Session(model, optimizer, classify, fixed("head.*"), log=tmp_path / "run.jsonl") as session:
        for batch in data(2):
            session.before_step(batch)
            plain_step(model, optimizer, classify, batch)
    steps = [line for line in lines(tmp_path / "run.jsonl") if line["event"] == "step"]
    assert [(line["step"], line["loss"]) for line in steps] == [(1, None), (2, None)]


def test_a_torn_log_is_mended_when_the_run_goes_on(tmp_path: Path) -> None:
    log, saved = tmp_path / "run.jsonl", tmp_path / "run.pt"
    model = make()
    session = Session(model, sgd(model), classify, fixed("head.*"), log=log)
    session.step(data()[0])
    session.save(saved)
    with open(log, "a") as file:
        file.write('{"event": "step", "st')  # the power went
    model = make()
    with Session(model, sgd(model), classify, fixed("head.*"), log=log) as session:
        session.load(saved)
        session.step(data()[1])
    told = [line["event"] for line in lines(log)]
    assert told[:2] == ["start", "round"]
    assert told[-3:] == ["resume", "step", "end"]


def test_a_checkpoint_is_never_ahead_of_the_log(tmp_path: Path) -> None:
    model, log = make(), tmp_path / "run.jsonl"
    with Session(model, sgd(model), classify, fixed("head.*"), log=log) as session:
        for batch in data(3):
            session.step(batch)
        session.save(tmp_path / "run.pt")
        # If the run dies now, whoever resumes it begins with step 4: the first three must be told already.
        assert [line["step"] for line in lines(log) if line["event"] == "step"] == [1, 2, 3]


def test_an_interrupted_save_leaves_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    saved = tmp_path / "run.pt"
    with Session(model, sgd(model), classify, fixed("head.*")) as session:
        session.step(data()[0])
        session.save(saved)
        old, then = saved.read_bytes(), snapshot(model)["weights"]
        session.step(data()[1])

        def fail(*_: object) -> None:
            raise OSError("the power went")

        for moment in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, moment, fail)
                with pytest.raises(OSError, match="the power went"):
                    session.save(saved)
            assert saved.read_bytes() == old
            assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
        session.load(saved)
        assert session.progress.step == 1
        assert differences(then, snapshot(model)["weights"]) == []


def test_a_checkpoint_that_is_not_whole_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = make()
    saved = tmp_path / "run.pt"
    with Session(model, sgd(model), classify, fixed("head.*")) as session:
        session.step(data()[0])
        session.save(saved)
        saved.write_bytes(saved.read_bytes()[:-200])
        before = snapshot(model)
        with pytest.raises(ValueError, match="not a whole checkpoint"):
            session.load(saved)
        with pytest.raises(FileNotFoundError):
            session.load(tmp_path / "nothing.pt")
        assert differences(before, snapshot(model)) == []


def test_the_checkpoint_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    other = make(Normed)
    with Session(other, sgd(other), classify, fixed("head.*")) as session:
        session.step(data()[0])
        session.save(tmp_path / "other.pt")
    model = make()
    optimizer = sgd(model)
    with Session(model, optimizer, classify, fixed("head.*")) as session:
        before = snapshot(model, optimizer)
        with pytest.raises((ValueError, RuntimeError)):
            session.load(tmp_path / "other.pt")
        assert differences(before, snapshot(model, optimizer)) == []


# ---------------------------------------------------------------- the user's objects


def test_the_users_objects_stay_what_they_are() -> None:
    model = make(Normed)
    optimizer = adamw(model)

    def look() -> list[Any]:
        hooks = [
            [len(value) for name, value in sorted(vars(module).items()) if name.endswith("hooks")] for module in model.modules()
        ]
        on_params = [param._backward_hooks for param in model.parameters()]
        kinds = [type(module) for module in model.modules()], type(optimizer), type(model.forward), type(optimizer.step)
        return [list(model.state_dict()), kinds, hooks, on_params, [id(param) for param in model.parameters()]]

    groups = [id(param) for group in optimizer.param_groups for param in group["params"]]
    before = look()
    policy = by_gain(schedule.every(steps=1), Budget(time=0.8))
    with Session(model, optimizer, classify, policy) as session:
        for batch in data(3):
            session.step(batch)
            assert look() == before
            copy.deepcopy(model), copy.deepcopy(optimizer)  # both can still be copied
            assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len(groups)
    assert look() == before
    assert groups == [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("where", ["loss", "body"])
def test_leaving_by_an_exception_restores_flags_and_modes(where: str) -> None:
    model = make(Normed)
    model.a.bias.requires_grad_(False)
    before, broken = snapshot(model), []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if broken:
            raise ZeroDivisionError
        return classify(model, batch)

    optimizer = sgd(model)
    with pytest.raises(ZeroDivisionError), Session(model, optimizer, loss, fixed("head.*")) as session:
        session.step(data()[0])
        assert not model.norm_a.training
        assert not model.b.weight.requires_grad
        if where == "loss":
            broken.append(True)
            session.step(data()[1])
        raise ZeroDivisionError
    after = snapshot(model)
    assert differences([before["flags"], before["modes"]], [after["flags"], after["modes"]]) == []
    assert not optimizer._optimizer_step_post_hooks


def test_a_loss_that_raised_once_spends_no_step() -> None:
    model, broken = make(), [True]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        value = classify(model, batch)
        if session.progress.step == 1 and broken:
            broken.clear()
            raise ZeroDivisionError
        return value

    with Session(model, sgd(model), loss, fixed("head.*")) as session:
        session.step(data()[0])
        before = snapshot(model)["weights"]
        with pytest.raises(ZeroDivisionError):
            session.step(data()[1])
        assert session.progress.step == 1
        assert differences(before, snapshot(model)["weights"]) == []
        session.step(data()[1])
        assert session.progress.step == 2


def test_another_optimizer_may_take_over() -> None:
    model = make()
    old, new = sgd(model), adamw(model)
    with Session(model, old, classify, fixed("head.*", head=True)) as session:
        session.step(data()[0])
        session.optimizer = new
        assert session.optimizer is new
        assert not old._optimizer_step_post_hooks
        before = snapshot(model)["weights"]
        session.step(data()[1])
        assert set(new.state) == {model.head.weight, model.head.bias}
        assert not torch.equal(before["head.weight"], model.head.weight)
        chosen, was = session.selection, flags(model)
        with pytest.raises(ValueError, match="no param group"):
            session.optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
        assert session.optimizer is new
        assert (session.selection, flags(model)) == (chosen, was)
    assert not new._optimizer_step_post_hooks


def test_an_optimizer_that_was_emptied_is_noticed() -> None:
    model = make()
    optimizer = sgd(model)
    with Session(model, optimizer, classify, fixed("head.*")) as session:
        session.step(data()[0])
        before, was = snapshot(model)["weights"], flags(model)
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        with pytest.raises(ValueError, match="no param group"):
            session.step(data()[1])
        assert flags(model) == was
        optimizer.param_groups.extend(groups)
        assert differences(before, snapshot(model)["weights"]) == []
        session.step(data()[1])
        assert session.progress.step == 2


@pytest.mark.parametrize("policy", [recipes.full(), fixed("*"), by_gain(schedule.every(steps=1), Budget(time=0.9))])
def test_what_the_optimizer_does_not_hold_is_never_chosen_and_that_is_said_once(policy: Policy, tmp_path: Path) -> None:
    model, log = make(), tmp_path / "run.jsonl"
    optimizer = torch.optim.SGD([*model.layers[2:].parameters(), model.head.weight], lr=0.1)
    held = {name for name, p in model.named_parameters() if any(p is q for q in optimizer.param_groups[0]["params"])}
    before = snapshot(model)["weights"]
    with Session(model, optimizer, classify, on_steady_device(policy), log=log) as session:
        with pytest.warns(UserWarning, match=r"'head.bias' is in no param group of the optimizer \(5 such parameters\)"):
            session.step(data()[0])
        session.step(data()[1])
        assert {name for unit in session.units for name in unit.params} == held
        assert session.selection.params <= held
    after = snapshot(model)["weights"]
    assert {name for name in before if not torch.equal(before[name], after[name])} <= held
    assert log.read_text().count("in no param group") == 1


def test_a_replaced_optimizer_that_holds_less_narrows_the_choice() -> None:
    model = make()
    with Session(model, sgd(model), classify, fixed("head.*")) as session:
        session.step(data()[0])
        with pytest.warns(UserWarning, match="in no param group"):
            session.optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        assert {name for unit in session.units for name in unit.params} == {"head.weight", "head.bias"}
        session.step(data()[1])


# ---------------------------------------------------------------- what is refused, and survived


def no_sample() -> Batch:
    return torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)


def not_a_number() -> Batch:
    images, labels = data()[0]
    return images * math.nan, labels


def all_of(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model)


def over_nothing(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.param_groups[0]["params"].clear()
    return optimizer


def two_numbers(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch[0]).mean(dim=0)


def detached(model: nn.Module, batch: Batch) -> torch.Tensor:
    return classify(model, batch).detach()


GAIN = by_gain(schedule.once(), Budget(time=0.8))
REFUSED_AT_THE_FIRST_STEP: dict[str, dict[str, Any]] = {
    "budget below the floor": {"policy": by_gain(schedule.once(), Budget(time=0.05)), "error": BudgetError, "says": "floor"},
    "two budgets, one below its floor": {
        "policy": recipes.pliant(time=0.9, memory="1B"),
        "error": BudgetError,
        "says": "memory",
    },
    "energy": {"policy": by_gain(schedule.once(), Budget(energy=0.5)), "error": MeterError, "says": "energy"},
    "empty batch": {"batch": no_sample(), "error": ValueError, "says": "batch is empty"},
    "not in the optimizer": {"optimizer": over_nothing, "error": ValueError, "says": "no param group"},
    "unknown unit": {"policy": fixed("nowhere.*"), "error": ValueError, "says": "no unit matches 'nowhere"},
    "unknown always": {"policy": replace(GAIN, always=("nowhere",)), "error": ValueError, "says": "no unit matches 'nowhere'"},
    "NaN loss": {"batch": not_a_number(), "error": ProbeError, "says": "nan"},
    "epochs, but how many steps": {
        "policy": on_steady_device(recipes.elastic_trainer()),
        "error": ValueError,
        "says": "steps_per_epoch",
    },
    "loss is not a scalar": {"loss": two_numbers, "error": ValueError, "says": "scalar"},
    "loss without gradient": {"loss": detached, "error": ValueError, "says": "no gradient can flow"},
}


@pytest.mark.parametrize("what", REFUSED_AT_THE_FIRST_STEP)
def test_a_first_step_that_is_refused_changes_nothing(what: str) -> None:
    row = REFUSED_AT_THE_FIRST_STEP[what]
    model = make(Normed)
    optimizer = row.get("optimizer", all_of)(model)
    before = snapshot(model, optimizer)
    with Session(model, optimizer, row.get("loss", classify), on_steady_device(row.get("policy", GAIN))) as session:
        with pytest.raises(row["error"], match=row["says"]):
            session.step(row.get("batch", data()[0]))
        after = snapshot(model, optimizer)
        assert differences({**before, "modes": None}, {**after, "modes": None}) == []
        with pytest.raises(RuntimeError, match="nothing is chosen yet"):
            _ = session.selection
    assert differences(before, snapshot(model, optimizer)) == []


AFTER_THE_PROBE = ["budget below the floor", "not in the optimizer", "unknown unit", "unknown always", "NaN loss"]


@pytest.mark.parametrize("what", AFTER_THE_PROBE)
def test_a_first_step_that_is_refused_leaves_norms_in_their_mode(what: str) -> None:
    row = REFUSED_AT_THE_FIRST_STEP[what]
    model = make(Normed)
    optimizer = row.get("optimizer", all_of)(model)
    session = Session(model, optimizer, row.get("loss", classify), on_steady_device(row.get("policy", GAIN)))
    with pytest.raises(row["error"]):
        session.step(row.get("batch", data()[0]))
    assert all(module.training for module in model.modules())


REFUSED_AT_ONCE: dict[str, tuple[dict[str, Any], str]] = {
    "engine": ({"engine": "steam"}, "engine='steam'"),
    "cache": ({"cache": {}}, "cache"),
    "norm": ({"norm": "sometimes"}, "norm='sometimes'"),
    "accumulate": ({"accumulate": 0}, "accumulate=0"),
    "clip": ({"clip": -1.0}, "clip=-1.0"),
    "total_steps": ({"total_steps": 0}, "total_steps=0 is not a number of optimizer steps"),
    "steps_per_epoch": ({"steps_per_epoch": 2.5}, "steps_per_epoch=2.5 is not"),
    "profile": ({"profile": os.devnull}, "not a whole Pliant profile"),
}


@pytest.mark.parametrize("what", REFUSED_AT_ONCE)
def test_a_session_that_is_refused_changes_nothing(what: str) -> None:
    arguments, says = REFUSED_AT_ONCE[what]
    model = make(Normed)
    optimizer = sgd(model)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=says):
        Session(model, optimizer, classify, GAIN, **arguments)
    assert differences(before, snapshot(model, optimizer)) == []


@pytest.mark.parametrize("what", ["norm", "profile"])
def test_a_session_that_is_refused_leaves_no_hook(what: str) -> None:
    model = make(Normed)
    optimizer = sgd(model)
    with pytest.raises(ValueError):
        Session(model, optimizer, classify, GAIN, **REFUSED_AT_ONCE[what][0])
    assert not optimizer._optimizer_step_post_hooks


def test_no_trainable_parameter() -> None:
    model = make().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        Session(model, sgd(model), classify, GAIN)


def floors(message: str) -> Iterator[tuple[str, float, str]]:
    for kind, share, amount, unit in re.findall(r"Use (\w+)>=([\d.]+) \(([\d.e+-]+) (\w+)\)", message):
        yield kind, float(share), f"{amount}{unit}"


@pytest.mark.parametrize("model_name", ZOO)
@pytest.mark.parametrize("as_share", [True, False])
def test_the_floor_that_an_error_names_works(model_name: str, as_share: bool) -> None:
    model, loss, batch = ZOO[model_name].make()
    policy = on_steady_device(recipes.elastic_trainer(time=0.01, when=schedule.once()))
    with Session(model, sgd(model), loss, policy) as session:
        with pytest.raises(BudgetError) as refused:
            session.step(batch)
        ((kind, share, amount),) = floors(str(refused.value))
        session.budget = Budget(**{kind: share if as_share else amount})
        session.step(batch)
        assert session.selection.share("seconds") <= share + 1e-9
        with pytest.raises(BudgetError):
            session.budget = Budget(**{kind: share - 0.002})  # and it is the floor


@pytest.mark.parametrize("floor", [1.2344e-3, 1.2344, 1.2346e-5])
def test_a_floor_named_with_its_unit_works_too(floor: float) -> None:
    profile = Profile(
        (Charge(ChargeKind.WEIGHT_GRAD, Cost(floor / 2), ("w",)), Charge(ChargeKind.WEIGHT_GRAD, Cost(floor), ("v",))),
        Cost(floor / 2),
    )
    policy = Policy(units.tensors(), score.nearness(), steady, solve.knapsack(), budget=Budget(time="1us"), head=False)
    values = {Unit(name, (Part(name),)): 1.0 for name in ("w", "v")}
    with pytest.raises(BudgetError) as refused:
        plan(policy, profile, values)
    ((_, _, amount),) = floors(str(refused.value))
    chosen = plan(replace(policy, budget=Budget(time=amount)), profile, values)
    assert [unit.name for unit in chosen.units] == ["w"]


def test_a_later_probe_without_a_finite_loss_keeps_the_choice(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy, log = by_gain(schedule.every(steps=2), Budget(time=0.7)), tmp_path / "run.jsonl"
    with Session(model, optimizer, classify, policy, log=log) as session:
        for batch in data(2):
            session.step(batch)
        chosen, was = session.selection, flags(model)
        session.before_step(not_a_number())
        assert (session.selection, flags(model)) == (chosen, was)
        for batch in data(4)[2:]:
            session.step(batch)
        assert session.progress.round == 1  # the next probe that is due is taken again
    notes = [line["text"] for line in lines(log) if line["event"] == "note"]
    assert len(notes) == 1
    assert "probe skipped" in notes[0]


def test_a_gradient_that_is_not_a_number_rules_out_its_unit_alone() -> None:
    model = make()
    model.layers[1].bias.register_hook(lambda grad: grad * math.nan)
    policy = by_gain(schedule.once(), Budget(time=1.0))
    with Session(model, sgd(model), classify, policy) as session:
        session.step(data()[0])
        assert "layers.1" not in names(session)
        assert {"head", "layers.0", "layers.3"} <= names(session)
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_a_profile_holds_for_its_batch_and_device(tmp_path: Path) -> None:
    model = make()
    profile = steady(model, sgd(model), classify, data()[0])
    profile.save(tmp_path / "profile.json")
    elsewhere = replace(profile, origin={**profile.origin, "device": "cpu: Raspberry Pi 4"})
    before = snapshot(model)

    def opened(given: Profile | Path, batch: Batch, **how: Any) -> set[str]:
        with Session(model, sgd(model), classify, GAIN, profile=given, **how) as session:
            session.before_step(batch)
            return names(session)

    small = data(1, size=4)[0]
    for given, batch, says in ((profile, small, "batch '8"), (elsewhere, data()[0], "Raspberry Pi 4")):
        with pytest.raises(ProfileMismatch, match=says):
            opened(given, batch)
        assert differences(before, snapshot(model)) == []
    assert opened(profile, data()[0]) == opened(tmp_path / "profile.json", data()[0])
    assert opened(elsewhere, small, allow_mismatch=True)


def test_a_given_profile_spares_the_measurement() -> None:
    model = make()
    profile = steady(model, sgd(model), classify, data()[0])

    def measured(*_: object) -> Profile:
        raise AssertionError("measured, though a profile was given")

    with Session(model, sgd(model), classify, replace(GAIN, cost=measured), profile=profile) as session:
        session.step(data()[0])
        assert session.profile is profile


def test_a_closed_session_does_nothing_more() -> None:
    model = make()
    session = Session(model, sgd(model), classify, GAIN)
    session.step(data()[0])
    session.close()
    session.close()
    before = snapshot(model)
    for ask in (session.step, session.before_step, lambda batch: session.fit([batch], epochs=9)):
        with pytest.raises(RuntimeError, match="closed"):
            ask(data()[1])
    assert differences(before, snapshot(model)) == []


def test_a_session_closed_within_a_step_does_nothing_more() -> None:
    model = make()
    session = Session(model, sgd(model), classify, GAIN, accumulate=2)
    session.step(data()[0])
    session.close()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="closed"):
        session.step(data()[1])
    assert differences(before, snapshot(model)) == []


def test_state_of_something_else_is_refused() -> None:
    model, other = make(), make(Normed)
    with Session(model, sgd(model), classify, GAIN) as session, Session(other, sgd(other), classify, GAIN) as another:
        another.step(data()[0])
        before = snapshot(model)
        with pytest.raises(ValueError, match="not the state of a Pliant session"):
            session.load_state_dict({"format": "something/1"})
        with pytest.raises(
            ValueError, match=r"another version of Pliant: format is 'pliant\.session/14', expected 'pliant\.session/19'"
        ):
            session.load_state_dict({**another.state_dict(), "format": "pliant.session/14"})
        with pytest.raises(ValueError, match="another model"):
            session.load_state_dict(another.state_dict())
        assert differences(before, snapshot(model)) == []


# ---------------------------------------------------------------- found by a first user


def test_a_second_session_closes_the_first() -> None:
    model = make()
    optimizer = sgd(model)
    first = Session(model, optimizer, classify, recipes.head())
    first.step(data()[0])
    with Session(model, optimizer, classify, recipes.full()) as second:
        second.step(data()[1])
        assert len(second.selection.params) == len(list(model.parameters()))
        with pytest.raises(RuntimeError, match="closed"):
            first.step(data()[0])
    assert all(param.requires_grad for param in model.parameters())


def test_the_state_of_another_recipe_is_refused(tmp_path: Path) -> None:
    model = make()
    optimizer = sgd(model)
    with Session(model, optimizer, classify, recipes.head()) as session:
        session.step(data()[0])
        session.save(tmp_path / "run.pt")
    with (
        Session(model, optimizer, classify, recipes.full()) as other,
        pytest.raises(ValueError, match=r"recipe 'head'.*runs 'full'"),
    ):
        other.load(tmp_path / "run.pt")


def test_what_is_no_policy_and_no_budget_is_told() -> None:
    model = make()
    with pytest.raises(TypeError, match=r"recipes\.pliant"):
        Session(model, sgd(model), classify, recipes.full)  # type: ignore[arg-type]
    with Session(model, sgd(model), classify, recipes.head()) as session, pytest.raises(TypeError, match="Budget"):
        session.budget = 0.5  # type: ignore[assignment]
    for names, said in [((), r"only\(\): name"), ((["a.*"],), r"only\(\['a\.\*'\]\): name")]:
        with pytest.raises(ValueError, match=said):
            recipes.only(*names)


def test_a_foreign_file_is_no_checkpoint(tmp_path: Path) -> None:
    model = make()
    torch.save({"weights": 1}, tmp_path / "foreign.pt")
    with (
        Session(model, sgd(model), classify, recipes.head()) as session,
        pytest.raises(ValueError, match=r"Session\.save"),
    ):
        session.load(tmp_path / "foreign.pt")


def test_rolling_back_forgets_a_half_collected_step() -> None:
    model = make()
    with Session(model, sgd(model), classify, recipes.head(), accumulate=2) as session:
        session.step(data()[0])
        session.rollback()
        assert all(param.grad is None for param in model.parameters())
        session.step(data()[0])
        assert session.progress.step == 0


def test_sparse_gradients_are_probed_and_watched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3))
    batch = torch.randint(0, 20, (8, 4)), torch.randint(0, 3, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, classify, recipes.pliant(time=1.0, when=schedule.on_drift(0.1, at_least=1))) as session:
        for _ in range(9):
            session.step(batch)
        assert session.progress.step == 9


def test_a_selection_says_itself_in_one_line() -> None:
    model = make()
    with Session(model, sgd(model), classify, recipes.head()) as session:
        session.step(data()[0])
        said = str(session.selection)
    assert said.startswith("round 0: 2 of ") and "head.weight" in said and "macs" in said


def test_an_error_before_the_step_leaves_no_step_behind() -> None:
    """The bytes of a step with a larger batch are measured first, by inference; a label out of range is an IndexError there."""
    model = make()
    policy = by_gain(schedule.once(), Budget(memory=0.9))
    images, labels = data()[0]
    with Session(model, sgd(model), classify, policy) as session:
        session.step((images, labels))
        with pytest.raises((IndexError, RuntimeError)):
            session.step((torch.cat([images, images]), torch.cat([labels, labels + 100])))
        session.step((images, labels))
        assert session.progress.step == 2


def test_a_cache_that_cannot_serve_is_not_priced() -> None:
    """Dropout in the prefix: its results differ from pass to pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    batch = data()[0]
    with Session(model, sgd(model), classify, recipes.only("4.*"), engine="prefix", cache="1MB") as session:
        for _ in range(3):
            session.step(batch, ids=range(len(batch[0])))
        assert "cache" in session.why_not and session.engine == "prefix"
        assert session.selection.cost.macs == session.profile.on(Mode(prefix=True)).cost(session.selection.units).macs


# ---------------------------------------------------------------- optimizers that evaluate the loss themselves


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)


class WithClosure(torch.optim.SGD):
    """Goes to where the gradient leads, and steps from there: it cannot do without a closure."""

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        with torch.enable_grad():
            value = closure()
            closure()
        super().step()
        return value


@pytest.mark.parametrize("make_optimizer", [lbfgs, lambda model: WithClosure(model.parameters(), lr=0.1)])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("trains", ["*", "head.*"])
def test_a_step_with_a_closure_is_that_of_plain_pytorch(make_optimizer: Any, clip: float | None, trains: str) -> None:
    ours, plain = make().double(), make().double()
    doubled = [(x.double(), y) for x, y in data(4)]
    with Session(ours, make_optimizer(ours), classify, recipes.only(trains), clip=clip) as session:
        losses = [float(session.step(batch)) for batch in doubled]
    for name, param in plain.named_parameters():
        param.requires_grad_(trains == "*" or name.startswith("head"))
    optimizer, expected = make_optimizer(plain), []
    for batch in doubled:

        def closure(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            value = classify(plain, batch)
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], clip)
            return value

        expected.append(float(optimizer.step(closure).detach()))
    assert losses == expected
    assert differences(snapshot(ours)["weights"], snapshot(plain)["weights"]) == []


def test_a_budget_or_an_optimizer_that_do_not_go_together_are_refused() -> None:
    model = make()
    with Session(model, lbfgs(model), classify, recipes.head()) as session:
        session.step(data()[0])
        with pytest.raises(ValueError, match="no budget can be kept"):
            session.budget = Budget(macs=0.9)
        session.optimizer = sgd(model)
        session.budget = Budget(macs=0.9)
        with pytest.raises(ValueError, match="no budget can be kept"):
            session.optimizer = lbfgs(model)
        session.step(data()[1])


def test_lbfgs_moves_nothing_that_is_no_longer_chosen() -> None:
    model = make()
    with Session(model, lbfgs(model), classify, recipes.badam(steps=2)) as session:
        for batch in data(8):
            before = snapshot(model)["weights"]
            session.step(batch)
            after = snapshot(model)["weights"]
            assert {name for name in before if not torch.equal(before[name], after[name])} <= session.selection.params


def test_lbfgs_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, cut, resumed = make(), make(), make(seed=3)
    policy = recipes.badam(steps=3)
    with Session(whole, lbfgs(whole), classify, policy) as session:
        for batch in data(8):
            session.step(batch)
    with Session(cut, lbfgs(cut), classify, policy) as session:
        for batch in data(8)[:5]:
            session.step(batch)
        session.save(tmp_path / "run.pt")
    with Session(resumed, lbfgs(resumed), classify, policy) as session:
        session.load(tmp_path / "run.pt")
        for batch in data(8)[5:]:
            session.step(batch)
    assert differences(snapshot(whole)["weights"], snapshot(resumed)["weights"]) == []


@pytest.mark.parametrize(
    ("policy", "how", "says"),
    [
        (recipes.last(time=0.9), {}, "what a step costs is unknown.*Use a recipe without one"),
        (replace(recipes.full(), budget=Budget(macs=1.0)), {}, "what a step costs is unknown.*Use a recipe without one"),
        (
            replace(recipes.pliant(head_first=0), signal=score.update_gain(), cost=counted),
            {},
            r"its update gain is unknown\. Use another signal",
        ),
        (recipes.full(), {"accumulate": 2}, "neither with a GradScaler nor with accumulate=2"),
    ],
)
def test_what_a_closure_cannot_do_is_refused(policy: Policy, how: Any, says: str) -> None:
    model = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=says), Session(model, lbfgs(model), classify, policy, **how) as session:
        for batch in data(2):
            session.step(batch)
    assert differences(before, snapshot(model)) == []


# ---------------------------------------------------------------- copies


def test_a_session_is_not_copied_but_saved(tmp_path: Path) -> None:
    model = make()
    with Session(model, sgd(model), classify, recipes.head()) as session:
        session.step(data()[0])
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"Use session.save\(path\), and load\(path\) in a session on a new model"):
                copied(session)
        session.save(tmp_path / "run.pt")
        again = make()
        with Session(again, sgd(again), classify, recipes.head()) as other:
            other.load(tmp_path / "run.pt")
            assert torch.equal(other.step(data()[1]), session.step(data()[1]))
