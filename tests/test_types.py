"""The nouns: costs add up, profiles and selections survive JSON, budgets mean what they say."""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from instances import chain_profile, laws, profiles, units
from torch import nn

from pliant import (
    Budget,
    BudgetError,
    Cost,
    Mode,
    Part,
    PliantError,
    Profile,
    ProfileMismatch,
    Progress,
    Selection,
    Unit,
    measure,
)
from pliant.core.types import match
from pliant.cost.profile import Charge, ChargeKind
from pliant.cost.table import _highest
from pliant.graph.backward import read
from pliant.graph.units import channels
from pliant.runtime.files import write_aside

# ---------------------------------------------------------------- names


def test_match_gives_positions_in_order_and_once() -> None:
    assert match(["a.w", "a.b", "c.w"], ["*.w", "a.*"]) == (0, 1, 2)
    assert match(["a.w"], []) == ()


def test_match_is_exact_about_case_and_names_what_exists() -> None:
    with pytest.raises(ValueError, match=r"no unit matches 'head\.\*'\. Units here: Head\.w, b \(2\)\."):
        match(["Head.w", "b"], ["head.*"])
    with pytest.raises(ValueError, match=r"no module matches 'x'\. Modules here: m0, m1, m2, m3, … \(9\)\."):
        match([f"m{i}" for i in range(9)], ["x"], what="module")


def test_a_unit_names_its_parameters() -> None:
    assert Unit("layer", (Part("w", 0, (1, 2)), Part("b"))).params == ("w", "b")


# ---------------------------------------------------------------- costs


def test_costs_add_up_and_unknown_joules_stay_unknown() -> None:
    assert Cost(1.0, 2, 3, 4.0) + Cost(0.5, 1, 1, 1.0) == Cost(1.5, 3, 4, 5.0)
    assert (Cost(1.0, 2, 3, 4.0) + Cost(0.5, 1, 1)).joules is None


def test_a_chain_pays_the_way_once() -> None:
    profile = chain_profile(own=[1, 2, 4], way=[10, 20, 0], base=100)
    u = units(3)
    assert profile.cost([]).seconds == 100
    assert profile.cost(u[:1]).seconds == 101
    assert profile.cost([u[2]]).seconds == 134
    assert profile.cost([u[1], u[2]]).seconds == 136
    assert profile.full == profile.cost(u)
    assert profile.full.bytes == 137_000
    assert profile.params == ("p0", "p1", "p2")


def test_a_tensor_that_two_operations_keep_is_counted_once() -> None:
    shared = Profile((Charge(ChargeKind.KEPT, Cost(bytes=7), ("p0", "p1")),), Cost(bytes=1))
    assert shared.cost(units(1)).bytes == shared.cost(units(2)).bytes == 8


def test_a_parameter_that_nothing_names_costs_nothing() -> None:
    assert chain_profile([1.0]).cost(units(5)) == chain_profile([1.0]).cost(units(1))


@laws(400)
@given(profiles() | profiles(moments=7), st.sets(st.integers(0, 7)), st.integers(1, 3))
def test_cost_and_table_agree(profile: Profile, chosen: set[int], group: int) -> None:
    """On any graph, for units of one or several parameters, two of which nothing names."""
    all_units = tuple(Unit(f"u{i}", tuple(Part(f"p{(i + k) % 8}") for k in range(group))) for i in range(8))
    table = profile.table(all_units)
    due = table.needed[:, sorted(chosen)].any(axis=1)
    cost = profile.cost(all_units[i] for i in chosen)
    assert profile.base.seconds + table.seconds[due].sum() == cost.seconds
    assert profile.base.bytes + (table.standing + table.bytes[:, due].sum(axis=1)).max() == cost.bytes
    assert profile.base.macs + table.macs[due].sum() == cost.macs
    assert table.needed.any(axis=1).all(), "a row that no unit needs is left out"
    assert len({row.tobytes() for row in table.needed}) == len(table.needed), "no two rows are equal"


@laws(200)
@given(profiles() | profiles(moments=7), st.sets(st.integers(0, 5)), st.integers(0, 5))
def test_one_more_unit_never_costs_less(profile: Profile, chosen: set[int], more: int) -> None:
    u = units(6)
    less, wider = profile.cost(u[i] for i in chosen), profile.cost(u[i] for i in chosen | {more})
    assert less.seconds <= wider.seconds <= profile.full.seconds
    assert less.bytes <= wider.bytes <= profile.full.bytes


def test_bytes_are_a_peak_above_that_of_the_forward_pass() -> None:
    """a lives early, b late, c all along: the highest moment decides, less what lives anyway at the highest of its own."""
    charges = (
        Charge(ChargeKind.KEPT, Cost(bytes=5), ("p0",), live=(0, 2)),
        Charge(ChargeKind.GRADIENT, Cost(bytes=7), ("p1",), live=(2, 4)),
        Charge(ChargeKind.OPTIMIZER, Cost(bytes=1), ("p2",)),
        Charge(ChargeKind.NODE, Cost(bytes=100), ("p3",), live=(2, 2)),
    )
    profile = Profile(charges, Cost(bytes=3), moments=(10, 8, 2, 0))
    a, b, c, d = units(4)
    assert profile.cost([]).bytes == 3
    assert profile.cost([a]).bytes == 3 + 15 - 10
    assert profile.cost([b]).bytes == 3, "it fits beneath the peak of the forward pass"
    assert profile.cost([a, b, c]).bytes == 3 + 16 - 10
    assert profile.cost([d]).bytes == 3, "it never lives"
    assert profile.kept([a, b, c, d]) == 5


@pytest.mark.parametrize("live", [(-1, 1), (2, 1), (0, 3), (3, 3)])
def test_a_charge_lives_within_the_moments_of_its_profile(live: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"charge 0 \('x'\) has live=.* of 2 moments"):
        Profile((Charge(ChargeKind.NODE, Cost(1.0), ("p0",), live=live, name="x"),), Cost(1.0), moments=(1, 0))


# ---------------------------------------------------------------- slices


class Small(nn.Module):
    """A chain with groups, a branch that reads what another layer reads, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.c, self.d = nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        return self.head((torch.sigmoid(self.c(x)) + self.d(x)).mean((2, 3)))


@functools.cache
def counted_small() -> tuple[Profile, dict[str, tuple[Unit, ...]]]:
    """Its profile, and its channels by axis."""
    torch.manual_seed(0)
    model, x = Small(), torch.randn(4, 3, 6, 6)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    profile = measure.counted(model, torch.optim.AdamW(model.parameters()), loss, x)
    graph = read(model, loss, x)
    return profile, {axis: channels(axis, group=2)(graph) for axis in ("out", "in")}  # type: ignore[arg-type]


def of_kind(profile: Profile, chosen: Iterable[Unit], kind: ChargeKind, param: str) -> int:
    """Bytes, or MACs where there are no bytes, of one kind that name this parameter."""
    due = [c for c in profile.due(chosen) if c.kind is kind and param in c.params]
    return sum(c.cost.bytes for c in due) or sum(c.cost.macs for c in due)


@pytest.mark.parametrize("engine", ["plain", "lean"])
@pytest.mark.parametrize("layer", ["b", "c", "d"])
@pytest.mark.parametrize("axis", ["out", "in"])
def test_a_quarter_of_a_layer_costs_a_quarter_of_its_own(axis: str, layer: str, engine: str) -> None:
    profile, by_axis = counted_small()
    profile, weight = profile.on(Mode(lean=engine == "lean")), f"{layer}.weight"
    all_of_it = [unit for unit in by_axis[axis] if weight in unit.params]
    count = len(all_of_it)
    assert count == (2 if (axis, layer) == ("in", "b") else 4)
    whole = [Unit(weight, (Part(weight),))]
    for unit in all_of_it:
        for kind, share in (
            (ChargeKind.OPTIMIZER, 1),
            (ChargeKind.WEIGHT_GRAD, 1),
            (ChargeKind.KEPT, 1 if axis == "in" else count),
        ):
            assert of_kind(profile, [unit], kind, weight) == pytest.approx(
                share * of_kind(profile, whole, kind, weight) / count, abs=3
            ), kind
        # Beside the gradient of a slice stands a copy of the slice.
        assert of_kind(profile, [unit], ChargeKind.GRADIENT, weight) in (
            of_kind(profile, whole, ChargeKind.GRADIENT, weight) * n // count for n in (1, 2)
        )
        assert profile.cost([unit]).macs < profile.cost(whole).macs


@pytest.mark.parametrize("engine", ["plain", "lean"])
@pytest.mark.parametrize("axis", ["out", "in"])
def test_all_channels_of_a_layer_are_the_layer(axis: str, engine: str) -> None:
    profile, by_axis = counted_small()
    profile = profile.on(Mode(lean=engine == "lean"))
    for layer in ("a", "b", "c", "d", "head"):
        all_of_it = [unit for unit in by_axis[axis] if f"{layer}.weight" in unit.params]
        params = dict.fromkeys(param for unit in all_of_it for param in unit.params)
        assert profile.cost(all_of_it) == profile.cost([Unit(layer, tuple(map(Part, params)))])


@laws(150)
@given(st.data(), st.sampled_from(["out", "in"]), st.sampled_from(["plain", "lean"]))
def test_cost_and_table_of_slices_agree(data: st.DataObject, axis: str, engine: str) -> None:
    profile, by_axis = counted_small()
    profile, candidates = profile.on(Mode(lean=engine == "lean")), by_axis[axis]
    chosen = data.draw(st.sets(st.integers(0, len(candidates) - 1)))
    table, cost = profile.table(candidates), profile.cost(candidates[i] for i in chosen)
    due = table.needed[:, sorted(chosen)].any(axis=1)
    assert table.seconds[due].sum() == pytest.approx(cost.seconds - profile.base.seconds)
    assert table.macs[due].sum() == pytest.approx(cost.macs - profile.base.macs, abs=len(profile.charges))
    held = (table.standing + table.bytes[:, due].sum(axis=1)).max()
    assert held >= cost.bytes - profile.base.bytes - len(profile.charges), "rounding aside, never below"


def test_what_weight_and_bias_share_is_paid_once_by_a_slice_of_both() -> None:
    profile = Profile((Charge(ChargeKind.WEIGHT_GRAD, Cost(8.0, 8, 8), ("w", "b")),), Cost(), shapes={"w": (4, 2), "b": (4,)})
    quarters = tuple(Unit(f"{i}", (Part("w", 0, (i,)), Part("b", 0, (i,)))) for i in range(4))
    table = profile.table(quarters)
    assert profile.cost(quarters[:1]).seconds == table.seconds[table.needed[:, 0]].sum() == 2.0
    assert profile.cost(quarters[:3]).seconds == table.seconds[table.needed[:, :3].any(axis=1)].sum() == 6.0


def test_each_slice_of_inputs_keeps_a_copy_beside_what_others_keep() -> None:
    """Of an input that two layers read, and an activation before them keeps."""
    charges = (Charge(ChargeKind.KEPT, Cost(bytes=80), ("w", "v"), (1,)), Charge(ChargeKind.NODE, Cost(), ("before",)))
    profile = Profile(charges, Cost(), shapes={"w": (4, 4), "v": (4, 4), "before": (4,)})
    w, v = (Unit(name, (Part(name, 1, (0,)),)) for name in "wv")
    all_units = (w, v, Unit("before", (Part("before"),)), Unit("out", (Part("w", 0, (0,)),)))
    assert [profile.kept([unit]) for unit in all_units] == [20, 20, 80, 80]
    assert profile.kept([w, v]) == 40
    assert profile.kept(all_units[:3]) == 120
    table = profile.table(all_units[:3])
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [0, 1, 2]):
        due = table.needed[:, chosen].any(axis=1)
        assert table.bytes[:, due].sum(axis=1).max() == profile.kept([all_units[i] for i in chosen])


def test_a_full_step_is_a_plain_one_where_that_was_measured() -> None:
    profile = chain_profile([1.0, 2.0])
    assert profile.full == profile.cost(units(2))
    assert replace(profile, plain=Cost(9.0, 8, 7)).full == Cost(9.0, 8, 7)


@laws(400)
@given(st.data())
def test_moments_that_are_left_out_are_never_the_only_highest(data: st.DataObject) -> None:
    moments, charges = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5))
    held = np.array([data.draw(st.lists(st.integers(0, 3), min_size=charges, max_size=charges)) for _ in range(moments)], float)
    held = held.reshape(moments, charges)
    standing = np.array(data.draw(st.lists(st.integers(-6, 0), min_size=moments, max_size=moments)), float)
    left = _highest(held, standing)
    assert len(left) and (np.diff(left) > 0).all()
    for chosen in range(2**charges):
        due = np.array([chosen >> j & 1 for j in range(charges)], bool)
        total = standing + held[:, due].sum(axis=1)
        assert total[left].max() == total.max()


def test_moments_that_a_neighbour_tops_are_left_out() -> None:
    held = np.array([[1, 0], [2, 0], [2, 1], [2, 1], [0, 1], [0, 9]], float)
    assert _highest(held, np.zeros(6)).tolist() in ([2, 5], [3, 5])
    assert _highest(held, np.array([0, 5, 0, 0, 0, 0.0])).tolist() in ([1, 2, 5], [1, 3, 5])


def test_a_table_merges_charges_that_the_same_units_need() -> None:
    table = chain_profile([1, 2], way=[3, 0]).table(units(2))
    assert table.needed.tolist() == [[False, True], [True, False]]
    assert table.seconds.tolist() == [5.0, 1.0]
    assert table.bytes.tolist() == [[5000.0, 1000.0]]


def test_a_profile_refuses_engines_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="engine='steam' is not known"):
        chain_profile([1.0]).cost([], engine="steam")  # type: ignore[arg-type]


@pytest.mark.parametrize("via", [0, 1, -1])
def test_a_charge_may_wait_for_later_ones_only(via: int) -> None:
    with pytest.raises(ValueError, match="later"):
        Profile((Charge(ChargeKind.NODE, Cost(1.0), ("p0",), (via,)),), Cost(1.0))


# ---------------------------------------------------------------- profiles in files


def some_profile() -> Profile:
    profile = chain_profile([1.0, 2.5], way=[0.1, 0.0], head=["p0"])
    known = replace(profile, origin={"device": "pi", "batch": 8}, coverage=0.97, uncounted=("aten::foo",))
    return replace(known, plain=Cost(9.0, 1, 2), checks=((1.0, 0.9, 1.2), (2.0, 2.0, 2.5)))


@laws(100)
@given(profiles() | profiles(moments=5))
def test_a_profile_survives_json(profile: Profile) -> None:
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    joules = replace(some_profile(), base=Cost(1.0, 2, 3, 4.5))
    for profile in (some_profile(), joules):
        profile.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json") == profile
    assert os.listdir(tmp_path) == ["profile.json"], "nothing is left aside"


@pytest.mark.parametrize("length", [0, 1, 40, 300, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, length: int) -> None:
    some_profile().save(tmp_path / "whole.json")
    cut = tmp_path / "cut.json"
    cut.write_bytes((tmp_path / "whole.json").read_bytes()[:length])
    with pytest.raises(ValueError, match=r"cut\.json' is not a whole Pliant profile: .*\. Measure and save it again\."):
        Profile.load(cut)


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"3",
        b'"text"',
        b"null",
        b'{"format": "pliant.profile/1"}',
        b'{"format": "pliant.profile/6"}',
        b'{"format": "pliant.profile/7"}',
        b'{"format": "pliant.profile/7", "charges": [{}]}',
        b"\xff\xfe\x00\x80",
        b"PK\x03\x04",
    ],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.json.*Pliant profile"):
        Profile.load(tmp_path / "other.json")


def test_another_format_is_refused_with_both_named(tmp_path: Path) -> None:
    (tmp_path / "later.json").write_text(json.dumps(some_profile().to_json() | {"format": "pliant.profile/9"}))
    with pytest.raises(ValueError, match=r"not a Pliant profile: format is 'pliant.profile/9', expected 'pliant.profile/7'"):
        Profile.load(tmp_path / "later.json")


def test_a_missing_file_is_the_usual_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Profile.load(tmp_path / "none.json")


def test_an_origin_that_differs_is_refused_with_what_differs() -> None:
    profile = some_profile()
    now = {"device": "pi", "batch": 32, "threads": 2}
    with pytest.raises(
        ProfileMismatch, match=r"taken at batch 8; the model now runs at batch 32\. Measure again, or pass allow_"
    ):
        profile.check_origin(now)
    profile.check_origin(now, allow_mismatch=True)
    profile.check_origin({"device": "pi", "batch": 8, "threads": 2})


def test_load_checks_the_origin(tmp_path: Path) -> None:
    some_profile().save(tmp_path / "p.json")
    with pytest.raises(ProfileMismatch, match="device 'pi'"):
        Profile.load(tmp_path / "p.json", now={"device": "x86"})
    assert Profile.load(tmp_path / "p.json", now={"device": "x86"}, allow_mismatch=True) == some_profile()


# ---------------------------------------------------------------- interrupted writes


class FullDisk(io.FileIO):
    def write(self, data: Any) -> int:
        super().write(bytes(data)[:3])
        raise OSError(28, "No space left on device")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "p.json"
    some_profile().save(target)
    before = target.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda path, mode: FullDisk(path, mode))
        with pytest.raises(OSError, match="No space left"):
            replace(some_profile(), coverage=0.1).save(target)
    assert target.read_bytes() == before
    assert os.listdir(tmp_path) == ["p.json"]


def test_an_interrupted_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "p.json"
    write_aside(target, b"old")

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_aside(target, b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["p.json"]
    write_aside(target, b"new")
    assert target.read_bytes() == b"new"


# ---------------------------------------------------------------- progress and budgets


def test_progress_knows_epochs_and_shares_only_when_told() -> None:
    known = Progress(step=30, steps_per_epoch=20, total_steps=40)
    assert (known.epoch, known.fraction) == (1.5, 0.75)
    assert Progress(step=50, total_steps=40).fraction == 1.0
    with pytest.raises(ValueError, match="steps_per_epoch=len"):
        _ = Progress(step=3).epoch
    with pytest.raises(ValueError, match="total_steps=…"):
        _ = Progress(step=3).fraction


FULL = Cost(seconds=2.0, bytes=1000, macs=500, joules=8.0)


@pytest.mark.parametrize(
    ("budget", "limits"),
    [
        (Budget(), {}),
        (Budget(time=0.5), {"seconds": 1.0}),
        (Budget(time=1), {"seconds": 2.0}),
        (Budget(time="12ms"), {"seconds": 0.012}),
        (Budget(time=" 1.5 s "), {"seconds": 1.5}),
        (Budget(time="2min"), {"seconds": 120.0}),
        (Budget(time="250us"), {"seconds": 250e-6}),
        (Budget(time="250µs"), {"seconds": 250e-6}),
        (Budget(memory="64MB"), {"bytes": 64e6}),
        (Budget(memory="64kB"), {"bytes": 64e3}),
        (Budget(memory="1KiB"), {"bytes": 1024.0}),
        (Budget(memory=".5GB"), {"bytes": 5e8}),
        (Budget(memory="64mb"), {"bytes": 64e6}),
        (Budget(memory="64 MB"), {"bytes": 64e6}),
        (Budget(memory="2gib", time="50%", macs=" 12.5 %"), {"seconds": 1.0, "bytes": 2.0**31, "macs": 62.5}),
        (Budget(time="100%"), {"seconds": 2.0}),
        (Budget(time="12 MS"), {"seconds": 0.012}),
        (Budget(macs="1.5GMAC"), {"macs": 1.5e9}),
        (Budget(macs="1.5gmac"), {"macs": 1.5e9}),
        (Budget(macs="2e3KMAC"), {"macs": 2e6}),
        (Budget(energy="3J", time=0.25), {"seconds": 0.5, "joules": 3.0}),
        (Budget(energy=0.5, macs=0.1, memory=0.2, time=0.3), {"seconds": 0.6, "bytes": 200.0, "macs": 50.0, "joules": 4.0}),
        (Budget(time=lambda progress: 1 - progress.fraction / 2), {"seconds": 1.5}),
        (Budget(memory=lambda progress: f"{progress.step}MB"), {"bytes": 5e6}),
    ],
)
def test_a_budget_in_shares_in_units_and_as_a_function(budget: Budget, limits: dict[str, float]) -> None:
    assert budget.limits(FULL, Progress(step=5, total_steps=10)) == pytest.approx(limits)


@pytest.mark.parametrize(
    "bad",
    [
        0,
        -0.1,
        1.5,
        100,
        float("nan"),
        float("inf"),
        True,
        "0.4",
        "0%",
        "101%",
        "%",
        "12",
        "ms",
        "-3ms",
        "0ms",
        "3MB",
        "",
        [],
        0.2j,
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_at_once(bad: Any) -> None:
    with pytest.raises(ValueError, match="time="):
        Budget(time=bad)


@pytest.mark.parametrize(
    ("kind", "bad"), [("memory", "64m"), ("memory", "3s"), ("macs", "1GFLOP"), ("energy", "3W"), ("energy", "3MJ")]
)
def test_units_of_measure_belong_to_their_resource(kind: str, bad: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind}='{bad}' is not an amount: write a share like 0\.4 or 40%, or a number with"):
        Budget(**{kind: bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0.0, 2.0, None, "soon"])
def test_what_a_function_of_progress_returns_is_checked_too(bad: Any) -> None:
    with pytest.raises(ValueError, match="time="):
        Budget(time=lambda progress: bad).limits(FULL)


def test_a_function_of_progress_that_lacks_the_length_says_so() -> None:
    with pytest.raises(ValueError, match="length of the run"):
        Budget(time=lambda progress: progress.fraction).limits(FULL, Progress(step=3))


def test_a_resource_that_was_not_measured_cannot_be_limited() -> None:
    with pytest.raises(BudgetError, match=r"energy=0\.5 cannot be kept: this profile holds no joules"):
        Budget(energy=0.5).limits(Cost(1.0, 1, 1))


def test_a_full_step_may_take_no_more_memory_than_inference() -> None:
    with pytest.raises(BudgetError, match=r"memory=0\.5 is a share of 0: .* Leave memory= out, or give an amount"):
        Budget(memory=0.5).limits(Cost(1.0, 0, 1))
    assert Budget(memory="1kB").limits(Cost(1.0, 0, 1)) == {"bytes": 1000.0}


def test_errors_are_what_both_worlds_expect() -> None:
    for error in (BudgetError, ProfileMismatch):
        assert issubclass(error, PliantError)
        assert issubclass(error, ValueError)


# ---------------------------------------------------------------- selections


def some_selection() -> Selection:
    chosen = (Unit("head", (Part("head.w"), Part("head.b"))), Unit("conv", (Part("conv.w", 0, (1, 5, 7)),)))
    return Selection(
        chosen,
        Cost(0.5, 10, 20, 1.5),
        {"seconds": 0.6},
        3.25,
        4,
        400,
        Cost(1.0, 100, 200, 3.0),
        {"head": 3.0, "conv": 0.25, "bn": -1.0},
        {"seconds": 0.5},
    )


def test_a_selection_survives_json() -> None:
    selection = some_selection()
    assert Selection.from_json(json.loads(json.dumps(selection.to_json()))) == selection


def test_a_selection_knows_its_parameters_and_its_share() -> None:
    selection = some_selection()
    assert selection.params == {"head.w", "head.b", "conv.w"}
    assert selection.share() == 0.5
    assert selection.share("bytes") == 0.1
    assert Selection((), Cost(1.0), {}, 0.0).share() == 0.0


def test_a_share_may_be_a_number_of_numpy() -> None:
    assert Budget(time=np.float32(0.5)).limits(Cost(seconds=4.0)) == {"seconds": 2.0}
