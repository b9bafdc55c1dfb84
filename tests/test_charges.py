"""What was measured of a graph becomes charges: a step that is worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from instances import chain_profile, laws
from oracle import steady
from torch import nn
from zoo import sgd

from pliant import Mode, Part, Profile, Unit, measure
from pliant.cost.from_graph import _suffix_maxima, profile, split
from pliant.cost.measurements import Sizes, Times
from pliant.cost.profile import SPARED_BY_INFERENCE, ChargeKind
from pliant.graph.backward import Graph, Node, Recomputed


def whole(*names: str) -> list[Unit]:
    return [Unit(name, (Part(name),)) for name in names]


# Two linear layers and a loss. Storage 1 is the first layer's output, which the loss's node does not need; it is kept for b.
# Storage 2 is the second layer's output, which the loss keeps for whatever lies behind it. Storage 3 is a copy of the batch.
#
#   operation   0 copy   1 first layer   2 second layer   3 loss
#   lives           8          8+20            20+6         6+1     if nothing is kept
GRAPH = Graph(
    nodes=(
        Node("MeanSquare", "", (1,), outputs=1, moved=7, saves=((2, 6, None),)),
        Node("Mm", "second", (2, "b"), macs=60, outputs=6, moved=36, saves=((1, 20, 1),)),
        Node("Mm", "first", (None, "a"), macs=80, outputs=20, moved=44, saves=((3, 8, 1),)),
    ),
    params={"a": 16, "b": 10},
    unused=(),
    modules={},
    head=("b",),
    forward_macs=140,
    inference=(8, 28, 26, 7),
    gone={3: 2, 1: 3, 2: 4},
)
TIMES = Times(np.array([1.0, 5.0, 4.0]), np.array([1.0, 2.0, 0.0]), forward=10.0, unseen=0.25, fixed=0.5, per_byte=0.125)
SIZES = Sizes([7, 26, 0], [7, 26, 20], {"a": 32, "b": 20})


def taken(sizes: Sizes = SIZES, accumulate: int = 1, times: Times = TIMES, graph: Graph = GRAPH) -> Profile:
    return profile(graph, times, sizes, {}, accumulate)


def timeline(made: Profile, *names: str) -> list[int]:
    """The bytes that live at each moment when these train."""
    lives = np.array(made.moments)
    for charge in made.due(whole(*names)):
        lives[slice(*(charge.live or (0, None)))] += charge.cost.bytes
    return lives.tolist()


# ---------------------------------------------------------------- the moments of a step


def test_moments_are_those_of_the_forward_pass_that_may_be_highest_then_nodes_then_the_optimizer() -> None:
    """Operation 0 is topped by a later one whatever is kept. The end of the forward pass is a moment too."""
    assert taken().moments == (28, 26, 7, 0, 0, 0, 0, 0)


def test_the_timeline_of_the_last_layer_alone() -> None:
    """b keeps its input (20) and the loss's (6) until their nodes have run; its gradient (10) and state (20) stay."""
    assert timeline(taken(), "b") == [
        28 + 20,  # the first layer: its output lives anyway
        26 + 20,
        7 + 20 + 20,  # the loss: the first layer's output would be gone
        20 + 20 + 6,  # the end of the forward pass
        20 + 20 + 6 + 7,  # the loss's node
        20 + 20 + 10,  # the second layer's: no input gradient is asked for
        20 + 10,
        20 + 10,  # the optimizer
    ]
    assert taken().cost(whole("b")).bytes == 53 - 28
    assert taken().kept(whole("b")) == 26


def test_the_timeline_of_the_first_layer_alone() -> None:
    """The second layer's node needs only its weight to hand the gradient on: nothing is kept for it."""
    assert timeline(taken(), "a") == [
        28 + 32,
        26 + 32 + 8,
        7 + 32 + 8,
        32 + 8 + 6,
        32 + 8 + 6 + 7,
        32 + 8 + 26,
        32 + 8 + 16 + 20,
        32 + 16,
    ]
    assert taken().cost(whole("a")).bytes == 76 - 28
    assert taken().kept(whole("a")) == 14


def test_together_shared_bytes_count_once() -> None:
    both = timeline(taken(), "a", "b")
    assert both == [28 + 52, 26 + 52 + 8, 7 + 52 + 28, 52 + 34, 52 + 34 + 7, 52 + 28 + 10 + 26, 52 + 8 + 26 + 20, 52 + 26]
    assert taken().full.bytes == 116 - 28
    assert taken().cost([]).bytes == 0


def test_a_forward_pass_that_holds_more_than_its_operations_show_is_raised_at_its_highest_moment() -> None:
    raised = taken(replace(SIZES, inference=40))
    assert raised.moments == (40, 26, 7, 0, 0, 0, 0, 0)
    assert raised.full.bytes == 116 - 40
    assert taken(replace(SIZES, inference=20)).moments == taken().moments


def test_what_everything_asked_for_needs_is_never_less_than_input_gradients_alone() -> None:
    strange = taken(replace(SIZES, everything=[0, 0, 0]))
    assert timeline(strange, "a", "b")[5] == 52 + 28 + 10 + 26
    assert all(charge.cost.bytes >= 0 for charge in strange.charges)


# Two branches, b and c, that read what a made.
FORK = Graph(
    nodes=(
        Node("Add", "", (1, 2)),
        Node("Mm", "one", (3, "b")),
        Node("Mm", "other", (3, "c")),
        Node("Mm", "first", (None, "a")),
    ),
    params={"a": 16, "b": 10, "c": 10},
    unused=(),
    modules={},
    head=("b",),
)


@pytest.mark.parametrize(
    ("names", "lives"),
    [
        ("a", [0, 0, 12, 32, 46, 16 + 20, 16]),
        ("b", [0, 0, 12, 10 + 3, 10, 10, 10]),
        ("c", [0, 0, 12, 0, 10, 10, 10]),
        ("bc", [0, 0, 12, 10 + 3, 20, 20, 20]),
        ("abc", [0, 0, 12, 10 + 35, 20 + 46, 36 + 20, 36]),
    ],
)
def test_a_branch_takes_memory_only_for_what_lies_on_it(names: str, lives: list[int]) -> None:
    """b's node takes 3 more for its weight; for a, both branches hand their gradients on."""
    made = taken(Sizes([12, 32, 46, 0], [12, 35, 46, 20], {}), times=Times.none(FORK), graph=FORK)
    assert timeline(made, *names) == lives


# ---------------------------------------------------------------- seconds and multiply-accumulates


# The same two layers inside a checkpoint, which computes the first one again (20 bytes) for the second one's weight.
CHECKPOINT = replace(
    GRAPH,
    nodes=(GRAPH.nodes[0], replace(GRAPH.nodes[1], saves=()), replace(GRAPH.nodes[2], saves=())),
    again=(Recomputed({1: ((1, 20, 1),), 2: ((-1, 0, 1),)}, inference=(20,), gone={1: 1}),),
)
MEASURED = replace(SIZES, inputs=[7, 46, 0], everything=[7, 46, 20])


def test_what_a_checkpoint_computes_again_lives_from_then_until_its_node_has_run() -> None:
    made = taken(MEASURED, graph=CHECKPOINT)
    assert timeline(made, "b") == [
        28 + 20,
        26 + 20,
        7 + 20,
        20 + 6,  # the end of the forward pass
        20 + 6 + 7,  # the loss's node
        20 + 20,  # the first layer, again
        20 + 20 + 10,  # the second layer's node: its input, and the gradient
        20 + 10,
        20 + 10,  # the optimizer
    ]
    assert made.kept(whole("b")) == 6


def test_what_a_checkpoint_would_keep_for_others_is_not_there() -> None:
    """Of the 46 bytes that were seen at the second layer's node, 20 were its input, which only b needs."""
    a = timeline(taken(MEASURED, graph=CHECKPOINT), "a")
    assert a == [28 + 32, 26 + 32, 7 + 32, 32 + 6, 32 + 6 + 7, 32 + 20, 32 + 26, 32 + 16 + 20, 32 + 16]
    assert timeline(taken(MEASURED, graph=CHECKPOINT), "a", "b")[6] == 52 + 46 + 10


def test_seconds_add_up() -> None:
    """The forward pass and the optimizer's fixed part; per node what no hook sees; dX; dW; the optimizer per byte."""
    base = 10 + 0.5
    assert taken().cost([]).seconds == base
    assert taken().cost(whole("b")).seconds == base + 2 * 0.25 + 1 + (5 - 2) + 10 / 8
    assert taken().cost(whole("a")).seconds == base + 3 * 0.25 + 1 + 2 + 4 + 16 / 8
    assert taken().full.seconds == base + 3 * 0.25 + 1 + 2 + 3 + 4 + 26 / 8


def test_macs_add_up() -> None:
    assert taken().cost(whole("b")).macs == 140 + 60
    assert taken().cost(whole("a")).macs == 140 + 60 + 80
    assert taken().full.macs == 140 + 60 + 60 + 80


@pytest.mark.parametrize("accumulate", [2, 5])
def test_batches_multiply_all_but_the_optimizer(accumulate: int) -> None:
    one, several = taken(), taken(accumulate=accumulate)
    for names in ((), ("a",), ("b",), ("a", "b")):
        update = 0.5 + sum(GRAPH.params[name] for name in names) / 8
        seconds = one.cost(whole(*names)).seconds
        assert several.cost(whole(*names)).seconds == pytest.approx(accumulate * (seconds - update) + update)
        assert several.cost(whole(*names)).macs == accumulate * one.cost(whole(*names)).macs


def test_between_batches_gradients_stay() -> None:
    """From the second batch on, they stand already when its forward pass begins; all else comes and goes as with one."""
    one, two = timeline(taken(), "a", "b"), timeline(taken(accumulate=2), "a", "b")
    gradients_of_one = [0, 0, 0, 0, 0, 10, 26, 26]
    assert [b - a for a, b in zip(one, two, strict=True)] == [26 - g for g in gradients_of_one]
    assert taken(accumulate=2).full.bytes == 116 + 16 - 28
    assert timeline(taken(accumulate=2), "a", "b") == timeline(taken(accumulate=5), "a", "b")


# ---------------------------------------------------------------- the optimizer's scratch memory

SCRATCH = replace(SIZES, scratch={"a": 160, "b": 100})


def test_scratch_memory_that_is_taken_up_together_adds_up() -> None:
    made = taken(replace(SCRATCH, together=True))
    assert len(made.moments) == 8
    assert timeline(made, "a", "b")[-1] == 52 + 26 + 260
    assert timeline(made, "b")[-1] == 20 + 10 + 100
    assert made.full.bytes == 338 - 28


def test_scratch_memory_that_is_taken_up_one_by_one_does_not() -> None:
    made = taken(SCRATCH)
    assert timeline(made, "a", "b")[-2:] == [52 + 26 + 160, 52 + 26 + 100]
    assert timeline(made, "b")[-2:] == [20 + 10, 20 + 10 + 100]
    assert made.full.bytes == 238 - 28
    assert made.cost(whole("b")).bytes == 130 - 28


def test_scratch_memory_that_can_never_be_the_highest_makes_no_moment() -> None:
    made = taken(replace(SIZES, scratch={"a": 160, "b": 1}))
    assert len(made.moments) == 8
    assert not any(charge.kind is ChargeKind.SCRATCH and charge.params == ("b",) for charge in made.charges)


def test_without_scratch_memory_the_optimizer_is_one_moment() -> None:
    assert len(taken(replace(SIZES, scratch={"a": 0, "b": 0})).moments) == 8


# ---------------------------------------------------------------- nodes of every kind


def test_a_parameter_that_the_loss_does_not_reach_costs_nothing() -> None:
    graph = replace(GRAPH, params={**GRAPH.params, "c": 1000}, unused=("c",))
    made = taken(replace(SIZES, state={**SIZES.state, "c": 2000}), graph=graph)
    assert made.cost(whole("c")) == made.base
    assert "c" in made.params


def test_a_node_that_computes_everything_whatever_is_asked_costs_the_same_for_all() -> None:
    nodes = (GRAPH.nodes[0], replace(GRAPH.nodes[1], whole=True), GRAPH.nodes[2])
    made = taken(graph=replace(GRAPH, nodes=nodes))
    base = 10 + 0.5
    assert made.cost(whole("b")).seconds == base + 2 * 0.25 + 1 + 5 + 10 / 8
    assert made.cost(whole("a")).seconds == base + 3 * 0.25 + 1 + 5 + 4 + 16 / 8
    assert made.cost(whole("b")).macs == 140 + 2 * 60
    assert timeline(made, "b")[5] == 20 + 20 + 10 + 26


def test_a_norm_that_moves_costs_more_forward_when_it_is_chosen() -> None:
    moving = replace(TIMES, norms={1: 3.0})
    assert taken(times=moving).cost(whole("b")).seconds - taken().cost(whole("b")).seconds == 3
    assert taken(times=moving).cost(whole("a")) == taken().cost(whole("a"))
    accumulated = [taken(times=t, accumulate=4).cost(whole("b")).seconds for t in (TIMES, moving)]
    assert accumulated[1] - accumulated[0] == 12


@pytest.mark.parametrize(("moves", "behind"), [(True, 0), (False, 4)])
def test_statistics_of_the_batch_are_kept_by_a_norm_that_moves(moves: bool, behind: int) -> None:
    """A norm that moves only when it is chosen keeps them only then; else whatever lies behind it needs them."""
    norm = replace(GRAPH.nodes[1], op="NativeBatchNorm", macs=0, saves=((1, 20, None), (9, 4, None)))
    made = taken(replace(SIZES, norms_differ=moves), graph=replace(GRAPH, nodes=(GRAPH.nodes[0], norm, GRAPH.nodes[2])))
    assert made.kept(whole("b")) == 6 + 20 + 4
    assert made.kept(whole("a")) == 6 + 20 + 8 + behind


def test_each_charge_tells_what_it_pays_for() -> None:
    kinds = [charge.kind for charge in taken(SCRATCH).charges]
    own = [ChargeKind.OPTIMIZER, ChargeKind.GRADIENT, ChargeKind.SCRATCH]
    run, forward = ChargeKind.NODE, ChargeKind.FORWARD
    dx, dw = [ChargeKind.INPUT_GRAD] * 2, [ChargeKind.WEIGHT_GRAD] * 2
    nodes = [run, *dx, forward, run, *dx, *dw, forward, run, *dw, forward]
    assert kinds == [ChargeKind.KEPT] * 3 + own * 2 + nodes


# ---------------------------------------------------------------- sizes from shapes


def test_sizes_from_shapes_are_what_flows_through_a_node_and_nothing_through_a_view() -> None:
    nodes = (*GRAPH.nodes, Node("View", "", (None, "a"), moved=100), Node("Mul", "", ("b",), moved=6))
    sizes = Sizes.counted(replace(GRAPH, nodes=nodes), {"a": 3})
    assert list(sizes.inputs) == list(sizes.everything) == [7, 36 - 10, 44 - 16, 0, 0]
    assert sizes.state == {"a": 3}
    assert not sizes.scratch and not sizes.together


def test_no_times_are_no_seconds() -> None:
    made = taken(times=Times.none(GRAPH))
    assert made.full.seconds == 0 and made.full.macs == taken().full.macs and made.full.bytes == taken().full.bytes


# ---------------------------------------------------------------- operations that may be the highest


@laws(300)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_operations_that_are_left_out_are_never_the_only_highest(lives: list[int], data: st.DataObject) -> None:
    """Whatever is kept only grows in the forward pass."""
    more = np.cumsum(data.draw(st.lists(st.integers(0, 4), min_size=len(lives), max_size=len(lives))))
    total = np.array(lives) + more
    left = _suffix_maxima(lives)
    assert total[left].max() == total.max()
    assert left == sorted(left)
    assert all(lives[a] > lives[b] for a, b in pairwise(left)), "and none that is left is in vain"


# ---------------------------------------------------------------- what the parameters of one node share

KNOWN: Any = [
    (8.0, [8.0], [8.0], 0.0),
    (8.0, [None], [8.0], 0.0),
    (8.0, [6.0, 7.0], [1.0, 2.0], 5.0),  # 6 + 7 − 8 is paid once
    (8.0, [3.0, 5.0], [3.0, 5.0], 0.0),
    (8.0, [3.0, None], [3.0, 5.0], 0.0),
    (8.0, [None, None], [4.0, 4.0], 0.0),
    (8.0, [2.0, 2.0], [4.0, 4.0], 0.0),  # together dearer than the sum: in proportion
    (8.0, [1.0, 3.0], [2.0, 6.0], 0.0),
    (8.0, [0.0, 0.0], [4.0, 4.0], 0.0),
    (8.0, [20.0, 8.0], [0.0, 0.0], 8.0),  # alone never dearer than together
    (0.0, [3.0, 4.0], [0.0, 0.0], 0.0),
]


@pytest.mark.parametrize(("joint", "alone", "each", "shared"), KNOWN)
def test_what_each_parameter_costs_beside_what_they_share(joint: float, alone: Any, each: list[float], shared: float) -> None:
    found, common = split(joint, alone)
    assert found == pytest.approx(each)
    assert common == pytest.approx(shared)


@laws(300)
@example(0.3, [5e-324, 5e-324])
@given(st.floats(0, 100), st.lists(st.none() | st.floats(0, 100), min_size=1, max_size=4))
def test_shares_add_up_to_what_all_cost_together_and_none_is_negative(joint: float, alone: list[float | None]) -> None:
    each, shared = split(joint, alone)
    assert len(each) == len(alone)
    assert sum(each) + shared == pytest.approx(joint)
    assert shared >= 0 and min(each) >= -1e-9


@laws(300)
@given(st.floats(1, 100), st.floats(0, 1), st.floats(0, 1))
def test_one_of_two_alone_costs_what_was_measured(joint: float, first: float, second: float) -> None:
    """Where the measurement is consistent: neither alone is dearer than both, both no dearer than the sum."""
    a, b = joint * max(first, 1 - second), joint * max(second, 1 - first)
    (one, other), shared = split(joint, [a, b])
    assert one + shared == pytest.approx(a, abs=1e-6)
    assert other + shared == pytest.approx(b, abs=1e-6)


def test_from_a_cache_the_forward_pass_is_paid_from_the_choice_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(5, 4)
    profile = measure.counted(model, optimizer, lambda model, x: model(x).square().mean(), batch)
    forward = {"0": 5 * 4 * 8, "2": 5 * 8 * 16, "4": 5 * 16 * 2}

    def cost(*names: str, cached: bool) -> int:
        return profile.cost([Unit("*", tuple(Part(name) for name in names))], cached=cached).macs

    everything = [name for name, _ in model.named_parameters()]
    assert cost(*everything, cached=True) == cost(*everything, cached=False)
    for first, skipped in (("0.weight", ()), ("2.weight", ("0",)), ("4.weight", ("0", "2"))):
        chosen = [first, "4.weight"]
        saved = cost(*chosen, cached=False) - cost(*chosen, cached=True)
        assert saved == sum(forward[name] for name in skipped)
    there = profile.on(Mode(prefix=True, cached=True))
    assert (there.base.macs, there.full, there.on(Mode()).base) == (0, profile.full, profile.base)
    assert Profile.from_json(there.to_json()) == there
    units = tuple(Unit(name, (Part(name),)) for name in everything)
    for k in range(1, len(units) + 1):  # the solver's table says the same
        table, mask = there.table(units), np.arange(len(units)) >= k
        due = (table.needed & mask).any(1)
        assert table.macs[due].sum() + there.base.macs == there.cost(units[k:]).macs


@pytest.mark.parametrize("spared", [0.0, 0.25, 0.8, 1.0])
def test_inference_spares_a_share_of_the_seconds_and_no_macs(spared: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = steady(model, optimizer, lambda model, x: model(x).square().mean(), torch.randn(5, 4))
    there = profile.on(Mode(prefix=True), spared)
    units = tuple(Unit(name, (Part(name),)) for name, _ in model.named_parameters())
    for k in range(len(units)):
        plain, cached = (
            profile.on(Mode(prefix=cached, cached=cached), float(cached)).cost(units[k:]) for cached in (False, True)
        )
        cost = there.cost(units[k:])
        assert cost.seconds == pytest.approx((1 - spared) * plain.seconds + spared * cached.seconds, rel=1e-12)
        assert cost.macs == (cached if spared == 1 else plain).macs and cost.bytes == plain.bytes
        assert (cached.seconds < plain.seconds) == (k >= 2)
        table = there.table(units)
        due = table.needed[:, k:].any(axis=1)
        assert there.base.seconds + table.seconds[due].sum() == pytest.approx(cost.seconds, rel=1e-12)
    assert there.full == profile.full and there.on(Mode()).base.seconds == pytest.approx(profile.base.seconds)
    assert Profile.from_json(there.to_json()) == there
    with pytest.raises(ValueError, match="a share of the forward pass"):
        profile.on(Mode(prefix=True), 1.5)


@pytest.mark.parametrize("spared", [0.0, 0.4, 1.0])
def test_a_captured_step_has_seconds_of_its_own(spared: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    eager = steady(model, sgd(model), lambda model, x: model(x).square().mean(), torch.randn(5, 4))
    faster = tuple(seconds / (2 + k) for k, seconds in enumerate(eager.seconds))  # not by the same factor everywhere
    profile = replace(eager, other_seconds=faster)
    charges = (replace(c, cost=replace(c.cost, seconds=s)) for c, s in zip(eager.charges, faster, strict=False))
    alone = replace(eager, charges=tuple(charges), base=replace(eager.base, seconds=faster[-1])).on(Mode(), spared)
    there = profile.on(Mode(), spared).on(Mode(graphs=True), spared)
    units = tuple(Unit(name, (Part(name),)) for name, _ in model.named_parameters())
    for k in range(len(units)):
        assert there.cost(units[k:]) == alone.cost(units[k:])
    assert there.full == eager.full and there.mode.graphs and there.spared == spared
    assert Profile.from_json(there.to_json()) == there
    back = there.on(Mode())
    assert back.seconds == pytest.approx(eager.seconds) and back.other_seconds == pytest.approx(faster)
    unknown = eager.on(Mode(graphs=True))  # nothing was measured of captured steps
    assert unknown.mode.graphs and unknown.cost(units) == eager.cost(units)


def test_a_mode_spares_what_is_known_of_it() -> None:
    profile = chain_profile([1.0])
    modes = (Mode(), Mode(lean=True), Mode(prefix=True), Mode(graphs=True), Mode(prefix=True, graphs=True))
    assert [profile.on(mode).spared for mode in modes] == [0, 0, 0, 0, SPARED_BY_INFERENCE]
    assert profile.on(Mode(prefix=True, graphs=True, cached=True)).spared == 1
