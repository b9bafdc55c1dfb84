"""The solvers equal brute force, keep every limit, and never get worse when a limit grows."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from instances import bits, brute_force, chain_rows, graph_rows, laws, problem, problems

from pliant.planning.solve import (
    Problem,
    Solver,
    coverage,
    cycle,
    fixed,
    freeze,
    greedy,
    knapsack,
    milp,
    sample,
    with_ends,
)
from pliant.planning.solve.silence import silence

TIE = 1e-6  # HiGHS calls two values equal below this share of the largest one


def at(given_: Problem, *limits: float) -> Problem:
    return replace(given_, limits=np.array(limits, float))


def names(given_: Problem, chosen: np.ndarray) -> str:
    return "".join(name for name, taken in zip(given_.names, chosen, strict=True) if taken)


def keeps(given_: Problem, chosen: np.ndarray) -> bool:
    return bool(np.all(given_.cost(chosen) <= given_.limits * (1 + 1e-9)))


def columns(chain: Problem) -> int:
    """So many bins that a bin is exactly 1, the unit of the prices: the table then rounds nothing."""
    rows = chain.needed & ~chain.needed[:, chain.always].any(axis=1, keepdims=True)
    return int(chain.price[0, rows[:, chain.free].sum(axis=1) == 1].sum())


def random_chain(seed: int, units: int, limits: int = 1) -> Problem:
    rng = np.random.default_rng(seed)
    price = rng.lognormal(0, 1, (limits, 2 * units))
    return problem(rng.lognormal(0, 1, units), chain_rows(units), price, price.sum(axis=1) / 2)


def random_graph(seed: int, units: int, limits: int = 1) -> Problem:
    rng = np.random.default_rng(seed)
    rows = graph_rows(units, [*range(units), *rng.integers(0, units, units).tolist()], rng.integers(0, 32, 2 * units).tolist())
    price = rng.lognormal(0, 1, (limits, 2 * units))
    return problem(rng.lognormal(0, 1, units), rows, price, price.sum(axis=1) / 2)


# ---------------------------------------------------------------- the judge


def test_a_charge_is_due_once() -> None:
    shared = problem([1, 1, 1], [[1, 1, 0], [0, 0, 1]], [[5, 2]], [9])
    assert shared.cost(np.array([True, True, False])).tolist() == [5]
    assert shared.cost(np.array([True, True, True])).tolist() == [7]
    assert shared.cost(np.zeros(3, bool)).tolist() == [0]


def test_a_choice_fits_only_if_every_limit_holds() -> None:
    two = problem([1], [[1]], [[5], [2]], [5, 2])
    one = np.array([True])
    assert two.fits(one)
    assert not at(two, 4.99, 2).fits(one)
    assert not at(two, 5, 1.99).fits(one)


# ---------------------------------------------------------------- equals brute force


@laws(1000)
@given(problems("chain", least=4))
def test_knapsack_is_the_best_on_chains(chain: Problem) -> None:
    chosen = knapsack()(chain)
    assert chain.value(chosen) == brute_force(chain)
    assert keeps(chain, chosen)


@laws(1000)
@given(problems("graph", least=4))
def test_knapsack_is_the_best_on_graphs(graph: Problem) -> None:
    chosen = knapsack()(graph)
    assert graph.value(chosen) == brute_force(graph)
    assert keeps(graph, chosen)


@laws(1000)
@given(problems("chain", least=10, lowest_value=1, lowest_price=1))
def test_the_table_is_the_best_on_chains_when_it_rounds_nothing(chain: Problem) -> None:
    bins = columns(chain)
    assert bins < 2 ** len(chain.free), "so few units are enumerated and never see the table"
    chosen = knapsack(bins)(chain)
    assert chain.value(chosen) == brute_force(chain)
    assert keeps(chain, chosen)


@laws(300)
@given(problems("chain", least=10, lowest_value=1, lowest_price=1), st.integers(20, 1000))
def test_rounding_costs_the_table_at_most_a_column_per_unit(chain: Problem, bins: int) -> None:
    chosen = knapsack(bins)(chain)
    less = chain.limits[0] - len(chain.free) * columns(chain) / bins
    if less >= chain.cost(chain.always)[0]:
        assert chain.value(chosen) >= brute_force(at(chain, less))
    assert chain.value(chosen) <= brute_force(chain)


@pytest.mark.parametrize("seed", range(12))
def test_the_table_equals_branch_and_bound_on_longer_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = int(rng.integers(14, 40))
    price = rng.integers(1, 100, (1, 2 * units))
    chain = problem(rng.integers(1, 1000, units), chain_rows(units), price, [price.sum() * rng.uniform(0.2, 0.9)])
    table, exact = chain.value(knapsack(columns(chain))(chain)), chain.value(milp()(chain))
    assert table == pytest.approx(exact, rel=TIE)


@laws(500)
@given(problems("graph", least=4, limits=3))
def test_milp_is_the_best_on_graphs_under_several_limits(graph: Problem) -> None:
    chosen = milp()(graph)
    assert graph.value(chosen) == pytest.approx(brute_force(graph), abs=TIE * 20)
    assert keeps(graph, chosen)


@laws(200)
@given(problems("chain", limits=2))
def test_milp_is_the_best_on_chains(chain: Problem) -> None:
    assert chain.value(milp()(chain)) == pytest.approx(brute_force(chain), abs=TIE * 20)


@pytest.mark.parametrize(
    ("over", "values", "price", "limits"),
    [
        (1e-8, [7, 8, 4], [[1, 4, 3], [4, 2, 4]], [4, 7]),
        (1e-7, [2, 4, 2], [[5, 4, 4], [4, 5, 2]], [8, 8]),
        (5e-7, [6, 6, 8, 7], [[5, 1, 1, 1], [2, 1, 1, 2]], [4, 4]),
    ],
)
def test_milp_refuses_what_almost_fits(over: float, values: list[float], price: list[list[float]], limits: list[float]) -> None:
    """HiGHS takes a limit that is missed by a millionth for kept, and finds such a choice first in each of these."""
    almost = problem(values, np.eye(len(values)), np.array(price) * (1 + over), limits)
    chosen = milp()(almost)
    assert keeps(almost, chosen)
    assert almost.value(chosen) == brute_force(almost)


# ---------------------------------------------------------------- never over a limit


@st.composite
def uneven(draw: st.DrawFn) -> Problem:
    """Prices of very different sizes, whose sums are not exact."""
    shape, units = draw(st.sampled_from(["chain", "graph"])), draw(st.integers(1, 18))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows = chain_rows(units) if shape == "chain" else random_graph(int(rng.integers(10**6)), units).needed
    price = rng.lognormal(-7, draw(st.sampled_from([0.1, 1.0, 4.0])), (1, len(rows)))
    limit = price.sum() * draw(st.floats(0, 1))
    return problem(rng.normal(0.5, 1, units), rows, price, [limit])


@laws(400)
@given(uneven(), st.sampled_from([1, 2, 7, 100, 10_000]))
def test_knapsack_keeps_the_limit_with_any_bins(uneven: Problem, bins: int) -> None:
    assert keeps(uneven, knapsack(bins)(uneven))


SOLVERS = {
    "milp": milp(),
    "milp, one node": milp(nodes=1),
    "greedy": greedy(),
    "greedy in order": greedy("order", stop=True),
    "sample": sample(),
    "sample three": sample(3),
    "cycle": cycle(2),
    "coverage": coverage(),
    "coverage, values add up": coverage(0, power=1),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_keeps_every_limit(name: str) -> None:
    for seed in range(12):
        graph = random_graph(seed, units=15, limits=1 + seed % 2)
        for share in (0.0, 0.1, 0.4, 0.8, 1.0):
            given_ = at(graph, *(share * graph.price.sum(axis=1)))
            assert keeps(given_, SOLVERS[name](given_))


@pytest.mark.parametrize("solver", [knapsack(), knapsack(1000), milp(), greedy(), sample(), cycle(), coverage()])
def test_what_is_always_chosen_stays(solver: Solver) -> None:
    for seed in range(6):
        graph = replace(random_graph(seed, units=16), always=np.arange(16) % 5 == 2)
        given_ = at(graph, graph.cost(graph.always)[0] * 1.2)
        assert solver(given_)[graph.always].all()


# ---------------------------------------------------------------- value never falls when a limit grows


@pytest.mark.parametrize("solver", [knapsack(50), knapsack(), milp()], ids=["coarse", "fine", "milp"])
@pytest.mark.parametrize("units", [8, 12, 24])
@pytest.mark.parametrize("make", [random_chain, random_graph])
def test_value_never_falls_when_a_limit_grows(make: type, units: int, solver: Solver) -> None:
    for seed in range(2):
        given_ = make(seed, units)
        best = -np.inf
        for limit in np.linspace(0, given_.price.sum(), 25):
            value = given_.value(solver(at(given_, limit)))
            assert value >= best - TIE * given_.values.max()
            best = max(best, value)
        assert best == pytest.approx(given_.values.sum())


@laws(100)
@given(problems("graph", least=8, lowest_value=1), st.integers(2, 200), st.integers(1, 20))
def test_value_of_the_table_never_falls_by_one_step_either(graph: Problem, bins: int, more: int) -> None:
    less, wider = knapsack(bins)(graph), knapsack(bins)(at(graph, graph.limits[0] + more))
    assert graph.value(wider) >= graph.value(less)


def test_the_table_takes_what_fits_on_a_branch() -> None:
    """Two branches that share little: one unit alone is cheap, whatever the table thinks of the way to it."""
    units = 20
    rows = np.concatenate([np.eye(units, dtype=bool), np.ones((1, units), bool), [np.arange(units) % 7 != 0]])
    price = [[1.0] * units + [1.0, 50.0]]
    branch = problem([1.0] * 7 + [100.0] + [1.0] * 12, rows, price, [2.5])
    assert names(branch, knapsack()(branch)) == "h"


def test_what_two_units_share_is_not_on_the_way_of_the_others() -> None:
    rows = np.concatenate([np.eye(20, dtype=bool), [np.arange(20) < 2]])
    beside = problem([1.0] * 18 + [100.0] * 2, rows, [[1.0] * 20 + [50.0]], [2.5])
    assert names(beside, knapsack()(beside)) == "st"


# ---------------------------------------------------------------- everything of positive value


@pytest.mark.parametrize("solver", [knapsack(), knapsack(10), milp(), greedy(), coverage(), coverage(0)])
@pytest.mark.parametrize("units", [5, 20])
def test_a_full_budget_chooses_everything_of_positive_value(units: int, solver: Solver) -> None:
    for seed in range(5):
        graph = random_graph(seed, units)
        values = np.where(np.arange(units) % 3 == 1, -graph.values, graph.values)
        values[0] = 0.0
        given_ = replace(at(graph, graph.price.sum()), values=values)
        assert solver(given_).tolist() == (values > 0).tolist()


def test_without_limits_everything_of_positive_value_is_chosen() -> None:
    free = problem([1, -1, 2], np.eye(3), np.zeros((0, 3)), [])
    for solver in (knapsack(), milp(), greedy(), coverage()):
        assert names(free, solver(free)) == "ac"


def test_what_costs_nothing_is_chosen_on_any_budget() -> None:
    gift = problem([1, 1, 1], [[1, 0, 0], [0, 0, 1]], [[4, 2]], [0])
    for solver in (knapsack(), milp(), greedy(), coverage()):
        assert names(gift, solver(gift)) == "b"


def test_units_that_only_share_a_way_have_no_price_of_their_own() -> None:
    """The table has nothing to divide into columns here; large limits must not overflow it."""
    rows = np.triu(np.ones((20, 20), bool))
    rows[-1] = rows[-2]
    shared = problem([1.0] * 20, rows, [[1e8] * 20], [9.5e8])
    assert int(knapsack()(shared).sum()) == 9


# ---------------------------------------------------------------- two budgets at once


def test_milp_keeps_two_budgets_at_once() -> None:
    two = problem([10, 6, 6, 1], np.eye(4), [[5, 2, 2, 1], [1, 4, 4, 1]], [5, 8])
    assert names(two, milp()(two)) == "bc"
    assert names(two, milp()(at(two, 5, 7))) == "a"
    assert names(two, milp()(at(two, 9, 8))) == "abd"
    assert names(two, milp()(at(two, 1, 1))) == "d"


def test_knapsack_refuses_two_budgets() -> None:
    with pytest.raises(ValueError, match=r"knapsack\(\) keeps one limit only, .*: use solve\.milp\(\)"):
        knapsack()(problem([1], [[1]], [[1], [1]], [0, 0]))


# ---------------------------------------------------------------- several moments of one peak


def random_peak(seed: int, units: int, moments: int = 6, resources: int = 1) -> Problem:
    """Bytes that live for a while: each charge at some neighbouring moments. Some moments have less room than others."""
    rng = np.random.default_rng(seed)
    graph = random_graph(seed, units)
    price = np.zeros((moments * resources, len(graph.needed)))
    for row in range(0, len(price), moments):
        for j in range(price.shape[1]):
            start, end = sorted(rng.integers(0, moments + 1, 2))
            price[row + start : row + end, j] = rng.lognormal(0, 1)
    price += 1e-3
    limits = price.sum(axis=1).max() * rng.uniform(0.3, 1.0) + rng.uniform(0, 2, len(price))
    resource = tuple(f"r{row // moments}" for row in range(len(price)))
    return replace(graph, price=price, limits=limits, resource=resource)


@laws(500)
@given(problems("graph", least=4, moments=5))
def test_knapsack_is_the_best_under_a_peak_where_it_enumerates(peak: Problem) -> None:
    chosen = knapsack()(peak)
    assert peak.value(chosen) == brute_force(peak)
    assert keeps(peak, chosen)


@laws(400)
@given(problems("graph", least=4, moments=5), st.sampled_from([1, 2, 7, 100]))
def test_knapsack_keeps_every_moment_of_a_peak_with_any_bins(peak: Problem, bins: int) -> None:
    chosen = knapsack(bins)(peak)
    assert keeps(peak, chosen)
    assert chosen[peak.always].all()
    assert peak.value(peak.always) <= peak.value(chosen) <= brute_force(peak)


@laws(500)
@given(problems("graph", least=4, limits=2, moments=4))
def test_milp_is_the_best_under_several_peaks(peaks: Problem) -> None:
    chosen = milp()(peaks)
    assert peaks.value(chosen) == pytest.approx(brute_force(peaks), abs=TIE * 20)
    assert keeps(peaks, chosen)


@laws(150)
@given(problems("chain", limits=2, moments=4))
def test_milp_is_the_best_under_several_peaks_on_chains(peaks: Problem) -> None:
    chosen = milp()(peaks)
    assert peaks.value(chosen) == pytest.approx(brute_force(peaks), abs=TIE * 20)
    assert keeps(peaks, chosen)


@pytest.mark.parametrize("solver", [knapsack(), knapsack(50), *SOLVERS.values()])
def test_every_solver_keeps_every_moment(solver: Solver) -> None:
    for seed in range(10):
        peak = random_peak(seed, units=16)
        for share in (0.0, 0.1, 0.4, 0.8, 1.0):
            given_ = at(peak, *(share * peak.limits))
            assert keeps(given_, solver(given_))


@pytest.mark.parametrize("solver", [knapsack(50), knapsack(), milp()], ids=["coarse", "fine", "milp"])
@pytest.mark.parametrize("units", [8, 18])
def test_value_never_falls_when_a_peak_may_be_higher(units: int, solver: Solver) -> None:
    for seed in range(4):
        peak, best = random_peak(seed, units, moments=4), 0.0
        for more in np.linspace(-peak.limits.min(), peak.price.sum(axis=1).max() - peak.limits.min(), 16):
            given_ = at(peak, *(peak.limits + more))
            value = given_.value(solver(given_))
            assert value >= best - TIE * peak.values.max(), (seed, more)
            best = value
        assert best == pytest.approx(peak.values.sum())


@pytest.mark.parametrize("seed", range(6))
def test_the_table_under_a_peak_is_no_better_than_branch_and_bound(seed: int) -> None:
    peak = random_peak(seed, units=20)
    table, exact = peak.value(knapsack()(peak)), peak.value(milp()(peak))
    assert 0 < table <= exact * (1 + TIE)


def test_moments_that_are_equal_are_one_limit() -> None:
    chain = random_chain(5, units=24)
    twice = replace(chain, price=np.repeat(chain.price, 3, axis=0), limits=np.repeat(chain.limits, 3), resource=("bytes",) * 3)
    for solver in (knapsack(), milp()):
        assert twice.value(solver(twice)) == pytest.approx(chain.value(solver(chain)), rel=1e-3)


def test_charges_that_never_meet_may_each_fill_the_limit() -> None:
    apart = problem([1, 1, 1], np.eye(3), [[5, 0, 1], [0, 5, 1]], [5, 5], resource=["bytes", "bytes"])
    for solver in (knapsack(), milp(), greedy()):
        assert names(apart, solver(apart)) == "ab"


def test_knapsack_takes_several_moments_of_one_resource_but_not_two_resources() -> None:
    moments = problem([1], [[1]], [[1], [1]], [0, 0], resource=["bytes", "bytes"])
    assert moments.is_single and names(moments, knapsack()(moments)) == ""
    mixed = replace(moments, resource=("seconds", "bytes"))
    assert not mixed.is_single
    with pytest.raises(ValueError, match=r"knapsack\(\) keeps one limit only, .*: use solve\.milp\(\)"):
        knapsack()(mixed)


def test_a_moment_without_room_takes_nothing_that_lives_then() -> None:
    """More than a dozen units, so that the table decides: what weighs nothing at the full moment is still free."""
    rows = np.concatenate([np.eye(20), np.eye(20)])
    price = [[1.0] * 10 + [0.0] * 30, [0.0] * 20 + [1.0] * 20]
    full = problem([1.0] * 20, rows, price, [0.0, 7.5], resource=["bytes", "bytes"])
    for solver in (knapsack(), milp(), greedy()):
        chosen = solver(full)
        assert keeps(full, chosen)
        assert chosen[:10].sum() == 0 and chosen[10:].sum() == 7


# ---------------------------------------------------------------- the plain solvers


def plain(limit: float, **more: int) -> Problem:
    """Five units, no sharing: values 1, 9, 4, 6, −2 at prices 1, 9, 1, 3, 1."""
    return problem([1, 9, 4, 6, -2], np.eye(5), [[1, 9, 1, 3, 1]], [limit], **more)


def test_greedy_goes_by_value_or_order() -> None:
    assert names(plain(9), greedy()(plain(9))) == "b"
    assert names(plain(9), greedy("order")(plain(9))) == "acde", "in order, values do not count"


def test_greedy_can_stop_at_the_first_that_does_not_fit() -> None:
    assert names(plain(5), greedy("value")(plain(5))) == "acd"
    assert names(plain(5), greedy("value", stop=True)(plain(5))) == ""
    assert names(plain(5), greedy("order", stop=True)(plain(5))) == "a"


def test_greedy_refuses_an_unknown_order() -> None:
    with pytest.raises(ValueError, match=r"greedy\(by='size'\): choose 'value', 'score' or 'order'"):
        greedy("size")


def test_roots_of_values_prefer_many_that_are_cheap_to_one_that_is_expensive() -> None:
    some = problem([20, 1, 1, 1, -5, 0], np.eye(6), [[3, 1, 1, 1, 1, 1]], [3])
    assert names(some, coverage(0, power=1)(some)) == "a"
    assert names(some, coverage(0)(some)) == "bcd", "the fourth root of 20 is 2.1"
    assert names(some, coverage(0, power=0)(some)) == "bcd", "neither a negative value nor 0"
    assert names(at(some, 100), coverage()(at(some, 100))) == "abcd"


def test_fixed_takes_what_matches_and_what_is_always_chosen() -> None:
    assert names(plain(5), fixed("b", "[d-e]")(plain(5))) == "bde"
    kept = replace(plain(5), always=np.array([True, False, False, False, False]))
    assert names(kept, fixed("c")(kept)) == "ac"


def test_fixed_refuses_a_glob_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"no unit matches 'head\.\*'\. Units here: a, b, c, d, … \(5\)\."):
        fixed("a", "head.*")(plain(5))


def test_sample_differs_by_round_and_seed_and_repeats_otherwise() -> None:
    def draws(seed: int) -> list[str]:
        rounds = [random_chain(0, 20)] * 8
        return [names(p, sample(5)(replace(p, round=r, seed=seed))) for r, p in enumerate(rounds)]

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)
    assert len(set(draws(0))) > 4


def test_sample_takes_every_unit_sooner_or_later_and_no_more_than_asked() -> None:
    seen: set[str] = set()
    for r in range(30):
        drawn = names(plain(15), sample(2)(replace(plain(15), round=r)))
        assert len(drawn) == 2
        seen |= set(drawn)
    assert seen == set("abcde")


def test_sample_fills_the_budget() -> None:
    for r in range(10):
        drawn = replace(plain(6), round=r)
        chosen = sample()(drawn)
        left = 6 - drawn.cost(chosen)[0]
        assert not any(price <= left for price, taken in zip(drawn.price[0], chosen, strict=True) if not taken)


def rounds(solver: Solver, given_: Problem, count: int) -> list[str]:
    return [names(given_, solver(replace(given_, round=r))) for r in range(count)]


def test_cycle_goes_around() -> None:
    assert rounds(cycle(), plain(15), 6) == ["a", "b", "c", "d", "e", "a"]
    assert rounds(cycle(2), plain(15), 4) == ["ab", "cd", "ae", "bc"]
    assert rounds(cycle(9), plain(15), 1) == ["abcde"]


def test_cycle_passes_over_what_is_always_chosen_and_what_does_not_fit() -> None:
    kept = replace(plain(5), always=np.array([False, False, True, False, False]))
    assert rounds(cycle(), kept, 4) == ["ac", "c", "cd", "ce"]
    everything = replace(plain(15), always=np.ones(5, bool))
    assert rounds(cycle(), everything, 1) == ["abcde"]


def test_cycle_goes_in_the_order_that_is_asked_for() -> None:
    assert rounds(cycle(order="ascending"), plain(15), 6) == ["e", "d", "c", "b", "a", "e"]
    assert rounds(cycle(2, "ascending"), plain(15), 3) == ["de", "bc", "ae"]
    by_lot = rounds(cycle(order="random"), plain(15), 20)
    laps = ["".join(by_lot[i : i + 5]) for i in range(0, 20, 5)]
    assert all(sorted(lap) == list("abcde") for lap in laps) and len(set(laps)) > 1
    assert rounds(cycle(order="random"), plain(15), 20) == by_lot
    assert rounds(cycle(order="random"), replace(plain(15), seed=1), 20) != by_lot


def test_what_the_loss_does_not_hang_on_has_no_turn_and_is_not_drawn() -> None:
    beside = problem([1, 1, 1, 1], [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]], [[1, 1, 1]], [9], always=())  # nothing needs c
    assert beside.reached.tolist() == [True, True, False, True]
    assert rounds(cycle(), beside, 4) == ["a", "b", "d", "a"]
    assert rounds(sample(), beside, 2) == ["abd"] * 2
    assert names(beside, with_ends(fixed())(replace(beside, needed=beside.needed[:2], price=np.ones((1, 2))))) == "ab"
    assert rounds(freeze(0.5), replace(beside, done=0.0), 1) == ["abd"]


def test_with_ends_leaves_what_lies_between_to_another() -> None:
    assert names(plain(15), with_ends(fixed("c"))(plain(15))) == "ace"
    drawn = rounds(with_ends(sample(1)), plain(15), 30)
    assert {one[0] + one[2] for one in drawn} == {"ae"} and {one[1] for one in drawn} == set("bcd")
    assert rounds(with_ends(cycle()), plain(15), 3) == ["abe", "ace", "ade"]
    alone = problem([1], [[1]], [[1]], [1])
    assert names(alone, with_ends(sample())(alone)) == "a"


def test_freeze_lets_units_go_from_the_input_on() -> None:
    headed = replace(plain(15), always=np.array([True, False, False, False, False]))  # e goes at ½, d at ⅝, c at ¾, b at ⅞
    at_eighths = [names(headed, freeze(0.5, cubed=False)(replace(headed, done=eighth / 8))) for eighth in range(9)]
    assert at_eighths == ["abcde"] * 4 + ["abcd", "abc", "ab", "a", "a"]
    cubes = [(eighth / 8) ** 3 for eighth in (4, 5, 6, 7)]
    assert [names(headed, freeze(0.5)(replace(headed, done=cube))) for cube in cubes] == ["abcd", "abc", "ab", "a"]
    assert names(headed, freeze(0.5)(replace(headed, done=cubes[0] - 1e-6))) == "abcde"


def test_freeze_keeps_to_a_budget_and_asks_for_the_length_of_the_run() -> None:
    assert names(plain(5), freeze()(replace(plain(5), done=0.0))) == "acd"
    with pytest.raises(ValueError, match=r"needs the length of the run: give Session\(total_steps=…\)"):
        freeze()(plain(5))


BAD: Sequence[tuple[str, object]] = (
    ("knapsack", lambda: knapsack(0)),
    ("sample", lambda: sample(0)),
    ("cycle", lambda: cycle(0)),
    ("cycle", lambda: cycle(order="upwards")),
    ("freeze", lambda: freeze(start=1.0)),
    ("freeze", lambda: freeze(start=-0.1)),
    ("freeze", lambda: freeze(start=float("nan"))),
    ("milp", lambda: milp(gap=-0.1)),
    ("milp", lambda: milp(nodes=0)),
    ("coverage", lambda: coverage(1.0)),
    ("coverage", lambda: coverage(-0.1)),
    ("coverage", lambda: coverage(float("nan"))),
    ("coverage", lambda: coverage(power=-0.1)),
    ("coverage", lambda: coverage(power=1.1)),
)


@pytest.mark.parametrize(("name", "make"), BAD)
def test_numbers_that_make_no_sense_are_refused_at_once(name: str, make: Solver) -> None:
    with pytest.raises(ValueError, match=name):
        make()  # type: ignore[call-arg]


# ---------------------------------------------------------------- units that count for their neighbours


def covered(given_: Problem, chosen: np.ndarray, discount: float) -> float:
    """What a choice is worth where units count for their neighbours, by the formula of `coverage`."""
    values, taken = np.maximum(given_.values, 0) ** 0.25, np.flatnonzero(chosen)
    counts = [np.minimum(v, values[taken]) * discount ** np.abs(u - taken) for u, v in enumerate(values)]
    return float(sum(count.max(initial=0.0) for count in counts))


def best_coverage(given_: Problem, discount: float) -> float:
    choices = (np.array(mask) for mask in product((False, True), repeat=len(given_.values)))
    sound = (mask for mask in choices if mask[given_.always].all() and given_.fits(mask))
    return max(covered(given_, mask, discount) for mask in sound)


def test_neighbours_of_what_is_chosen_are_worth_little() -> None:
    """Six units alike, each two away from the loss pays the way: three beside each other, or two that reach further."""
    row = problem([1.0] * 6, chain_rows(6), [[1.0] * 6 + [1.0] * 6], [6.0], always=[0])
    assert names(row, milp()(row)) == "abc"
    assert names(row, coverage(0)(row)) == "abc"
    assert names(row, coverage(0.9)(row)) == "ad", "b and c have neighbours on both sides"


def test_what_is_worth_little_counts_for_little() -> None:
    beside = problem([1.0, 0.01, 1.0], np.eye(3), [[9.0, 1.0, 3.0]], [3.0])
    assert names(beside, coverage(0.9)(beside)) == "c", "b is cheap, and near to both"
    level = replace(beside, values=np.array([1.0, 1.0, 1.0]))
    assert names(level, coverage(0.9)(level)) == "b"


@laws(60)
@given(problems("graph", most=8, limits=2), st.sampled_from([0.0, 0.3, 0.8, 0.95]))
def test_coverage_is_the_best_of_few_units(graph: Problem, discount: float) -> None:
    chosen = coverage(discount)(graph)
    assert keeps(graph, chosen)
    assert covered(graph, chosen, discount) == pytest.approx(best_coverage(graph, discount))


def test_a_value_that_is_not_a_number_is_worth_nothing_to_coverage() -> None:
    for units in (9, 20):
        chain = random_chain(1, units)
        odd = replace(chain, values=np.where(np.arange(units) == 4, np.nan, chain.values))
        chosen = coverage()(odd)
        assert keeps(odd, chosen) and chosen.any() and not chosen[4]


def test_a_peak_of_many_moments_has_one_price_to_coverage() -> None:
    """Sixty moments that are alike weigh no more than one of them."""
    for seed in range(12):
        chain = random_chain(seed, 20, limits=2)
        both = replace(chain, limits=0.8 * chain.limits, resource=("seconds", "bytes"))
        rows = [0] + [1] * 60
        many = replace(both, price=both.price[rows], limits=both.limits[rows], resource=("seconds", *["bytes"] * 60))
        assert coverage()(many).tolist() == coverage()(both).tolist()


@pytest.mark.parametrize("make", [random_chain, random_graph])
@pytest.mark.parametrize(("discount", "starts"), [(0.0, 16), (0.5, 16), (0.8, 16), (0.95, 16), (0.5, 3), (0.8, 3)])
def test_coverage_is_near_the_best_of_more_units(
    make: Any, discount: float, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grown, and not enumerated."""
    module = sys.modules["pliant.planning.solve.coverage"]
    monkeypatch.setattr(module, "_FEW", 0)
    monkeypatch.setattr(module, "_STARTS", starts)
    lost = []
    for seed in range(8):
        given_ = make(seed, 9, limits=1 + seed % 2)
        best = best_coverage(given_, discount)
        lost.append((best - covered(given_, coverage(discount)(given_), discount)) / max(best, 1e-9))
    assert max(lost) < 0.1, lost
    assert np.mean(lost) < 0.02, lost


# ---------------------------------------------------------------- determinism


@pytest.mark.parametrize("solver", [knapsack(), knapsack(100), *SOLVERS.values()])
def test_same_problem_same_answer(solver: Solver) -> None:
    for limits in (1, 2):
        graph = random_graph(3, units=18, limits=limits)
        if limits == 2 and solver not in SOLVERS.values():
            continue
        first = solver(graph)
        assert solver(replace(graph, values=graph.values.copy(), price=graph.price.copy())).tolist() == first.tolist()


@pytest.mark.parametrize("solver", [knapsack(), knapsack(100), *SOLVERS.values(), fixed("a")])
def test_a_solver_leaves_its_problem_alone(solver: Solver) -> None:
    graph = random_graph(4, units=18)
    before = [getattr(graph, part).copy() for part in ("values", "needed", "price", "limits", "always")]
    solver(graph)
    for part, was in zip(("values", "needed", "price", "limits", "always"), before, strict=True):
        assert np.array_equal(getattr(graph, part), was)


def test_milp_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Some versions of HiGHS leave lines on the standard output; these problems are known to bring them out."""
    chains = [(20, 2, 0.5), (30, 14, 0.5), (50, 8, 0.2), (50, 17, 0.5), (50, 22, 0.5), (50, 26, 0.2)]
    for make, units, seed, share in [(random_chain, *chain) for chain in chains] + [(random_graph, 50, 13, 0.5)]:
        given_ = make(seed, units)
        milp()(at(given_, share * given_.price.sum()))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_bits_name_positions() -> None:
    assert bits(np.array([True, False, True])) == 0b101


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "puts"), reason="no C library to write with")
def test_what_the_solver_prints_of_itself_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The standard output may be read by another program; it is there again afterwards, also where the solver fails."""
    libc = ctypes.CDLL(None)
    one = problem([3.0, 2.0, 2.5], np.eye(3, dtype=int), [[1.0, 2.0, 1.5], [2.0, 1.0, 1.5]], [2.6, 2.6])

    def noisy(*args: Any, **kwargs: Any) -> Any:
        libc.puts(b"solving a part again")
        if fails:
            raise RuntimeError("no answer")
        return own(*args, **kwargs)

    own = scipy.optimize.milp
    monkeypatch.setattr(scipy.optimize, "milp", noisy)
    fails = False
    milp()(one)
    fails = True
    with pytest.raises(RuntimeError):
        milp()(one)
    libc.puts(b"after")
    libc.fflush(None)
    assert capfd.readouterr().out == "after\n"


def test_two_threads_that_choose_at_once_keep_the_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """One begins, the other begins, the first ends, the second ends: in this order the standard output was once lost."""
    first, second = ExitStack(), ExitStack()
    first.enter_context(silence())
    second.enter_context(silence())
    os.write(1, b"between\n")  # another thread prints
    first.close()
    second.close()
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "between\nafter\n"


def test_the_solver_touches_no_file_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, replaced = random_graph(3, 24), []
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup2", lambda *which: replaced.append(which))
        assert milp()(at(graph, 0.4 * graph.price.sum())).any()
    assert not replaced


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not silenced there")
def test_milp_writes_nothing_where_highs_solves_a_part_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Two towers that meet at the loss, for which HiGHS 1.12 prints a line whatever it is told."""
    for seed, units in ((29, 47), (84, 42), (352, 40)):
        rng = np.random.default_rng(seed)
        tower = np.arange(units) % 2
        way = np.triu(np.ones((units, units), bool)) & (tower[None] == tower[:, None])
        values, price = rng.lognormal(0, 1.5, units), rng.lognormal(0, 1, (1, 2 * units))
        milp()(problem(values, np.concatenate([np.eye(units, dtype=int), way]), price, 0.5 * price.sum(axis=1)))
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""
