"""Asked, predicted, measured: the arithmetic of the closed loop."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from instances import laws

from pliant.session.feedback import Feedback, Round

ASKED = 2.0


def following(predicted: float = 1.0, **known: float) -> Feedback:
    feedback = Feedback(**known)
    feedback.begin(Round(0, 0, ASKED, predicted, 4.0))
    return feedback


def test_a_round_tells_its_mean_step_in_shares_of_a_full_one() -> None:
    feedback = following(predicted=1.0)
    assert feedback.rounds[0].measured is None
    assert str(feedback.rounds[0]) == ("round 0 from step 0: asked 0.500, predicted 0.250, measured – of a full step, 0 steps")
    feedback.see([1.0, 2.0], ASKED)
    feedback.see([3.0], 1.0)
    now = feedback.rounds[0]
    assert (now.steps, now.seconds, now.measured, now.asked) == (3, 6.0, 2.0, 2.0)
    assert str(now).endswith("asked 0.500, predicted 0.250, measured 0.500 of a full step, 3 steps")


def test_a_round_without_a_full_step_or_a_limit_tells_what_it_knows() -> None:
    told = str(Round(3, 7, None, 0.002, 0.0, seconds=0.04, steps=10))
    assert told.startswith("round 3 from step 7: asked –, predicted 2 ms, measured 4 ms")


def test_the_first_look_sets_the_ratio_and_later_ones_move_it_half_way() -> None:
    feedback = following(predicted=2.0)
    feedback.see([3.0, 3.0, 3.0], ASKED)
    assert feedback.ratio == 1.5
    feedback.see([5.0], ASKED)
    assert feedback.ratio == 2.0
    feedback.begin(Round(1, 4, ASKED, 1.0, 4.0))
    feedback.see([4.0], ASKED)
    assert feedback.ratio == 3.0


def test_where_another_choice_is_costly_what_was_seen_last_is_believed_at_once() -> None:
    feedback = following(predicted=2.0)
    feedback.see([3.0] * 5, ASKED, left=1000)
    feedback.see([5.0] * 5, ASKED, left=1000)
    assert feedback.ratio == 2.5


def test_where_another_choice_is_costly_the_steps_that_pay_for_it_tell_nothing_of_the_others() -> None:
    """A capture would else look like steps that are too slow, and be answered by another one. It is owed, as far as a disturbed
    step is."""
    paying, replays = [ASKED * 10, ASKED * 40], [ASKED] * 8
    feedback = following(predicted=ASKED)
    feedback.see([*paying, *replays], ASKED, left=1000)
    assert feedback.recent == ASKED and feedback.ratio == 1
    assert feedback.debt == -2 * ASKED
    assert not feedback.is_off(ASKED)
    feedback.see(paying, ASKED, left=1000)  # and too few to tell them apart
    assert feedback.recent == ASKED and feedback.ratio == 1
    assert feedback.rounds[-1].steps == 12


def test_where_another_choice_is_costly_a_slow_moment_is_no_reason_for_one() -> None:
    """It would be captured, and then be too small, and the next too large: chains of captures, and other layers each time."""
    feedback, slow, toll = following(predicted=ASKED), 1.3 * ASKED, 0.05 * ASKED

    def look(seconds: float) -> bool:
        feedback.see([seconds] * 10, ASKED, left=1000)
        feedback.forget()  # what is owed is another reason
        return feedback.is_off(ASKED, toll)

    for _ in range(5):
        assert [look(seconds) for seconds in (ASKED, slow, slow, ASKED, 0.6 * ASKED, slow, 0.6 * ASKED)] == [False] * 7
    near = 1.03 * ASKED  # off, but by less than another choice is worth
    for _ in range(5):
        assert [look(seconds) for seconds in (near, near, near, near, slow, slow)] == [False] * 6
    assert not look(near)
    assert [look(slow) for _ in range(4)] == [False, False, True, True]  # this lasts
    assert feedback.is_off(ASKED) and Feedback.of(json.loads(json.dumps(feedback.state()))) == feedback
    feedback.begin(Round(1, 400, ASKED, 0.8 * ASKED, 4.0))
    assert feedback.looks == []
    assert [look(0.7 * ASKED) for _ in range(3)] == [False, False, True]  # and looks at the last choice say nothing of this one
    feedback.expect(0.7 * ASKED)
    assert [look(0.7 * ASKED) for _ in range(3)] == [False, False, True]


def test_where_another_choice_is_costly_two_that_ran_tell_how_seconds_grow() -> None:
    """Steps of 1.5 and 3.5 seconds where 2 and 3 were predicted: with the ratio of the last one, the next choice would be too
    small, and the one after it too large."""
    feedback = following(predicted=2.0)
    feedback.see([1.5] * 10, ASKED, pays=False, left=1000)
    assert feedback.correction(ASKED) == pytest.approx(1 / 0.75)  # one choice tells a ratio
    feedback.begin(Round(0, 10, ASKED, 3.0, 4.0))
    feedback.see([3.5] * 10, ASKED, pays=False, left=1000)
    assert feedback.correction(ASKED) * ASKED == pytest.approx(2.25)  # 1.5 too much, at a slope of 2
    assert feedback.is_nearer(2.25, ASKED) and not feedback.is_nearer(3.2, ASKED)
    feedback.see([3.5] * 10, ASKED, pays=False)
    assert feedback.correction(ASKED) == pytest.approx(3 / 3.5, rel=0.2)  # where it is not costly, little by little
    feedback.see([3.5] * 10, ASKED, pays=False, left=1000)
    resumed = Feedback.of(json.loads(json.dumps(feedback.state())))
    assert resumed == feedback and resumed.correction(ASKED) == feedback.correction(ASKED)
    feedback.predict(2.8)  # by other prices, those of before tell nothing
    assert feedback.correction(ASKED) * ASKED == pytest.approx(ASKED / feedback.ratio)


@pytest.mark.parametrize("steep", [1.5, 2.0, 3.0])
def test_choices_do_not_swing_where_prices_are_wrong_for_some_layers(steep: float) -> None:
    """Small choices take less than is predicted of them, and what comes on top of those takes more."""
    costs = [1.0 + 0.02 * n for n in range(150)]
    feedback, limit, chosen, choices = Feedback(), ASKED, 0.0, 0
    for _ in range(60):
        best = max(cost for cost in costs if cost <= max(limit, costs[0]))
        if best != chosen and (not chosen or feedback.is_nearer(best, ASKED)):
            chosen, choices = best, choices + 1
            feedback.begin(Round(0, 0, ASKED, chosen, 4.0))
        feedback.see([0.7 * min(chosen, 2.0) + steep * max(chosen - 2.0, 0.0)] * 10, ASKED, pays=False, left=1000)
        if feedback.is_off(ASKED, toll=0.05 * ASKED):
            limit = ASKED * feedback.correction(ASKED)
    assert choices <= 4
    assert feedback.recent == pytest.approx(ASKED, rel=0.1)


@pytest.mark.parametrize(("taken", "slope"), [(3.49, 0.75), (1.0, 4.0)])
def test_a_slope_stays_within_bounds(taken: float, slope: float) -> None:
    feedback = following(predicted=2.0)
    feedback.see([taken] * 10, ASKED, pays=False, left=1000)
    feedback.begin(Round(0, 10, ASKED, 2.2, 4.0))
    feedback.see([3.5] * 10, ASKED, pays=False, left=1000)
    line = 2.2 + (ASKED - 3.5) / (slope * 3.5 / 2.2)
    assert feedback.correction(ASKED) * ASKED == pytest.approx(max(line, 0.75 * ASKED * 2.2 / 3.5))


def test_predictions_that_are_near_each_other_tell_no_slope() -> None:
    feedback = following(predicted=0.97)
    feedback.see([1.0] * 10, ASKED, pays=False, left=1000)
    feedback.begin(Round(0, 10, ASKED, 1.0, 4.0))
    feedback.see([1.0] * 10, ASKED, pays=False, left=1000)
    assert feedback.correction(ASKED) * ASKED == pytest.approx(ASKED)
    feedback.begin(Round(0, 20, ASKED, 1.5, 4.0))
    feedback.see([0.0] * 10, ASKED, pays=False, left=1000)  # a clock that is too coarse
    assert feedback.correction(ASKED) > 0


def test_without_a_prediction_there_is_no_ratio() -> None:
    feedback = following(predicted=0.0)
    feedback.see([3.0], ASKED)
    assert (feedback.ratio, feedback.recent) == (1.0, 3.0)


def test_nothing_seen_changes_nothing() -> None:
    feedback = following(debt=1.0)
    before = feedback.state()
    feedback.see([], ASKED)
    assert feedback.state() == before
    empty = Feedback()
    empty.see([1.0], ASKED)
    assert empty == Feedback()


def test_debt_is_what_was_asked_and_not_taken() -> None:
    feedback = following()
    feedback.see([1.5, 1.5], ASKED)
    assert feedback.debt == 1.0
    feedback.see([3.0], ASKED)
    assert feedback.debt == 0.0
    feedback.see([3.0], ASKED)
    assert feedback.debt == -1.0
    feedback.forget()
    assert feedback.debt == 0.0


@pytest.mark.parametrize(("asked", "pays"), [(None, True), (ASKED, False)])
def test_no_limit_and_one_that_moves_by_itself_leave_no_debt(asked: float | None, pays: bool) -> None:
    feedback = following(debt=5.0)
    feedback.see([1.5, 1.5], asked, pays)
    assert feedback.debt == 0.0
    assert feedback.rounds[0].steps == 2


@pytest.mark.parametrize(
    ("debt", "target"), [(0.0, 2.0), (5.0, 2.1), (-5.0, 1.9), (25.0, 2.5), (1e9, 2.5), (-25.0, 1.5), (-1e9, 1.5)]
)
def test_debt_is_paid_back_over_fifty_steps_and_never_by_more_than_a_quarter(debt: float, target: float) -> None:
    feedback = following(debt=debt, ratio=1.25)
    assert feedback.target(ASKED) == pytest.approx(target, rel=1e-12)
    assert feedback.correction(ASKED) == pytest.approx(target / ASKED / 1.25, rel=1e-12)


@pytest.mark.parametrize(
    ("how", "horizon"),
    [
        *[({"pause": 0.0}, 50), ({"pause": 99.0}, 50), ({"pause": 400.0}, 200)],  # until the next correction may come
        *[({"left": 0}, 50), ({"left": 60}, 50), ({"left": 400}, 200)],  # within half of the steps that are left
    ],
)
def test_debt_is_paid_back_no_sooner_than_it_must_be(how: dict[str, Any], horizon: int) -> None:
    feedback = following()
    feedback.see([ASKED] * 4, ASKED, **how)
    feedback.debt = 4.0
    assert feedback.target(ASKED) == pytest.approx(ASKED + 4.0 / horizon)


@pytest.mark.parametrize(("step", "is_off"), [(2.0, False), (2.028, False), (2.032, True), (1.972, False), (1.968, True)])
def test_steps_are_off_beyond_a_hundredth_and_a_half_of_what_was_asked(step: float, is_off: bool) -> None:
    feedback = following()
    assert not feedback.is_off(ASKED)  # nothing was seen
    feedback.see([step] * 10, ASKED)
    feedback.forget()
    assert feedback.is_off(ASKED) == is_off


def test_what_is_owed_makes_steps_off_that_take_what_was_asked() -> None:
    feedback = following(debt=-5.0)
    feedback.see([ASKED] * 10, ASKED)
    assert feedback.is_off(ASKED)


def test_another_selection_is_not_off_before_its_first_step() -> None:
    feedback = following()
    feedback.see([4.0] * 10, ASKED)
    assert feedback.is_off(ASKED)
    feedback.begin(Round(0, 10, ASKED, 0.5, 4.0))
    assert not feedback.is_off(ASKED)


def test_a_disturbed_step_counts_twice_at_most_but_is_told_in_full() -> None:
    feedback = following(predicted=2.0)
    feedback.see([2.0] * 9 + [500.0], ASKED)
    assert feedback.ratio == 1.0
    assert feedback.recent == pytest.approx(2.2)
    assert feedback.debt == pytest.approx(-2.0)
    assert feedback.rounds[0].seconds == 518.0


def test_a_clock_that_is_too_coarse_for_a_step_corrects_nothing() -> None:
    feedback = following()
    feedback.see([0.0] * 10, ASKED)
    assert feedback.correction(ASKED) > 0


def test_the_mean_is_over_the_steps_of_all_rounds() -> None:
    feedback = following()
    assert feedback.mean is None
    feedback.see([1.0], ASKED)
    feedback.begin(Round(1, 1, ASKED, 1.0, 4.0))
    feedback.see([3.0] * 3, ASKED)
    assert feedback.mean == 2.5


def test_feedback_goes_on_from_its_state() -> None:
    feedback = following(predicted=1.0)
    feedback.see([1.5] * 3, ASKED)
    feedback.begin(Round(1, 3, ASKED, 1.0, 4.0))
    feedback.see([1.7, 9.0], ASKED)
    resumed = Feedback.of(json.loads(json.dumps(feedback.state())))
    assert resumed == feedback
    for half in (feedback, resumed):
        half.see([1.6] * 3, ASKED)
    assert resumed == feedback
    assert resumed.rounds[0].steps == 3  # nothing is shared with the state it came from


# ---------------------------------------------------------------- on a device that is not as predicted


def steps_of(speed: float, asked: float, costs: list[float], count: int = 200) -> list[float]:
    """Steps where a selection of predicted cost c takes speed × c, planned as a session does: looked at every ten."""
    feedback, steps, limit, chosen = Feedback(), [], asked, None
    while len(steps) < count:
        best = max((cost for cost in costs if cost <= limit), default=costs[0])
        if best != chosen:
            chosen = best
            feedback.begin(Round(0, len(steps), asked, chosen, costs[-1]))
        taken = [speed * chosen] * 10
        steps += taken
        feedback.see(taken, asked)
        if feedback.is_off(asked):
            limit = asked * feedback.correction(asked)
    return steps


@laws(examples=200)
@given(
    speed=st.floats(0.6, 1.6),
    asked=st.floats(1e-3, 1e3),
    floor=st.floats(0.3, 0.85),
    gaps=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=8),
)
@example(speed=1.6, asked=1.0, floor=0.85, gaps=[1.0])
@example(speed=0.6, asked=1.0, floor=0.85, gaps=[1.0])
def test_the_mean_step_comes_to_what_was_asked_where_that_is_in_reach(
    speed: float, asked: float, floor: float, gaps: list[float]
) -> None:
    costs, gap = [floor * asked * min(1.0, 1 / speed)], cycle(gaps)
    while costs[-1] < 1.2 * asked * max(1.0, 1 / speed):
        costs.append(costs[-1] + next(gap) * 0.05 * asked / speed)  # a twentieth of what was asked lies between two steps
    steps = steps_of(speed, asked, costs)
    assert sum(steps) / len(steps) == pytest.approx(asked, rel=0.03)
    assert sum(steps[100:]) / 100 == pytest.approx(asked, rel=0.03)


def test_what_ran_in_this_round_counts_as_it_ran() -> None:
    feedback = following(predicted=1.9)
    feedback.see([2.3] * 10, ASKED)
    feedback.begin(Round(0, 10, ASKED, 2.0, 4.0))
    feedback.debt = 0.0
    feedback.see([2.1] * 10, ASKED, pays=False)
    assert not feedback.is_nearer(1.9, ASKED)  # predicted to be nearer, and known to be further away
    assert feedback.is_nearer(1.85, ASKED)
    feedback.begin(Round(1, 20, ASKED, 2.0, 4.0))
    feedback.see([2.1] * 10, ASKED, pays=False)
    assert feedback.is_nearer(1.9, ASKED)  # another round has other values, maybe another device


@pytest.mark.parametrize(("toll", "is_off"), [(0.0, True), (0.06, True), (0.08, False)])
def test_steps_are_off_only_where_another_choice_is_worth_its_toll(toll: float, is_off: bool) -> None:
    feedback = following()
    for _ in range(3):
        feedback.see([ASKED + 0.1] * 10, ASKED)
    feedback.forget()
    assert feedback.is_off(ASKED, toll) == is_off


def test_seconds_that_memory_keeps_from_being_spent_stay() -> None:
    """Each attempt to spend them would take more bytes than it may, and be taken back."""
    limit, feedback = 100, Feedback()

    def run(predicted: int, peak: int, seconds: float = ASKED / 2, number: int = 0, asked: int = limit) -> bool:
        feedback.begin(Round(number, 10, ASKED, 1.0, 4.0, asked_bytes=asked, predicted_bytes=predicted))
        feedback.see_bytes(peak, 1)
        feedback.see([seconds] * 10, ASKED)
        feedback.forget()
        return feedback.is_off(ASKED, asked_bytes=limit)

    assert run(100, limit + 20)  # a first choice may be too large for any reason
    assert run(95, limit + 10)  # and a smaller one still
    assert run(80, limit)
    assert run(90, limit + 10, asked=limit + 10)  # within what was asked when it ran
    assert run(85, limit - 5)
    run(90, limit + 5, ASKED)
    assert not run(80, limit - 8)
    feedback.predict(1.5)  # prices are no matter of bytes
    assert not feedback.is_off(ASKED, asked_bytes=limit)
    assert feedback.is_off(ASKED) and feedback.is_off(ASKED, asked_bytes=limit + 5)  # other limits
    assert run(80, limit - 8, 2 * ASKED)  # too slow is too slow
    assert not run(80, limit - 8)
    assert run(80, limit, number=1)  # another choice, another chance
    run(90, limit + 5, ASKED, number=1)
    assert not run(80, limit, number=1)
    feedback.forget_bytes()  # another engine
    assert feedback.is_off(ASKED, asked_bytes=limit)
