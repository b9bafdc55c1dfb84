"""One table: every recipe × every zoo model × the laws. A new recipe is one more row."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from oracle import differences, freeze_by_hand, on_steady_device, plain_step, snapshot
from zoo import ZOO, Case, adamw, sgd

from pliant import Budget, Part, Policy, Progress, Session, Unit, plan, recipes, schedule, score, units
from pliant.graph.backward import Graph, read, trainable
from pliant.runtime.sandbox import sandbox
from pliant.runtime.trainable import apply_, found, restore_

SHARE = {"two_inputs": 0.8}  # where 0.7 of a full step lies below the floor
OFTEN = schedule.every(steps=2)
LENGTH = 5  # steps of a run

# Each recipe as a function of the share of a full step that it may spend.
RECIPES: dict[str, Callable[[float], Policy]] = {
    "pliant": lambda s: recipes.pliant(time=s, memory=0.95, when=schedule.on_drift(0.05, at_least=2, at_most=4)),
    "elastic_trainer": lambda s: recipes.elastic_trainer(time=s, when=OFTEN),
    "elastic_layers": lambda s: recipes.elastic_layers(time=s, when=OFTEN),
    "green_trainer": lambda s: recipes.green_trainer(macs=s, when=OFTEN),
    "tinytrain": lambda s: recipes.tinytrain(memory=None, macs=s, head=True, when=OFTEN),
    "random": lambda s: recipes.random(time=s, when=OFTEN),
    "last": lambda s: recipes.last(time=s),
    "full": lambda s: recipes.full(),
    "head": lambda s: recipes.head(),
    "bias": lambda s: recipes.bias(),
    "norm": lambda s: recipes.norm(),
    "only": lambda s: recipes.only("*w*"),
    "freeze_out": lambda s: recipes.freeze_out(start=0.3, when=OFTEN),
    "lisa": lambda s: recipes.lisa(layers=1, steps=2),
    "badam": lambda s: recipes.badam(steps=2, order="random"),
    "tent": lambda s: recipes.tent(),
    "gala": lambda s: recipes.gala(window=3),
}
# Solvers that promise the best choice, and what norms do: `pliant` chooses otherwise where they rest.
_EXACT = ("pliant", "elastic_trainer", "elastic_layers", "green_trainer")
EXACTLY = [*((recipe, "chosen") for recipe in _EXACT), ("pliant", "frozen")]  # and what batch norms do
WITH_NORMS = ("conv_net", "branches", "transformer")
NOT_THERE = {
    ("bias", "functional"),  # no parameter of this model is called bias
    ("tinytrain", "functional"),  # nor is there a layer whose channels could be told apart
    *(("tent", model) for model in ZOO if model not in WITH_NORMS),
}
ROWS = [(recipe, model) for recipe in RECIPES for model in ZOO if (recipe, model) not in NOT_THERE]
table = pytest.mark.parametrize(("recipe", "model_name"), ROWS, ids=[f"{r}-{m}" for r, m in ROWS])


def policy_for(recipe: str, case: Case) -> Policy:
    return on_steady_device(RECIPES[recipe](SHARE.get(case.name, 0.7)))


def turn_about(recipe: str, model_name: str, first: Any, second: Any) -> Any:
    """One for every other row: each recipe and each model meets both."""
    return (first, second)[(list(RECIPES).index(recipe) + list(ZOO).index(model_name)) % 2]


def batch_no(case: Case, k: int) -> Any:
    torch.manual_seed(100 + k)
    return case.batch()


def graph_of(model: torch.nn.Module, loss: Any, batch: Any) -> Graph:
    with sandbox(model):
        return read(model, loss, batch)


@cache
def scored(recipe: str, model_name: str, seed: int = 0) -> tuple[Policy, Any, Mapping[Unit, float]]:
    """A recipe's policy, the profile of a fresh model and the value of each of its units."""
    case = ZOO[model_name]
    policy = replace(policy_for(recipe, case), seed=seed)
    model, loss, batch = case.make()
    optimizer = adamw(model)
    profile = policy.cost(model, optimizer, loss, batch)
    candidates = policy.units(graph_of(model, loss, batch))
    values = score.probe(policy.signal, model, optimizer, loss, batch, candidates, seed=policy.seed)
    return policy, profile, MappingProxyType(values)


def test_every_recipe_has_a_row() -> None:
    public = {n for n, f in inspect.getmembers(recipes, inspect.isfunction) if f.__module__ == recipes.__name__ and n[0] != "_"}
    assert public - {"only"} <= set(RECIPES), f"add a row for: {', '.join(sorted(public - set(RECIPES)))}"


def test_a_model_without_biases_says_so() -> None:
    case = ZOO["functional"]
    model, loss, batch = case.make()
    before = snapshot(model)
    with (
        Session(model, sgd(model), loss, policy_for("bias", case)) as session,
        pytest.raises(ValueError, match="this model has no bias"),
    ):
        session.step(batch)
    assert differences(before, snapshot(model)) == []


# ---------------------------------------------------------------- 1: the solver


@table
def test_law_1_never_over_a_limit(recipe: str, model_name: str) -> None:
    policy, profile, values = scored(recipe, model_name)
    for round_ in range(3):
        chosen = plan(policy, profile, values, Progress(step=2 * round_, round=round_, total_steps=LENGTH))
        cost = profile.cost(chosen.units)
        assert cost == chosen.cost
        limits = policy.budget.limits(profile.full)
        assert all(getattr(cost, name) <= amount * (1 + 1e-8) for name, amount in limits.items())
        standing = {param for unit in values for param in unit.params}  # a tied weight has no channels to choose
        assert set(profile.head) & standing <= chosen.params or not policy.head


@pytest.mark.parametrize("model_name", [name for name in ZOO if name != "transformer"])
@pytest.mark.parametrize(("recipe", "norms"), EXACTLY)
def test_law_1_equals_brute_force(recipe: str, norms: str, model_name: str) -> None:
    policy, profile, values = scored(recipe, model_name)
    profile = replace(profile, origin={**profile.origin, "norms": norms})
    limits = policy.budget.limits(profile.full)
    head = [unit for unit in values if not set(profile.head).isdisjoint(unit.params)]
    others = [unit for unit in values if unit not in head and values[unit] > 0]
    best = worth_to(recipe, norms, values, head)
    for size in range(1, len(others) + 1):
        for extra in combinations(others, size):
            worth = worth_to(recipe, norms, values, (*head, *extra))
            if worth > best:
                cost = profile.cost((*head, *extra))
                if all(getattr(cost, name) <= amount for name, amount in limits.items()):
                    best = worth
    chosen = [unit for unit in plan(policy, profile, values).units if unit in head or values[unit] > 0]
    assert worth_to(recipe, norms, values, chosen) == pytest.approx(best, rel=2e-4)


@pytest.mark.parametrize("model_name", ZOO)
@pytest.mark.parametrize(("recipe", "norms"), EXACTLY)
def test_law_1_value_grows_with_the_limit_until_everything_is_chosen(recipe: str, norms: str, model_name: str) -> None:
    policy, profile, values = scored(recipe, model_name)
    profile = replace(profile, origin={**profile.origin, "norms": norms})
    kind = "macs" if policy.budget.macs else "time"
    reached = [
        plan(replace(policy, budget=Budget(**{kind: share})), profile, values)
        for share in (SHARE.get(model_name, 0.6), 0.92, 0.95, 0.98, 1.0)
    ]
    worths = [worth_to(recipe, norms, values, selection.units) for selection in reached]
    assert all(b >= a - 1e-4 * abs(a) for a, b in pairwise(worths))
    assert {unit for unit, value in values.items() if value > 0} <= set(reached[-1].units)


def worth_to(recipe: str, norms: str, values: Mapping[Unit, float], chosen: Sequence[Unit]) -> float:
    """What a recipe maximises: the sum of values; for `pliant`, how well the chosen layers cover their neighbours."""
    if recipe != "pliant":
        return sum(values[unit] for unit in chosen)
    discount = 0.8 if norms == "frozen" else 0.0
    root = {unit: max(value, 0.0) ** 0.5 for unit, value in values.items()}
    place = {unit: k for k, unit in enumerate(values)}

    def counts(unit: Unit) -> float:
        return max(min(root[unit], root[c]) * discount ** abs(place[unit] - place[c]) for c in chosen)

    return sum(counts(unit) for unit in values)


# ---------------------------------------------------------------- 2: a step moves what was chosen, as a plain step would


@table
def test_law_2_only_the_chosen_move_and_as_in_plain_pytorch(recipe: str, model_name: str) -> None:
    case = ZOO[model_name]
    make_optimizer = turn_about(recipe, model_name, sgd, adamw)
    model, loss, batch = case.make()
    optimizer = make_optimizer(model)
    twin = copy.deepcopy(model)
    twin_optimizer = make_optimizer(twin)
    may_train, found_as = set(trainable(model)), snapshot(model)
    with Session(model, optimizer, loss, policy_for(recipe, case), norm="chosen", total_steps=3) as session:
        drops = session.budget.memory is not None or session.policy.state == "drop"  # the state of what left
        for k in range(3):
            batch = batch_no(case, k)
            before = snapshot(model, optimizer)
            torch.manual_seed(k)
            value = session.step(batch)
            chosen = session.selection.params

            freeze_by_hand(twin, chosen, may_train)
            if drops:
                for name, param in twin.named_parameters():
                    if name not in chosen:
                        twin_optimizer.state.pop(param, None)
            torch.manual_seed(k)
            expected = plain_step(twin, twin_optimizer, loss, batch)
            after = snapshot(model, optimizer)
            assert torch.equal(value, expected)
            assert differences(snapshot(twin, twin_optimizer), after) == []
            for name in set(before["weights"]) - chosen:
                assert torch.equal(before["weights"][name], after["weights"][name])
                assert after["grads"][name] is None
                kept = None if drops else before["optimizer"].get(name)
                assert differences(kept, after["optimizer"].get(name)) == []
    left_as = snapshot(model)  # law 5: a session leaves flags and modes as it found them
    assert differences([found_as["flags"], found_as["modes"]], [left_as["flags"], left_as["modes"]]) == []
    assert not optimizer._optimizer_step_post_hooks


# ---------------------------------------------------------------- 3: full is plain training


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("model_name", ZOO)
def test_law_3_full_is_plain_pytorch_bit_for_bit(model_name: str, make_optimizer: Callable[..., Any]) -> None:
    case = ZOO[model_name]
    stream = [batch_no(case, k) for k in range(4)]
    ends, losses = [], []
    for own in (False, True):
        model, loss, _ = case.make()
        optimizer = make_optimizer(model)
        torch.manual_seed(7)
        if own:
            values = [plain_step(model, optimizer, loss, stream[k % 4]) for k in range(8)]
        else:
            with Session(model, optimizer, loss, policy_for("full", case)) as session:
                values = [session.step(stream[k % 4]) for k in range(8)]
        ends.append(snapshot(model, optimizer))
        losses.append(torch.stack(values))
    assert torch.equal(*losses)
    assert differences(*ends) == []


# ---------------------------------------------------------------- 4: measuring, probing and planning leave no trace


@table
def test_law_4_before_the_step_nothing_but_the_choice_has_changed(recipe: str, model_name: str) -> None:
    case = ZOO[model_name]
    model, loss, batch = case.make()
    optimizer = adamw(model)
    for _ in range(2):  # so that there is optimizer state, and gradients stand on the parameters
        plain_step(model, optimizer, loss, batch)
    # No limit: what a noisy clock says must not decide here.
    policy = replace(RECIPES[recipe](1.0), budget=Budget())
    if model_name not in ("conv_net", "transformer"):  # on these two, recipes measure as they do for users
        policy = on_steady_device(policy)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before = snapshot(model, optimizer)
    with Session(model, optimizer, loss, policy, norm="chosen", total_steps=LENGTH) as session:
        session.before_step(batch)
        after = snapshot(model, optimizer)
        chosen = session.selection.params
    for name in set(before["flags"]) - chosen:
        assert not after["flags"][name]
        assert after["grads"][name] is None
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d) and f"{name}.weight" not in chosen and f"{name}.bias" not in chosen:
            assert not after["modes"].pop(name)
            assert before["modes"].pop(name)
    for kind in ("grads", "flags", *(["optimizer"] if policy.state == "drop" else [])):
        for half in (before, after):
            half[kind] = {name: half[kind][name] for name in chosen}
    assert differences(before, after) == []


# ---------------------------------------------------------------- 5: apply and restore


@table
def test_law_5_apply_twice_is_once_and_restore_brings_back(recipe: str, model_name: str) -> None:
    policy, profile, values = scored(recipe, model_name)
    chosen = plan(policy, profile, values, Progress(total_steps=LENGTH)).params
    model, _, _ = ZOO[model_name].make()
    optimizer = adamw(model)
    params, was, before = trainable(model), found(model), snapshot(model, optimizer)
    apply_(params, optimizer, chosen)
    once = snapshot(model, optimizer)
    assert {name for name, flag in once["flags"].items() if flag} == set(chosen)
    apply_(params, optimizer, chosen)
    assert differences(once, snapshot(model, optimizer)) == []
    restore_(was)
    assert differences(before, snapshot(model, optimizer)) == []


# ---------------------------------------------------------------- 6: stop and go on; the same again


@pytest.mark.parametrize(("recipe", "model_name"), [row for row in ROWS if row[0] != "gala"])  # its window begins anew
def test_law_6_stop_and_go_on_is_never_having_stopped(recipe: str, model_name: str, tmp_path: Path) -> None:
    """Five steps on five batches, with dropout drawing from the global random state; saving leaves no trace."""
    case = ZOO[model_name]
    stop, by_file = turn_about(recipe, model_name, (3, True), (4, False))
    stream = [batch_no(case, k) for k in range(LENGTH)]

    def opened(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Session]:
        model, loss, _ = case.make(seed)
        optimizer = adamw(model)
        return model, optimizer, Session(model, optimizer, loss, policy_for(recipe, case), total_steps=LENGTH)

    def go_on(session: Session, start: int, end: int) -> list[tuple[str, ...]]:
        return [
            session.step(batch) is not None and tuple(u.name for u in session.selection.units) for batch in stream[start:end]
        ]

    model, optimizer, session = opened(seed=0)
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    go_on(session, 0, stop)
    before = snapshot(model, optimizer)
    session.save(tmp_path / "run.pt")
    by_hand = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
    randoms = torch.get_rng_state(), random.getstate(), np.random.get_state()
    assert differences(before, snapshot(model, optimizer)) == []
    chosen = go_on(session, stop, LENGTH)
    through = snapshot(model, optimizer)
    session.close()
    model, optimizer, other = opened(seed=5)  # other weights: nothing may come from them
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    if by_file:
        other.load(tmp_path / "run.pt")
    else:
        model.load_state_dict(by_hand[0])
        optimizer.load_state_dict(by_hand[1])
        other.load_state_dict(by_hand[2])
        torch.set_rng_state(randoms[0]), random.setstate(randoms[1]), np.random.set_state(randoms[2])
    assert go_on(other, stop, LENGTH) == chosen
    assert differences(through, snapshot(model, optimizer)) == []
    assert other.selection == session.selection and other.progress == session.progress
    if RECIPES[recipe](1.0).when.name != "once":
        assert session.progress.round >= 1  # it did choose again in between


def test_law_6_another_seed_chooses_other_random_layers() -> None:
    drawn = set()
    for seed in range(8):
        drawn.add(plan(*scored("random", "transformer", seed)).params)
    assert len(drawn) > 1


# ---------------------------------------------------------------- 7: values add up

SIGNALS = {make(1.0).signal.name: make(1.0).signal for make in RECIPES.values()}


@pytest.mark.parametrize("model_name", ZOO)
@pytest.mark.parametrize("signal", SIGNALS)
def test_law_7_a_layer_is_worth_the_sum_of_its_tensors(signal: str, model_name: str) -> None:
    case = ZOO[model_name]
    model, loss, batch = case.make()
    optimizer, graph = adamw(model), graph_of(*case.make())

    def values(candidates: tuple[Unit, ...]) -> dict[Unit, float]:
        return score.probe(SIGNALS[signal], model, optimizer, loss, batch, candidates)

    for grouped in (units.layers()(graph), units.blocks()(graph)):
        # In the order of the layers: nearness and chance depend on the place in the list.
        tensors = values(tuple(Unit(param, (Part(param),)) for unit in grouped for param in unit.params))
        worth = {unit.name: value for unit, value in tensors.items()}
        for unit, value in values(grouped).items():
            assert value == pytest.approx(sum(worth[param] for param in unit.params), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("model_name", ZOO)
@pytest.mark.parametrize(
    "signal",
    [score.update_gain(), score.grad_norm(), score.weight_norm()],
    ids=["update_gain", "grad_norm", "weight_norm"],
)
def test_law_7_a_tensor_is_worth_the_sum_of_its_channels(signal: score.Signal, model_name: str) -> None:
    model, loss, batch = ZOO[model_name].make()
    optimizer = adamw(model)
    whole, slices = [], []
    for name, param in trainable(model).items():
        whole.append(Unit(name, (Part(name),)))
        for dim, size in enumerate(param.shape):
            slices += [Unit(f"{name}/{dim}/{i}", (Part(name, dim, (i,)),)) for i in range(size)]
    of_whole = score.probe(signal, model, optimizer, loss, batch, whole)
    of_slices = score.probe(signal, model, optimizer, loss, batch, slices)
    for unit, value in of_whole.items():
        for dim in range(trainable(model)[unit.name].dim()):
            channels = [v for u, v in of_slices.items() if u.name.startswith(f"{unit.name}/{dim}/")]
            assert sum(channels) == pytest.approx(value, rel=1e-4, abs=1e-8)
