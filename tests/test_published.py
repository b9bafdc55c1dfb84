"""Published baselines as recipes: what trains at which step is what their papers say."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import ZOO, adamw

from pliant import Policy, Progress, Session, plan, recipes, schedule, score
from pliant.graph.backward import read
from pliant.runtime.sandbox import sandbox

BLOCKS = tuple(f"blocks.{i}" for i in range(6))  # of `Stack`, from the input on


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """An embedding, six blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Half() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def chain() -> nn.Module:
    """Four layers and a head."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.ReLU())), nn.Linear(5, 3))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def batch_no(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(k)
    return torch.randn(12, 5, generator=random), torch.randint(0, 3, (12,), generator=random)


def opened(
    policy: Policy, build: Callable[[], nn.Module] = Stack, seed: int = 0, **how: Any
) -> tuple[Session, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = build()
    optimizer = adamw(model)
    return Session(model, optimizer, loss, policy, **how), optimizer


def chosen(session: Session) -> tuple[str, ...]:
    return tuple(unit.name for unit in session.selection.units)


def run(policy: Policy, steps: int, build: Callable[[], nn.Module] = Stack, **how: Any) -> list[tuple[str, ...]]:
    """What trained at each step."""
    session, _ = opened(policy, build, **how)
    with session:
        out = []
        for k in range(steps):
            session.step(batch_no(k))
            out.append(chosen(session))
    return out


# ---------------------------------------------------------------- FreezeOut


LAYERS = ("0", "2", "4", "6")  # of `chain`, from the input on; the head is "8"


def formula(done: Fraction, start: Fraction, cubed: bool) -> set[str]:
    """What trains when so much of the run is done, exactly."""
    times = [(start + (1 - start) * Fraction(i, 4)) ** (3 if cubed else 1) for i in range(4)]
    return {layer for layer, time in zip(LAYERS, times, strict=True) if done < time} | {"8"}


@pytest.mark.parametrize("cubed", [False, True])
@pytest.mark.parametrize("start", [Fraction(0), Fraction(1, 5), Fraction(1, 2), Fraction(4, 5)])
def test_freeze_out_trains_what_the_formula_says_at_every_step(start: Fraction, cubed: bool) -> None:
    """In 40 steps every step is a selection; with 4/5, t_i falls on steps that floats do not hit. The run goes on for longer
    than it said."""
    default = start == Fraction(4, 5) and cubed
    trained = run(recipes.freeze_out() if default else recipes.freeze_out(float(start), cubed=cubed), 42, chain, total_steps=40)
    assert [set(names) for names in trained] == [formula(Fraction(step, 40), start, cubed) for step in range(42)]
    assert all(set(later) <= set(earlier) for earlier, later in pairwise(trained))
    assert set(trained[39:]) == {("8",)} and (start == 0 or set(trained[0]) == {*LAYERS, "8"})


def test_a_long_run_chooses_again_every_hundredth_of_it() -> None:
    trained = run(recipes.freeze_out(0.5, cubed=False), 200, chain, total_steps=200)
    at = [Fraction(step - step % 2, 200) for step in range(200)]
    assert [set(names) for names in trained] == [formula(done, Fraction(1, 2), False) for done in at]


def test_freeze_out_frees_the_optimizer_state_of_what_is_frozen() -> None:
    session, optimizer = opened(recipes.freeze_out(0.5, cubed=False), chain, total_steps=16)
    params = dict(session.model.named_parameters())
    with session:
        for k in range(16):
            session.step(batch_no(k))
            assert set(optimizer.state) == {params[name] for name in session.selection.params}


def test_freeze_out_counts_no_layer_that_never_runs() -> None:
    case = ZOO["unused"]
    model, loss_of, batch = case.make()
    seen = []
    with Session(model, adamw(model), loss_of, recipes.freeze_out(0.5, cubed=False), total_steps=8) as session:
        for _ in range(8):
            session.step(batch)
            seen.append(set(chosen(session)))
    assert seen == [{"first", "last"}] * 4 + [{"last"}] * 4


def test_freeze_out_without_the_length_of_the_run_says_so_and_changes_nothing() -> None:
    session, _ = opened(recipes.freeze_out(), chain)
    with session, pytest.raises(ValueError, match=r"give Session\(total_steps=…\), or use fit"):
        session.step(batch_no(0))
    assert all(param.requires_grad for param in session.model.parameters())


def test_fit_knows_the_length_of_the_run() -> None:
    session, _ = opened(recipes.freeze_out(0.5), chain)
    with session:
        session.fit([batch_no(k) for k in range(10)], epochs=2)
        assert chosen(session) == ("8",)


# ---------------------------------------------------------------- LISA


def drawn(names: tuple[str, ...]) -> set[str]:
    return set(names) - {"embed", "head"}


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_lisa_trains_both_ends_and_as_many_blocks_as_asked(layers: int) -> None:
    trained = run(recipes.lisa(layers, steps=3), 24)
    assert all({"embed", "head"} <= set(names) for names in trained)
    assert all(len(drawn(names)) == layers and drawn(names) <= set(BLOCKS) for names in trained)
    for step, (before, after) in enumerate(pairwise(trained), start=1):
        assert before == after or step % 3 == 0
    assert len(set(trained)) > 2


def test_a_draw_larger_than_the_model_is_all_of_it_and_another_seed_draws_otherwise() -> None:
    assert set(run(recipes.lisa(layers=9), 1)[0]) == {"embed", "head", *BLOCKS}
    first, other = (run(recipes.lisa(steps=1, seed=seed), 10) for seed in (3, 4))
    assert first != other


def test_lisa_draws_every_block_and_every_pair_of_blocks_alike() -> None:
    """400 draws of 2 of 6: a block is expected 133 times, a pair 27 times. The seeds are fixed, so the counts are too."""
    torch.manual_seed(0)
    model, policy = Stack(), recipes.lisa()
    profile = policy.cost(model, adamw(model), loss, batch_no(0))
    with sandbox(model):
        units = policy.units(read(model, loss, batch_no(0)))
    values = score.probe(policy.signal, model, adamw(model), loss, batch_no(0), units)
    blocks, pairs = Counter[str](), Counter[tuple[str, ...]]()
    for seed in range(50):
        for round_ in range(8):
            names = {unit.name for unit in plan(recipes.lisa(seed=seed), profile, values, Progress(round=round_)).units}
            blocks.update(names - {"embed", "head"})
            pairs[tuple(sorted(names - {"embed", "head"}))] += 1
    assert set(blocks) == set(BLOCKS) and set(pairs) == set(combinations(BLOCKS, 2))
    assert all(90 < count < 180 for count in blocks.values())
    assert all(8 < count < 55 for count in pairs.values())


def test_lisa_keeps_the_state_of_both_ends_and_frees_the_rest() -> None:
    session, optimizer = opened(recipes.lisa(steps=2))
    params = dict(session.model.named_parameters())
    with session:
        for k in range(12):
            session.step(batch_no(k))
            assert set(optimizer.state) == {params[name] for name in session.selection.params}
        assert int(optimizer.state[params["embed.weight"]]["step"]) == 12


# ---------------------------------------------------------------- BAdam


AROUND = ("head", *reversed(BLOCKS), "embed")  # from the loss outwards


@pytest.mark.parametrize(("order", "expected"), [("descending", AROUND), ("ascending", AROUND[::-1])])
def test_badam_trains_one_block_at_a_time_in_its_order(order: Any, expected: tuple[str, ...]) -> None:
    trained = run(recipes.badam(steps=2, order=order), 40)
    assert trained == [(expected[step // 2 % 8],) for step in range(40)]


def test_badam_at_random_trains_each_block_once_each_time_around() -> None:
    trained = [names[0] for names in run(recipes.badam(steps=1, order="random"), 32)]
    laps = [tuple(trained[i : i + 8]) for i in range(0, 32, 8)]
    assert all(sorted(lap) == sorted(AROUND) for lap in laps)
    assert len(set(laps)) > 1
    assert trained == [names[0] for names in run(recipes.badam(steps=1, order="random"), 32)]
    assert trained != [names[0] for names in run(recipes.badam(steps=1, order="random", seed=1), 32)]


def test_badam_with_a_head_that_always_trains() -> None:
    trained = run(recipes.badam(steps=1, order="ascending", head=True), 14)
    assert [set(names) for names in trained] == [{"head", AROUND[:0:-1][step % 7]} for step in range(14)]


def test_badam_passes_over_what_never_runs() -> None:
    model, loss_of, batch = ZOO["unused"].make()
    with Session(model, adamw(model), loss_of, recipes.badam(steps=1)) as session:
        seen = []
        for _ in range(4):
            session.step(batch)
            seen.append(chosen(session))
    assert seen == [("last",), ("first",)] * 2


def test_badam_frees_the_state_of_a_block_that_it_leaves_and_begins_anew() -> None:
    session, optimizer = opened(recipes.badam(steps=3))
    params = dict(session.model.named_parameters())
    with session:
        left: list[weakref.ref[torch.Tensor]] = []
        for k in range(48):
            session.step(batch_no(k))
            assert set(optimizer.state) == {params[name] for name in session.selection.params}
            assert {int(state["step"]) for state in optimizer.state.values()} == {k % 3 + 1}, "counted from its entry on"
            if k % 3 == 0:
                assert not any(moment() is not None for moment in left)
                left = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]


def test_under_badam_the_loss_falls() -> None:
    session, _ = opened(recipes.badam(steps=5, order="random"))
    with session:
        values = [float(session.step(batch_no(0))) for _ in range(80)]  # twice around
    assert values[0] > values[39] > values[79]
    assert values[79] < 0.6 * values[0]


# ---------------------------------------------------------------- all three


THREE: dict[str, Callable[[], Policy]] = {
    "freeze_out": lambda: recipes.freeze_out(0.2),
    "freeze_out, by steps": lambda: recipes.freeze_out(0.2, cubed=False, when=schedule.every(steps=3)),
    "lisa": lambda: recipes.lisa(steps=3, seed=5),
    "badam": lambda: recipes.badam(steps=3),
    "badam, random": lambda: recipes.badam(steps=2, order="random", seed=5),
}


@pytest.mark.parametrize("name", THREE)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(name: str, tmp_path: Path) -> None:
    ends = []
    for stops in (False, True):
        session, _ = opened(THREE[name](), total_steps=14)
        trained = []
        for k in range(14):
            if stops and k == 7:
                session.save(tmp_path / "run.pt")
                session.close()
                session, _ = opened(THREE[name](), seed=9, total_steps=14)
                session.load(tmp_path / "run.pt")
            session.step(batch_no(k))
            trained.append(chosen(session))
        session.close()
        ends.append((trained, session.model.state_dict()))
    (through, weights), (resumed, others) = ends
    assert resumed == through and len(set(through)) > 2
    assert all(torch.equal(weights[key], others[key]) for key in weights)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: recipes.freeze_out(start=1.0),
        lambda: recipes.freeze_out(start=-0.1),
        lambda: recipes.freeze_out(start=float("nan")),
        lambda: recipes.lisa(layers=0),
        lambda: recipes.lisa(steps=0),
        lambda: recipes.badam(steps=-1),
        lambda: recipes.badam(order="upwards"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused_with_what_was_given(bad: Callable[[], Policy]) -> None:
    with pytest.raises(ValueError, match=r"(freeze|sample|every|cycle)\(.*(1\.0|-0\.1|nan|0|-1|'upwards')"):
        bad()
