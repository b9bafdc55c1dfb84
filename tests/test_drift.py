"""Values over time."""

from __future__ import annotations

import math

import pytest

from pliant.signals.drift import Drift, latest


def seen(drift: Drift, *looks: dict[str, float]) -> Drift:
    for look in looks:
        drift.see(look)
    return drift


def test_drift_is_unknown_until_the_first_mean_stands() -> None:
    drift = Drift()
    for _ in range(Drift.settle):
        assert drift.amount is None
        drift.see({"a": 1.0, "b": 2.0})
    assert drift.amount is None
    drift.see({"a": 1.0, "b": 2.0})
    assert drift.amount == pytest.approx(0.0, abs=1e-12)


def test_length_does_not_matter_direction_does() -> None:
    start = [{"a": 1.0, "b": 0.0}] * Drift.settle
    assert seen(Drift(), *start, *[{"a": 9.0, "b": 0.0}] * 5).amount == pytest.approx(0.0, abs=1e-12)
    turned = seen(Drift(), *start, *[{"a": 0.0, "b": 1.0}] * 60).amount
    assert turned == pytest.approx(1.0, abs=1e-5)


def test_what_is_not_finite_says_nothing() -> None:
    drift = seen(Drift(), *[{"a": 1.0}] * (Drift.settle + 1))
    before = drift.state()
    seen(drift, {}, {"a": math.nan}, {"a": math.inf})
    assert drift.state() == before


def test_drift_goes_on_from_its_state() -> None:
    looks = [{"a": 1.0 + i, "b": 2.0 - i} for i in range(9)]
    whole = seen(Drift(), *looks)
    resumed = seen(Drift.of(seen(Drift(), *looks[:6]).state()), *looks[6:])
    assert resumed.state() == whole.state() and resumed.amount == whole.amount


def test_the_latest_finite_value_counts() -> None:
    assert latest({"a": 4.0}, {"a": 8.0, "b": 1.0}) == {"a": 8.0, "b": 1.0}
    assert latest({"a": 4.0}, {"a": math.nan}) == {"a": 4.0}
    assert math.isnan(latest({}, {"a": math.inf})["a"])


def test_one_unit_cannot_turn_but_it_can_change() -> None:
    start = [{"a": 1.0}] * Drift.settle
    assert seen(Drift(), *start, {"a": 1.0}).amount == pytest.approx(0.0, abs=1e-12)
    assert seen(Drift(), *start, *[{"a": 0.1}] * 60).amount == pytest.approx(0.9, abs=1e-4)


def test_what_leaves_is_no_longer_followed_and_what_stays_goes_on() -> None:
    looks = [{"a": 1.0 + i, "b": 2.0 - i / 9, "c": 0.5} for i in range(9)]
    drift = seen(Drift(), *looks[:6])
    drift.follow_only(["a", "b", "d"])
    seen(drift, *[{"a": look["a"], "b": look["b"], "d": 7.0} for look in looks[6:]])
    without = seen(Drift(), *[{"a": look["a"], "b": look["b"]} for look in looks])
    assert drift.state() == without.state()
    assert drift.amount == without.amount


def test_drift_is_unknown_where_nothing_stayed() -> None:
    drift = seen(Drift(), *[{"a": 1.0, "b": 2.0}] * (Drift.settle + 1))
    drift.follow_only(["c"])
    assert seen(drift, {"c": 1.0}).amount is None


def test_what_joins_before_the_first_mean_stands_is_not_taken_for_drift() -> None:
    drift = seen(Drift(), *[{"a": 1.0}] * (Drift.settle - 1))
    drift.follow_only(["a", "b"])
    assert seen(drift, *[{"a": 1.0, "b": 3.0}] * 60).amount == pytest.approx(0.0, abs=1e-6)
